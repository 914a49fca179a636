#!/usr/bin/env bash
# Remove a job that was not committed from this host. Arguments: folder, token of the job.
# uses kill_job.sh
# The token: a folder of the same name may belong to another job.
[ "$(cat "$1/.token" 2> /dev/null)" = "$2" ] || exit 0
kill_job "$1"
rm -rf "$1"
