#!/usr/bin/env bash
# Run one node of gpt, inside its container:
# srun --nodes=2 --ntasks-per-node=1 '--container-image=nvcr.io#nvidia/pytorch:24.01-py3' --container-mounts=/data:/data:ro,/home/me/work:/home/me/work --container-workdir=/data "$PWD/this-script.sh"
fail() {
  echo "error: $*" >&2
  exit 1
}
# There is no scontrol in the container: of each [range], take the first number, then the first host.
mapfile -t gptctl_nodes < <(sed 's/\[\([0-9]*\)[^]]*]/\1/g; s/,.*//' <<< "${SLURM_JOB_NODELIST:?run this inside a Slurm job}")
[ "${#gptctl_nodes[@]}" -gt 0 ] || fail "scontrol cannot list the hosts of $SLURM_JOB_NODELIST"
MASTER_ADDR=$(getent ahostsv4 "${gptctl_nodes[0]}" | awk '$1 !~ /^127[.]/ { print $1; exit }')
[ -n "$MASTER_ADDR" ] || fail "${gptctl_nodes[0]} has no address that other nodes can reach: check DNS or /etc/hosts, or set master_interface"
# A port by job id, so that jobs on one node differ, and below the range of outgoing connections.
MASTER_PORT=$((20000 + (SLURM_JOB_ID + ${GPTCTL_ATTEMPT:-0} * 97) % 12000))
export MASTER_ADDR MASTER_PORT

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

# Setup of cluster profile lab.
{
  pip install -e 'x y'
} || fail 'setup failed: pip install -e '"'"'x y'"'"''

exec torchrun \
  --nnodes=2 --nproc-per-node=4 --node-rank="$SLURM_NODEID" \
  --master-addr="$MASTER_ADDR" --master-port="$MASTER_PORT" --max-restarts=0 \
  --signals-to-handle=SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1 \
  -m trainer
