#!/usr/bin/env bash
export PYTHONUNBUFFERED=1
export PYTHONFAULTHANDLER=1
export TORCH_NCCL_ASYNC_ERROR_HANDLING=3
export NCCL_DEBUG=WARN
export GLOO_SOCKET_IFNAME=lo
# torchrun's default is one thread per rank: share the cores of the node instead.
gptctl_cores=${SLURM_CPUS_PER_TASK:-$(env -u OMP_NUM_THREADS nproc)}
export OMP_NUM_THREADS=$((gptctl_cores > 8 ? gptctl_cores / 8 : 1)) # for 8 ranks
python -m torch.distributed.launch \
  --nnodes=1 --nproc-per-node=8 --node-rank=0 \
  --master-addr=127.0.0.1 --master-port=29500 --max-restarts=0 \
  --signals-to-handle=SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1 \
  /home/me/work/multigpu_torchrun.py --batch_size 32 10 5
