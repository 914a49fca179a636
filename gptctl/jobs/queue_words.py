"""What a job in the queue of a machine waits for, in words, each with what can be done. Pure.

The reasons are those of `engine/queue_rules.py` and `engine/admission.py`.
"""

from __future__ import annotations

import re

from gptctl.reporting import Waiting

_TEXTS = (
    (
        r"waits for \S+ to (?:complete|end|fail)",
        "it was submitted with --after, and that job has not ended",
        "wait for that job: gptctl why OTHER; or cancel this one, and submit it without --after",
    ),
    (
        r"waits for .{1,300} \(group .{1,100}: \d+ at once\)",
        "as many runs of its sweep as allowed are running",
        "wait, or submit the sweep with a larger --parallel",
    ),
    (
        r"waits for .{1,200}: other processes use \d+ of \d+",
        "processes that gptctl did not start use the GPUs",
        "see whose they are (nvidia-smi), use other GPUs (--devices), or wait",
    ),
    (
        r"waits for .{1,300} \(\d+ of \d+ in the queue\)",
        "jobs that came before it run on this machine or wait for it",
        "wait, cancel a job before it, or submit without --queue",
    ),
    (
        r"waits for the lock of the queue",
        "another process holds the lock of this machine's queue, and may be stopped",
        "look for stopped processes of gptctl: ps -C python,python3 -o pid,stat,args",
    ),
    (
        r"cannot read the queue",
        "the folder of this machine's queue cannot be read",
        "check the file system that the message names",
    ),
    (
        r"being submitted",
        "gptctl is submitting it now",
        "wait a moment",
    ),
)


def in_words(waiting: Waiting) -> Waiting:
    """Add the words for a reason, if its backend has none."""
    if waiting.cause:
        return waiting
    for pattern, cause, fix in _TEXTS:
        if re.search(pattern, waiting.reason):
            return waiting._replace(cause=cause, fix=fix)
    return waiting
