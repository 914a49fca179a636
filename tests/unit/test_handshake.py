"""Agents join each other over real sockets. Oracles: what each side ends up with, and what was recorded on the way."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress

import pytest

from gptctl.engine import join_requests, listening
from gptctl.engine.handshake import Handshake, JoinRefused, answer, handshake_with, hello, join, new_nonce, node_key
from gptctl.engine.host_agent import HostRefused, start_message
from gptctl.engine.join_requests import JoinRequests, source_of
from gptctl.engine.messages import ConnectionLost, MessageStream, socket_stream
from gptctl.engine.peer_agent import endpoint_in, start_in

KEY = b"k" * 32
NODES = 4


class Head:
    """A listener and the requests to join it; `serve` does what the agent of the first host does."""

    def __init__(self, most: int = 256) -> None:
        self.listener = listening.listener_on("127.0.0.1")
        self.listener.setblocking(True)
        self.requests = JoinRequests(KEY, NODES, most)
        self.port: int = self.listener.getsockname()[1]

    def connect(self) -> socket.socket:
        """A stranger, who has been accepted."""
        stranger = socket.create_connection(("127.0.0.1", self.port), timeout=5)
        self.accept()
        return stranger

    def accept(self) -> None:
        connection, address = self.listener.accept()
        self.requests.add(connection, address[0])

    def serve(self, is_done: Callable[[], bool]) -> None:
        self.listener.setblocking(False)
        deadline = time.monotonic() + 10
        while not is_done():
            assert time.monotonic() < deadline
            for descriptor in self.requests.descriptors():
                self.requests.handle(descriptor)
            try:
                self.accept()
            except BlockingIOError:
                time.sleep(0.001)
        self.listener.setblocking(True)


@pytest.fixture
def head() -> Head:
    return Head()


def joining(head: Head, node: int = 3, key: bytes | None = None, patience: float = 5.0) -> list[object]:
    """What becomes of a peer that joins while the head serves."""
    result: list[object] = []

    def run() -> None:
        try:
            result.append(join("127.0.0.1", head.port, node, key or node_key(KEY, node), 5.0, patience))
        except ConnectionLost as lost:
            result.append(lost)

    thread = threading.Thread(target=run)
    thread.start()
    head.serve(lambda: bool(result))
    thread.join()
    return result


def is_closed(connection: socket.socket) -> bool:
    connection.settimeout(5)
    try:
        return connection.recv(1) == b""
    except ConnectionResetError:
        return True


def test_both_sides_have_an_authenticated_connection(head: Head) -> None:
    (peer,) = joining(head)
    assert isinstance(peer, MessageStream)
    there = head.requests.peers[3]
    peer.send(a=1)
    there.send(b=2)
    assert there.receive(5) == {"a": 1}
    assert peer.receive(5) == {"b": 2}
    os.write(peer.reading, b'{"killed": true}\n')
    with pytest.raises(ConnectionLost, match="altered, repeated or not sent"):
        there.receive(5)


@pytest.mark.parametrize(
    ("node", "key"),
    [(3, b"other"), (3, KEY), (3, node_key(KEY, 2)), (0, node_key(KEY, 0)), (NODES, node_key(KEY, NODES))],
    ids=["another", "of the job", "of another node", "first host", "no such node"],
)
def test_a_peer_without_the_key_of_its_node(head: Head, node: int, key: bytes) -> None:
    (lost,) = joining(head, node, key, patience=0.3)
    assert isinstance(lost, ConnectionLost)
    assert head.requests.peers == {}


def test_a_node_joins_once(head: Head) -> None:
    """The second one is told, and the first one is not disturbed."""
    (peer,) = joining(head)
    (refused,) = joining(head)
    assert isinstance(refused, JoinRefused)
    assert str(refused) == "node 3 has joined already"
    assert isinstance(peer, MessageStream)
    peer.send(a=1)
    assert head.requests.peers[3].receive(5) == {"a": 1}


def test_a_repeated_first_line_is_refused(head: Head) -> None:
    """Also while the connection that it was recorded from is open: nobody without the key gets an answer."""
    shake = Handshake(node_key(KEY, 1), 1, new_nonce())
    honest = socket_stream(socket.create_connection(("127.0.0.1", head.port)), 5.0)
    honest.send(**hello(shake))
    head.accept()
    assert (honest.receive(5) or {}).keys() == {"nonce", "proof"}
    replayed = socket.create_connection(("127.0.0.1", head.port))
    MessageStream(replayed.fileno(), replayed.fileno()).send(**hello(shake))
    head.accept()
    assert is_closed(replayed)
    assert len(head.requests.descriptors()) == 1


def test_a_repeated_session_is_refused(head: Head) -> None:
    """The last proof is of a nonce that the head has just chosen."""
    shake = handshake_with(hello(Handshake(node_key(KEY, 1), 1, new_nonce())), KEY, NODES)
    assert shake
    again = socket.create_connection(("127.0.0.1", head.port))
    stream = MessageStream(again.fileno(), again.fileno(), again)
    stream.send(**hello(Handshake(node_key(KEY, 1), 1, shake.peer_nonce)))
    head.accept()
    assert stream.receive(5)
    stream.send(proof=shake.derive("peer"))
    head.serve(lambda: not head.requests.descriptors())
    assert is_closed(again)
    assert head.requests.peers == {}


@pytest.mark.parametrize(
    "words", [answer(Handshake(b"other", 3, "0" * 32, "1" * 32)), {"nonce": "\ud800", "proof": 5}, {}]
)
def test_a_false_head_is_not_joined(words: dict[str, object]) -> None:
    """One that listens at the right place, keeps the connection, and does not have the key."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def pretend() -> None:
            while not done.is_set():
                connection, _ = listener.accept()
                stream = socket_stream(connection, 5.0)
                with suppress(ConnectionLost):
                    stream.receive(5.0)
                    stream.send(**words)
                connections.append(connection)

        connections: list[socket.socket] = []
        done = threading.Event()
        thread = threading.Thread(target=pretend)
        thread.start()
        with pytest.raises(ConnectionLost, match="is not the agent of the first host"):
            join("127.0.0.1", listener.getsockname()[1], 3, node_key(KEY, 3), 5.0, patience=0.3)
        done.set()
        socket.create_connection(listener.getsockname()).close()
        thread.join()
        for connection in connections:
            connection.close()


def test_nobody_listens() -> None:
    """Another attempt would not help: it fails at once, although there is time."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    with pytest.raises(JoinRefused, match="Connection refused"):
        join("127.0.0.1", port, 1, KEY, 5.0, patience=60.0)


def test_a_crowd_of_silent_strangers_lets_peers_in() -> None:
    """More of them than may wait, before and while it joins; only the newest and some others keep their connection."""
    head = Head(most=20)
    crowd = [head.connect() for _ in range(200)]
    assert len(head.requests.descriptors()) == 20
    (peer,) = joining(head)
    assert isinstance(peer, MessageStream)
    for stranger in crowd:
        stranger.close()


def test_a_crowd_from_one_place_drops_only_its_own(head: Head) -> None:
    """A peer whose first line is late waits among strangers from elsewhere, far more than may wait, and still joins."""
    requests = JoinRequests(KEY, NODES, most=5)
    ours, theirs = tcp_pair()
    requests.add(theirs, "10.0.0.9")
    late = theirs.fileno()
    crowd = [tcp_pair() for _ in range(100)]
    for number, (_, stranger) in enumerate(crowd):
        requests.add(stranger, f"10.0.0.{1 + number % 2}")
    assert late in requests
    MessageStream(ours.fileno(), ours.fileno()).send(**hello(Handshake(node_key(KEY, 1), 1, new_nonce())))
    requests.handle(late)
    # It has proved the key: from now on no stranger at all makes it leave.
    for _, stranger in [tcp_pair() for _ in range(20)]:
        requests.add(stranger, "10.0.0.9")
    assert late in requests
    requests.close()
    for here, _ in crowd:
        here.close()


def tcp_pair() -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        ours = socket.create_connection(listener.getsockname())
        return ours, listener.accept()[0]


def test_who_does_not_prove_the_key_in_time_is_disconnected(head: Head, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(join_requests, "HANDSHAKE_TIMEOUT", 0.05)
    stranger = head.connect()
    stranger.send(b'{"node"')
    time.sleep(0.06)
    head.requests.expire()
    assert is_closed(stranger)
    assert head.requests.descriptors() == []


def test_where_a_connection_comes_from() -> None:
    assert source_of("10.0.0.1") == "10.0.0.1"
    assert source_of("::ffff:10.0.0.1") != source_of("::ffff:10.0.0.2")
    assert source_of("fd00::1") == source_of("fd00::ffff:1:2:3") != source_of("fd00:0:0:1::1")
    assert source_of("fe80::1%eth0") == source_of("fe80::2%eth1")


@pytest.mark.parametrize("address", ["127.0.0.1", "::1"])
def test_listening_on_one_address_only(address: str) -> None:
    """Another address of this machine refuses; the oracle is the kernel."""
    if not listening.is_own_address(address):
        pytest.skip(f"this machine has no {address}")
    with listening.listener_on(address) as listener:
        assert listener.getsockname()[0] == address
        port = listener.getsockname()[1]
        socket.create_connection((address, port)).close()
        for other in {"127.0.0.1", "127.0.0.2", "::1"} - {address}:
            with pytest.raises(OSError, match=r"refused|address"):
                socket.create_connection((other, port))


def test_addresses_of_this_machine() -> None:
    assert listening.is_own_address("127.0.0.1")
    assert not listening.is_own_address("192.0.2.77")
    assert not listening.is_own_address("2001:db8::77")
    assert not listening.is_own_address("")
    assert listening.own_address("127.0.0.1", "127.0.0.2") == "127.0.0.1"
    assert listening.own_address("192.0.2.77", "127.0.0.2") == "127.0.0.2"  # behind NAT: where ssh came in
    assert listening.own_address("192.0.2.77", "") == ""
    assert listening.resolved("127.0.0.1") == "127.0.0.1"
    assert listening.resolved("::1") == "::1"
    assert listening.resolved("localhost") == "127.0.0.1"
    with pytest.raises(OSError, match=r"cannot resolve host name no-such-host\.invalid"):
        listening.resolved("no-such-host.invalid")
    with listening.listener_on("") as listener:
        socket.create_connection(("127.0.0.1", listener.getsockname()[1])).close()


START = {"start": 1, "attempt": 0, "host": "10.0.0.1", "port": 29500}


@pytest.mark.parametrize("change", [{"start": True}, {"start": 0}, {"attempt": -1}, {"attempt": 10**10}, {"attempt": "../x"}, {"host": "a\0b"}, {"host": "\ud800"}, {"host": ""}, {"host": 5}, {"port": 0}, {"port": 65536}, {"port": "1"}, {"port": None}])  # fmt: skip
def test_a_malformed_start_ends_the_connection(change: dict[str, object]) -> None:
    assert start_in(START) == (1, 0, "10.0.0.1", 29500)
    with pytest.raises(ConnectionLost):
        start_in({**START, **change})


@pytest.mark.parametrize("place", [None, [], ["a"], ["a", 0], ["a", True], ["a", 1, 2], [1, 1], ["a b", 1], "ab"])
def test_a_malformed_address_to_join(place: object) -> None:
    assert endpoint_in(["fe80::1%eth0", 5]) == ("fe80::1%eth0", 5)
    with pytest.raises(HostRefused):
        endpoint_in(place)


FIRST = {"key": "ab" * 32, "lease": 5, "address": None, "secrets": {"A": "ff41", "B": ""}}


@pytest.mark.parametrize("change", [{"key": "ab"}, {"key": 5}, {"lease": "5"}, {"lease": 0}, {"lease": 1e12}, {"address": 5}, {"secrets": []}, {"secrets": {"A": 5}}, {"secrets": {"A": "4100"}}, {"secrets": {"A": "f"}}, {"secrets": {"A=B": ""}}, {"secrets": {"": ""}}, {"secrets": None}])  # fmt: skip
def test_a_malformed_start_message_of_gptctl(change: dict[str, object]) -> None:
    """Secrets arrive byte for byte, also those that are not valid UTF-8."""
    start = start_message(FIRST)
    assert start == (b"\xab" * 32, 5, "", {"A": os.fsdecode(b"\xffA"), "B": ""})
    with pytest.raises(HostRefused, match="invalid start message"):
        start_message({**FIRST, **change})
