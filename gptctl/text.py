"""Format counts and times, and make untrusted text safe to print."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping, Sequence
from typing import Any

# Untrusted text (file names, values, logs) may hold escape sequences, control characters or
# Unicode direction marks, which could change what a terminal shows.
CONTROL = re.compile(
    r"\x1b\[[0-?]*[ -/]*[@-~]|\x1b\][^\x07\x1b]*(\x07|\x1b\\)"
    r"|[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069\ufeff]"
)
LONGEST_TIME = 1e12  # seconds; a log line may contain any number


def clean(text: str) -> str:
    """Remove escape sequences and control characters; keep tabs and newlines."""
    # None of them is printable, and almost every text is: searching takes ten times as long.
    return text if text.isprintable() else CONTROL.sub("", text)


def duration(seconds: float) -> str:
    """Format seconds as `0:40`, `1:02:03` or, from one day on, `2 d 03:04`."""
    minutes, second = divmod(max(0, int(min(seconds, LONGEST_TIME))), 60)
    hours, minute = divmod(minutes, 60)
    if hours >= 24:
        return f"{hours // 24:,} d {hours % 24:02}:{minute:02}"
    return f"{hours}:{minute:02}:{second:02}" if hours else f"{minute}:{second:02}"


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


SIZE_UNITS = ("bytes", "KB", "MB", "GB", "TB", "PB", "EB")
_SIZE = re.compile(r"(\d{1,19})(\.\d{1,9})? ?([KMGTPE]?)(I?)B?", re.IGNORECASE | re.ASCII)


def size_text(size: int) -> str:
    """Format a number of bytes: `4.6 EB`."""
    number, unit = float(size), 0
    while number >= 999.95 and unit + 1 < len(SIZE_UNITS):
        number, unit = number / 1000, unit + 1
    return f"{number:.1f} {SIZE_UNITS[unit]}" if unit else count(size, "byte")


def enough_for(total: int) -> str:
    """A limit for an option that allows so many bytes, and some more."""
    number, unit = size_text(total + total // 10).split()
    return f"{number}{unit}" if unit in SIZE_UNITS[1:] else str(total)


def parse_size(text: str) -> int | None:
    """Parse a number of bytes such as 500MB, 1.5 TB or 2GiB; None if it is none."""
    found = _SIZE.fullmatch(text.strip())
    if not found:
        return None
    whole, fraction, unit, binary = found.groups()
    if fraction and not unit:  # 1.5 bytes: probably the unit was forgotten
        return None
    power = " KMGTPE".index(unit.upper() or " ")
    return int(float(f"{whole}{fraction or ''}") * (1024 if binary else 1000) ** power)


def count(number: int, one: str, many: str = "") -> str:
    """Format a number with its noun: `1 rank`, `4 ranks`."""
    return f"{number:,} {one if number == 1 else many or one + 's'}"


def some_of(names: Sequence[str], most: int) -> str:
    """List the first names, and how many others there are: a host may have sent millions."""
    more = len(names) - most
    return ", ".join(names[:most]) + (f" and {count(more, 'other')}" if more > 0 else "")
