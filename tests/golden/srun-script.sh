#!/usr/bin/env bash
# One node of gpt: srun --nodes=2 --ntasks-per-node=1 ./this-script.sh
fail() {
  echo "error: $*" >&2
  exit 1
}
mapfile -t gptctl_nodes < <(scontrol show hostnames "${SLURM_JOB_NODELIST:?this is to be run inside a Slurm job}")
[ "${#gptctl_nodes[@]}" -gt 0 ] || fail "scontrol does not name the hosts of $SLURM_JOB_NODELIST"
MASTER_ADDR=$(getent ahostsv4 "${gptctl_nodes[0]}" | awk '$1 !~ /^127[.]/ { print $1; exit }')
[ -n "$MASTER_ADDR" ] || fail "${gptctl_nodes[0]} resolves to no address that other nodes can reach"
MASTER_PORT=$((20000 + (SLURM_JOB_ID + ${GPTCTL_ATTEMPT:-0} * 97) % 12000)) # below the ports that outgoing connections take
export MASTER_ADDR MASTER_PORT

export PYTHONUNBUFFERED=1
export PYTHONFAULTHANDLER=1
export TORCH_NCCL_ASYNC_ERROR_HANDLING=3
export NCCL_DEBUG=WARN
export NCCL_IB_DISABLE=1
export NCCL_SOCKET_IFNAME=bond0
export GLOO_SOCKET_IFNAME=bond0
gptctl_cores=${SLURM_CPUS_PER_TASK:-$(env -u OMP_NUM_THREADS nproc)}
export OMP_NUM_THREADS=$((gptctl_cores > 4 ? gptctl_cores / 4 : 1)) # 4 ranks share the cores

# Setup of cluster profile lab.
{
  module load anaconda/3-2023.03
} || fail 'in the setup: module load anaconda/3-2023.03'
{
  conda activate gpt
} || fail 'in the setup: conda activate gpt'

exec torchrun \
  --nnodes=2 --nproc-per-node=4 --node-rank="$SLURM_NODEID" \
  --master-addr="$MASTER_ADDR" --master-port="$MASTER_PORT" --max-restarts=0 \
  --signals-to-handle=SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1 \
  -m trainer
