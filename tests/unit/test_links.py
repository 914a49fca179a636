"""The connection that all jobs on a host share. Oracle: which errors concern the connection. A stand-in for ssh counts closings."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from gptctl.deadline import Deadline
from gptctl.remote.connection import MAX_SESSIONS, Connection
from gptctl.remote.host_error import HostError, silent_host
from gptctl.remote.link import HostLink
from gptctl.remote.sftp import InvalidReply

LOST = HostError("gpu1", "lost the connection", is_lost=True)
OF_ONE_JOB = HostError("gpu1", "its agent script failed")


class Route:
    name, patience = "gpu1", 5.0


class StandIn:
    is_closed = False

    def close(self) -> None:
        self.is_closed = True


def link_to(connection: Any) -> HostLink:
    route: Any = Route()
    return HostLink(route, lambda: connection)


@pytest.mark.parametrize(
    ("error", "is_closed"),
    [(OF_ONE_JOB, False), (LOST, True), (silent_host("gpu1", 5), True), (InvalidReply("a reply of 0 bytes"), True)],
    ids=["of one job", "lost", "silent", "invalid"],
)
def test_a_problem_of_one_job_does_not_close_the_connection_of_others(error: Exception, is_closed: bool) -> None:
    connection = StandIn()
    with pytest.raises(HostError), link_to(connection).connected():
        raise error
    assert connection.is_closed == is_closed


def test_a_command_that_waits_for_others_does_not_blame_the_host() -> None:
    """sshd allows ten sessions: gptctl waits, for as long as the command may take, until one of its own ends."""
    connection: Any = object.__new__(Connection)
    connection.route, connection._limit = Route(), Deadline()
    connection._sessions = threading.BoundedSemaphore(MAX_SESSIONS)
    for _ in range(MAX_SESSIONS):
        connection._sessions.acquire()
    with pytest.raises(HostError, match="other commands of gptctl") as caught, connection._session(0.1):
        pass
    assert not caught.value.is_lost
    assert not caught.value.is_silent
    threading.Timer(0.2, connection._sessions.release).start()
    with connection._session(30.0):
        pass
