"""What programs write when they fail, in the shape of the real texts, each with the code that `gptctl why` must give.

Written for this test: hosts, numbers and paths are invented.
"""

from __future__ import annotations

from typing import NamedTuple

TRACE = 'Traceback (most recent call last):\n  File "/job/train.py", line 41, in <module>\n    main()\n'
RANK_TRACE = '[rank3]: Traceback (most recent call last):\n[rank3]:   File "/job/train.py", line 41, in <module>\n[rank3]:     main()\n'
STEPS = "".join(
    f"[2026-03-01 10:00:{second:02},120] [    INFO] - [train] epoch: 0, batch: {second}, loss: 4.{second:02}1234567, avg_batch_cost: 0.50000 sec, speed: 2.00 step/s, ips_total: 8192 tokens/s, ips: 2048 tokens/s, learning rate: 1.00000e-04\n"
    for second in range(10, 40)
)
FRAMES = "".join(
    f"frame #{n}: <unknown function> + 0x{n:x}f3a (0x7f3a00{n:02x} in libtorch_cuda.so)\n" for n in range(9)
)


class Excerpt(NamedTuple):
    """The end of the log of the rank that failed first, unless `node` or `batch` has it."""

    code: str
    log: str = ""
    exit: int | None = 1
    signal: int | None = None
    oom: str | None = None
    node: str = ""  # the log of its node; no rank has failed then
    node_exit: int = 1
    batch: str = ""
    state: str = "FAILED"
    reason: str = ""  # of the state, if nothing else is known


# Such texts also are what a rank writes when another one has failed: the earliest of them is named.
LIKE_CONSEQUENCES = ("K009", "K020", "K021", "K022", "K030", "K031", "K032", "K033", "K034", "K035")

EXCERPTS = [
    # GPUs
    Excerpt("K001", "rank 3: error: out of memory at global step 12: GPU 0 has 79.2 GiB, torch had allocated 77.9 GiB, tried to allocate 2.0 GiB more, the estimate was 70.3 GiB\nhint: any one of these changes is enough: Model.use_recompute: true\n", 93),
    Excerpt("K002", f"{RANK_TRACE}[rank3]: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 3.10 GiB. GPU 3 has a total capacity of 39.39 GiB of which 1.20 GiB is free. Process 77 has 38.1 GiB memory in use.\n"),
    Excerpt("K002", f"{TRACE}torch.cuda.OutOfMemoryError: CUDA out of memory. Tried to allocate 64.00 MiB (GPU 0; 15.78 GiB total capacity; 14.1 GiB already allocated)\n"),
    Excerpt("K002", f"{TRACE}RuntimeError: CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`\n"),
    Excerpt("K003", f"{TRACE}RuntimeError: CUDA error: uncorrectable ECC error encountered\nCompile with `TORCH_USE_CUDA_DSA` to enable device-side assertions.\n"),
    Excerpt("K003", f"kernel: NVRM: Xid (PCI:0000:4e:00): 79, pid=77, GPU has fallen off the bus.\n{TRACE}RuntimeError: CUDA error: unknown error\n"),
    Excerpt("K004", f"/env/torch/cuda/__init__.py:174: UserWarning: CUDA initialization: The NVIDIA driver on your system is too old (found version 11040). Please update your GPU driver.\n{TRACE}RuntimeError: No CUDA GPUs are available\n"),
    Excerpt("K004", f"{TRACE}RuntimeError: Unexpected error from cudaGetDeviceCount(). Error 803: system has unsupported display driver / cuda driver combination\n"),
    Excerpt("K004", f"{TRACE}pynvml.NVMLError_LibRmVersionMismatch: Driver/library version mismatch\n"),
    Excerpt("K005", f"{TRACE}RuntimeError: CUDA error: no kernel image is available for execution on the device\nCUDA kernel errors might be asynchronously reported at some other API call.\n"),
    Excerpt("K006", f"{TRACE}AssertionError: Torch not compiled with CUDA enabled\n"),
    Excerpt("K006", "rank 3: error: Global.device is gpu, but torch finds no GPU\nhint: use Global.device: cpu\n", 93),
    Excerpt("K007", f"{TRACE}RuntimeError: CUDA error: invalid device ordinal\n"),
    Excerpt("K008", f"{TRACE}RuntimeError: CUDA error: all CUDA-capable devices are busy or unavailable\n"),
    Excerpt("K009", f"{TRACE}torch.distributed.DistBackendError: NCCL error in: /src/ProcessGroupNCCL.cpp:1287, invalid usage, NCCL version 2.21.5\nncclInvalidUsage: This usually reflects invalid usage of NCCL library.\nLast error:\nDuplicate GPU detected : rank 3 and rank 2 both on CUDA device 4e000\n"),
    Excerpt("K010", f"/src/aten/native/cuda/Indexing.cu:1553: indexSelectLargeIndex: block: [8,0,0], thread: [12,0,0] Assertion `srcIndex < srcSelectDimSize` failed.\n{TRACE}RuntimeError: CUDA error: device-side assert triggered\n"),
    Excerpt("K010", f"{TRACE}IndexError: index out of range in self\n"),
    Excerpt("K011", f"{TRACE}RuntimeError: CUDA error: an illegal memory access was encountered\n"),
    Excerpt("K012", f"{TRACE}RuntimeError: cuDNN error: CUDNN_STATUS_NOT_INITIALIZED\n"),
    Excerpt("K012", f"{TRACE}RuntimeError: CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasGemmEx( handle, opa)`\n"),
    Excerpt("K013", f"{TRACE}torch._inductor.exc.InductorError: RuntimeError: Failed to find C compiler. Please specify via CC environment variable.\n"),
    # Networks
    Excerpt("K020", f"gpu7:77:90 [3] misc/ibvwrap.cc:262 NCCL WARN Call to ibv_modify_qp failed with 110 Connection timed out, on dev mlx5_2:1, curr state INIT, next state RTR\n{TRACE}torch.distributed.DistBackendError: NCCL error in: /src/ProcessGroupNCCL.cpp:3384, remote process exited or there was a network error, NCCL version 2.21.5\n"),
    Excerpt("K020", f"gpu7:77:91 [3] transport/net_ib.cc:2100 NCCL WARN NET/IB: Got completion from peer 10.2.0.4<48211> with status=12 opcode=0 len=0 vendor err 129 (Send) hca mlx5_0\ngpu7:77:91 [3] transport/net_ib.cc:2105 NCCL WARN NET/IB : Got completion with error 12, opcode 0, len 0, vendor err 129\n{TRACE}torch.distributed.DistBackendError: NCCL error: unhandled system error\n"),
    Excerpt("K021", f"gpu7:77:77 [3] bootstrap.cc:45 NCCL WARN Bootstrap : no socket interface found\n{TRACE}torch.distributed.DistBackendError: NCCL error in: /src/NCCLUtils.hpp:219, internal error, NCCL version 2.21.5\n"),
    Excerpt("K021", f"{TRACE}RuntimeError: [enforce fail at /src/gloo/transport/tcp/device.cc:83] ifa != nullptr. Unable to find address for: ib9\n"),
    Excerpt("K022", f"gpu7:77:77 [3] init.cc:900 NCCL WARN Mismatched NCCL version detected : rank 0/8 running 22105 rank 3/8 running 22304\n{TRACE}torch.distributed.DistBackendError: NCCL error: invalid usage\n"),
    Excerpt("K023", f"{TRACE}RuntimeError: Detected mismatch between collectives on ranks. Rank 3 is running collective: CollectiveFingerPrint(SequenceNumber=7, OpType=ALLREDUCE), but Rank 0 is running collective: BARRIER.\n"),
    Excerpt("K024", "error: rank 3 (host gpu7, pid 771, T (stopped)) does not respond; the other ranks wait in step 9\nhint: see stacks.3\n", None, 9),
    Excerpt("K025", node="torch.distributed.DistNetworkError: The server socket has failed to listen on any local network address. port: 29500, useIpv6: false, code: -98, name: EADDRINUSE, message: address already in use\n"),
    Excerpt("K036", f"{TRACE}OSError: [Errno 98] Address already in use\n"),
    Excerpt("K026", f"{TRACE}socket.gaierror: [Errno -2] Name or service not known\n"),
    Excerpt("K026", node="error: gpu7 has no address that other nodes can reach: check DNS or /etc/hosts, or set master_interface\n", node_exit=78),
    Excerpt("K027", node="Host key verification failed.\nerror: setup ended\n", node_exit=255),
    Excerpt("K028", node="me@data: Permission denied (publickey,gssapi-with-mic).\n", node_exit=255),
    Excerpt("K029", reason="node 1 (gpu7): its host is lost: no message for 20 s"),
    Excerpt("K030", f"gpu7:77:90 [3] misc/socket.cc:533 NCCL WARN socketPollConnect: connect to 10.2.0.4<56849> returned No route to host, retrying\n{TRACE}torch.distributed.DistBackendError: NCCL error: unhandled system error\n"),
    Excerpt("K030", f"{TRACE}RuntimeError: Gloo connectFullMesh failed with [/src/gloo/transport/tcp/pair.cc:144] no error\n"),
    Excerpt("K031", f"{TRACE}torch.distributed.DistNetworkError: The client socket has timed out after 60000ms while trying to connect to (gpu1, 24511).\n"),
    Excerpt("K031", node=f"{TRACE}torch.distributed.elastic.rendezvous.api.RendezvousTimeoutError\n"),
    Excerpt("K032", f"[rank3]:[E301 10:20:44.9 ProcessGroupNCCL.cpp:616] [Rank 3] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=808, OpType=ALLREDUCE, NumelIn=980, NumelOut=980, Timeout(ms)=600000) ran for 600020 milliseconds before timing out.\nterminate called after throwing an instance of 'c10::DistBackendError'\n  what():  [PG ID 0 Rank 3] Process group watchdog thread terminated with exception: [Rank 3] Watchdog caught collective operation timeout\n{FRAMES}", None, 6),
    Excerpt("K033", f"{TRACE}torch.distributed.DistBackendError: NCCL error in: /src/ProcessGroupNCCL.cpp:3384, unhandled system error (run with NCCL_DEBUG=INFO for details), NCCL version 2.21.5\nncclSystemError: System call (e.g. socket, malloc) or external library call failed or device error.\nLast error:\nsocketProgress: Connection closed by remote peer gpu2<42830>\n"),
    Excerpt("K034", f"{TRACE}torch.distributed.DistBackendError: NCCL error in: /src/ProcessGroupNCCL.cpp:3384, unhandled cuda error, NCCL version 2.21.5\nncclUnhandledCudaError: Call to CUDA function failed.\n"),
    Excerpt("K035", f"{TRACE}RuntimeError: [/src/gloo/transport/tcp/pair.cc:547] Connection closed by peer [10.2.0.4]:41012\n"),
    # Nodes
    Excerpt("K040", STEPS, None, 9, "cgroup"),
    Excerpt("K040", STEPS, None, 9, batch="slurmstepd: error: Detected 1 oom_kill event in StepId=177.0. Some of the step tasks have been OOM Killed.\n"),
    Excerpt("K040", state="OUT_OF_MEMORY", reason="killed by the out-of-memory killer; Slurm reports OUT_OF_MEMORY, on gpu7"),
    Excerpt("K041", f"ERROR: Unexpected bus error encountered in worker. This might be caused by insufficient shared memory (shm).\n{TRACE}RuntimeError: DataLoader worker (pid(s) 812) exited unexpectedly\n"),
    Excerpt("K041", STEPS, None, 7),
    Excerpt("K042", f"{TRACE}RuntimeError: [enforce fail at alloc_cpu.cpp:117] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to allocate 98304000000 bytes. Error code 12 (Cannot allocate memory)\n"),
    Excerpt("K042", f"{TRACE}numpy.core._exceptions._ArrayMemoryError: Unable to allocate 89.4 GiB for an array with shape (12000000000,) and data type float64\n"),
    Excerpt("K043", f"{TRACE}OSError: [Errno 28] No space left on device: '/data/out/step_500'\n"),
    Excerpt("K043", "rank 3: error: cannot save the last checkpoint: not enough disk space: 812.0 MiB needed, 3.1 MiB free\n"),
    Excerpt("K044", f"{TRACE}OSError: [Errno 122] Disk quota exceeded: '/data/out/step_500'\n"),
    Excerpt("K045", f"{TRACE}OSError: [Errno 116] Stale file handle: '/data/corpus/part-3.npy'\n"),
    Excerpt("K046", f"{TRACE}OSError: [Errno 5] Input/output error\n"),
    Excerpt("K046", f"{TRACE}OSError: [Errno 30] Read-only file system: '/scratch/out'\n"),
    Excerpt("K047", f"{TRACE}OSError: [Errno 24] Too many open files: '/data/corpus/part-9.npy'\n"),
    Excerpt("K048", f"{TRACE}RuntimeError: can't start new thread\n"),
    Excerpt("K049", f"{TRACE}RuntimeError: DataLoader worker (pid(s) 812, 813) exited unexpectedly\n"),
    Excerpt("K050", node="mkdir: cannot create directory '/data/runs/gpt-1': not possible\n", node_exit=73),
    Excerpt("K051", f"{TRACE}PermissionError: [Errno 13] Permission denied: '/data/out'\n"),
    Excerpt("K052", STEPS, None, 9),
    Excerpt("K052", reason="node 1 (gpu7): no exit code recorded: srun exited with code 137"),
    Excerpt("K053", reason="node 1 (gpu7): no exit code recorded: srun exited with code 1"),
    # Programs
    Excerpt("K060", f"{TRACE}ModuleNotFoundError: No module named 'flash_attn'\n"),
    Excerpt("K060", node="/usr/bin/python3: No module named torch\n"),
    Excerpt("K061", f"{TRACE}ImportError: /env/flash_attn_2_cuda.so: undefined symbol: _ZN3c105ErrorC2ENS_14SourceLocationE\n"),
    Excerpt("K061", f"{TRACE}ImportError: /lib64/libstdc++.so.6: version `GLIBCXX_3.4.29' not found (required by /env/_C.so)\n"),
    Excerpt("K061", f"{TRACE}ImportError: libcudart.so.12: cannot open shared object file: No such file or directory\n"),
    Excerpt("K062", f"{TRACE}ImportError: cannot import name 'AdamW' from 'transformers' (/env/transformers/__init__.py)\n"),
    Excerpt("K063", '  File "/job/train.py", line 7\n    match x:\n          ^\nSyntaxError: invalid syntax\n'),
    Excerpt("K064", "usage: train.py [-h] [--lr LR]\ntrain.py: error: unrecognized arguments: --learning-rate 3\n", 2),
    Excerpt("K065", node="Lmod has detected the following error: unknown module\nerror: setup failed: module load cuda/99\n", node_exit=78),
    Excerpt("K066", node="/data/runs/gpt-1/launch.sh: line 81: /opt/py/bin/python: No such file or directory\n", node_exit=127),
    Excerpt("K067", f"{TRACE}RuntimeError: Error(s) in loading state_dict for GPT:\n\tsize mismatch for wte.weight: copying a param with shape torch.Size([50304, 768]) from checkpoint, the shape in current model is torch.Size([50257, 768]).\n"),
    Excerpt("K067", "rank 0: error: /data/out/step_5 is a checkpoint of another model: wte has shape (64, 32) there and (64, 48) here\nhint: use the config of that run\n", 93),
    Excerpt("K068", "rank 0: error: /data/out contains no usable checkpoint: step_500: rank_0.bin is damaged: wrong checksum; and 1 more\nhint: set Engine.save_load.ckpt_dir to another one\n", 93),
    Excerpt("K068", f"{TRACE}RuntimeError: PytorchStreamReader failed reading zip archive: failed finding central directory\n"),
    Excerpt("K069", f"{TRACE}Exception: Current loss scale already at minimum - cannot decrease scale anymore. Exiting run.\n"),
    Excerpt("K070", "rank 3: error: no progress: 100 updates in a row had no finite gradient\nhint: lower Optimizer.lr.max_lr\n", 93),
    Excerpt("K070", f"{TRACE}ValueError: loss is nan at step 812, stopping\n"),
    Excerpt("K071", f"{TRACE}RuntimeError: mat1 and mat2 shapes cannot be multiplied (8x768 and 512x64)\n"),
    Excerpt("K072", "rank 0: error: another run is writing to /data/out (process 77 on gpu2)\nhint: stop it first\n", 93),
    Excerpt("K073", f"{TRACE}OSError: We couldn't connect to 'https://huggingface.co' to load the files, and couldn't find them in the cached files.\n"),
    Excerpt("K074", f"{TRACE}wandb.errors.UsageError: api_key not configured (no-tty). call wandb.login(key=[your_api_key])\nwandb: ERROR api_key not configured (no-tty)\n"),
    Excerpt("K075", f"{TRACE}FileNotFoundError: [Errno 2] No such file or directory: '/data/corpus_ids.npy'\n"),
    Excerpt("K075", "rank 0: error: no data at /data/corpus: No such file or directory\n", 93),
    Excerpt("K076", reason="rank 1 (node 0): exited with code 0 while other ranks were running"),
    Excerpt("K077", reason="rank 1 (node 0): exit code 5; three attempts without a new checkpoint"),
    Excerpt("K078", 'Fatal Python error: Segmentation fault\n\nCurrent thread 0x00 (most recent call first):\n  File "/job/train.py", line 9 in step\n', None, 11),
    Excerpt("K079", "", None, 4),
    Excerpt("K080", "terminate called after throwing an instance of 'std::runtime_error'\n  what():  tokenizer table is empty\n", None, 6),
    Excerpt("K081", "rank 0: error: the number of samples changed since the checkpoint\n", 93),
    Excerpt("K082", node="something\n", node_exit=78),
    # Schedulers and people
    Excerpt("K090", state="TIMEOUT", reason="Slurm reports TIMEOUT, on gpu7"),
    Excerpt("K091", state="PREEMPTED", reason="Slurm reports PREEMPTED"),
    Excerpt("K092", state="NODE_FAIL", reason="Slurm reports NODE_FAIL (Node failure on gpu7)"),
    Excerpt("K093", reason="Slurm could not start the job script on gpu7: check that the nodes see /data/runs/gpt-1"),
    Excerpt("K093", batch="slurmstepd: error: execve(): /data/runs/gpt-1/job.sbatch: Permission denied\n", reason="Slurm reports FAILED, exit code 1"),
    Excerpt("K094", batch="srun: error: Unable to allocate resources: Invalid account or account/partition combination specified\n", reason="Slurm reports FAILED, exit code 1"),
    Excerpt("K095", batch="srun: error: Unable to create step for job 177: Job credential expired\n", reason="Slurm reports FAILED, exit code 1"),
    Excerpt("K096", node="torch.distributed.elastic.multiprocessing.api.SignalException: Process 771 got signal: 1\n"),
    Excerpt("K097", STEPS, None, 15),
    Excerpt("K098", state="STOPPED", reason="the trainer stopped on request"),
    Excerpt("K099", state="CANCELLED", reason="by me on login1, 2026-03-01 10:00:00"),
    Excerpt("K101", state="CANCELLED", reason="gpt-3f9a2c is FAILED, and this job starts only if it completes"),
    Excerpt("K100", state="LOST", reason="its supervisor was killed"),
]  # fmt: skip

# What programs that are well write: warnings and notes that look like failures.
HEALTHY = {
    "steps of the trainer": STEPS,
    "steps at a loss of nearly nothing": "[2026-03-01 10:00:10,120] [    INFO] - [valid] epoch: 0, batch: 100, loss: 0.000000001\n",
    "NCCL with NCCL_DEBUG=INFO": """\
gpu7:77:77 [0] NCCL INFO Bootstrap : Using eth0:10.2.0.7<0>
gpu7:77:77 [0] NCCL INFO NET/Plugin : Plugin load (libnccl-net.so) returned 2 : libnccl-net.so: cannot open shared object file: No such file or directory
gpu7:77:77 [0] NCCL INFO NET/IB : No device found.
gpu7:77:77 [0] misc/ibvwrap.cc:63 NCCL WARN Failed to open libibverbs.so[.1]
gpu7:77:77 [0] NCCL INFO NCCL_IB_TIMEOUT set by environment to 22.
gpu7:77:77 [0] NCCL INFO comm 0x5581 rank 0 nranks 8 cudaDev 0 busId 4e000 - Init COMPLETE
""",
    "sockets of torch": """\
[W301 10:00:01.5 socket.cpp:697] [c10d] The client socket has failed to connect to [localhost]:29500 (errno: 97 - Address family not supported by protocol).
[W301 10:00:01.5 socket.cpp:755] [c10d] The IPv6 network addresses of (gpu1, 29500) cannot be retrieved (gai error: -2 - Name or service not known).
[rank0]:[W301 10:00:02.7 ProcessGroupNCCL.cpp:4561] [PG ID 0 Rank 0] using GPU 0 to perform barrier as devices used by this process are currently unknown.
""",
    "warnings of Python": """\
/env/torch/utils/data/dataloader.py:558: UserWarning: This DataLoader will create 16 worker processes in total. Our suggested max number of worker in current system is 8. Unable to allocate more may slow down.
/job/train.py:9: DeprecationWarning: No module named 'old' is deprecated
[2026-03-01 10:00:10,120] [ WARNING] - cannot write metrics: No space left on device; the training continues
[2026-03-01 10:00:11,120] [ WARNING] - global step 7: the gradient norm is nan, update skipped, loss scale is now 32768
""",
    "a user's script": """\
epoch 1: train loss 2.31, lr 3.0e-4, grad norm 0.98, 18.2 samples/s, memory 31.0 of 39.4 GiB
saved checkpoint to out/step_500 (signal handlers installed for SIGTERM and SIGUSR1)
evaluated 1000 samples: accuracy 0.81, permission model v2 loaded, timeout 600 s
0 errors, exit code 0
""",
    "Slurm": "srun: Job step created for StepId=177.0\nengine: attempt 0 on gpu7, gpu8; port 23877 is free\n",
    "torchrun": "W0301 10:00:01.678000 771 torch/distributed/run.py:774] Setting OMP_NUM_THREADS environment variable for each process to be 1 in default, to avoid your system being overloaded\n",
}  # fmt: skip
