#!/usr/bin/env bash
# Remove the folder of a job that has ended. Arguments: folder, token of the job.
# Exit code 66: nothing of the job is on this host; 75: processes of the job are running.
# uses kill_job.sh
# uses token_of.sh
gone=${1%/*}/.${1##*/}.$2
# An earlier removal may have been interrupted.
[ ! -e "$gone" ] || rm -rf "$gone" || exit 1
# The token: a folder of the same name may belong to another job.
token=$(token_of "$1")
[ "$token" != damaged ] || { echo "$1/.token is damaged: remove the folder by hand" >&2; exit 1; }
[ "$token" = "$2" ] || exit 66
[ ! -L "$1" ] || { echo "$1 is a symbolic link" >&2; exit 1; }
[ -z "$(job_processes "$1")" ] || exit 75
# Rename first: without its token, a half-removed folder would stay forever.
mv "$1" "$gone" && rm -rf "$gone"
