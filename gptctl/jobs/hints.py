"""What to change after a failure: one hint for each kind that has a usual fix. Pure."""

from __future__ import annotations

import re
import signal

from gptctl.engine.cause import Cause
from gptctl.engine.error_text import is_about_memory

_NO_SPACE = re.compile(r"No space left on device|not enough disk space|Disk quota exceeded")
_PORT = re.compile(r"EADDRINUSE|address already in use", re.IGNORECASE)
_MODULE = re.compile(r"No module named")


def hint_of(cause: Cause, is_trainer: bool) -> str:
    """Return a hint for a failure; empty if there is no usual fix."""
    text = cause.text
    if is_about_memory(text):
        if is_trainer and "the estimate was" in text:
            return "its log names changes that would fit: gptctl logs --failed"
        if is_trainer:
            return (
                "lower Global.micro_batch_size, set Model.use_recompute, or raise sharding_degree "
                "or mp_degree; `gptctl validate` estimates the memory of a rank"
            )
        return "use less memory per rank, fewer ranks per node, or nodes with more memory"
    if cause.signal == signal.SIGBUS:
        return "shared memory may be full: check /dev/shm, or use fewer data loader workers"
    if _NO_SPACE.search(text):
        return "free space there, or use another disk: output_dir, or run_root of the profile"
    if _PORT.search(text):
        return "delete Launch.rdzv.port: gptctl chooses a free port"
    if _MODULE.search(text):
        return "install it for the ranks: see `python` and `setup` of the cluster profile"
    return ""
