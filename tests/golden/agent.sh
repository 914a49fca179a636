#!/usr/bin/env bash
# Start a module of gptctl's engine on a host of job gpt-3f9a2c: `agent.sh guard NODE` runs the
# job there, `agent.sh host_commands COMMAND` answers gptctl.
umask 077
gptctl_dir=/home/me/work/runs/gpt-3f9a2c
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
# Wait until the agent and its guard have exited; if both were killed, kill what they have left.
if [ "$1" = kill_orphans ]; then
  read -r word
  while [ "$word" != finished ] && [ -n "$(job_processes "$gptctl_dir")" ]; do
    kill_job "$gptctl_dir"
    sleep 0.1
  done
  exit
fi
# If the connection is lost, this script must still remove what was sent here.
trap '' PIPE
# Keep gptctl's messages (3, 4) from the setup, and the setup's output from gptctl.
exec 3>&1 4<&0 1>&2 < /dev/null
fail() {
  echo "error: $*" >&2
  exit 78
}
gptctl_timer=''
# Kill the timer and its child. Right after its start it may not have its own session yet, and bash
# loses a TERM that arrives between fork and exec.
end_timer() {
  [ -n "$gptctl_timer" ] || return
  kill -KILL -- -"$gptctl_timer" && return
  kill -KILL "$gptctl_timer"
  kill -KILL -- -"$gptctl_timer"
} 2> /dev/null
# Remove the job's folder if this script fails: fail() has explained code 78 already.
roll_back() {
  end_timer
  rm -rf "$gptctl_dir"
  [ "$1" = 78 ] || echo "error: the setup exited with code $1" >&2
}
gptctl_functions=$(declare -f job_processes kill_job)
# Until the agent runs, which rolls back by itself.
if [ -n "${GPTCTL_ROLL_BACK:-}" ]; then
  trap 'roll_back $?' EXIT
  # A timer kills a setup that hangs: gptctl may have lost the connection meanwhile.
  # shellcheck disable=SC2016
  setsid bash -c "$gptctl_functions"'
    sleep "$1"
    for began in "$2"/agent.*.json; do [ ! -e "$began" ] || exit; done
    echo "error: the setup did not finish in $1 s" >&2
    kill_job "$2"
    rm -rf "$2"' gptctl "$GPTCTL_ROLL_BACK" "$gptctl_dir" > /dev/null 3>&- 4<&- &
  gptctl_timer=$!
  disown "$gptctl_timer" # or bash reports that it was killed
fi

# Setup of cluster profile lab.
{
  module load cuda/12
} || fail 'setup failed: module load cuda/12'

gptctl_python=/srv/venv/bin/python
[ "$1" != old ] ||
  fail "$gptctl_python is older than Python 3.10: set engine_python in the profile"
command -v "$gptctl_python" > /dev/null || fail "cannot find $gptctl_python"
# With a time limit: if gptctl was killed, nothing may stay here, even if this hangs.
timeout --kill-after=5 "${GPTCTL_ROLL_BACK:-60}" "$gptctl_python" -E -S -c '' ||
  fail "$gptctl_python does not start"
cd "$gptctl_dir" || fail "the job's folder is missing here"
end_timer
# -S: the engine needs only the standard library, and starts faster without site-packages.
# A Python that is too old starts this script again with `old`.
exec "$gptctl_python" -E -S engine.pyz "$1" "$gptctl_dir" "${@:2}" >&3 3>&- <&4 4<&-
