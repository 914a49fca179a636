"""Notice a host that is connected and sends nothing. Knows sockets, channels and no protocol.

A command on a host may work for minutes without printing anything. So the ssh server gets a
keepalive request meanwhile; its answer also arrives while a large file is copied over a slow line.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any


class MeteredSocket:
    """A socket, or what takes its place, that knows when something was received last."""

    def __init__(self, sock: Any) -> None:
        self._sock = sock
        self.heard = time.monotonic()

    def recv(self, size: int) -> bytes:
        data: bytes = self._sock.recv(size)
        self.heard = time.monotonic()
        return data

    def __getattr__(self, name: str) -> Any:
        return getattr(self._sock, name)


class SilenceWatch:
    """Sends keepalive requests to a quiet host, and gives up on it after `patience` seconds."""

    def __init__(
        self,
        sock: MeteredSocket,
        patience: float,
        ask: Callable[[], object],
        give_up: Callable[[], object],
    ) -> None:
        self._sock, self._patience = sock, patience
        self._ask, self._give_up = ask, give_up
        self._stopped = threading.Event()
        self.has_given_up = False
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        asking: threading.Thread | None = None
        # Ask after a third of the patience: a slow answer then has two thirds to arrive.
        while not self._stopped.wait(min(5.0, self._patience / 6)):
            quiet = time.monotonic() - self._sock.heard
            if quiet > self._patience:
                self.has_given_up = True
                self._give_up()
                return
            # The question waits for its answer, so it has a thread of its own.
            if quiet > self._patience / 3 and not (asking and asking.is_alive()):
                asking = threading.Thread(target=self._ask_once, daemon=True)
                asking.start()

    @property
    def is_quiet(self) -> bool:
        """Whether not even a keepalive request was answered: the host itself is silent."""
        # A live one has answered the request that was sent after a third of the patience.
        return time.monotonic() - self._sock.heard > 2 / 3 * self._patience

    def _ask_once(self) -> None:
        # The next use of a broken connection reports it.
        with suppress(Exception):
            self._ask()

    def stop(self) -> None:
        self._stopped.set()
