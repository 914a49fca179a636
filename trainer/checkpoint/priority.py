"""The priority of the threads that write and verify checkpoints."""

from __future__ import annotations

import contextlib
import os
import threading

# Enough for the training to be as fast as with 19. A save that the training then has to wait for,
# on cores that others use too, would take five times as long with 19.
NICE = 5


def lower_thread_priority() -> None:
    """Let this thread, and those that it starts, use mostly the CPU time that training leaves."""
    with contextlib.suppress(OSError):  # some containers forbid it
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICE)  # Linux: of one thread
