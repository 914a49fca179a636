#!/usr/bin/env bash
#SBATCH --job-name=gpt
#SBATCH --partition=a800
#SBATCH --nodes=2
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
# A port by job id, so that jobs on one node differ, and below the range of outgoing connections.
MASTER_PORT=$((20000 + (SLURM_JOB_ID + ${GPTCTL_ATTEMPT:-0} * 97) % 12000))
while (exec 3<> "/dev/tcp/$MASTER_ADDR/$MASTER_PORT") 2> /dev/null; do # while the port is in use
  MASTER_PORT=$((MASTER_PORT + 1))
done
export MASTER_ADDR MASTER_PORT

# The first four lines of the output: node id, hosts, first host, number of nodes.
echo "${SLURM_NODEID:-0}"
echo "${gptctl_nodes[*]}"
echo "${gptctl_nodes[0]}"
echo "${#gptctl_nodes[@]}"

export PYTHONUNBUFFERED=1
export PYTHONFAULTHANDLER=1
export TORCH_NCCL_ASYNC_ERROR_HANDLING=3
export NCCL_DEBUG=WARN
export NCCL_IB_DISABLE=1
export NCCL_SOCKET_IFNAME=bond0
export GLOO_SOCKET_IFNAME=bond0
# torchrun's default is one thread per rank: share the cores of the node instead.
gptctl_cores=${SLURM_CPUS_PER_TASK:-$(env -u OMP_NUM_THREADS nproc)}
export OMP_NUM_THREADS=$((gptctl_cores > 4 ? gptctl_cores / 4 : 1)) # for 4 ranks
# srun does not inherit --cpus-per-task from sbatch since Slurm 22.05.
[ -z "$SLURM_CPUS_PER_TASK" ] || export SRUN_CPUS_PER_TASK="$SLURM_CPUS_PER_TASK"

# Start one srun for each node, with its node rank.
gptctl_steps=()
for gptctl_node in "${!gptctl_nodes[@]}"; do
  srun --nodes=1 --ntasks=1 --nodelist="${gptctl_nodes[$gptctl_node]}" \
    '--container-image=nvcr.io#nvidia/pytorch:24.01-py3' --container-mounts=/data:/data:ro,/home/me/work:/home/me/work --container-workdir=/data \
    --container-env=PYTHONUNBUFFERED,PYTHONFAULTHANDLER,TORCH_NCCL_ASYNC_ERROR_HANDLING,NCCL_DEBUG,NCCL_IB_DISABLE,NCCL_SOCKET_IFNAME,GLOO_SOCKET_IFNAME,OMP_NUM_THREADS,GPTCTL_LOG_DIR \
    bash -c '{
pip install -e '"'"'x y'"'"'
} || exit 78
exec "$@"' node \
    torchrun \
  --nnodes=2 --nproc-per-node=4 --node-rank="$gptctl_node" \
  --master-addr="$MASTER_ADDR" --master-port="$MASTER_PORT" --max-restarts=0 \
  --signals-to-handle=SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1 \
  -m trainer &
  gptctl_steps+=("$!")
done

# If a node fails, stop the others and fail the job.
gptctl_code=0
for _ in "${gptctl_steps[@]}"; do
  wait -n || {
    gptctl_code=$?
    kill "${gptctl_steps[@]}" 2> /dev/null
    break
  }
done
wait
exit "$gptctl_code"
