"""Messages to and among the agents of an ssh job: one JSON object a line, over pipes or sockets."""

from __future__ import annotations

import hmac
import json
import os
import select
import socket
import time
from typing import Any

LONGEST = 1 << 20
HANDSHAKE = 10.0  # seconds in which a peer has to show that it has the key


class ConnectionLost(Exception):
    """The other side is gone, or speaks nonsense."""


class MessageStream:
    """Read from one descriptor, written to another. `heard` and `said`: when either side last spoke."""

    def __init__(self, reading: int, writing: int, keeps: object = None) -> None:
        self.reading, self._writing = reading, writing
        self._keeps = keeps  # the socket that owns the descriptors
        self._rest = b""
        self.heard = self.said = time.monotonic()

    def send(self, **message: Any) -> None:
        data = json.dumps(message).encode() + b"\n"
        try:
            while data:
                data = data[os.write(self._writing, data) :]
        except OSError as error:
            raise ConnectionLost(error.strerror) from None
        self.said = time.monotonic()

    def receive(self, patience: float = 0.0) -> dict[str, Any] | None:
        """The next message, or None when none came in time."""
        deadline = time.monotonic() + patience
        while b"\n" not in self._rest:
            left = max(0.0, deadline - time.monotonic())
            if not select.select([self.reading], [], [], left)[0]:
                return None
            self._read()
        line, _, self._rest = self._rest.partition(b"\n")
        self.heard = time.monotonic()
        try:
            message = json.loads(line)
        except (ValueError, RecursionError):
            raise ConnectionLost("it does not speak our language") from None
        if not isinstance(message, dict):
            raise ConnectionLost("it does not speak our language")
        return message

    def _read(self) -> None:
        try:
            data = os.read(self.reading, 1 << 16)
        except OSError as error:
            raise ConnectionLost(error.strerror) from None
        if not data or len(self._rest) > LONGEST:
            raise ConnectionLost("it closed the connection")
        self._rest += data


def socket_stream(connection: socket.socket, silence: float) -> MessageStream:
    """A stream that notices within some seconds when the other machine is gone without a word."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    if hasattr(socket, "TCP_USER_TIMEOUT"):
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(silence * 1000))
    return MessageStream(connection.fileno(), connection.fileno(), connection)


def prove(key: bytes, *words: str) -> str:
    """What only somebody with the key can say of these words."""
    return hmac.new(key, "\n".join(words).encode(), "sha256").hexdigest()


def challenge() -> str:
    return os.urandom(16).hex()


def is_proof(said: object, key: bytes, *words: str) -> bool:
    return isinstance(said, str) and hmac.compare_digest(said.encode(), prove(key, *words).encode())


def join(address: str, port: int, node: int, key: bytes, silence: float) -> MessageStream:
    """Connects an agent to that of the head; each shows the other that it has the key."""
    try:
        connection = socket.create_connection((address, port), timeout=HANDSHAKE)
    except OSError as error:
        raise ConnectionLost(
            f"{address}:{port} cannot be reached: {error.strerror or error}"
        ) from None
    connection.settimeout(None)
    stream = socket_stream(connection, silence)
    theirs = (stream.receive(HANDSHAKE) or {}).get("challenge", "")
    mine = challenge()
    stream.send(node=node, challenge=mine, proof=prove(key, "peer", str(theirs), str(node)))
    welcome = stream.receive(HANDSHAKE) or {}
    if not is_proof(welcome.get("proof"), key, "head", mine):
        raise ConnectionLost(f"{address}:{port} is not the agent of the first host")
    return stream


def admit(stream: MessageStream, asked: str, message: dict[str, Any], key: bytes) -> int | None:
    """The number of the node that answered the challenge as it should, after telling it so; None for anybody else."""
    node = message.get("node")
    if not isinstance(node, int) or not is_proof(
        message.get("proof"), key, "peer", asked, str(node)
    ):
        return None
    stream.send(proof=prove(key, "head", str(message.get("challenge"))))
    return node
