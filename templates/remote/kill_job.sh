# shellcheck shell=bash
# Kill every process of a job on this machine. Ranks have their own sessions, so they are found by
# their environment: every process of a job has the job's folder in GPTCTL_RUN_DIR.
job_processes() {
  grep -lszxF "GPTCTL_RUN_DIR=$1" /proc/[0-9]*/environ | cut -d/ -f3
}
kill_job() {
  for pid in $(job_processes "$1"); do
    [ "$pid" = "$$" ] || kill -KILL "$pid"
  done 2> /dev/null
}
