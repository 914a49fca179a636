"""Messages between ranks, through the TCPStore that they used to connect.

No messages are sent while all is well. Every rank has a queue of messages. It waits for them on a
separate connection, because a waiting connection blocks all its users. If the process of the store
is stopped, requests never return, so callers use `with_timeout`.
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

from trainer.input_files import parse_object

T = TypeVar("T")
Message = dict[str, Any]
PAUSE = 0.02  # seconds between two checks for answers
LEAST_CONNECT_SECONDS = 10.0  # whatever the timeout: a busy machine can take long


class Channel:
    """The message queues of all ranks of a job.

    `name` separates the attempts of a job, because a store can outlive an attempt.
    """

    def __init__(self, name: str, rank: int, world: int, timeout: float) -> None:
        self.name, self.rank, self.world = name, rank, world
        self._sender = _connect(timeout)
        self._receiver = _connect(timeout)
        # torch needs a timeout; `next_message` starts to wait again after it. Not for connecting:
        # if the store has exited meanwhile, torch would try for as long.
        self._receiver.set_timeout(timedelta(days=20))

    def send(self, message: Mapping[str, Any], to: int | None = None) -> None:
        """Send a message to one rank, or to all, including this one."""
        for rank in range(self.world) if to is None else [to]:
            self._sender.queue_push(self._key("rank", rank), json.dumps(message))

    def wait_until_received(self, timeout: float) -> None:
        """Wait until all ranks have received what was sent to them, or the time is over."""
        deadline = time.monotonic() + timeout
        for rank in range(self.world):
            queue = self._key("rank", rank)
            while self._sender.queue_len(queue) and time.monotonic() < deadline:
                time.sleep(PAUSE)

    def next_message(self) -> Message:
        """Wait for the next message, as long as the store exists."""
        while True:
            # The connection timed out, or somebody else wrote to the store.
            with suppress(dist.DistStoreError, ValueError):
                return parse_object(self._receiver.queue_pop(self._key("rank", self.rank)))

    def ask(self, number: int, timeout: float, **more: Any) -> list[Message] | None:
        """Ask all ranks, and return the answers that arrive in time.

        None if another rank asks this question already: one set of answers is enough.
        """
        if self.set_once(f"question/{number}", {"by": self.rank}).get("by") != self.rank:
            return None
        self.send({"question": number, **more})
        answers: dict[int, Message] = {}
        queue, deadline = self._key("answers", number), time.monotonic() + timeout
        while len(answers) < self.world and time.monotonic() < deadline:
            # queue_pop would block until there is an answer, and miss the deadline.
            if self._sender.queue_len(queue):
                with suppress(ValueError):
                    answer = parse_object(self._sender.queue_pop(queue))
                    if answer.get("rank") in range(self.world):
                        answers[answer["rank"]] = answer
            else:
                time.sleep(PAUSE)
        return list(answers.values())

    def answer(self, number: int, answer: Mapping[str, Any]) -> None:
        # Called by the thread that receives, so its connection is not waiting.
        self._receiver.queue_push(self._key("answers", number), json.dumps(answer))

    def set_once(self, name: str, value: Message) -> Message:
        """Set a value unless a rank has set it before. Returns the value that counts."""
        counts = self._sender.compare_set(self._key("settled", name), "", json.dumps(value))
        try:
            return parse_object(counts)
        except ValueError as error:
            raise RuntimeError(f"the store contains an invalid message: {error}") from None

    def leave(self) -> None:
        self._sender.set(self._key("left", self.rank), "")

    def has_left(self, rank: int) -> bool:
        return self._sender.check([self._key("left", rank)])

    def wait_until_all_left(self) -> None:
        self._sender.wait([self._key("left", rank) for rank in range(self.world)])

    def announce_exit(self) -> None:
        """Say that the ranks that failed have exited, and that their launcher knows it."""
        self._sender.set(self._key("exited", ""), "")

    def wait_for_exit(self, timeout: float) -> None:
        self._sender.wait([self._key("exited", "")], timedelta(seconds=timeout))

    def _key(self, kind: str, what: object) -> str:
        return f"watchdog/{self.name}/{kind}/{what}"


def with_timeout(seconds: float, act: Callable[[], T]) -> T | None:
    """The result of `act`, or None if it fails or takes too long."""
    results: list[T] = []

    def run() -> None:
        with suppress(RuntimeError):
            results.append(act())

    # A daemon: if it never returns, it must not keep the process from exiting.
    thread = threading.Thread(target=run, daemon=True)
    try:
        thread.start()
    except RuntimeError:  # no memory for its stack
        return None
    thread.join(seconds)
    return results[0] if results else None


def address() -> str:
    return f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"


def is_in_first_rank() -> bool:
    """Whether the store runs in the process of the first rank; otherwise it runs in torchrun."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"


def _connect(timeout: float) -> Any:
    host, _, port = address().rpartition(":")
    settings: dict[str, Any] = {
        "is_master": False,
        "wait_for_workers": False,
        "timeout": timedelta(seconds=max(timeout, LEAST_CONNECT_SECONDS)),
    }
    store = dist.TCPStore(host, int(port), **settings)  # type: ignore[attr-defined]
    store.set_timeout(timedelta(seconds=timeout))
    return store
