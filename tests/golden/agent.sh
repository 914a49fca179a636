#!/usr/bin/env bash
# A part of gptctl on a host of job gpt-3f9a2c: `agent.sh agent NODE` runs the job there, `agent.sh host_commands VERB` looks after it.
umask 077
trap '' PIPE # of a connection that is lost: what was sent here is still to be taken back
exec 3>&1 4<&0 1>&2 < /dev/null # what gptctl says is not meant for the setup, nor what the setup says for gptctl
fail() {
  echo "error: $*" >&2
  exit 78
}
gptctl_dir=/home/me/work/runs/gpt-3f9a2c
take_back() {
  end_guard
  rm -rf "$gptctl_dir"
  [ "$1" = 78 ] || echo "error: the setup ended with exit code $1" >&2
}
gptctl_guard=''
end_guard() { # its session may be too young to be known
  [ -z "$gptctl_guard" ] || kill -- -"$gptctl_guard" 2> /dev/null || kill "$gptctl_guard"
}
if [ -n "${GPTCTL_TAKE_BACK:-}" ]; then # as long as there is no agent that would
  trap 'take_back $?' EXIT
  # A setup that hangs is ended by a shell of its own.
  # shellcheck disable=SC2016
  setsid sh -c 'sleep "$1"
    for began in "$2"/agent.*.json; do [ ! -e "$began" ] || exit; done
    echo "error: the setup did not end in $1 s" >&2
    for pid in $(grep -lszxF "GPTCTL_RUN_DIR=$2" /proc/[0-9]*/environ | cut -d/ -f3); do
      [ "$pid" = $$ ] || kill -KILL "$pid"
    done 2> /dev/null
    rm -rf "$2"' gptctl "$GPTCTL_TAKE_BACK" "$gptctl_dir" > /dev/null 3>&- 4<&- &
  gptctl_guard=$!
fi

# Setup of cluster profile lab.
{
  module load cuda/12
} || fail 'in the setup: module load cuda/12'

gptctl_python=/srv/venv/bin/python
[ "$1" != old ] || fail "$gptctl_python is not Python 3.10 or newer"
command -v "$gptctl_python" > /dev/null || fail "there is no $gptctl_python"
"$gptctl_python" -S -c '' || fail "$gptctl_python does not start"
cd "$gptctl_dir/lib" || fail "the job's folder is not here"
end_guard
# -S: it needs nothing but the standard library, and starts in half the time. An old Python comes back here.
exec "$gptctl_python" -S gptctl/engine/bootstrap.py "$1" "$gptctl_dir" "${@:2}" >&3 3>&- <&4 4<&-
