"""The first host's agent while it waits for the others and for gptctl. Oracles: who has joined, and what the kernel says."""

from __future__ import annotations

import errno
import os
import socket
import threading
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from gptctl.engine import listening
from gptctl.engine.handshake import join, node_key
from gptctl.engine.host_agent import HostRefused
from gptctl.engine.messages import MessageStream
from gptctl.engine.peer_admission import PeerAdmission

KEY = b"k" * 32


class Rehearsal:
    """An admission for two nodes, with gptctl at the other end of a pipe and node 1 in a thread."""

    def __init__(self, lease: float = 20.0, address: str = "127.0.0.1") -> None:
        self.address = address
        reading, self.gptctl = os.pipe()
        self.answers, writing = os.pipe()
        self.listener = listening.listener_on(address)
        self.port: int = self.listener.getsockname()[1]
        plan = SimpleNamespace(nodes=2)
        head: Any = SimpleNamespace(key=KEY, lease=lease, plan=plan, gptctl=MessageStream(reading, writing))
        self.admission = PeerAdmission(head, self.listener)
        self._files = (reading, self.gptctl, self.answers, writing)

    def say(self, line: bytes) -> None:
        os.write(self.gptctl, line + b"\n")

    def peer(self) -> threading.Thread:
        """Joins, and confirms that it is ready."""

        def run() -> None:
            stream = join(self.address, self.port, 1, node_key(KEY, 1), 5.0, patience=10.0)
            while "ready" not in (stream.receive(10) or {"ready": True}):
                pass
            stream.send(ready=True, machine="m1")
            stream.receive(10)

        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        return thread

    def close(self) -> None:
        self.listener.close()
        for file in self._files:
            os.close(file)


@pytest.fixture
def rehearsal() -> Iterator[Rehearsal]:
    rehearsal = Rehearsal()
    yield rehearsal
    rehearsal.close()


def test_a_commit_that_comes_first_counts_when_all_have_joined(rehearsal: Rehearsal) -> None:
    rehearsal.say(b'{"commit": true}')
    rehearsal.peer()
    found = rehearsal.admission.until_committed()
    assert {number: machine for number, (_, machine) in found.items()} == {1: "m1"}


def test_joining_over_ipv6() -> None:
    if not listening.is_own_address("::1"):
        pytest.skip("this machine has no IPv6")
    rehearsal = Rehearsal(address="::1")
    rehearsal.peer()
    rehearsal.say(b'{"commit": true}')
    assert list(rehearsal.admission.until_committed()) == [1]
    rehearsal.close()


def test_too_many_open_files_drop_strangers_only(rehearsal: Rehearsal) -> None:
    """accept() fails every second time, as it does when no descriptor is left."""
    real, calls = rehearsal.listener, []

    def accept() -> Any:
        calls.append(1)
        if len(calls) % 2:
            raise OSError(errno.EMFILE, "Too many open files")
        return real.accept()

    rehearsal.admission.listener = SimpleNamespace(fileno=real.fileno, accept=accept)  # type: ignore[assignment]
    crowd = [socket.create_connection(("127.0.0.1", rehearsal.port)) for _ in range(30)]
    rehearsal.say(b'{"commit": true}')
    rehearsal.peer()
    assert list(rehearsal.admission.until_committed()) == [1]
    for stranger in crowd:
        stranger.close()


def test_a_crowd_does_not_outlast_the_lease() -> None:
    """Strangers knock all the time: without gptctl the agent ends all the same."""
    rehearsal, is_over = Rehearsal(lease=0.5), threading.Event()

    def knock() -> None:
        while not is_over.is_set():
            socket.create_connection(("127.0.0.1", rehearsal.port)).close()

    thread = threading.Thread(target=knock)
    thread.start()
    began = time.monotonic()
    with pytest.raises(HostRefused, match="did not commit"):
        rehearsal.admission.until_committed()
    assert time.monotonic() - began < 10
    is_over.set()
    thread.join()
    rehearsal.close()


def test_a_lost_peer_is_noticed_before_the_commit(rehearsal: Rehearsal) -> None:
    """Also if somebody only injects a line into its connection."""

    def run() -> None:
        stream = join("127.0.0.1", rehearsal.port, 1, node_key(KEY, 1), 5.0, patience=10.0)
        os.write(stream.reading, b'{"ready": true, "machine": "m1"}\n')
        stream.receive(5)

    threading.Thread(target=run, daemon=True).start()
    with pytest.raises(HostRefused, match="node 1: a message was altered, repeated or not sent by its agent"):
        rehearsal.admission.until_committed()
