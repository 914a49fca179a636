#!/usr/bin/env bash
# Remove what an agent that was killed could not remove. Arguments: folder, token of the job.
# uses kill_job.sh
[ "$(cat "$1/.token" 2> /dev/null)" = "$2" ] || exit 0
kill_job "$1"
rm -rf "$1"
