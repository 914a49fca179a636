"""What ranks tell each other when something is wrong, through the store where they met. Silent as long as all is well.

Every rank has a queue of messages, and waits for them on a connection of its own: one that waits blocks all its users.
A store whose process is stopped never answers, so that whoever asks it does so `within` some seconds.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from datetime import timedelta
from typing import Any, TypeVar

import torch.distributed as dist

T = TypeVar("T")
Message = dict[str, Any]
PAUSE = 0.02  # seconds between two looks for answers


class Line:
    """All ranks of a job under one name: a store may outlive an attempt of theirs."""

    def __init__(self, name: str, rank: int, world: int, patience: float) -> None:
        self.name, self.rank, self.world = name, rank, world
        self._mouth, self._ear = _connect(patience), _connect(timedelta(days=20).total_seconds())

    def send(self, message: Mapping[str, Any], to: int | None = None) -> None:
        """To one rank, or to all, this one included."""
        for rank in range(self.world) if to is None else [to]:
            self._mouth.queue_push(self._key("rank", rank), json.dumps(message))

    def next_message(self) -> Message:
        """Waits for it, for as long as the store is there."""
        while True:
            with suppress(dist.DistStoreError):  # the connection's patience is over
                return json.loads(self._ear.queue_pop(self._key("rank", self.rank)))

    def ask(self, number: int, patience: float, **more: Any) -> dict[int, Message] | None:
        """The answers that come in time, by rank; None where another rank asks this question already."""
        if self.settle(f"question/{number}", self.rank) != self.rank:
            return None
        self.send({"question": number, **more})
        answers: dict[int, Message] = {}
        queue, deadline = self._key("answers", number), time.monotonic() + patience
        while len(answers) < self.world and time.monotonic() < deadline:
            if self._mouth.queue_len(queue):
                answer = json.loads(self._mouth.queue_pop(queue))
                answers[answer["rank"]] = answer
            else:
                time.sleep(PAUSE)
        return answers

    def answer(self, number: int, answer: Mapping[str, Any]) -> None:
        self._ear.queue_push(self._key("answers", number), json.dumps(answer))

    def settle(self, name: str, value: Any) -> Any:
        """The value that the first rank gave."""
        return json.loads(
            self._mouth.compare_set(self._key("settled", name), "", json.dumps(value))
        )

    def leave(self) -> None:
        self._mouth.set(self._key("left", self.rank), "")

    def has_left(self, rank: int) -> bool:
        return self._mouth.check([self._key("left", rank)])

    def wait_for_leave(self) -> None:
        self._mouth.wait([self._key("left", rank) for rank in range(self.world)])

    def _key(self, kind: str, what: object) -> str:
        return f"watchdog/{self.name}/{kind}/{what}"


def within(seconds: float, act: Callable[[], T]) -> T | None:
    """What it returns, or None where it fails or takes too long."""
    results: list[T] = []

    def run() -> None:
        with suppress(RuntimeError):
            results.append(act())

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)
    return results[0] if results else None


def address() -> str:
    return f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"


def is_in_first_rank() -> bool:
    """Where the store lives: in the process of the first rank, or in torchrun's."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"


def _connect(patience: float) -> Any:
    host, _, port = address().rpartition(":")
    settings: dict[str, Any] = {
        "is_master": False,
        "wait_for_workers": False,
        "timeout": timedelta(seconds=patience),
    }
    return dist.TCPStore(host, int(port), **settings)  # type: ignore[attr-defined]
