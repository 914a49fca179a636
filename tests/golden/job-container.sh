#!/usr/bin/env bash
# One node of an attempt of job gpt-3f9a2c. Nodes: 1; ranks per node: 2.
# gptctl starts this script. To start it by hand, from any folder:
#   GPTCTL_NODE=0 GPTCTL_ATTEMPT=0 MASTER_ADDR=127.0.0.1 MASTER_PORT=29500 \
#     bash /home/me/work/runs/gpt-3f9a2c/launch.sh
: "${GPTCTL_NODE:?set it to the number of this node, from 0}"
: "${GPTCTL_ATTEMPT:?set it to the number of earlier attempts}"
: "${MASTER_ADDR:?set it to the address of node 0}"
: "${MASTER_PORT:?set it to a free port of node 0}"

export GPTCTL_NODE GPTCTL_ATTEMPT
export GPTCTL_JOB=gpt-3f9a2c
# All processes of the job inherit this variable: gptctl finds them by it.
export GPTCTL_RUN_DIR=/home/me/work/runs/gpt-3f9a2c
export GPTCTL_ATTEMPT_DIR="$GPTCTL_RUN_DIR/attempt-$GPTCTL_ATTEMPT"
export GPTCTL_LOG_DIR=/home/me/work/runs/gpt-3f9a2c/logs/"attempt-$GPTCTL_ATTEMPT"
gptctl_stop_requested='' # not empty after a signal asked this script to stop
umask 077
mkdir -p "$GPTCTL_ATTEMPT_DIR" "$GPTCTL_LOG_DIR" || exit 73

# Record how this node exited.
finish() {
  echo "$1" > "$GPTCTL_ATTEMPT_DIR/node.$GPTCTL_NODE.exit" || exit "$1"
  # After a stop torchrun exits with 1, for which srun would kill nodes that are still saving.
  [ -z "$gptctl_stop_requested" ] || exit 0
  exit "$1"
}
fail() {
  echo "error: $*" >&2
  finish 78
}

export PYTHONUNBUFFERED=1
export PYTHONFAULTHANDLER=1
export TORCH_NCCL_ASYNC_ERROR_HANDLING=3
export NCCL_DEBUG=WARN
export GLOO_SOCKET_IFNAME=lo
# torchrun's default is one thread per rank: share the cores of the node instead.
gptctl_cores=${SLURM_CPUS_PER_TASK:-$(env -u OMP_NUM_THREADS nproc)}
export OMP_NUM_THREADS=$((gptctl_cores > 2 ? gptctl_cores / 2 : 1)) # for 2 ranks
export TORCH_FR_DUMP_TEMP_FILE="${TORCH_FR_DUMP_TEMP_FILE:-$GPTCTL_LOG_DIR/nccl_trace_rank_}"

cd /home/me/work || fail "the job's working folder is missing here"

# `-m trainer` runs the copy that was frozen with the job.
export GPTCTL_WORK_DIR=/home/me/work/runs/gpt-3f9a2c/code PYTHONPATH=/home/me/work/runs/gpt-3f9a2c/code"${PYTHONPATH:+:$PYTHONPATH}"
# torchrun imports modules from its current folder: this one contains none.
cd "$GPTCTL_ATTEMPT_DIR" || fail "the folder of the attempt is missing here"
# The job may have been cancelled while the setup ran.
[ ! -e "$GPTCTL_RUN_DIR/cancelled" ] || finish 143

# Python first imports sitecustomize.py from there: torchrun exits with this script, and its static
# rendezvous listens on MASTER_ADDR only.
PYTHONPATH="$GPTCTL_RUN_DIR/python${PYTHONPATH:+:$PYTHONPATH}" \
singularity exec --nv --pwd /b -B '/a b:/b:rw' -B /home/me/work/runs/gpt-3f9a2c /images/gpt.sif torchrun \
  --nnodes=1 --nproc-per-node=2 --node-rank="$GPTCTL_NODE" \
  --master-addr="$MASTER_ADDR" --master-port="$MASTER_PORT" --max-restarts=0 \
  --signals-to-handle=SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1 --log-dir="$GPTCTL_ATTEMPT_DIR/torchrun.$GPTCTL_NODE" \
  /home/me/work/runs/gpt-3f9a2c/code/rank_log.py -m trainer -c /home/me/work/runs/gpt-3f9a2c/config.json -o Engine.save_load.output_dir=/home/me/work/runs/gpt-3f9a2c/output &
torchrun=$!

# Signals go to torchrun, which passes them on to its ranks; this script must survive them to record
# the exit code.
echo "$torchrun" > "$GPTCTL_ATTEMPT_DIR/node.$GPTCTL_NODE.pid"
trap 'gptctl_stop_requested=yes; : > "$GPTCTL_ATTEMPT_DIR/node.$GPTCTL_NODE.stop-requested"' TERM INT HUP USR1 USR2
wait "$torchrun"
# A signal interrupts `wait`.
while kill -0 "$torchrun" 2> /dev/null; do
  wait "$torchrun"
done
# Again, for the exit code: torchrun may have exited while a signal was handled.
wait "$torchrun"
code=$?
finish "$code"
