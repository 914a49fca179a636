#!/usr/bin/env bash
export PYTHONUNBUFFERED=1
export PYTHONFAULTHANDLER=1
export TORCH_NCCL_ASYNC_ERROR_HANDLING=3
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
export NCCL_DEBUG=WARN
export GLOO_SOCKET_IFNAME=lo
# torchrun's default is one thread per rank: share the cores of the node instead.
gptctl_cores=${SLURM_CPUS_PER_TASK:-$(env -u OMP_NUM_THREADS nproc)}
export OMP_NUM_THREADS=$((gptctl_cores > 4 ? gptctl_cores / 4 : 1)) # for 4 ranks
torchrun \
  --standalone --nproc-per-node=4 --max-restarts=0 \
  --signals-to-handle=SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1 \
  -m trainer
