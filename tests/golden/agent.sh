#!/usr/bin/env bash
# A part of gptctl on a host of job gpt-3f9a2c: `agent.sh agent NODE` runs the job there, `agent.sh on_host VERB` looks after it.
umask 077
trap '' PIPE # of a connection that is lost: what was sent here is still to be taken back
exec 3>&1 1>&2 # what the setup says is not meant for gptctl
fail() {
  echo "error: $*" >&2
  [ -z "${GPTCTL_TAKE_BACK:-}" ] || rm -rf /home/me/work/runs/gpt-3f9a2c # nobody else will
  exit 78
}

# Setup of cluster profile lab.
{
  module load cuda/12
} || fail 'in the setup: module load cuda/12'

gptctl_python=/srv/venv/bin/python
[ "$1" != old ] || fail "$gptctl_python is not Python 3.10 or newer"
command -v "$gptctl_python" > /dev/null || fail "there is no $gptctl_python"
cd /home/me/work/runs/gpt-3f9a2c/lib || fail "the job's folder is not here"
# -S: it needs nothing but the standard library, and starts in half the time. An old Python comes back here.
exec "$gptctl_python" -S gptctl/begin.py "$1" /home/me/work/runs/gpt-3f9a2c "${@:2}" >&3 3>&-
