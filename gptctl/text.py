"""Format counts and times, and make untrusted text safe to print."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping
from typing import Any

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


def plain_value(value: Any) -> str:
    """Format a value of a config or profile for people, as YAML would show it."""
    if value is None:
        return ""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, Mapping):
        parts = {name: plain_value(part).replace("\n", ", ") for name, part in value.items()}
        return "\n".join(f"{name}: {text}" for name, text in parts.items() if text)
    if isinstance(value, list | tuple):
        return "\n".join(plain_value(part).replace("\n", ", ") for part in value)
    return str(value)


def count(number: int, one: str, many: str = "") -> str:
    """Format a number with its noun: `1 rank`, `4 ranks`."""
    return f"{number:,} {one if number == 1 else many or one + 's'}"
