#!/usr/bin/env bash
# Run a module of the engine on a node of a Slurm job, with the first Python that can.
# Arguments: folder, engine_python of the profile, the Python of gptctl, module and its arguments.
for python in "$2" "$3" python3; do
  if [ -n "$python" ] && "$python" -E -S -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2> /dev/null; then
    GPTCTL_PARENT=$PPID exec "$python" -E -S "$1/engine.pyz" "$4" "$1" "${@:5}"
  fi
done
echo "error: no Python 3.10 or newer for gptctl's engine on $(uname -n): set engine_python in the profile" >&2
exit 72
