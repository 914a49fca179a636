"""A link to one host: a connection that is opened when needed, and again after it was lost."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

from gptctl.remote.connection import ANSWER_TIMEOUT, CommandResult, Files, host_errors
from gptctl.remote.host_error import HostError
from gptctl.remote.listing import Entry
from gptctl.remote.route import Route

RETRY_DELAYS = (1.0, 15.0)  # seconds until an unreachable host is tried again: first, maximum


class LinkConnection(Protocol):
    """An open connection, whatever opened it. Every failure is a HostError."""

    route: Route

    def run(
        self, command: Sequence[str], stdin: bytes = b"", timeout: float = ANSWER_TIMEOUT
    ) -> CommandResult: ...

    @property
    def files(self) -> Files: ...

    def listed(self, folder: str) -> list[Entry]: ...

    def close(self) -> None: ...


class HostLink:
    """One connection at a time, which several threads share."""

    def __init__(self, route: Route, connect: Callable[[], LinkConnection]) -> None:
        self.route, self._connect = route, connect
        self._connection: LinkConnection | None = None
        self._error: HostError | None = None  # of the last try to connect, if it failed
        self._pause, self._try_at = 0.0, 0.0  # until the next try
        self._opening = threading.Lock()
        # Paramiko's SFTP client must not be used by two threads at the same time.
        self.copying = threading.Lock()

    @contextmanager
    def connected(self) -> Iterator[LinkConnection]:
        """Use the open connection, or open one; close it if it fails."""
        # Two threads must not open two connections.
        with self._opening:
            connection = self._connection = self._connection or self._opened()
        try:
            with host_errors(self.route):
                yield connection
        except HostError:
            self._close(connection)
            raise

    def _opened(self) -> LinkConnection:
        began = time.monotonic()
        # Right after a failure do not try again: every caller would wait for the same timeout.
        if self._error and began < self._try_at:
            raise self._error
        try:
            connection = self._connect()
            self._error, self._pause = None, 0.0
            return connection
        except HostError as error:
            now = time.monotonic()
            # Back off, by at least twice the time that the failed try took.
            shortest, longest = RETRY_DELAYS
            self._pause = min(longest, max(shortest, 2 * self._pause, 2 * (now - began)))
            self._error, self._try_at = error, now + self._pause
            raise

    def _close(self, connection: LinkConnection) -> None:
        # Another thread may have opened a new one already.
        if self._connection is connection:
            self._connection = None
        connection.close()

    def wait_for_next_try(self) -> None:
        time.sleep(max(0.0, self._try_at - time.monotonic()))
