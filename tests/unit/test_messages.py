"""The language of agents, over real sockets and pipes. Oracle: what was said on the other side."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Iterator

import pytest

from gptctl.engine.cause import Cause
from gptctl.engine.messages import ConnectionLost, MessageStream, admit, challenge, is_proof, join, prove, socket_stream
from gptctl.engine.node import NodeExit
from gptctl.engine.remote_node import RemoteNode

KEY = b"k" * 32


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


def meet(peer_key: bytes, head_key: bytes) -> list[object]:
    """A peer that joins and a head that admits, each with its own key: what became of each."""
    answers: list[object] = [None, None]
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def as_peer() -> None:
            try:
                answers[0] = join("127.0.0.1", listener.getsockname()[1], 3, peer_key, 5.0)
            except ConnectionLost as closed:
                answers[0] = str(closed)

        thread = threading.Thread(target=as_peer)
        thread.start()
        connection, _ = listener.accept()
        stream, asked = socket_stream(connection, 5.0), challenge()
        stream.send(challenge=asked)
        answers[1] = admit(stream, asked, stream.receive(5.0) or {}, head_key)
        if answers[1] is None:
            connection.close()
        thread.join()
    return answers


def test_both_sides_need_the_key() -> None:
    peer, head = meet(KEY, KEY)
    assert isinstance(peer, MessageStream)
    assert head == 3
    peer, head = meet(KEY, b"other")
    assert isinstance(peer, str)
    assert head is None


def test_a_false_head_is_not_joined() -> None:
    """One that listens at the right place, keeps the connection, and does not have the key."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def pretend() -> None:
            connection, _ = listener.accept()
            stream = socket_stream(connection, 5.0)
            stream.send(challenge=challenge())
            stream.receive(5.0)
            stream.send(proof=prove(b"other", "head", "x"))
            done.wait(5)
            connection.close()

        done = threading.Event()
        thread = threading.Thread(target=pretend)
        thread.start()
        with pytest.raises(ConnectionLost, match="is not the agent of the first host"):
            join("127.0.0.1", listener.getsockname()[1], 3, KEY, 5.0)
        done.set()
        thread.join()


def test_deep_nonsense_is_nonsense() -> None:
    reading, writing = os.pipe()
    threading.Thread(target=os.write, args=(writing, b"[" * 60_000 + b"\n"), daemon=True).start()
    with pytest.raises(ConnectionLost):
        MessageStream(reading, writing).receive(5)


@pytest.mark.parametrize("fields", [5, "no", {}, [], ["1"], [1], [1, "", False, "late", False, False]])
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


def test_an_exit_arrives_as_it_was_sent(pair: tuple[MessageStream, MessageStream]) -> None:
    here, there = pair
    node = RemoteNode(1, here)
    node.start(0, "host", 1)
    cause = Cause("RuntimeError: last words", 1, 3, "b", 1, None, 12.5, True)
    sent = NodeExit(7, cause, True, 1.5)
    there.send(start=1, exit=sent)
    assert node.exited() == sent


def test_a_proof_is_of_these_words_only() -> None:
    assert is_proof(prove(KEY, "peer", "x", "1"), KEY, "peer", "x", "1")
    for said in (prove(KEY, "peer", "x", "2"), prove(KEY, "head", "x", "1"), "", None, 5, "ü"):
        assert not is_proof(said, KEY, "peer", "x", "1")
