"""Failures of GPUs, their driver and CUDA's libraries. The most specific come first."""

from __future__ import annotations

from gptctl.jobs.failures.signature import Signature

DOCTOR = "gptctl doctor --cluster {cluster}"
ELSEWHERE = "gptctl rerun {job} --exclude {host}"
FIRST_LINES = "gptctl logs {job} --failed"
SMALLER = (
    "lower Global.micro_batch_size, set Model.use_recompute, or raise sharding_degree or "
    "mp_degree; `gptctl validate` estimates the memory of a rank"
)

SIGNATURES = (
    Signature(
        "K001",
        "out of memory, with the estimate of the trainer",
        "A rank needs more memory than its GPU or host has; the estimate before the start was too "
        "low, or the check was passed over.",
        "its log names changes that would fit: gptctl logs --failed",
        (r"out of memory .{0,300}the estimate was",),
        (FIRST_LINES,),
    ),
    Signature(
        "K002",
        "GPU out of memory",
        "Weights, optimizer state and activations of a rank need more memory than its GPU has.",
        "use less memory per rank: a smaller batch, recomputation, or more GPUs that share the "
        "model",
        (
            r"CUDA out of memory",
            r"CUDA error: out of memory",
            r"\bOutOfMemoryError: ",
            r"(CUBLAS|CUDNN)_STATUS_ALLOC_FAILED",
        ),
        ("gptctl rerun {job} -o Global.micro_batch_size=1",),
        trainer_fix=SMALLER,
    ),
    Signature(
        "K003",
        "broken GPU",
        "The hardware of a GPU failed: its memory had an error that cannot be corrected, or it "
        "left the bus.",
        "run on other nodes, and report this one to its administrator",
        (
            r"[Uu]ncorrectable (NVLink|ECC) error",
            r"Xid \(PCI",
            r"GPU has fallen off the bus",
            r"CUDA error: hardware stack error",
        ),
        (ELSEWHERE, DOCTOR),
    ),
    Signature(
        "K004",
        "GPU driver too old for this torch",
        "The node's NVIDIA driver is older than the CUDA version that torch was built with, or was "
        "updated without a restart.",
        "install a torch for the driver's CUDA version, or use nodes with a newer driver",
        (
            r"NVIDIA driver on your system is too old",
            r"CUDA driver version is insufficient",
            r"unsupported display driver / cuda driver combination",
            r"Driver/library version mismatch",
        ),
        (DOCTOR, ELSEWHERE),
    ),
    Signature(
        "K005",
        "torch has no code for this GPU",
        "torch was built for other generations of GPUs.",
        "install a torch build that supports this GPU",
        (r"no kernel image is available for execution",),
        (DOCTOR,),
    ),
    Signature(
        "K006",
        "no GPU for the rank",
        "The node has no GPU, the job did not request one, CUDA_VISIBLE_DEVICES hides it, or torch "
        "is built without CUDA.",
        "request GPUs (gpu_request and gpus_per_node of the profile), and check the torch build",
        (
            r"no CUDA-capable device is detected",
            r"No CUDA GPUs are available",
            r"Found no NVIDIA driver",
            r"Torch not compiled with CUDA enabled",
            r"torch finds no GPU",
        ),
        (DOCTOR,),
        is_general=True,
    ),
    Signature(
        "K007",
        "more ranks than GPUs on a node",
        "A rank asked for a GPU with a number that its node does not have.",
        "start at most as many ranks per node as it has GPUs",
        (r"invalid device ordinal", r"no GPU for local rank \d"),
        (DOCTOR, "gptctl rerun {job} --gpus-per-node G"),
    ),
    Signature(
        "K008",
        "GPU used by somebody else",
        "The GPU is in exclusive mode, and another process has it.",
        "stop the other process, use other GPUs (--devices), or wait for free ones (--queue)",
        (r"all CUDA-capable devices are busy or unavailable", r"exclusive-thread device already"),
        (ELSEWHERE,),
    ),
    Signature(
        "K009",
        "two ranks on one GPU",
        "NCCL refuses two ranks on the same GPU: the script does not use LOCAL_RANK, or each rank "
        "sees all GPUs as number 0.",
        "call torch.cuda.set_device(int(os.environ['LOCAL_RANK'])) before init_process_group",
        (r"Duplicate GPU detected",),
        (FIRST_LINES,),
    ),
    Signature(
        "K010",
        "index out of range on the GPU",
        "A kernel found an invalid index: most often a token or label that is not smaller than the "
        "vocabulary.",
        "compare the largest token id of the data with the vocabulary size; for the exact line run "
        "again with CUDA_LAUNCH_BLOCKING=1",
        (
            r"device-side assert triggered",
            r"\.cu:\d{1,6}: .{0,200}Assertion .{0,200} failed",
            r"IndexError: index out of range in self",
        ),
        ("gptctl rerun {job} --env CUDA_LAUNCH_BLOCKING=1",),
    ),
    Signature(
        "K011",
        "illegal memory access on the GPU",
        "A kernel read or wrote memory that is not its own: a bug in a custom or compiled kernel, "
        "or a broken GPU.",
        "run again with CUDA_LAUNCH_BLOCKING=1 to see the kernel; if it fails only on this node, "
        "exclude it",
        (
            r"an illegal (memory access|instruction) was encountered",
            r"CUDA error: (misaligned address|unspecified launch failure)",
        ),
        ("gptctl rerun {job} --env CUDA_LAUNCH_BLOCKING=1", ELSEWHERE),
        is_general=True,
    ),
    Signature(
        "K012",
        "cuDNN or cuBLAS cannot start",
        "The library found no free GPU memory for itself, or does not fit the driver or torch.",
        "leave some GPU memory free (a smaller batch), and unset LD_LIBRARY_PATH for other CUDA "
        "versions",
        (
            r"CU(DNN|BLAS)_STATUS_(NOT_INITIALIZED|EXECUTION_FAILED|INTERNAL_ERROR|NOT_SUPPORTED)",
            r"cuDNN error: ",
            r"Unable to load any of \{?libcudnn",
        ),
        (DOCTOR,),
        is_general=True,
    ),
    Signature(
        "K013",
        "compilation of a kernel failed",
        "torch.compile or Triton could not build a kernel: often the node has no C compiler, or "
        "its cache folder cannot be written.",
        "run without compilation, or install a C compiler on the nodes",
        (
            r"torch\._(dynamo|inductor)\.exc\.",
            r"BackendCompilerFailed",
            r"InductorError",
            r"Failed to find C compiler",
            r"triton\.(compiler|runtime)\.errors\.",
        ),
        (FIRST_LINES,),
    ),
)
