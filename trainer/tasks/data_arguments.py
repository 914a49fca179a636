"""What the programs for data have in common: inputs, progress in a log, and the result."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from trainer.corpus.sources import FORMATS
from trainer.stop import StopRequest
from trainer.tasks.arguments import TaskParser

EVERY = 10.0  # seconds between two lines of progress: a log keeps them all


class DataParser(TaskParser):
    """Inputs, and how they are read."""

    def __init__(self, description: str) -> None:
        super().__init__(description, has_checkpoint=False)
        self.add_argument("inputs", nargs="+", metavar="INPUT", help="a file, folder or pattern")
        self.add_argument("--format", dest="input_format", choices=FORMATS)
        self.add_argument("--documents", choices=["file", "line", "paragraph"], default="file")
        self.add_argument("--field", default="text", metavar="NAME")
        self.add_argument("--invalid-utf8", choices=["replace", "refuse"], default="replace")
        self.add_argument("--invalid-lines", choices=["refuse", "skip"], default="refuse")
        self.add_argument("--json", action="store_true", help="print the result as JSON")


def is_first() -> bool:
    """Whether this rank does the work: one is enough, and it uses all cores."""
    return os.environ.get("RANK", "0") == "0"


class Reporter:
    """Prints progress now and then, and stops the work after a signal."""

    def __init__(self, stop: StopRequest) -> None:
        self._stop, self._next = stop, time.monotonic() + EVERY

    def __call__(self, text: str) -> None:
        if self._stop.signal:
            raise KeyboardInterrupt
        if time.monotonic() >= self._next:
            self._next = time.monotonic() + EVERY
            print(text, file=sys.stderr, flush=True)


@contextmanager
def ended_by(stop: StopRequest, then: str) -> Iterator[None]:
    """After a stop, say what it means for the work."""
    try:
        yield
    except KeyboardInterrupt:
        signal = stop.signal or "SIGINT"
        print(f"stopped by {signal}: {then}", file=sys.stderr, flush=True)
        raise


def print_facts(facts: dict[str, Any], as_json: bool) -> None:
    if as_json:
        print(json.dumps(facts), flush=True)
        return
    width = max(map(len, facts))
    for name, value in facts.items():
        shown = f"{value:,}" if isinstance(value, int) else json.dumps(value, ensure_ascii=False)
        print(f"{name:<{width}}  {shown}", flush=True)
