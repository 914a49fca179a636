"""Times that people type: an age such as `30d`, or a date such as `2026-11-01`. Pure."""

from __future__ import annotations

import re
from datetime import datetime

FORMS = "an age such as 30d, 12h or 90m, or a date such as 2026-11-01 or 2026-11-01T18:30"
_UNITS = {"s": 1, "m": 60, "min": 60, "h": 3600, "d": 86_400, "w": 604_800}
_AGE = re.compile(r"(\d{1,6})(s|m|min|h|d|w)", re.ASCII)
_DATE = re.compile(r"\d{4}-\d\d-\d\d([T ]\d\d:\d\d(:\d\d)?)?", re.ASCII)


def moment_of(text: str, now: float) -> float | None:
    """Return the moment in seconds since the epoch; None if the text is neither of the two."""
    text = text.strip()
    if age := _AGE.fullmatch(text):
        return max(0.0, now - int(age[1]) * _UNITS[age[2]])
    if not _DATE.fullmatch(text):
        return None
    try:
        # By the clock of this machine, like the times that gptctl prints.
        return datetime.fromisoformat(text).timestamp()
    except (ValueError, OverflowError):  # 2026-02-30, or a year that the platform does not have
        return None
