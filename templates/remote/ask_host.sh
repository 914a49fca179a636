#!/usr/bin/env bash
# Run a host command of the engine for a job. Arguments: folder, token, command and its arguments.
# Exit code 66: nothing of the job is on this host.
# uses kill_job.sh
# uses token_of.sh
# The token: a folder of the same name may belong to another job.
token=$(token_of "$1")
[ "$token" != "$2" ] || exec bash --norc "$1/agent.sh" host_commands "${@:3}"
case "$3 $token" in
  'end ' | 'end damaged') ;;
  *damaged) echo "$1/.token is damaged" >&2; exit 74 ;;
  *) exit 66 ;;
esac
# Without the folder, or with a damaged token, processes of the job may still be running.
for _ in 1 2 3 4 5; do
  kill_job "$1"
  sleep 0.1
done
echo "{\"left\": [$(job_processes "$1" | paste -sd, -)]}"
