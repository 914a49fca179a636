"""The priority of the threads that write and verify checkpoints."""

from __future__ import annotations

import contextlib
import os
import threading

# Steps beside a save are as fast as with 19. Where four other processes use both cores, 60 MB take
# 0.3 s with 5, and 4 s with 19; a run that is told to stop waits for a save that has begun.
NICE = 5


def lower_thread_priority() -> None:
    """Let this thread, and those that it starts, use mostly the CPU time that training leaves."""
    with contextlib.suppress(OSError):  # some containers forbid it
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICE)  # Linux: of one thread
