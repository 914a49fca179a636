"""How layers below the command line talk to the user: by what they are given, never by printing."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import NamedTuple

Say = Callable[[str], None]  # tells the user what is going on
Progress = Callable[[int], None]  # told how many bytes have arrived
ShowProgress = Callable[[str, int], AbstractContextManager[Progress]]  # title, total bytes


class Fetched(NamedTuple):
    """What `gptctl fetch` has copied to this machine."""

    files: int
    bytes: int
    folder: str
