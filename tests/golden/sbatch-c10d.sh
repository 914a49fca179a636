#!/usr/bin/env bash
#SBATCH --job-name=gpt
#SBATCH --partition=a800
#SBATCH --nodes=2-4
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=16
#SBATCH --gres=gpu:4
#SBATCH --open-mode=append
fail() {
  echo "error: $*" >&2
  exit 1
}
mapfile -t gptctl_nodes < <(scontrol show hostnames "${SLURM_JOB_NODELIST:?run this inside a Slurm job}")
[ "${#gptctl_nodes[@]}" -gt 0 ] || fail "scontrol cannot list the hosts of $SLURM_JOB_NODELIST"
MASTER_ADDR=$(ip -4 -o address show dev bond0 | awk '{ sub("/.*", "", $4); print $4; exit }')
[ -n "$MASTER_ADDR" ] || fail "${gptctl_nodes[0]} has no IPv4 address on master_interface "bond0
MASTER_PORT=29400
export MASTER_ADDR MASTER_PORT

# The first four lines of the output: node id, hosts, first host, number of nodes.
echo "${SLURM_NODEID:-0}"
echo "${gptctl_nodes[*]}"
echo "${gptctl_nodes[0]}"
echo "${#gptctl_nodes[@]}"

export PYTHONUNBUFFERED=1
export PYTHONFAULTHANDLER=1
export TORCH_NCCL_ASYNC_ERROR_HANDLING=3
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
export NCCL_DEBUG=WARN
export NCCL_IB_DISABLE=1
export NCCL_SOCKET_IFNAME=bond0
export GLOO_SOCKET_IFNAME=bond0
# torchrun's default is one thread per rank: share the cores of the node instead.
gptctl_cores=${SLURM_CPUS_PER_TASK:-$(env -u OMP_NUM_THREADS nproc)}
export OMP_NUM_THREADS=$((gptctl_cores > 4 ? gptctl_cores / 4 : 1)) # for 4 ranks
# srun does not inherit --cpus-per-task from sbatch since Slurm 22.05.
[ -z "$SLURM_CPUS_PER_TASK" ] || export SRUN_CPUS_PER_TASK="$SLURM_CPUS_PER_TASK"

# Setup of cluster profile lab.
{
  module load anaconda/3-2023.03
} || fail 'setup failed: module load anaconda/3-2023.03'
{
  conda activate gpt
} || fail 'setup failed: conda activate gpt'

# Start one torchrun on every node. The text in single quotes is expanded there;
# torchrun reads PET_… variables as options.
# shellcheck disable=SC2016
srun --nodes="${#gptctl_nodes[@]}" --ntasks-per-node=1 --kill-on-bad-exit=1 \
  bash -c 'PET_RDZV_CONF=is_host=$((SLURM_NODEID == 0)) exec "$@"' node \
  torchrun \
  --nnodes=2:4 --nproc-per-node=4 --max-restarts=2 \
  --rdzv-backend=c10d --rdzv-id="$SLURM_JOB_ID" --rdzv-endpoint="$MASTER_ADDR":"$MASTER_PORT" \
  --signals-to-handle=SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1 \
  -m trainer
