#!/usr/bin/env bash
# Unpack a job's folder from stdin, and become its agent.
# Arguments: folder, bytes of the archive, node, seconds in which the archive must arrive, and then
# seconds in which the agent must start.
umask 077
mkdir -p "${1%/*}" || exit 73
mkdir "$1" || {
  [ ! -e "$1" ] || echo "$1 exists already: if hosts share run_root, set shared_fs: true" >&2
  exit 73
}
# With a time limit: if the connection is lost, nothing may stay here.
errors=$(timeout "$4" head -c "$2" | LC_ALL=C tar -xzf - -C "$1" 2>&1) || {
  rm -rf "$1"
  case $errors in
    *"Wrote only"* | *"No space left"*) errors="No space left on device: $1" ;;
  esac
  echo "$errors" | head -n 1 >&2
  exit 74
}
# The agent rolls back by itself from here on.
GPTCTL_RUN_DIR=$1 GPTCTL_ROLL_BACK=$5 exec bash --norc "$1/agent.sh" guard "$3"
