#!/usr/bin/env bash
# One part for each node: run it there. `--node N` prints one part alone.

# Node 0: 10.0.0.46
export PYTHONUNBUFFERED=1
export PYTHONFAULTHANDLER=1
export TORCH_NCCL_ASYNC_ERROR_HANDLING=3
export NCCL_DEBUG=WARN
export NCCL_IB_DISABLE=1
export NCCL_SOCKET_IFNAME=bond0
export GLOO_SOCKET_IFNAME=bond0
# torchrun's default is one thread per rank: share the cores of the node instead.
gptctl_cores=${SLURM_CPUS_PER_TASK:-$(env -u OMP_NUM_THREADS nproc)}
export OMP_NUM_THREADS=$((gptctl_cores > 2 ? gptctl_cores / 2 : 1)) # for 2 ranks
torchrun \
  --nnodes=2 --nproc-per-node=2 --node-rank=0 \
  --master-addr=10.0.0.46 --master-port=29500 --max-restarts=0 \
  --signals-to-handle=SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1 \
  /home/me/work/multigpu_torchrun.py --batch_size 32 10 5

# Node 1: 10.0.0.45
export PYTHONUNBUFFERED=1
export PYTHONFAULTHANDLER=1
export TORCH_NCCL_ASYNC_ERROR_HANDLING=3
export NCCL_DEBUG=WARN
export NCCL_IB_DISABLE=1
export NCCL_SOCKET_IFNAME=bond0
export GLOO_SOCKET_IFNAME=bond0
# torchrun's default is one thread per rank: share the cores of the node instead.
gptctl_cores=${SLURM_CPUS_PER_TASK:-$(env -u OMP_NUM_THREADS nproc)}
export OMP_NUM_THREADS=$((gptctl_cores > 2 ? gptctl_cores / 2 : 1)) # for 2 ranks
torchrun \
  --nnodes=2 --nproc-per-node=2 --node-rank=1 \
  --master-addr=10.0.0.46 --master-port=29500 --max-restarts=0 \
  --signals-to-handle=SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1 \
  /home/me/work/multigpu_torchrun.py --batch_size 32 10 5
