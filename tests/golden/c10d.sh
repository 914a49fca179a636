#!/usr/bin/env bash
export PYTHONUNBUFFERED=1
export PYTHONFAULTHANDLER=1
export TORCH_NCCL_ASYNC_ERROR_HANDLING=3
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
export NCCL_DEBUG=WARN
export GLOO_SOCKET_IFNAME=lo
# torchrun's default is one thread per rank: share the cores of the node instead.
gptctl_cores=${SLURM_CPUS_PER_TASK:-$(env -u OMP_NUM_THREADS nproc)}
export OMP_NUM_THREADS=$((gptctl_cores > 8 ? gptctl_cores / 8 : 1)) # for 8 ranks
torchrun \
  --nnodes=1 --nproc-per-node=8 --max-restarts=0 \
  --rdzv-backend=c10d --rdzv-id=100 --rdzv-endpoint=127.0.0.1:29400 --rdzv-conf=is_host=1 \
  --signals-to-handle=SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1 \
  /home/me/work/multigpu_torchrun.py --batch_size 32 10 5
