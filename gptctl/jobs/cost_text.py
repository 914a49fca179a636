"""GPU time as text, for `gptctl cost` and reports. Pure."""

from __future__ import annotations

# How accounts are called where their own name would be too long for a column.
SHORT_NAMES = {"checkpoint": "saving", "evaluation": "eval"}
SMALLEST_SHARE = 0.0005  # of an allocation: less is not shown


def hours_text(seconds: float) -> str:
    """`4.2 h`; short times in minutes or seconds."""
    if seconds >= 3600:
        return f"{seconds / 3600:,.1f} h"
    return f"{seconds / 60:.1f} min" if seconds >= 60 else f"{seconds:.0f} s"


def share_text(seconds: float, allocation: float) -> str:
    """`4.2 h 12%`: a part of an allocation."""
    if seconds < SMALLEST_SHARE * allocation or not allocation:
        return ""
    return f"{hours_text(seconds)} {seconds / allocation:.0%}"
