#!/usr/bin/env bash
# Run a module of the engine for a job on this host. Arguments: folder, token, module, its arguments.
# The token: a folder of the same name may belong to another job.
[ "$(cat "$1/.token" 2> /dev/null)" = "$2" ] || {
  echo "error: nothing of the job is on this host" >&2
  exit 66
}
GPTCTL_PARENT=$PPID exec bash --norc "$1/agent.sh" "${@:3}"
