# shellcheck shell=bash
# Kill every process of a job on this machine. Ranks have sessions of their own, so only the
# environment tells: each process of a job has the job's folder in GPTCTL_RUN_DIR.
job_processes() {
  grep -lszxF "GPTCTL_RUN_DIR=$1" /proc/[0-9]*/environ | cut -d/ -f3
}
kill_job() {
  for pid in $(job_processes "$1"); do
    [ "$pid" = "$$" ] || kill -KILL "$pid"
  done 2> /dev/null
}
