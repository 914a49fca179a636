"""Failures of a node: its memory, disks and limits. The most specific come first."""

from __future__ import annotations

from gptctl.engine.contract import CANNOT_CREATE, CANNOT_UNPACK
from gptctl.engine.job_result import OUT_OF_MEMORY
from gptctl.jobs.failures.gpu_failures import DOCTOR, ELSEWHERE, FIRST_LINES, SMALLER
from gptctl.jobs.failures.signature import Signature

LESS_MEMORY = "use less memory per rank, fewer ranks per node, or nodes with more memory"
MORE_MEMORY = "gptctl rerun {job} --mem 200G"

SIGNATURES = (
    Signature(
        "K040",
        "killed by the host's out-of-memory killer",
        "The processes of the node used more memory than the job or the machine has.",
        f"{LESS_MEMORY}; on Slurm request more with --mem",
        (
            r"killed by the out-of-memory killer$",
            r"oom[_-]kill event",
            r"OOM Killed",
            r"srun: error: .{0,80}: Out Of Memory",
            r"Out of memory: Killed process",
            r"probably by the out-of-memory killer",
        ),
        (MORE_MEMORY, FIRST_LINES),
        states=(OUT_OF_MEMORY,),
        trainer_fix=SMALLER,
    ),
    Signature(
        "K041",
        "shared memory is full",
        "The node's or container's /dev/shm is too small for the workers of the data loader.",
        "shared memory may be full: check /dev/shm, or use fewer data loader workers",
        (
            r"(?i)out of shared memory",
            r"(?i)insufficient shared memory",
            r"unable to (write to|open|allocate|mmap) .{0,60}(shared memory|/torch_)",
            r"is killed by signal: Bus error",
        ),
        (DOCTOR,),
        signals=(7,),
    ),
    Signature(
        "K042",
        "no memory on the host",
        "A process asked for more memory of the host than it could get.",
        LESS_MEMORY,
        (
            r"\bMemoryError\b",
            r"DefaultCPUAllocator",
            r"[Cc]annot allocate memory",
            r"can't allocate memory",
            r"std::bad_alloc",
            r"Unable to allocate .{0,60}(bytes|[KMGT]iB)",
            r"out of memory .{0,80}: the host",
        ),
        (MORE_MEMORY,),
        trainer_fix=SMALLER,
    ),
    Signature(
        "K043",
        "disk full",
        "The file system that the job writes to has no space left.",
        "free space there, or use another disk: output_dir, or run_root of the profile",
        (r"No space left on device", r"not enough disk space", r"PytorchStreamWriter failed"),
        ("gptctl list --sort=-size --limit 10", "gptctl rm --older 30d --dry-run"),
    ),
    Signature(
        "K044",
        "disk quota used up",
        "You or your project may not store more on that file system.",
        "free space there, ask for a larger quota, or use another disk: output_dir, or run_root of "
        "the profile",
        (r"Disk quota exceeded", r"\[Errno 122\]"),
        ("gptctl list --sort=-size --limit 10", "gptctl rm --older 30d --dry-run"),
    ),
    Signature(
        "K045",
        "stale file of a network file system",
        "A file or folder was removed or moved on the server while the job used it, or the server "
        "was restarted.",
        "do not delete or move folders of running jobs; run it again",
        (r"Stale (NFS )?file handle", r"\[Errno 116\]"),
        ("gptctl rerun {job} --resume",),
    ),
    Signature(
        "K046",
        "file system lost or read-only",
        "The disk or the network file system failed, or is mounted read-only.",
        "use another node or disk, and report it",
        (
            r"Read-only file system",
            r"Input/output error",
            r"Transport endpoint is not connected",
            r"Remote I/O error",
        ),
        (ELSEWHERE, DOCTOR),
    ),
    Signature(
        "K047",
        "too many open files",
        "The process reached its limit of open files: many data shards, workers or connections.",
        "raise it with `ulimit -n 65536` in setup of the profile, or use fewer data loader workers",
        (r"Too many open files",),
        ("gptctl clusters show {cluster}",),
    ),
    Signature(
        "K048",
        "too many processes or threads",
        "The user or the control group reached its limit of processes.",
        "set OMP_NUM_THREADS, use fewer data loader workers, or raise `ulimit -u` in setup",
        (
            r"can't start new thread",
            r"[Tt]hread creation failed",
            r"fork: (retry: )?Resource temporarily unavailable",
            r"BlockingIOError: \[Errno 11\]",
        ),
        ("gptctl rerun {job} --env OMP_NUM_THREADS=4",),
    ),
    Signature(
        "K049",
        "a worker of the data loader died",
        "A process that loads data was killed or crashed: often no memory, sometimes damaged data.",
        "use fewer workers, or none, to see the error itself",
        (r"DataLoader worker \(pid.{0,80}(exited unexpectedly|is killed by signal)",),
        (FIRST_LINES,),
        is_general=True,
    ),
    Signature(
        "K050",
        "a folder of the job cannot be created",
        "run_root or the log folder does not exist on the node, or may not be written there.",
        "check run_root of the profile and its permissions on every node",
        (r"the (job's )?(working )?folder (of the attempt )?is missing here",),
        (DOCTOR,),
        exits=(CANNOT_CREATE, CANNOT_UNPACK),
    ),
    Signature(
        "K051",
        "permission denied",
        "The user may not read, write or run a file that the job needs.",
        "check the owner and mode of the file in the message, on the node",
        (r"Permission denied", r"\bPermissionError\b", r"Operation not permitted"),
        (FIRST_LINES,),
    ),
    Signature(
        "K052",
        "killed by SIGKILL",
        "Somebody killed the process: the out-of-memory killer, an administrator, or a user.",
        f"if nobody did, it was probably out of memory: {LESS_MEMORY}",
        (r"killed by signal 9 \(SIGKILL\)", r"exitcode {0,8}: -9\b", r"exited with code 137\b"),
        (MORE_MEMORY, FIRST_LINES),
        signals=(9,),
        is_general=True,
        trainer_fix=f"if nobody did, it was probably out of memory: {SMALLER}",
    ),
    Signature(
        "K053",
        "a node ended without a record",
        "launch.sh was killed on that node, or the node could not write to the run folder.",
        "check the disk of run_root and the memory of that node",
        (r"no exit code recorded",),
        (FIRST_LINES, DOCTOR),
        is_general=True,
    ),
)
