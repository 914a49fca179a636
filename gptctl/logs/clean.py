"""Removes what a terminal would obey from foreign text: file names, values, log lines."""

from __future__ import annotations

import re

# Escape sequences; control characters but for tab and newline; marks that turn the text around.
CONTROL = re.compile(
    r"\x1b\[[0-?]*[ -/]*[@-~]|\x1b\][^\x07\x1b]*(\x07|\x1b\\)"
    r"|[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ufeff]"
)


def clean(text: str) -> str:
    return CONTROL.sub("", text)
