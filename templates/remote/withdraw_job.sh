#!/usr/bin/env bash
# Remove a job that was not started, with what an interrupted request left of it.
# Arguments: folder, token of the job.
rm -rf "${1%/*}/.${1##*/}.$2."*
# The token: a folder of the same name may belong to another job.
[ "$(cat "$1/.token" 2> /dev/null)" = "$2" ] || exit 0
rm -rf "$1"
