"""Until when a command waits for other machines."""

from __future__ import annotations

import math
import time


class Deadline:
    """A moment that does not move: whoever waits until it, in however many steps, ends in time."""

    def __init__(self, seconds: float = math.inf) -> None:
        self._end = time.monotonic() + seconds

    @property
    def left(self) -> float:
        """The seconds until then; 0 if it has passed."""
        return max(0.0, self._end - time.monotonic())

    def within(self, seconds: float) -> Deadline:
        """This deadline, or one so many seconds from now, if that is earlier."""
        return Deadline(min(seconds, self.left))
