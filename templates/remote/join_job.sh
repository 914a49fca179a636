#!/usr/bin/env bash
# Become the agent of a job whose folder another host has unpacked on a shared file system.
# Arguments: folder, unused, node, seconds until the folder must be visible here.
# Network file systems show a new folder only after some seconds.
# Count: bash's SECONDS follows the clock, which somebody may set.
tries=$((5 * (${4%.*} + 1)))
while [ $((tries -= 1)) -ge 0 ]; do
  [ ! -e "$1/agent.sh" ] || GPTCTL_RUN_DIR=$1 exec bash --norc "$1/agent.sh" guard "$3"
  sleep 0.2
done
echo "error: $1 of the first host is not visible here, although the profile has shared_fs: true" >&2
exit 73
