"""The progress of `prepare`, as numbers and as a line of text. Torch-free and numpy-free."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple


class Progress(NamedTuple):
    """How far `prepare` is: first it tokenizes, then it joins the shards."""

    documents: int
    done: int  # bytes
    total: int
    seconds: float  # of this call
    done_before: int = 0  # bytes that an earlier call had done
    documents_before: int = 0
    is_joining: bool = False  # `done` and `total` are bytes of tokens, each counted more than once

    @property
    def rate(self) -> float:
        """Documents per second, of this call."""
        return (self.documents - self.documents_before) / max(self.seconds, 1e-9)

    @property
    def eta(self) -> float | None:
        """Seconds that are left; None if that is unknown yet."""
        new = self.done - self.done_before
        return self.seconds * (self.total - self.done) / new if new > 0 else None

    @property
    def text(self) -> str:
        # The last byte is not the end of the work: what was read is encoded and written to disk.
        percent = min(99.9, 100 * self.done / max(1, self.total))
        eta = "" if self.eta is None else f", {duration(max(1.0, self.eta))} left"
        if self.is_joining:
            return f"joining shards: {percent:.1f} %{eta}"
        return f"{percent:.1f} %: {self.documents:,} documents, {self.rate:,.0f} docs/s{eta}"


def duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


Report = Callable[[Progress], None]
