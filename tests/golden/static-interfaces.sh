#!/usr/bin/env bash
# One part for each node: run it there. `--node N` prints one part alone.
fail() { echo "error: $*" >&2; }

# Node 0: a
export PYTHONUNBUFFERED=1
export PYTHONFAULTHANDLER=1
export TORCH_NCCL_ASYNC_ERROR_HANDLING=3
export NCCL_DEBUG=WARN
export GPTCTL_PRIVATE_DISKS=1
# torchrun's default is one thread per rank: share the cores of the node instead.
gptctl_cores=${SLURM_CPUS_PER_TASK:-$(env -u OMP_NUM_THREADS nproc)}
export OMP_NUM_THREADS=$((gptctl_cores > 2 ? gptctl_cores / 2 : 1)) # for 2 ranks
export GLOO_SOCKET_IFNAME=bond0
export NCCL_SOCKET_IFNAME="="bond0

# Setup of cluster profile lab.
{
  module load cuda/12
} || fail 'setup failed: module load cuda/12'
/srv/venv/bin/python -m torch.distributed.run \
  --nnodes=2 --nproc-per-node=2 --node-rank=0 \
  --master-addr=a --master-port=29500 --max-restarts=0 \
  --signals-to-handle=SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1 \
  -m trainer

# Node 1: b
export PYTHONUNBUFFERED=1
export PYTHONFAULTHANDLER=1
export TORCH_NCCL_ASYNC_ERROR_HANDLING=3
export NCCL_DEBUG=WARN
export GPTCTL_PRIVATE_DISKS=1
# torchrun's default is one thread per rank: share the cores of the node instead.
gptctl_cores=${SLURM_CPUS_PER_TASK:-$(env -u OMP_NUM_THREADS nproc)}
export OMP_NUM_THREADS=$((gptctl_cores > 2 ? gptctl_cores / 2 : 1)) # for 2 ranks
export GLOO_SOCKET_IFNAME=eth1
export NCCL_SOCKET_IFNAME="="eth1

# Setup of cluster profile lab.
{
  module load cuda/12
} || fail 'setup failed: module load cuda/12'
/srv/venv/bin/python -m torch.distributed.run \
  --nnodes=2 --nproc-per-node=2 --node-rank=1 \
  --master-addr=a --master-port=29500 --max-restarts=0 \
  --signals-to-handle=SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1 \
  -m trainer
