"""Messages to and between the agents of an ssh job: one JSON object per line.

What gptctl and an agent send each other is protected by ssh. Between two agents every line starts
with a MAC: the keys come from `handshake.py`.
"""

from __future__ import annotations

import hmac
import json
import math
import os
import select
import socket
import time
from typing import Any

from gptctl.engine.file_reading import parse_json

MAX_BUFFER = 1 << 20  # bytes of a line; the longest, with the cause of a failure, has some thousand
MAX_BURST = 100  # messages of one sender handled at a time: others must not wait for a flood
HANDSHAKE_TIMEOUT = 10.0  # seconds in which a peer must prove that it has the key
MAC_LENGTH = 64  # hex digits of SHA-256
INVALID_MESSAGE = "unexpected reply"
INVALID_MAC = "a message was altered, repeated or not sent by its agent"


class ConnectionLost(Exception):
    """The peer closed the connection, or sent something that is not a message."""


class Seal:
    """Authenticates the messages of one direction of one connection, and their order."""

    def __init__(self, key: bytes) -> None:
        self._key, self._count = key, 0

    def add(self, data: bytes) -> bytes:
        return self._next_mac(data) + data

    def remove(self, line: bytes) -> bytes | None:
        """Return the message in a line, or None unless it is the next one of its sender."""
        mac, data = line[:MAC_LENGTH], line[MAC_LENGTH:]
        # Takes the same time wherever the difference is, so that it cannot be guessed in parts.
        return data if hmac.compare_digest(mac, self._next_mac(data)) else None

    def _next_mac(self, data: bytes) -> bytes:
        # Both sides count: a line that is repeated, dropped or moved has another number.
        number = self._count.to_bytes(8, "big")
        self._count += 1
        return hmac.new(self._key, number + data, "sha256").hexdigest().encode()


class MessageStream:
    """Reads messages from one file descriptor, and writes messages to another."""

    def __init__(
        self,
        reading: int,
        writing: int,
        owner: socket.socket | None = None,
        limit: int = MAX_BUFFER,
    ) -> None:
        self.reading, self._writing = reading, writing
        # The socket that owns the descriptors: it closes them when it is garbage collected.
        self._owner = owner
        self._limit, self._buffer = limit, b""
        self._sending: Seal | None = None
        self._receiving: Seal | None = None
        self.last_received = self.last_sent = time.monotonic()

    def secure(self, sending: bytes, receiving: bytes) -> None:
        """From now on every message has a MAC, with one key for each direction."""
        # Bytes that arrived before have none, so they must not count as messages.
        if self._buffer:
            raise ConnectionLost(INVALID_MESSAGE)
        self._sending, self._receiving = Seal(sending), Seal(receiving)
        self._limit = MAX_BUFFER

    def send(self, **message: Any) -> None:
        data = json.dumps(message).encode()
        data = (self._sending.add(data) if self._sending else data) + b"\n"
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
            if not is_readable(self.reading, max(0.0, deadline - time.monotonic())):
                return None
            self._read()
        line, _, self._buffer = self._buffer.partition(b"\n")
        message = self._message_in(line)
        self.last_received = time.monotonic()
        return message

    def close(self) -> None:
        if self._owner:
            self._owner.close()

    def _read(self) -> None:
        try:
            data = os.read(self.reading, 1 << 16)
        except OSError as error:
            raise ConnectionLost(error.strerror) from None
        if not data:
            raise ConnectionLost("it closed the connection")
        self._buffer += data
        if b"\n" not in data and len(self._buffer) > self._limit:
            raise ConnectionLost(self._too_long())

    def _message_in(self, line: bytes) -> dict[str, Any]:
        if len(line) > self._limit:
            raise ConnectionLost(self._too_long())
        data = self._receiving.remove(line) if self._receiving else line
        if data is None:
            raise ConnectionLost(INVALID_MAC)
        message = parse_json(data)
        if message is None:
            raise ConnectionLost(INVALID_MESSAGE)
        return message

    def _too_long(self) -> str:
        return f"it sent a line of more than {self._limit:,} bytes"


def is_readable(descriptor: int, timeout: float) -> bool:
    """Wait until something can be read, or until the connection breaks."""
    # Unlike select(), poll() also works for descriptors above 1023.
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    return bool(poll.poll(math.ceil(timeout * 1000)))


def socket_stream(
    connection: socket.socket, timeout: float, limit: int = MAX_BUFFER
) -> MessageStream:
    """Open a stream that fails within `timeout` seconds if the other machine disappears."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    # Messages are small and urgent: send each at once.
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    if hasattr(socket, "TCP_USER_TIMEOUT"):
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(timeout * 1000))
    return MessageStream(connection.fileno(), connection.fileno(), connection, limit)
