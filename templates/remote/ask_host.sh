#!/usr/bin/env bash
# Run a host command of the engine for a job. Arguments: folder, token, command and its arguments.
# Exit code 66: nothing of the job is on this host.
# uses kill_job.sh
# The token: a folder of the same name may belong to another job.
[ "$(cat "$1/.token" 2> /dev/null)" != "$2" ] ||
  exec bash --norc "$1/agent.sh" host_commands "${@:3}"
# Without the folder, processes of the job may still be running.
[ "$3" = end ] && [ ! -e "$1/.token" ] || exit 66
for _ in 1 2 3 4 5; do
  kill_job "$1"
  sleep 0.1
done
echo "{\"left\": [$(job_processes "$1" | paste -sd, -)]}"
