"""Sending a job to a host. Oracles: the clock, and paramiko's own server, made to read slowly."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import paramiko
import pytest

from gptctl.backends.ssh import launcher
from gptctl.backends.ssh.launcher import AgentClient
from gptctl.deadline import Deadline
from gptctl.remote.connection import Connection, _transport_over
from gptctl.remote.host_error import HostError
from gptctl.remote.route import Route
from gptctl.remote.scripts import START_MARKER
from tests.unit.test_connection import KEY, AcceptAll

ROUTE = Route("gpu1", "", 1, "", (), ())
PLAN: Any = SimpleNamespace(remote_dir="/srv/job")
ARCHIVE = bytes(200_000)
WINDOW = 1 << 15  # bytes that can be sent before the host reads anything: the smallest of paramiko


class AcceptCommands(AcceptAll):
    def check_channel_exec_request(self, channel: Any, command: bytes) -> bool:
        return True


class Host:
    """A host that starts an agent, and a client that is connected to it."""

    def __init__(self) -> None:
        ours, theirs = socket.socketpair()
        self.server = paramiko.Transport(theirs, default_window_size=WINDOW)
        self.server.add_server_key(KEY)
        self.server.start_server(event=threading.Event(), server=AcceptCommands())
        self.client = _transport_over(ours)
        self.client.start_client(timeout=10)
        self.client.auth_none("user")

    def agent(self) -> AgentClient:
        agent: Any = object.__new__(AgentClient)
        connection: Any = object.__new__(Connection)
        connection.route, connection._limit = ROUTE, Deadline()
        connection._client = SimpleNamespace(get_transport=lambda: self.client)
        connection._watch = SimpleNamespace(has_given_up=False, stop=lambda: None)
        agent.route, agent.node, agent.connection = ROUTE, 0, connection
        agent._sending, agent._buffer, agent._has_started, agent._is_silent = threading.Lock(), b"", False, False
        return agent  # type: ignore[no-any-return]

    def serve(self, behave: Callable[[Any], None]) -> None:
        threading.Thread(target=lambda: behave(self.server.accept(10)), daemon=True).start()

    def close(self) -> None:
        self.client.close()
        self.server.close()


@pytest.fixture
def host() -> Iterator[Host]:
    found = Host()
    yield found
    found.close()


def begin(host: Host, monkeypatch: pytest.MonkeyPatch) -> AgentClient:
    # Half a second, and a fifth for the archive.
    monkeypatch.setattr(launcher, "MIN_SPEED", 10**6)
    agent = host.agent()
    agent.begin(PLAN, ARCHIVE, 0.5)
    return agent


def drip(channel: Any) -> None:
    channel.sendall(f"{START_MARKER}\n".encode())
    while channel.recv(WINDOW // 8):
        time.sleep(0.1)


def say_nothing(channel: Any) -> None:
    while channel.recv(WINDOW):
        pass


def stop_reading(channel: Any) -> None:
    channel.sendall(f"{START_MARKER}\n".encode())
    time.sleep(10)


@pytest.mark.parametrize("behave", [drip, say_nothing, stop_reading])
def test_a_host_that_reads_slowly_has_one_deadline(
    behave: Callable[[Any], None], host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Starting, sending and the first answer together: each of them alone would be in time."""
    host.serve(behave)
    began = time.monotonic()
    with pytest.raises(HostError, match=r"no answer in 0\.7 s"):
        begin(host, monkeypatch)
    assert time.monotonic() - began < 3


def test_a_host_that_reads_in_time_is_begun(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    """What its login shell prints before the agent starts is skipped."""

    def read(channel: Any) -> None:
        channel.sendall(f"Welcome!\n{START_MARKER}\n".encode())
        size = 0
        while size < len(ARCHIVE):
            size += len(channel.recv(WINDOW))
        channel.sendall(b'{"control": ["h", 1]}\n')

    host.serve(read)
    assert begin(host, monkeypatch).receive("control", 10)["control"] == ["h", 1]
