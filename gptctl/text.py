"""Words about numbers, and foreign text made safe to print."""

from __future__ import annotations

import re

# Escape sequences, control characters except tab and newline, and marks that turn text around: a terminal
# would obey them in foreign text (file names, values, log lines).
CONTROL = re.compile(
    r"\x1b\[[0-?]*[ -/]*[@-~]|\x1b\][^\x07\x1b]*(\x07|\x1b\\)"
    r"|[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ufeff]"
)


def clean(text: str) -> str:
    return CONTROL.sub("", text)


def count(number: int, one: str, many: str = "") -> str:
    """`1 rank`, `4 ranks`"""
    return f"{number:,} {one if number == 1 else many or one + 's'}"
