"""Write to the log of the process that runs the supervisor: the engine's standard output."""

from __future__ import annotations

import time
from contextlib import suppress


def say(text: str) -> None:
    write_log(f"[{time.strftime('%Y-%m-%d %H:%M:%S')}] {text}")


def write_log(*lines: str) -> None:
    # A full disk, or a character that the locale lacks, must not cost the job its result.
    with suppress(OSError, UnicodeError):
        for line in lines:
            print(line, flush=True)


def os_error_text(error: OSError) -> str:
    """A full disk raises without a file name."""
    return f"{error.filename}: {error.strerror}" if error.filename else str(error.strerror)
