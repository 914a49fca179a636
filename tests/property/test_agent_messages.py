"""Hostile bytes for the agents' protocol, on both sides, before and after the handshake. Oracles: an honest peer always
joins and stays, only messages that were sent arrive, in order, and nothing but ConnectionLost is ever raised.

Every case has a number, and its bytes derive from it alone: `CASES=4711 pytest tests/property/test_agent_messages.py`
repeats case 4711 of each test."""

from __future__ import annotations

import json
import os
import random
import socket
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from typing import Any

import pytest

from gptctl.engine.admission import NeverStarts
from gptctl.engine.handshake import MAX_HELLO, Handshake, answer, hello, join_on, new_nonce, node_key
from gptctl.engine.host_agent import HostRefused, start_message
from gptctl.engine.join_requests import JoinRequests
from gptctl.engine.messages import ConnectionLost, MessageStream
from gptctl.engine.node import NodeExit
from gptctl.engine.peer_agent import endpoint_in, start_in
from gptctl.engine.remote_node import RemoteNode

KEY = b"k" * 32
NODES = 4
SHORT, LONG = 400, 20_000  # cases of each of the five tests: 2,000 in `make test`, 100,000 in `make test-long`

counts = pytest.mark.parametrize("count", [SHORT, pytest.param(LONG, marks=pytest.mark.long)])


def each_case(count: int, run: Callable[[random.Random, int], None]) -> None:
    """Run all cases, each with a source of chance that depends on its number only."""
    for number in [int(word) for word in os.environ.get("CASES", "").split()] or range(count):
        try:
            run(random.Random(number), number)
        except Exception as error:
            raise AssertionError(f"case {number}: {error!r}") from error


# Hostile values and bytes

TEXTS = [
    "",
    "0" * 32,
    "f" * 64,
    "\ud800",
    "\udfff",
    "ü" * 40,
    "\0",
    "a\nb",
    "x" * 400,
    "1",
    "-1",
    "\u202e",
    "NaN",
    "٣" * 32,
]
NUMBERS = [
    0,
    1,
    2,
    3,
    -1,
    4,
    True,
    False,
    1.0,
    1.5,
    -0.0,
    1e308,
    10**18,
    2**31,
    2**63,
    2**64,
    10**400,
    float("nan"),
    float("inf"),
]
KEYS = "node nonce proof joined refused start exit ranks killed waits_for cannot_queue attempt host port ready kill machine heartbeat key lease address secrets".split()  # fmt: skip


def value(chance: random.Random, depth: int = 0) -> Any:
    kind = chance.choice([0, 0, 0, 1, 1, 1, 2, 3, 4] if depth < 3 else [0, 1, 2])
    if kind == 0:
        return chance.choice(TEXTS)
    if kind == 1:
        return chance.choice(NUMBERS)
    if kind == 2:
        return None
    if kind == 3:
        return [value(chance, depth + 1) for _ in range(chance.randrange(8))]
    return {chance.choice(KEYS): value(chance, depth + 1) for _ in range(chance.randrange(4))}


def message(chance: random.Random) -> dict[str, Any]:
    return {chance.choice(KEYS): value(chance) for _ in range(chance.randrange(1, 6))}


def altered(chance: random.Random, valid: dict[str, Any]) -> dict[str, Any]:
    """A valid message with one or two other values."""
    changed = dict(valid)
    while json.dumps(changed) == json.dumps(valid):
        for name in chance.sample(sorted(valid), min(len(valid), chance.randint(1, 2))):
            changed[name] = value(chance)
        if chance.random() < 0.1:
            del changed[chance.choice(sorted(valid))]
    return changed


def garbage(chance: random.Random) -> bytes:
    shapes: list[Callable[[], bytes]] = [
        lambda: chance.randbytes(chance.randrange(200)),
        lambda: chance.randbytes(chance.randrange(60)) + b"\n",
        lambda: b"[" * chance.choice([10, 101, 400, 5000, 60_000]) + b"\n",
        lambda: b'{"node":' * chance.choice([10, 60, 3000]) + b"\n",
        lambda: b'{"node": ' + b"9" * chance.choice([20, 400, 5000]) + b"}\n",
        lambda: b'{"node": 1, "proof": "\\ud800"}\n',
        lambda: b"\n" * chance.randrange(1, 50),
        lambda: b"x" * chance.choice([MAX_HELLO, MAX_HELLO + 1, 70_000]),
        lambda: b'{"node": 1, "node": 2, "proof": NaN}\n',
        lambda: b"GET / HTTP/1.1\r\n\r\n",
        lambda: b"",
    ]
    return chance.choice(shapes)()


def spoiled(chance: random.Random, line: bytes) -> bytes:
    """A valid line with one small change to its bytes."""
    at = chance.randrange(len(line))
    how = chance.randrange(4)
    if how == 0:
        return line[:at] + bytes([line[at] ^ (1 << chance.randrange(8))]) + line[at + 1 :]
    if how == 1:
        return line[:at]
    if how == 2:
        return line[:at] + chance.randbytes(1) + line[at:]
    return line[at:]


def line(words: dict[str, Any]) -> bytes:
    return json.dumps(words).encode() + b"\n"


def nonce(chance: random.Random) -> str:
    return chance.randbytes(16).hex()


class Pair:
    """Two connected sockets: ours is a stream, theirs is what somebody else has in hand."""

    def __init__(self, limit: int = 1 << 20) -> None:
        self.near, self.far = socket.socketpair()
        # More than any of the lines above: sending must not wait for the reader.
        self.far.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 18)
        self.stream = MessageStream(self.near.fileno(), self.near.fileno(), self.near, limit)

    def say(self, data: bytes, is_last: bool = True) -> None:
        with suppress(OSError):
            self.far.sendall(data)
            if is_last:
                self.far.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        self.near.close()
        self.far.close()


class Door(JoinRequests):
    """The first host, where strangers can knock."""

    def knock(self, data: bytes, source: str, is_last: bool) -> socket.socket:
        ours, theirs = tcp()
        with suppress(OSError):
            ours.sendall(data)
            if is_last:
                ours.shutdown(socket.SHUT_WR)
        self.add(theirs, source)
        return ours


@cache
def listener() -> socket.socket:
    return socket.create_server(("127.0.0.1", 0))


def tcp() -> tuple[socket.socket, socket.socket]:
    ours = socket.create_connection(listener().getsockname())
    return ours, listener().accept()[0]


def has_answer(stranger: socket.socket) -> bool:
    try:
        return stranger.recv(1, socket.MSG_DONTWAIT) != b""
    except OSError:
        return False


def join_door(door: JoinRequests, node: int) -> MessageStream:
    """An honest peer, step by step."""
    ours, theirs = tcp()
    stream = MessageStream(ours.fileno(), ours.fileno(), ours)
    shake = Handshake(node_key(KEY, node), node, new_nonce())
    stream.send(**hello(shake))
    door.add(theirs, "10.0.0.1")
    words = stream.receive(5)
    assert words, "the head did not answer an honest peer"
    shake = shake._replace(head_nonce=words["nonce"])
    assert shake.is_proof(words["proof"], "head")
    stream.send(proof=shake.derive("peer"))
    shake.secure(stream, is_head=False)
    door.handle(theirs.fileno())
    assert stream.receive(5) == {"joined": True}
    return stream


@counts
def test_strangers_at_the_first_host(count: int) -> None:
    """Valid lines of others are among theirs: recorded ones, and such as were made with another key or for another node."""
    door = Door(KEY, NODES, most=8)
    peer = join_door(door, 1)
    recorded = [line(hello(Handshake(node_key(KEY, 1), 1, "ab" * 16)))]
    door.knock(recorded[0], "10.0.0.3", is_last=True).close()
    open_: list[socket.socket] = []

    def case(chance: random.Random, number: int) -> None:
        node = chance.choice([0, 1, 2, 3, 4, True, -1, 10**30])
        foreign = hello(Handshake(chance.choice([b"other", KEY, node_key(KEY, 2)]), 3, nonce(chance)))
        valid = hello(Handshake(node_key(KEY, 1), 1, nonce(chance)))
        data = chance.choice(
            [
                garbage(chance),
                line(message(chance)),
                line(altered(chance, valid)),
                line({**valid, "node": node if node != 1 or node is True else 2}),
                line(foreign),
                spoiled(chance, recorded[0]),
                chance.choice(recorded),
                chance.choice(recorded) * 2,
            ]
        )
        open_.append(door.knock(data, f"10.0.{chance.randrange(3)}.{chance.randrange(9)}", chance.random() < 0.5))
        if len(open_) > 20:
            open_.pop(chance.randrange(20)).close()
        for descriptor in door.descriptors():
            door.handle(descriptor)
        assert list(door.peers) == [1]
        assert not any(map(has_answer, open_)), "a stranger got an answer"
        if number % 20 == 0:
            peer.send(number=number)
            assert door.peers[1].receive(5) == {"number": number}
        if number % 100 == 0:
            other = join_door(door, 2)
            door.peers.pop(2).close()
            other.close()

    each_case(count, case)


@counts
def test_hosts_that_pretend_to_be_the_first(count: int) -> None:
    """A peer ends with ConnectionLost, whatever they answer: they never have its key."""

    def case(chance: random.Random, number: int) -> None:
        shake = Handshake(node_key(KEY, 1), 1, nonce(chance))
        true = shake._replace(head_nonce=nonce(chance))
        valid = answer(true)
        foreign = answer(Handshake(b"other", 1, shake.peer_nonce, true.head_nonce))
        other = answer(Handshake(node_key(KEY, 1), 1, nonce(chance), true.head_nonce))
        first = chance.choice(
            [
                garbage(chance),
                line(message(chance)),
                line(altered(chance, valid)),
                line(foreign),
                line(other),
                line({**valid, "proof": shake.derive("hello")}),
                line({**valid, "proof": true.derive("peer")}),
                line(valid),
            ]
        )
        # Even an answer that somebody stole is of no use for what follows.
        second = chance.choice([garbage(chance), line({"joined": True}), b"0" * 64 + line({"joined": True})])
        pair = Pair(MAX_HELLO)
        pair.say(first + second)
        with pytest.raises(ConnectionLost):
            join_on(pair.stream, shake, deadline=0.0)
        pair.close()

    each_case(count, case)


def sealed_pair() -> tuple[Pair, Pair]:
    """A sender and a receiver with the same keys; what the sender sends is read from its far side."""
    sender, receiver = Pair(), Pair()
    sender.stream.secure(b"a" * 32, b"b" * 32)
    receiver.stream.secure(b"b" * 32, b"a" * 32)
    return sender, receiver


def tamper(chance: random.Random, lines: list[bytes]) -> list[bytes]:
    at = chance.randrange(len(lines))
    how = chance.randrange(7)
    changed = list(lines)
    if how == 0:
        changed[at] = spoiled(chance, lines[at])
    elif how == 1:
        changed.insert(at, chance.choice(lines))
    elif how == 2:
        del changed[at]
    elif how == 3:
        chance.shuffle(changed)
    elif how == 4:
        changed.insert(at, garbage(chance))
    elif how == 5:
        changed.insert(at, line(message(chance)))
    else:
        changed[at] = lines[at][:64] + line(message(chance))
    return changed


@counts
def test_somebody_between_two_agents(count: int) -> None:
    """What arrives is the beginning of what was sent, and nothing else."""

    def case(chance: random.Random, number: int) -> None:
        sender, receiver = sealed_pair()
        sent = [{"number": number, "text": chance.choice(TEXTS[:3])} for number in range(chance.randint(1, 5))]
        lines = []
        for words in sent:
            sender.stream.send(**words)
            lines.append(sender.far.recv(1 << 16))
        changed = tamper(chance, lines)
        receiver.say(b"".join(changed))
        received = []
        with suppress(ConnectionLost):
            while words := receiver.stream.receive():
                received.append(words)
        same = [one == two for one, two in zip(b"".join(changed), b"".join(lines))]
        assert received == sent[: len(received)]
        assert len(received) == len(sent) or changed != lines or all(same)
        sender.close()
        receiver.close()

    each_case(count, case)


@counts
def test_an_agent_of_another_host_that_is_broken(count: int) -> None:
    """It has the key. The supervisor sees a node that runs, has exited, or is lost; nothing is raised but NeverStarts."""
    exit_ = list(NodeExit(1, None, False, 5.0, False, False))

    def case(chance: random.Random, number: int) -> None:
        pair = Pair()
        node = RemoteNode(1, pair.stream, queues=chance.random() < 0.5)
        node.start(0, "host", 1)
        for _ in range(chance.randint(1, 4)):
            fields = list(exit_)
            fields[chance.randrange(6)] = value(chance)
            cause = ["text", 1, 2, "b", 1, None, 12.5, True]
            cause[chance.randrange(8)] = value(chance)
            valid = chance.choice(
                [{"start": 1, "exit": fields}, {"start": 1, "exit": [1, cause, False, 0, False, False]}]
            )
            words = chance.choice([line(message(chance)), line(valid), line(altered(chance, valid)), garbage(chance)])
            pair.say(words, is_last=chance.random() < 0.3)
        with suppress(NeverStarts):
            node.poll()
        node.has_ranks()
        end = node.exited()
        pair.far.close()
        end = node.exited()
        assert end
        assert 0 <= end.code < 1 << 16
        assert 0 <= end.time < 1e11
        assert len(str(end.cause)) < 4000
        json.dumps(end)
        # It can be written and printed.
        assert end.cause is None or end.cause.reason().encode()
        node.kill()
        pair.close()

    each_case(count, case)


@counts
def test_a_first_host_and_a_gptctl_that_are_broken(count: int) -> None:
    """The agent of another host reads them. A start has a safe host, port and number; else it ends with words."""
    start = {"start": 1, "attempt": 0, "host": "10.0.0.1", "port": 29500}
    first = {"key": "ab" * 32, "lease": 5.0, "address": "10.0.0.1", "secrets": {"A": "41"}}

    def case(chance: random.Random, number: int) -> None:
        pair = Pair()
        pair.say(line(chance.choice([altered(chance, start), altered(chance, first), message(chance)])))
        with suppress(ConnectionLost):
            words = pair.stream.receive() or {}
            with suppress(HostRefused):
                given = start_message(words)
                assert os.fsencode(given.address) is not None
                os.environ.__class__(given.secrets, os.fsencode, os.fsdecode, os.fsencode, os.fsdecode)
            with suppress(HostRefused):
                assert 0 < endpoint_in(chance.choice([words.get("join"), value(chance)]))[1] < 1 << 16
            found = start_in(words)
            assert 0 < len(found.host) < 256
            assert set(found.host) <= set("0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ.:%_-")
            assert 0 < found.port < 1 << 16
            assert found.attempt >= 0
        pair.close()

    each_case(count, case)
