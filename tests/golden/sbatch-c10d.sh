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
mapfile -t gptctl_nodes < <(scontrol show hostnames "${SLURM_JOB_NODELIST:?this is to be run inside a Slurm job}")
[ "${#gptctl_nodes[@]}" -gt 0 ] || fail "scontrol does not name the hosts of $SLURM_JOB_NODELIST"
MASTER_ADDR=$(ip -4 -o address show dev bond0 | awk '{ sub("/.*", "", $4); print $4; exit }')
[ -n "$MASTER_ADDR" ] || fail "${gptctl_nodes[0]} has no address on "bond0
MASTER_PORT=29400
export MASTER_ADDR MASTER_PORT

# Node id, hosts, head node, number of nodes: the first four lines of the output.
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
gptctl_cores=${SLURM_CPUS_PER_TASK:-$(env -u OMP_NUM_THREADS nproc)}
export OMP_NUM_THREADS=$((gptctl_cores > 4 ? gptctl_cores / 4 : 1)) # 4 ranks share the cores
[ -z "$SLURM_CPUS_PER_TASK" ] || export SRUN_CPUS_PER_TASK="$SLURM_CPUS_PER_TASK" # srun does not take it over by itself

# Setup of cluster profile lab.
{
  module load anaconda/3-2023.03
} || fail 'in the setup: module load anaconda/3-2023.03'
{
  conda activate gpt
} || fail 'in the setup: conda activate gpt'

# One torchrun on every node. What stands in single quotes is expanded there; PET_… are options of torchrun.
# shellcheck disable=SC2016
srun --nodes="${#gptctl_nodes[@]}" --ntasks-per-node=1 --kill-on-bad-exit=1 \
  bash -c 'PET_RDZV_CONF=is_host=$((SLURM_NODEID == 0)) exec "$@"' node \
  torchrun \
  --nnodes=2:4 --nproc-per-node=4 --max-restarts=2 \
  --rdzv-backend=c10d --rdzv-id="$SLURM_JOB_ID" --rdzv-endpoint="$MASTER_ADDR":"$MASTER_PORT" \
  --signals-to-handle=SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1 \
  -m trainer
