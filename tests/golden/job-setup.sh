#!/usr/bin/env bash
# One node of one attempt of job gpt-3f9a2c: 1 node(s) with 2 rank(s) each. gptctl starts it; by hand, from any folder:
#   GPTCTL_NODE=0 GPTCTL_ATTEMPT=0 MASTER_ADDR=127.0.0.1 MASTER_PORT=29500 bash /home/me/work/runs/gpt-3f9a2c/launch.sh
: "${GPTCTL_NODE:?the number of this node, from 0}" "${GPTCTL_ATTEMPT:?how often the job was started before}"
: "${MASTER_ADDR:?the address of node 0}" "${MASTER_PORT:?a free port of node 0}"

export GPTCTL_NODE GPTCTL_ATTEMPT
export GPTCTL_JOB=gpt-3f9a2c
export GPTCTL_RUN_DIR=/home/me/work/runs/gpt-3f9a2c # in the environment of every process of the job, so that each can be found
export GPTCTL_ATTEMPT_DIR="$GPTCTL_RUN_DIR/attempt-$GPTCTL_ATTEMPT"
export GPTCTL_LOG_DIR=/home/me/work/runs/gpt-3f9a2c/logs/"attempt-$GPTCTL_ATTEMPT"
asked='' # to stop, by a signal to this script
umask 077
mkdir -p "$GPTCTL_ATTEMPT_DIR" "$GPTCTL_LOG_DIR" || exit 73

# Record how this node exited.
finish() {
  echo "$1" > "$GPTCTL_ATTEMPT_DIR/node.$GPTCTL_NODE.exit" || exit "$1"
  [ -z "$asked" ] || exit 0 # torchrun exits with 1 then, for which srun would kill nodes that are still saving
  exit "$1"
}
fail() {
  echo "error: $*" >&2
  finish 78
}

export PYTHONUNBUFFERED=1
export PYTHONFAULTHANDLER=1
export TORCH_NCCL_ASYNC_ERROR_HANDLING=3
export NCCL_DEBUG=INFO
export GLOO_SOCKET_IFNAME=lo
# torchrun's default is one thread per rank: share the cores of the node instead.
gptctl_cores=${SLURM_CPUS_PER_TASK:-$(env -u OMP_NUM_THREADS nproc)}
export OMP_NUM_THREADS=$((gptctl_cores > 2 ? gptctl_cores / 2 : 1)) # for 2 ranks
TOKEN=$(< /home/me/work/t) || fail 'cannot read the secret TOKEN from /home/me/work/t' # never written to a file
export TOKEN
[ -n "${MY_KEY:-}" ] || fail MY_KEY 'is not set: the secret KEY is read from it'
export KEY="${MY_KEY:-}"
export TORCH_FR_DUMP_TEMP_FILE="${TORCH_FR_DUMP_TEMP_FILE:-$GPTCTL_LOG_DIR/nccl_trace_rank_}"

cd /home/me/work || fail "the job's working folder is not here"

# Setup of cluster profile lab.
{
  module load cuda/12
} || fail 'setup failed: module load cuda/12'
{
  source /venv/bin/activate
} || fail 'setup failed: source /venv/bin/activate'

# `-m trainer` is the frozen copy.
export GPTCTL_WORK_DIR=/home/me/work/runs/gpt-3f9a2c/code PYTHONPATH=/home/me/work/runs/gpt-3f9a2c/code"${PYTHONPATH:+:$PYTHONPATH}"
cd "$GPTCTL_ATTEMPT_DIR" || fail # torchrun imports from where it is started: there is nothing here
[ ! -e "$GPTCTL_RUN_DIR/cancelled" ] || finish 143

torchrun \
  --nnodes=1 --nproc-per-node=2 --node-rank="$GPTCTL_NODE" \
  --master-addr="$MASTER_ADDR" --master-port="$MASTER_PORT" --max-restarts=0 \
  --signals-to-handle=SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1 --log-dir="$GPTCTL_ATTEMPT_DIR/torchrun.$GPTCTL_NODE" \
  /home/me/work/runs/gpt-3f9a2c/code/rank_log.py -m trainer -c /home/me/work/runs/gpt-3f9a2c/config.json -o Engine.save_load.output_dir=/home/me/work/runs/gpt-3f9a2c/output &
torchrun=$!

# Signals are for torchrun, which passes them on to its ranks; this script only has to outlive them.
echo "$torchrun" > "$GPTCTL_ATTEMPT_DIR/node.$GPTCTL_NODE.pid"
trap 'asked=yes; : > "$GPTCTL_ATTEMPT_DIR/node.$GPTCTL_NODE.asked"' TERM INT HUP USR1 USR2
wait "$torchrun"
while kill -0 "$torchrun" 2> /dev/null; do # a signal ends `wait` early
  wait "$torchrun"
done
wait "$torchrun" # again: it may have ended while a signal was dealt with
code=$?
finish "$code"
