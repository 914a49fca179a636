"""Format counts and times, and make untrusted text safe to print."""

from __future__ import annotations

import re
import time

# Untrusted text (file names, values, logs) may hold escape sequences, control characters or
# Unicode direction marks, which could change what a terminal shows.
CONTROL = re.compile(
    r"\x1b\[[0-?]*[ -/]*[@-~]|\x1b\][^\x07\x1b]*(\x07|\x1b\\)"
    r"|[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ufeff]"
)


def clean(text: str) -> str:
    """Remove escape sequences and control characters; keep tabs and newlines."""
    return CONTROL.sub("", text)


def clock_time(moment: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(moment))


def count(number: int, one: str, many: str = "") -> str:
    """Format a number with its noun: `1 rank`, `4 ranks`."""
    return f"{number:,} {one if number == 1 else many or one + 's'}"
