"""The priority of the threads that write and verify checkpoints."""

from __future__ import annotations

import contextlib
import os
import threading

LOWEST = 19


def lower_thread_priority() -> None:
    """Let this thread, and those that it starts, use only the CPU time that training leaves."""
    with contextlib.suppress(OSError):  # some containers forbid it
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), LOWEST)  # Linux: of one thread
