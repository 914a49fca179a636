"""Messages to and between the agents of an ssh job: one JSON object per line.

Two agents authenticate each other with a key that gptctl gives to each of them over ssh.
"""

from __future__ import annotations

import hmac
import json
import os
import select
import socket
import time
from typing import Any

MAX_BUFFER = 1 << 20  # bytes without a line end after which a peer is disconnected
HANDSHAKE = 10.0  # seconds in which a peer must prove that it has the key
INVALID_MESSAGE = "unexpected reply"


class ConnectionLost(Exception):
    """The peer closed the connection, or sent something that is not a message."""


class MessageStream:
    """Reads messages from one file descriptor, and writes messages to another."""

    def __init__(self, reading: int, writing: int, owner: object = None) -> None:
        self.reading, self._writing = reading, writing
        # The socket that owns the descriptors: it closes them when it is garbage collected.
        self._owner = owner
        self._buffer = b""
        self.last_received = self.last_sent = time.monotonic()

    def send(self, **message: Any) -> None:
        data = json.dumps(message).encode() + b"\n"
        try:
            # A pipe or socket may accept only a part of the data at a time.
            while data:
                data = data[os.write(self._writing, data) :]
        except OSError as error:
            raise ConnectionLost(error.strerror) from None
        self.last_sent = time.monotonic()

    def receive(self, timeout: float = 0.0) -> dict[str, Any] | None:
        """Return the next message, or None if none arrives in time."""
        deadline = time.monotonic() + timeout
        while b"\n" not in self._buffer:
            left = max(0.0, deadline - time.monotonic())
            if not select.select([self.reading], [], [], left)[0]:
                return None
            self._read()
        line, _, self._buffer = self._buffer.partition(b"\n")
        self.last_received = time.monotonic()
        message = parse_message(line)
        if message is None:
            raise ConnectionLost(INVALID_MESSAGE)
        return message

    def _read(self) -> None:
        try:
            data = os.read(self.reading, 1 << 16)
        except OSError as error:
            raise ConnectionLost(error.strerror) from None
        if not data:
            raise ConnectionLost("it closed the connection")
        if len(self._buffer) > MAX_BUFFER:
            raise ConnectionLost(INVALID_MESSAGE)
        self._buffer += data


def parse_message(line: bytes) -> dict[str, Any] | None:
    """Return the JSON object in a line, or None if the line is anything else."""
    try:
        message = json.loads(line)
    # RecursionError: deeply nested JSON must crash nobody.
    except (ValueError, RecursionError):
        return None
    return message if isinstance(message, dict) else None


def socket_stream(connection: socket.socket, timeout: float) -> MessageStream:
    """Open a stream that fails within `timeout` seconds if the other machine disappears."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    # Messages are small and urgent: send each at once.
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    if hasattr(socket, "TCP_USER_TIMEOUT"):
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(timeout * 1000))
    return MessageStream(connection.fileno(), connection.fileno(), connection)


def prove(key: bytes, *words: str) -> str:
    """Sign these words with the key."""
    return hmac.new(key, "\n".join(words).encode(), "sha256").hexdigest()


def challenge() -> str:
    """Return a random text for the peer to sign: an old proof does not fit a new challenge."""
    return os.urandom(16).hex()


def is_proof(proof: object, key: bytes, *words: str) -> bool:
    if not isinstance(proof, str):
        return False
    # Takes the same time wherever the difference is, so that a proof cannot be guessed in parts.
    return hmac.compare_digest(proof.encode(), prove(key, *words).encode())


def join(address: str, port: int, node: int, key: bytes, timeout: float) -> MessageStream:
    """Connect an agent to that of the first host; both prove that they have the key."""
    try:
        connection = socket.create_connection((address, port), timeout=HANDSHAKE)
    except OSError as error:
        problem = f"cannot connect to {address}:{port}: {error.strerror or error}"
        raise ConnectionLost(problem) from None
    connection.settimeout(None)
    stream = socket_stream(connection, timeout)
    # The head sends its challenge first: it must not sign anything for an unknown client.
    head_challenge = (stream.receive(HANDSHAKE) or {}).get("challenge", "")
    own_challenge = challenge()
    # Role and node are signed, too: nobody can reuse the proof for another node or as the head.
    proof = prove(key, "peer", str(head_challenge), str(node))
    stream.send(node=node, challenge=own_challenge, proof=proof)
    # The peer runs what the head tells it, so the head must prove that it has the key as well.
    welcome = stream.receive(HANDSHAKE) or {}
    if not is_proof(welcome.get("proof"), key, "head", own_challenge):
        raise ConnectionLost(f"{address}:{port} is not the agent of the first host")
    return stream


def admit(
    stream: MessageStream, own_challenge: str, message: dict[str, Any], key: bytes
) -> int | None:
    """Check a peer's answer to the challenge; confirm it and return its node, or return None."""
    node = message.get("node")
    if not isinstance(node, int):
        return None
    if not is_proof(message.get("proof"), key, "peer", own_challenge, str(node)):
        return None
    # Only now, so that nobody without the key gets anything signed.
    stream.send(proof=prove(key, "head", str(message.get("challenge"))))
    return node
