"""A link to one host: a connection that is opened when needed, and again after it was lost."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

from gptctl.deadline import Deadline
from gptctl.remote.connection import CommandResult, Connection, JumpHosts, host_errors
from gptctl.remote.host_error import SHORTEST_WAIT, HostError, silent_host
from gptctl.remote.route import Route
from gptctl.remote.sftp import InvalidReply, OutOfTime, SftpReader

RETRY_DELAYS = (1.0, 15.0)  # seconds until an unreachable host is tried again: first, maximum


class LinkConnection(Protocol):
    """An open connection, whatever opened it. Every failure is a HostError."""

    route: Route

    def run(
        self, command: Sequence[str], stdin: bytes = b"", timeout: float | None = None
    ) -> CommandResult: ...

    def files(self, deadline: Deadline) -> SftpReader: ...

    def close_files(self) -> None: ...

    @property
    def is_quiet(self) -> bool: ...

    def close(self) -> None: ...


class _Failure:
    """Why something of a host cannot be used now, and when it may be tried again."""

    def __init__(self) -> None:
        self.error: HostError | None = None
        self._pause, self._try_at = 0.0, 0.0

    def remember(self, error: HostError, waited: float) -> None:
        # Back off, by at least twice the time that the failed try took.
        shortest, longest = RETRY_DELAYS
        self._pause = min(longest, max(shortest, 2 * self._pause, 2 * waited))
        self.error, self._try_at = error, time.monotonic() + self._pause

    def forget(self) -> None:
        self.error, self._pause = None, 0.0

    @property
    def wait(self) -> float:
        """Seconds until the next try."""
        return max(0.0, self._try_at - time.monotonic())


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
        self._failure, self._failure_of_files = _Failure(), _Failure()
        self._slow_until = 0.0  # a command that ends soon does not copy before
        self._opening = threading.Lock()
        # An SFTP session must not be used by two threads at the same time.
        self._copying = threading.Lock()

    @property
    def time_left(self) -> float:
        """The seconds for which the command can wait, with some to spare for the last reply."""
        return max(0.0, self._limit.left - SHORTEST_WAIT)

    @contextmanager
    def connected(self) -> Iterator[LinkConnection]:
        """Use the open connection, or open one; close it if it fails."""
        if self._limit.left < SHORTEST_WAIT:
            raise silent_host(self.route.name, self._limit.left)
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
                self.remember_error(error, 0.0)
            raise

    @contextmanager
    def _closed_if_invalid(self, connection: LinkConnection) -> Iterator[None]:
        """Nothing after an invalid reply can be understood."""
        try:
            yield
        except InvalidReply:
            self._close(connection)
            raise

    @contextmanager
    def files(self, deadline: Deadline | None = None) -> Iterator[SftpReader]:
        """Use the files of the host; raise OutOfTime at the deadline, if there is one.

        The silence of its SFTP server concerns files only: the host may answer commands.
        """
        limit = deadline or Deadline()
        began = time.monotonic()
        # What it sends next would be late, too.
        if limit.left < math.inf and began < self._slow_until:
            raise OutOfTime
        error = self._failure_of_files.error
        if error and (self._failure_of_files.wait or not self.keeps_trying):
            raise error
        with self._turn(limit), self.connected() as connection:
            try:
                files = connection.files(limit)
                with files.within(limit):
                    yield files
                self._failure_of_files.forget()
            except OutOfTime:
                connection.close_files()
                self._slow_until = time.monotonic() + 2 * (time.monotonic() - began)
                raise
            except TimeoutError:
                connection.close_files()
                if not limit.left:
                    raise OutOfTime from None
                if connection.is_quiet:
                    raise
                raise self._silent_files(time.monotonic() - began) from None

    @property
    def has_silent_files(self) -> bool:
        """Whether its SFTP server did not answer, although the host does."""
        return self._failure_of_files.error is not None

    @contextmanager
    def _turn(self, deadline: Deadline) -> Iterator[None]:
        if not self._copying.acquire(timeout=min(deadline.left, threading.TIMEOUT_MAX)):
            raise OutOfTime
        try:
            yield
        finally:
            self._copying.release()

    def _silent_files(self, waited: float) -> HostError:
        problem = f"its SFTP server did not answer in {self.route.patience:.3g} s"
        error = HostError(self.route.name, problem, "check the sftp subsystem of sshd there")
        self._failure_of_files.remember(error, waited)
        return error

    def _opened(self) -> LinkConnection:
        began = time.monotonic()
        # Right after a failure do not try again: every caller would wait for the same timeout.
        error = self._failure.error
        if error and (self._failure.wait or not self._may_try_again(error)):
            raise error
        try:
            connection = self._connect()
            self._failure.forget()
            return connection
        except HostError as error:
            self.remember_error(error, time.monotonic() - began)
            raise

    def _may_try_again(self, error: HostError) -> bool:
        return self.keeps_trying or not error.is_silent

    def remember_error(self, error: HostError, waited: float) -> None:
        """Remember why the host cannot be used, for all jobs on it."""
        self._failure.remember(error, waited)

    def _close(self, connection: LinkConnection) -> None:
        # Another thread may have opened a new one already.
        if self._connection is connection:
            self._connection = None
        connection.close()

    def wait_for_next_try(self) -> None:
        self.keeps_trying = True
        time.sleep(self._failure.wait)


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

    def remember_error(self, error: HostError) -> None:
        """Remember that a host was silent on another connection of this command."""
        with self._lock:
            links = list(self._links.items())
        for route, link in links:
            if route.name == error.host and error.is_silent:
                link.remember_error(error, 0.0)
