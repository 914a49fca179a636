"""Settings of glibc's malloc. Knows nothing of torch."""

from __future__ import annotations

import os
import resource
from contextlib import suppress

# From glibc's malloc.h.
M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_MAX = -1, -2, -4


def keep_memory() -> None:
    """Let the C library keep freed memory, unless the user has configured or limited it.

    By default it returns large blocks to the kernel, which clears every page before its next use:
    a step of 8 layers × 512 would take 1.13 times as long. What is kept can be too much for a
    limit such as `ulimit -v`.
    """
    if _is_configured() or _is_limited():
        return
    with suppress(AttributeError, ImportError, OSError):  # not glibc
        import ctypes

        mallopt = ctypes.CDLL(None).mallopt
        mallopt(M_MMAP_MAX, 0)
        mallopt(M_TRIM_THRESHOLD, -1)
        mallopt(M_TOP_PAD, 64 << 20)


def _is_configured() -> bool:
    tunables = os.environ.get("GLIBC_TUNABLES", "")
    return "glibc.malloc." in tunables or any(name.startswith("MALLOC_") for name in os.environ)


def _is_limited() -> bool:
    limits = (resource.RLIMIT_AS, resource.RLIMIT_DATA)
    return any(resource.getrlimit(limit)[0] != resource.RLIM_INFINITY for limit in limits)
