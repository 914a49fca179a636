"""The language of agents, over real sockets and pipes. Oracle: what was said on the other side."""

from __future__ import annotations

import fcntl
import os
import socket
import threading
from collections.abc import Iterator
from contextlib import suppress

import pytest

from gptctl.engine.cause import Cause, cause_from
from gptctl.engine.messages import INVALID_MAC, MAX_BUFFER, MAX_BURST, ConnectionLost, MessageStream
from gptctl.engine.node import NodeExit
from gptctl.engine.remote_node import RemoteNode


@pytest.fixture
def pair() -> Iterator[tuple[MessageStream, MessageStream]]:
    ours, theirs = socket.socketpair()
    yield MessageStream(ours.fileno(), ours.fileno(), ours), MessageStream(theirs.fileno(), theirs.fileno(), theirs)
    ours.close()
    theirs.close()


def test_messages_come_one_by_one(pair: tuple[MessageStream, MessageStream]) -> None:
    """However they were cut on the way."""
    here, there = pair
    here.send(a=1)
    here.send(b="ü\n", c=[1, None])
    assert there.receive(1) == {"a": 1}
    assert there.receive(1) == {"b": "ü\n", "c": [1, None]}
    assert there.receive() is None


@pytest.mark.parametrize("nonsense", [b"hello\n", b"[1]\n", b"\xff\xfe\n"])
def test_nonsense_ends_the_conversation(nonsense: bytes) -> None:
    reading, writing = os.pipe()
    os.write(writing, nonsense)
    with pytest.raises(ConnectionLost):
        MessageStream(reading, writing).receive(1)
    os.close(reading)
    os.close(writing)


def test_the_other_side_is_gone(pair: tuple[MessageStream, MessageStream]) -> None:
    here, there = pair
    there._owner.close()  # type: ignore[attr-defined]
    with pytest.raises(ConnectionLost):
        here.receive(1)


def test_deep_nonsense_is_nonsense() -> None:
    reading, writing = os.pipe()
    threading.Thread(target=os.write, args=(writing, b"[" * 60_000 + b"\n"), daemon=True).start()
    with pytest.raises(ConnectionLost):
        MessageStream(reading, writing).receive(5)


@pytest.mark.parametrize(
    "fields",
    [
        5,
        "no",
        {},
        [],
        ["1"],
        [1],
        [1, "", False, "late", False, False],
        [True, None, False, 0, False, False],
        [10**18, None, False, 0, False, False],
        [-1, None, False, 0, False, False],
        [1, None, False, 1e300, False, False],
    ],
)
def test_an_exit_that_is_malformed_means_a_lost_host(pair: tuple[MessageStream, MessageStream], fields: object) -> None:
    """The supervisor goes on: for it the node has exited. The oracle is what was sent."""
    here, there = pair
    node = RemoteNode(1, here)
    node.start(0, "host", 1)
    there.send(start=1, exit=fields)
    end = node.exited()
    assert end
    assert end.code == 255
    assert end.cause
    assert end.cause.text == "its host is lost: unexpected reply"
    node.kill()  # does not wait for a host that is lost


@pytest.mark.parametrize("node", [0, 2, 1 << 20])
def test_a_node_reports_on_itself_only(pair: tuple[MessageStream, MessageStream], node: int) -> None:
    """Whichever node its agent names: the oracle is the connection that the message came from."""
    here, there = pair
    remote = RemoteNode(1, here)
    remote.start(0, "host", 1)
    there.send(start=1, exit=NodeExit(1, Cause("boom", node)))
    end = remote.exited()
    assert end
    assert end.cause == Cause("boom", 1)


@pytest.mark.parametrize("node", [-1, -(10**9), True, 1 << 40, 1.0, "1", None])
def test_a_cause_without_a_valid_node_is_none(node: object) -> None:
    """As the number of a host, a negative one would name another host, or none at all."""
    assert cause_from({"cause": "boom", "node": node}) is None


def test_an_exit_arrives_as_it_was_sent(pair: tuple[MessageStream, MessageStream]) -> None:
    here, there = pair
    node = RemoteNode(1, here)
    node.start(0, "host", 1)
    cause = Cause("RuntimeError: last words", 1, 3, "b", 1, None, 12.5, True)
    sent = NodeExit(7, cause, True, 1.5)
    there.send(start=1, exit=sent)
    assert node.exited() == sent


def test_a_line_without_an_end(pair: tuple[MessageStream, MessageStream]) -> None:
    """The limit is named; what was sent before still arrives."""
    here, there = pair

    def flood() -> None:
        with suppress(OSError):
            os.write(there.reading, b'{"a": 1}\n' + b"x" * (MAX_BUFFER + 70_000))

    thread = threading.Thread(target=flood)
    thread.start()
    assert here.receive(5) == {"a": 1}
    with pytest.raises(ConnectionLost, match="more than 1,048,576 bytes"):
        here.receive(5)
    here.close()
    thread.join()


def test_a_descriptor_above_1023(pair: tuple[MessageStream, MessageStream]) -> None:
    """select() raises ValueError for it."""
    here, there = pair
    high = fcntl.fcntl(here.reading, fcntl.F_DUPFD_CLOEXEC, 1500)
    there.send(a=1)
    assert high >= 1500
    assert MessageStream(high, high).receive(5) == {"a": 1}
    os.close(high)


def sealed(pair: tuple[MessageStream, MessageStream]) -> tuple[MessageStream, MessageStream]:
    here, there = pair
    here.secure(b"a" * 32, b"b" * 32)
    there.secure(b"b" * 32, b"a" * 32)
    return here, there


def line_of(stream: MessageStream) -> bytes:
    """What the other side sent, as somebody in between sees it."""
    return os.read(stream.reading, 1 << 16)


def test_sealed_messages_arrive_in_both_directions(pair: tuple[MessageStream, MessageStream]) -> None:
    here, there = sealed(pair)
    for number in range(3):
        here.send(n=number)
        there.send(m=number)
    assert [there.receive(1) for _ in range(3)] == [{"n": number} for number in range(3)]
    assert [here.receive(1) for _ in range(3)] == [{"m": number} for number in range(3)]


def tampered(name: str, first: bytes, second: bytes) -> bytes:
    return {
        "repeated": first + first,
        "moved": second + first,
        "dropped": second,
        "altered": first.replace(b"1", b"2", 1),
        "injected": b'{"kill": true}\n',
        "unsigned": first[64:],
        "cut": first[:70] + b"\n",
        "empty": b"\n",
    }[name]


@pytest.mark.parametrize("how", ["repeated", "moved", "dropped", "altered", "injected", "unsigned", "cut", "empty"])
def test_a_message_that_somebody_tampered_with_ends_the_connection(
    pair: tuple[MessageStream, MessageStream], how: str
) -> None:
    """At most the untouched messages before it arrive."""
    here, there = sealed(pair)
    here.send(n="one")
    first = line_of(there)
    here.send(n="two")
    second = line_of(there)
    os.write(here.reading, tampered(how, first, second))
    if how == "repeated":
        assert there.receive(1) == {"n": "one"}
    with pytest.raises(ConnectionLost, match=INVALID_MAC):
        there.receive(1)


def test_a_message_is_not_valid_in_the_other_direction(pair: tuple[MessageStream, MessageStream]) -> None:
    here, there = sealed(pair)
    here.send(kill=True)
    os.write(there.reading, line_of(there))
    with pytest.raises(ConnectionLost, match=INVALID_MAC):
        here.receive(1)


def test_bytes_from_before_the_handshake_do_not_count(pair: tuple[MessageStream, MessageStream]) -> None:
    here, there = pair
    os.write(here.reading, b'{"a": 1}\n{"kill": true}\n')
    assert there.receive(1) == {"a": 1}
    with pytest.raises(ConnectionLost):
        there.secure(b"a", b"b")


@pytest.mark.parametrize("start", [True, 1.0, "1", None, [1], 2, -1])
def test_only_messages_about_this_start_count(pair: tuple[MessageStream, MessageStream], start: object) -> None:
    here, there = pair
    node = RemoteNode(1, here)
    node.start(0, "host", 1)
    there.send(start=start, ranks=True, exit=NodeExit(0))
    assert not node.has_ranks()
    assert node.exited() is None


def test_a_flood_does_not_keep_the_supervisor(pair: tuple[MessageStream, MessageStream]) -> None:
    """Of very many messages a part is handled at a time."""
    here, there = pair
    node = RemoteNode(1, here, queues=True)
    os.write(there.reading, b'{"waits_for": "x"}\n' * 1000 + b'{"waits_for": ""}\n')
    polls = 0
    while node.poll():
        polls += 1
    assert polls == 1000 // MAX_BURST
