"""Says on stderr how far a conversion is: in a line that changes, or in a log now and then."""

from __future__ import annotations

import sys
import time

GB, TERMINAL, LOG = 10**9, 0.5, 10.0  # bytes; seconds between two messages


class Progress:
    def __init__(self, verb: str, total: int) -> None:
        self.verb, self.total, self.done = verb, total, 0
        self.is_terminal = sys.stderr.isatty()
        self._pause = TERMINAL if self.is_terminal else LOG
        self._began = self._last = time.monotonic()

    def add(self, size: int) -> None:
        self.done += size
        now = time.monotonic()
        if now - self._last >= self._pause:
            self._last = now
            self._write(self._text(now), end="" if self.is_terminal else "\n")

    def close(self) -> None:
        if self.is_terminal and self._last > self._began:
            self._write("", end="")

    def _text(self, now: float) -> str:
        speed = self.done / (now - self._began)
        left = (self.total - self.done) / speed
        return (
            f"{self.verb} {self.done / GB:.2f} of {self.total / GB:.2f} GB, "
            f"{speed / 10**6:.0f} MB/s, {left:.0f} s left"
        )

    def _write(self, text: str, end: str) -> None:
        start = "\r\x1b[K" if self.is_terminal else ""
        print(f"{start}{text}", end=end, file=sys.stderr, flush=True)
