#!/usr/bin/env bash
# Remove the doctor's folder and its processes. Arguments: folder, parent folders that it created.
# uses kill_job.sh
kill_job "$1"
rm -rf "$1"
shift
for above in "$@"; do
  rmdir "$above" 2> /dev/null
done
:
