"""A link to one host: a connection that is opened when needed, and again after it was lost."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

from gptctl.deadline import Deadline
from gptctl.remote.connection import CommandResult, Connection, JumpHosts, host_errors
from gptctl.remote.host_error import HostError
from gptctl.remote.route import Route
from gptctl.remote.sftp import MAX_ENTRIES, Entry, InvalidReply, SftpReader

SHORTEST_WAIT = 0.5  # seconds: a host that gets less could look silent
RETRY_DELAYS = (1.0, 15.0)  # seconds until an unreachable host is tried again: first, maximum


class LinkConnection(Protocol):
    """An open connection, whatever opened it. Every failure is a HostError."""

    route: Route

    def run(
        self, command: Sequence[str], stdin: bytes = b"", timeout: float | None = None
    ) -> CommandResult: ...

    @property
    def files(self) -> SftpReader: ...

    def listed(self, folder: str, most: int = MAX_ENTRIES) -> list[Entry]: ...

    def close(self) -> None: ...


class HostLink:
    """One connection at a time, which several threads and jobs share."""

    def __init__(
        self, route: Route, connect: Callable[[], LinkConnection], limit: Deadline | None = None
    ) -> None:
        """`limit`: when the command that uses it must end, if it has to."""
        self.route, self._connect, self._limit = route, connect, limit or Deadline()
        # A command that ends soon waits for a silent host once; one that follows a job asks again.
        self.keeps_trying = False
        self._connection: LinkConnection | None = None
        self._error: HostError | None = None  # why the host cannot be used now, if so
        self._pause, self._try_at = 0.0, 0.0  # until the next try
        self._opening = threading.Lock()
        # An SFTP session must not be used by two threads at the same time.
        self.copying = threading.Lock()

    @property
    def time_left(self) -> float:
        """The seconds for which the command can wait, with some to spare for the last reply."""
        return max(0.0, self._limit.left - SHORTEST_WAIT)

    @contextmanager
    def connected(self) -> Iterator[LinkConnection]:
        """Use the open connection, or open one; close it if it fails."""
        # Two threads must not open two connections.
        with self._opening:
            connection = self._connection = self._connection or self._opened()
        try:
            with host_errors(self.route), self._closed_if_invalid(connection):
                yield connection
        except HostError as error:
            # Other jobs use the same connection: a problem of this one is no reason to close it.
            if error.is_lost or error.is_silent:
                self._close(connection)
            # A new connection may succeed at once, if the network was interrupted.
            if error.is_silent:
                self.blame(error, 0.0)
            raise

    @contextmanager
    def _closed_if_invalid(self, connection: LinkConnection) -> Iterator[None]:
        """Nothing after an invalid reply can be understood."""
        try:
            yield
        except InvalidReply:
            self._close(connection)
            raise

    def _opened(self) -> LinkConnection:
        began = time.monotonic()
        # Right after a failure do not try again: every caller would wait for the same timeout.
        if self._error and (began < self._try_at or not self._may_try_again(self._error)):
            raise self._error
        try:
            connection = self._connect()
            self._error, self._pause = None, 0.0
            return connection
        except HostError as error:
            self.blame(error, time.monotonic() - began)
            raise

    def _may_try_again(self, error: HostError) -> bool:
        return self.keeps_trying or not error.is_silent

    def blame(self, error: HostError, waited: float) -> None:
        """Remember why the host cannot be used, for all jobs on it."""
        # Back off, by at least twice the time that the failed try took.
        shortest, longest = RETRY_DELAYS
        self._pause = min(longest, max(shortest, 2 * self._pause, 2 * waited))
        self._error, self._try_at = error, time.monotonic() + self._pause

    def _close(self, connection: LinkConnection) -> None:
        # Another thread may have opened a new one already.
        if self._connection is connection:
            self._connection = None
        connection.close()

    def wait_for_next_try(self) -> None:
        self.keeps_trying = True
        time.sleep(max(0.0, self._try_at - time.monotonic()))


class HostLinks:
    """The links of one command, one for each host: however many of its jobs run there.

    So a host that does not answer is waited for once, and sshd has to accept one connection.
    """

    def __init__(self, limit: Deadline | None = None) -> None:
        self.jump_hosts, self._limit = JumpHosts(), limit
        self._links: dict[Route, HostLink] = {}
        self._lock = threading.Lock()

    def to(self, route: Route) -> HostLink:
        with self._lock:
            if route not in self._links:
                self._links[route] = HostLink(
                    route, lambda: Connection(route, self.jump_hosts, self._limit), self._limit
                )
            return self._links[route]

    def blame(self, error: HostError) -> None:
        """Remember that a host was silent on another connection of this command."""
        with self._lock:
            links = list(self._links.items())
        for route, link in links:
            if route.name == error.host and error.is_silent:
                link.blame(error, 0.0)
