"""How the agent of a host joins that of the first host: both prove that they have the node's key.

    peer → head   {node, nonce, proof}   proves the key at once: a stranger gets no answer
    head → peer   {nonce, proof}         the peer runs what the head tells it to run
    peer → head   {proof}                of the head's nonce: the first line may be a repeated one
    head → peer   {joined} or {refused}  from here on every line has a MAC, in both directions

gptctl gives the job's key to the first host only, and each other host gets the key of its node:
no host can pretend to be another one.
"""

from __future__ import annotations

import hmac
import os
import re
import socket
import time
from collections.abc import Mapping
from typing import Any, NamedTuple

from gptctl.engine.file_reading import is_whole
from gptctl.engine.messages import (
    HANDSHAKE_TIMEOUT,
    ConnectionLost,
    MessageStream,
    socket_stream,
)

MAX_HELLO = 512  # bytes of a line before its sender has proved anything; a valid one has 150
JOIN_PAUSE = 0.1  # seconds between two attempts to join
NONCE = re.compile(r"[0-9a-f]{32}", re.ASCII)


class JoinRefused(ConnectionLost):
    """Joining fails for a reason that another attempt would not change."""


class Handshake(NamedTuple):
    """What both sides know of one connection; all its proofs and keys derive from this."""

    key: bytes  # of the node
    node: int
    peer_nonce: str
    head_nonce: str = ""

    def derive(self, purpose: str) -> str:
        # Purpose and node are signed, too: no proof can be used in the place of another one.
        words = (purpose, str(self.node), self.peer_nonce, self.head_nonce)
        return hmac.new(self.key, "\n".join(words).encode(), "sha256").hexdigest()

    def is_proof(self, proof: object, purpose: str) -> bool:
        if not isinstance(proof, str) or not proof.isascii():
            return False
        return hmac.compare_digest(proof, self.derive(purpose))

    def secure(self, stream: MessageStream, is_head: bool) -> None:
        """Begin to authenticate all messages of this connection."""
        keys = [bytes.fromhex(self.derive(f"messages of the {side}")) for side in ("head", "peer")]
        sending, receiving = keys if is_head else reversed(keys)
        stream.secure(sending, receiving)


def node_key(job_key: bytes, node: int) -> bytes:
    """Return the key that the agent of this node shares with the first host."""
    return hmac.new(job_key, f"node {node}".encode(), "sha256").digest()


def new_nonce() -> str:
    """Return a random text that makes the proofs and keys of each connection different."""
    return os.urandom(16).hex()


def hello(shake: Handshake) -> dict[str, Any]:
    """Return the first message of a peer."""
    return {"node": shake.node, "nonce": shake.peer_nonce, "proof": shake.derive("hello")}


def handshake_with(message: Mapping[str, Any], job_key: bytes, nodes: int) -> Handshake | None:
    """Return how the head continues after a first message, or None if its sender has no key."""
    match message:
        case {"node": int(node), "nonce": str(nonce), "proof": proof}:
            if is_whole(node, 1, nodes) and NONCE.fullmatch(nonce):
                shake = Handshake(node_key(job_key, node), node, nonce)
                if shake.is_proof(proof, "hello"):
                    return shake._replace(head_nonce=new_nonce())
    return None


def answer(shake: Handshake) -> dict[str, Any]:
    """Return the answer of the head to a valid first message."""
    return {"nonce": shake.head_nonce, "proof": shake.derive("head")}


def join(
    address: str, port: int, node: int, key: bytes, timeout: float, patience: float
) -> MessageStream:
    """Connect an agent to that of the first host, which may be crowded: try until patience ends."""
    deadline = time.monotonic() + patience
    while True:
        try:
            return _join_once(address, port, Handshake(key, node, new_nonce()), timeout, deadline)
        except JoinRefused:
            raise
        except ConnectionLost as lost:
            if time.monotonic() + JOIN_PAUSE >= deadline:
                raise ConnectionLost(f"{address}:{port}: {lost}") from None
        time.sleep(JOIN_PAUSE)


def _join_once(
    address: str, port: int, shake: Handshake, timeout: float, deadline: float
) -> MessageStream:
    connection = _connect(address, port, deadline)
    try:
        stream = socket_stream(connection, timeout, MAX_HELLO)
        return join_on(stream, shake, deadline)
    except BaseException as error:
        connection.close()
        if isinstance(error, OSError):
            raise ConnectionLost(error.strerror) from None
        raise


def _connect(address: str, port: int, deadline: float) -> socket.socket:
    left = max(JOIN_PAUSE, min(HANDSHAKE_TIMEOUT, deadline - time.monotonic()))
    try:
        connection = socket.create_connection((address, port), timeout=left)
    # The first host may have too many connections to accept now.
    except (TimeoutError, ConnectionResetError) as error:
        raise ConnectionLost(f"cannot connect: {error.strerror or error}") from None
    except OSError as error:
        problem = f"cannot connect to {address}:{port}: {error.strerror or error}"
        raise JoinRefused(problem) from None
    connection.settimeout(None)
    return connection


def join_on(stream: MessageStream, shake: Handshake, deadline: float) -> MessageStream:
    """Join over this connection; raise JoinRefused if the head itself refuses."""
    stream.send(**hello(shake))
    message = stream.receive(max(0.0, min(HANDSHAKE_TIMEOUT, deadline - time.monotonic())))
    if message is None:
        raise ConnectionLost("it does not answer")
    nonce = message.get("nonce")
    if not isinstance(nonce, str) or not NONCE.fullmatch(nonce):
        raise ConnectionLost("it is not the agent of the first host")
    shake = shake._replace(head_nonce=nonce)
    if not shake.is_proof(message.get("proof"), "head"):
        raise ConnectionLost("it is not the agent of the first host")
    stream.send(proof=shake.derive("peer"))
    shake.secure(stream, is_head=False)
    return _await_admission(stream, deadline)


def _await_admission(stream: MessageStream, deadline: float) -> MessageStream:
    message = stream.receive(max(HANDSHAKE_TIMEOUT, deadline - time.monotonic()))
    if message is None:
        raise JoinRefused("it does not answer")
    if "joined" not in message:
        raise JoinRefused(str(message.get("refused"))[:MAX_HELLO])
    return stream
