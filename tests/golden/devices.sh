#!/usr/bin/env bash
export PYTHONUNBUFFERED=1
export PYTHONFAULTHANDLER=1
export TORCH_NCCL_ASYNC_ERROR_HANDLING=3
export NCCL_DEBUG=WARN
export GLOO_SOCKET_IFNAME=lo
export CUDA_VISIBLE_DEVICES=0,1,2,3,4,5,6,7
# torchrun's default is one thread per rank: share the cores of the node instead.
gptctl_cores=${SLURM_CPUS_PER_TASK:-$(env -u OMP_NUM_THREADS nproc)}
export OMP_NUM_THREADS=$((gptctl_cores > 8 ? gptctl_cores / 8 : 1)) # for 8 ranks
export GPTCTL_LOG_DIR=/home/me/work/dp8
mkdir -p "$GPTCTL_LOG_DIR"
torchrun \
  --nnodes=1 --nproc-per-node=8 --node-rank=0 \
  --master-addr=127.0.0.1 --master-port=29500 --max-restarts=0 \
  --signals-to-handle=SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1 \
  /venv/lib/trainer/rank_log.py -m trainer
