"""Carry TCP connections over one pair of pipes: engine.pyz relay RUN_DIR PORT

gptctl runs the one end with a listening socket here, and this module is the other end on a node of
a job, which connects to PORT there. The pipes are those of `ssh` or `srun`, so no port of the node
is opened. The relay ends with its pipes.
"""

from __future__ import annotations

import os
import select
import socket
import struct
import sys
from collections.abc import Callable
from contextlib import suppress

from gptctl.engine.processes import exit_with_parent

# A login shell may print something before the relay starts.
BEGIN = b"\0gptctl relay 1\n"
HEADER = struct.Struct(">IBI")  # connection, kind, length of the data that follows
OPEN, DATA, END, REFUSED, PAUSE, RESUME, CLOSE = range(7)
CHUNK = 1 << 16  # bytes
MAX_WAITING = 1 << 20  # bytes that may wait to be written before no more are read
MAX_UNREAD = 64 << 20  # bytes of all connections, for an older other end that does not pause
MAX_CONNECTIONS = 400  # at the same time; more wait, since select() cannot take 1024 descriptors
CONNECT_TIMEOUT = 5.0  # seconds


def frame(number: int, kind: int, data: bytes = b"") -> bytes:
    return HEADER.pack(number, kind, len(data)) + data


class FrameReader:
    """Cuts what arrives into frames; skips everything before the relay begins."""

    def __init__(self) -> None:
        self._buffer = bytearray()
        self.has_begun = False

    def feed(self, data: bytes) -> list[tuple[int, int, bytes]]:
        self._buffer += data
        if not self.has_begun:
            before, marker, rest = self._buffer.partition(BEGIN)
            # Keep the end: it may be the first part of the marker.
            self._buffer = rest if marker else before[-len(BEGIN) :]
            self.has_begun = bool(marker)
        frames = []
        while self.has_begun and len(self._buffer) >= HEADER.size:
            number, kind, length = HEADER.unpack_from(self._buffer)
            if len(self._buffer) < HEADER.size + length:
                break
            frames.append((number, kind, bytes(self._buffer[HEADER.size : HEADER.size + length])))
            del self._buffer[: HEADER.size + length]
        return frames


class Carried:
    """One TCP connection, as this end sees it."""

    def __init__(self, connection: socket.socket) -> None:
        self.socket = connection
        self.waiting = bytearray()  # to be written to the socket
        self.can_read = True  # its own program has not ended its output
        self.must_end = False  # the program at the other end has
        self.is_paused = False  # the other end has no place for more
        self.pauses_other = False  # so has this one, and it said so

    @property
    def is_read(self) -> bool:
        return self.can_read and not self.is_paused


class Relay:
    """One end of the relay. `connect` opens connections for the other end, `listener` has them."""

    def __init__(
        self,
        reading: int,
        writing: int,
        connect: Callable[[], socket.socket] | None = None,
        listener: socket.socket | None = None,
        on_refused: Callable[[str], None] = lambda text: None,
    ) -> None:
        self._reading, self._writing = reading, writing
        self._connect, self._listener, self._on_refused = connect, listener, on_refused
        self._frames, self._carried, self._next = FrameReader(), dict[int, Carried](), 0
        self._outgoing = bytearray()
        self.is_over = False
        for descriptor in (reading, writing):
            os.set_blocking(descriptor, False)

    @property
    def has_begun(self) -> bool:
        return self._frames.has_begun

    def begin(self) -> None:
        self._outgoing += BEGIN

    def step(self, timeout: float | None) -> None:
        """Wait until something can be moved, at most so long, and move it."""
        by_socket = {each.socket: number for number, each in self._carried.items()}
        readable, writable, _ = select.select(*self._interests(), [], timeout)
        if self._writing in writable:
            self._write_pipe()
        if self._reading in readable:
            self._read_pipe()
        if self._listener and self._listener in readable:
            self._accept(self._listener)
        for connection, number in by_socket.items():
            if connection in readable and number in self._carried:
                self._read(number)
            if connection in writable and number in self._carried:
                self._write(number)

    def _interests(self) -> tuple[list[int | socket.socket], list[int | socket.socket]]:
        reading: list[int | socket.socket] = []
        if sum(len(each.waiting) for each in self._carried.values()) < MAX_UNREAD:
            reading.append(self._reading)
        if len(self._outgoing) < MAX_WAITING:
            reading += [each.socket for each in self._carried.values() if each.is_read]
            has_place = self.has_begun and len(self._carried) < MAX_CONNECTIONS
            reading += [self._listener] if self._listener and has_place else []
        writing: list[int | socket.socket] = [self._writing] if self._outgoing else []
        writing += [each.socket for each in self._carried.values() if each.waiting]
        return reading, writing

    def _write_pipe(self) -> None:
        try:
            del self._outgoing[: os.write(self._writing, self._outgoing[:CHUNK])]
        except BlockingIOError:
            return
        except OSError:
            self.is_over = True

    def _read_pipe(self) -> None:
        try:
            data = os.read(self._reading, CHUNK)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        self.is_over |= not data
        for number, kind, content in self._frames.feed(data):
            self._handle(number, kind, content)

    def _handle(self, number: int, kind: int, content: bytes) -> None:
        if kind == OPEN and self._connect:
            self._open(number, self._connect)
        elif kind == REFUSED:
            self._on_refused(content.decode(errors="replace"))
            self._close(number)
        elif kind == CLOSE:
            self._close(number)
        elif number in self._carried:
            if kind in (PAUSE, RESUME):
                self._carried[number].is_paused = kind == PAUSE
            self._carried[number].waiting += content
            self._carried[number].must_end |= kind == END
            self._write(number)
        elif kind == DATA:
            # The program here has closed it: the other one might send forever.
            self._outgoing += frame(number, CLOSE)

    def _open(self, number: int, connect: Callable[[], socket.socket]) -> None:
        try:
            self._carried[number] = Carried(connect())
        except OSError as error:
            self._outgoing += frame(number, REFUSED, str(error.strerror or error).encode())

    def _accept(self, listener: socket.socket) -> None:
        with suppress(OSError):
            connection, _ = listener.accept()
            connection.setblocking(False)
            self._next += 1
            self._carried[self._next] = Carried(connection)
            self._outgoing += frame(self._next, OPEN)

    def _read(self, number: int) -> None:
        try:
            data = self._carried[number].socket.recv(CHUNK)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if data:
            self._outgoing += frame(number, DATA, data)
            return
        self._carried[number].can_read = False
        self._outgoing += frame(number, END)
        self._close_if_done(number)

    def _write(self, number: int) -> None:
        each = self._carried[number]
        try:
            if each.waiting:
                del each.waiting[: each.socket.send(each.waiting[:CHUNK])]
            if each.must_end and not each.waiting:
                each.socket.shutdown(socket.SHUT_WR)
        except BlockingIOError:
            return
        # The program here has closed it: nobody reads the rest.
        except OSError:
            each.waiting.clear()
            each.must_end = True
        finally:
            self._balance(number, each)
        self._close_if_done(number)

    def _balance(self, number: int, each: Carried) -> None:
        """A slow program makes only its own other end wait, instead of using up the memory."""
        if not each.pauses_other and len(each.waiting) >= MAX_WAITING:
            each.pauses_other = True
            self._outgoing += frame(number, PAUSE)
        elif each.pauses_other and len(each.waiting) < MAX_WAITING // 2:
            each.pauses_other = False
            self._outgoing += frame(number, RESUME)

    def _close_if_done(self, number: int) -> None:
        each = self._carried[number]
        if each.must_end and not each.waiting and not each.can_read:
            self._close(number)

    def _close(self, number: int) -> None:
        if each := self._carried.pop(number, None):
            each.socket.close()

    def close(self) -> None:
        for number in list(self._carried):
            self._close(number)


def connect_here(port: int) -> socket.socket:
    """Connect to a port of this machine: most programs listen on the loopback address."""
    first: OSError | None = None
    for host in ("127.0.0.1", "::1", os.uname().nodename):
        try:
            connection = socket.create_connection((host, port), CONNECT_TIMEOUT)
            connection.setblocking(False)
            return connection
        except OSError as error:
            first = first or error
    assert first
    raise first


def main() -> None:
    port = int(sys.argv[2])
    exit_with_parent()
    relay = Relay(0, 1, lambda: connect_here(port))
    relay.begin()
    while not relay.is_over:
        relay.step(None)


if __name__ == "__main__":
    main()
