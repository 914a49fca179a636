"""Read files of a host over SFTP (version 3), and believe nothing that it sends.

paramiko's own client trusts the host: a listing without end, or a reply that announces 2^32 names,
uses up the memory here. Everything that arrives here has a limit, and every wait a deadline.
Knows nothing of connections: it needs something with `send`, `recv`, `settimeout` and `close`.
"""

from __future__ import annotations

import errno
import os
import struct
import time
from collections import deque
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from typing import NamedTuple, Protocol

from gptctl.deadline import Deadline
from gptctl.text import clean

VERSION = 3
INIT, OPEN, CLOSE, READ, STAT, OPEN_FOLDER, READ_FOLDER = 1, 3, 4, 5, 17, 11, 12
VERSION_REPLY, STATUS, HANDLE, DATA, NAME, ATTRIBUTES = 2, 101, 102, 103, 104, 105
HAS_SIZE, HAS_OWNER, HAS_MODE, HAS_TIMES, HAS_MORE = 1, 2, 4, 8, 1 << 31
END_OF_FILE, NO_SUCH_FILE, NO_PERMISSION = 1, 2, 3
FOR_READING = 1

MAX_PACKET = 1 << 18  # bytes: OpenSSH neither sends nor accepts longer ones
MAX_HANDLE = 256  # bytes, by the standard
SMALLEST_NAME = 12  # bytes of an entry in a listing: three empty fields
SMALLEST_ATTRIBUTE = 8  # bytes of an additional attribute: two empty fields
READ_SIZE = 1 << 15  # bytes that every server returns in one reply
READS_AHEAD = 64  # requests that are sent before the first reply is here: 2 MB on the way
MAX_ENTRIES = 100_000  # of one folder; a job of 1,024 ranks has about 4,000 log files
MAX_NAME = 255  # bytes of a file name: Linux has no longer ones
MAX_LISTING = 1000 * MAX_ENTRIES  # bytes of one folder, with a line like that of `ls -l` for each
MAX_FAILURE = 200  # characters of a host's error message


class InvalidReply(Exception):
    """The host sent something that no SFTP server sends."""


class TooManyEntries(Exception):
    """A folder has more entries than may be listed."""


class OutOfTime(Exception):
    """The caller has no more time. A reply may be on its way: the session cannot be used."""


class ReadFailed(Exception):
    """The host could not do what it was asked for, and says why."""


class Stream(Protocol):
    """A connection to an SFTP server."""

    def send(self, data: bytes) -> int: ...

    def recv(self, size: int) -> bytes: ...

    def settimeout(self, seconds: float) -> None: ...

    def close(self) -> None: ...


class Entry(NamedTuple):
    """A file or folder on a host."""

    name: str
    mode: int
    size: int
    changed: int


class Fields:
    """The content of a reply, field by field. Nothing is read beyond its end."""

    def __init__(self, data: bytes) -> None:
        self._data, self._at = data, 0

    @property
    def left(self) -> int:
        return len(self._data) - self._at

    def take(self, size: int) -> bytes:
        if size > self.left:
            raise InvalidReply("a reply is shorter than it says")
        self._at += size
        return self._data[self._at - size : self._at]

    def number(self) -> int:
        return int.from_bytes(self.take(4), "big")

    def long_number(self) -> int:
        return int.from_bytes(self.take(8), "big")

    def string(self) -> bytes:
        return self.take(self.number())

    def count(self, smallest: int) -> int:
        """A number of items, each of which has at least this many bytes."""
        number = self.number()
        # Checked before the first of them: the number alone could keep us busy for hours.
        if number * smallest > self.left:
            raise InvalidReply("a reply announces more than it contains")
        return number

    def entry(self, name: str) -> Entry:
        """Read the attributes of a file."""
        flags = self.number()
        size = self.long_number() if flags & HAS_SIZE else 0
        if flags & HAS_OWNER:
            self.take(8)
        mode = self.number() if flags & HAS_MODE else 0
        changed = 0
        if flags & HAS_TIMES:
            self.number()
            changed = self.number()
        if flags & HAS_MORE:
            for _ in range(2 * self.count(SMALLEST_ATTRIBUTE)):
                self.string()
        return Entry(name, mode, size, changed)

    def entries(self) -> Iterator[Entry]:
        """Read a part of a listing."""
        for _ in range(self.count(SMALLEST_NAME)):
            name = self.string()
            if len(name) > MAX_NAME:
                raise InvalidReply(f"a file name of {len(name):,} bytes")
            self.string()  # a line like that of `ls -l`
            yield self.entry(os.fsdecode(name))


def failure(fields: Fields) -> Exception:
    """The exception for a status reply."""
    code = fields.number()
    if code == END_OF_FILE:
        return EOFError()
    if code == NO_SUCH_FILE:
        return FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))
    if code == NO_PERMISSION:
        return PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    text = fields.string().decode(errors="replace") if fields.left else ""
    return ReadFailed(" ".join(clean(text).split())[:MAX_FAILURE] or f"SFTP status {code}")


def expected(wanted: int, kind: int, fields: Fields) -> Fields:
    """Return the content of a reply of this kind; raise what any other one means."""
    if kind == STATUS:
        raise failure(fields)
    if kind != wanted:
        raise InvalidReply(f"unexpected SFTP reply {kind}")
    return fields


class SftpReader:
    """Lists folders and reads files of one host. Not for two threads at the same time."""

    def __init__(self, stream: Stream, timeout: float, limit: Deadline | None = None) -> None:
        """`timeout`: seconds in which every reply must be complete; `limit`: as in `within`."""
        self._stream, self._timeout = stream, timeout
        self._limit = limit or Deadline()
        self._number = 0
        # Replies to requests that nobody waits for any longer.
        self._unwanted: set[int] = set()
        self._send_packet(INIT, struct.pack(">I", VERSION))
        kind, _ = self._packet(self.deadline())
        if kind != VERSION_REPLY:
            raise InvalidReply("it did not answer as an SFTP server")

    def deadline(self) -> float:
        return time.monotonic() + self._timeout

    @contextmanager
    def within(self, limit: Deadline) -> Iterator[None]:
        """Raise OutOfTime for what is not done by then, in however many steps: each may be slow."""
        self._limit = limit
        try:
            yield
        finally:
            self._limit = Deadline()

    # Folders

    def listed(self, folder: str, most: int = MAX_ENTRIES) -> list[Entry]:
        """List a folder in any order; return nothing if it is missing."""
        # One deadline for the whole listing: it may have no end.
        deadline = self.deadline()
        found: list[Entry] = []
        size = 0
        try:
            handle = self._handle(OPEN_FOLDER, _string(os.fsencode(folder)), deadline)
        except FileNotFoundError:
            return []
        try:
            while len(found) <= most:
                fields = self._ask(READ_FOLDER, _string(handle), NAME, deadline)
                size += fields.left
                if size > MAX_LISTING:
                    raise InvalidReply(f"a listing of more than {MAX_LISTING:,} bytes")
                part = list(fields.entries())
                if not part:
                    raise InvalidReply("a part of a listing is empty")
                found += [entry for entry in part if entry.name not in (".", "..")]
        except EOFError:
            pass
        # After any other failure the connection cannot be used.
        self.close_handle(handle)
        if len(found) > most:
            raise TooManyEntries(f"more than {most:,} files in {folder}")
        return found

    # Files

    def open(self, path: str) -> RemoteFile:
        flags = struct.pack(">II", FOR_READING, 0)
        handle = self._handle(OPEN, _string(os.fsencode(path)) + flags, self.deadline())
        return RemoteFile(self, handle)

    def stat(self, path: str) -> Entry:
        reply = self._ask(STAT, _string(os.fsencode(path)), ATTRIBUTES, self.deadline())
        return reply.entry(os.path.basename(path))

    def close_handle(self, handle: bytes) -> None:
        # Without waiting: the reply to this request tells nothing.
        self._unwanted.add(self.request(CLOSE, _string(handle)))

    def _handle(self, kind: int, content: bytes, deadline: float) -> bytes:
        handle = self._ask(kind, content, HANDLE, deadline).string()
        if len(handle) > MAX_HANDLE:
            raise InvalidReply("a handle is too long")
        return handle

    # Requests and replies

    def _ask(self, kind: int, content: bytes, wanted: int, deadline: float) -> Fields:
        number = self.request(kind, content)
        return expected(wanted, *self.reply({number}, deadline)[1:])

    def request(self, kind: int, content: bytes) -> int:
        """Send a request; return its number."""
        self._number = (self._number + 1) & 0xFFFFFFFF
        self._send_packet(kind, struct.pack(">I", self._number) + content)
        return self._number

    def reply(self, wanted: set[int], deadline: float) -> tuple[int, int, Fields]:
        """Return number, kind and content of the next reply to one of these requests."""
        while True:
            kind, fields = self._packet(deadline)
            number = fields.number()
            if number in wanted:
                return number, kind, fields
            # Each request has one reply. Anything else could continue forever.
            if number not in self._unwanted:
                raise InvalidReply("it replied to a request that gptctl did not send")
            self._unwanted.discard(number)

    def forget(self, numbers: set[int]) -> None:
        """Ignore the replies to these requests."""
        self._unwanted |= numbers

    def _send_packet(self, kind: int, content: bytes) -> None:
        data = struct.pack(">IB", len(content) + 1, kind) + content
        deadline = self.deadline()
        while data:
            self._limit_wait(deadline)
            data = data[self._stream.send(data) :]

    def _packet(self, deadline: float) -> tuple[int, Fields]:
        size = int.from_bytes(self._bytes(4, deadline), "big")
        if not 1 <= size <= MAX_PACKET:
            raise InvalidReply(f"a reply of {size:,} bytes")
        data = self._bytes(size, deadline)
        return data[0], Fields(data[1:])

    def _bytes(self, size: int, deadline: float) -> bytes:
        data = bytearray()
        while len(data) < size:
            # Before each part: a host may send one byte a minute, forever.
            self._limit_wait(deadline)
            try:
                new = self._stream.recv(size - len(data))
            except TimeoutError:  # of which of the two limits?
                continue
            if not new:
                raise ConnectionResetError(errno.ECONNRESET, "it closed the connection")
            data += new
        return bytes(data)

    def _limit_wait(self, deadline: float) -> None:
        left = deadline - time.monotonic()
        if not self._limit.left:
            raise OutOfTime
        if left <= 0:
            raise TimeoutError
        self._stream.settimeout(min(left, self._limit.left))


class RemoteFile:
    """An open file on a host."""

    def __init__(self, sftp: SftpReader, handle: bytes) -> None:
        self._sftp, self._handle = sftp, handle
        self._unanswered: set[int] = set()
        self._early: dict[int, tuple[int, Fields]] = {}  # replies that came before their turn

    def __enter__(self) -> RemoteFile:
        return self

    def __exit__(self, *error: object) -> None:
        # After a failure the connection cannot be used.
        if not isinstance(error[1], (OSError, InvalidReply, OutOfTime)):
            self._sftp.close_handle(self._handle)

    def read(self, most: int) -> bytes:
        """Return the first bytes of the file, at most this many."""
        return b"".join(self.chunks(0, most))

    def chunks(self, start: int, end: int) -> Generator[bytes, None, None]:
        """Return the bytes from `start` to `end`, or to the end of the file."""
        requests: deque[tuple[int, int, int]] = deque()  # number, offset, size
        at = start
        try:
            while at < end or requests:
                # Many requests at once: otherwise every 32 KB would cost a round trip.
                while at < end and len(requests) < READS_AHEAD:
                    size = min(READ_SIZE, end - at)
                    requests.append((self._request(at, size), at, size))
                    at += size
                yield from self._whole(*requests.popleft())
        except EOFError:
            return
        finally:
            self._sftp.forget(self._unanswered)
            self._unanswered, self._early = set(), {}

    def _whole(self, number: int, offset: int, size: int) -> Iterator[bytes]:
        """Return what a request asks for, in one or several parts."""
        # One deadline for all parts: each may be a single byte.
        deadline = self._sftp.deadline()
        while True:
            data = self._data_of(number, deadline)
            if not 1 <= len(data) <= size:
                raise InvalidReply("a reply has more data than requested, or none")
            yield data
            if len(data) == size:
                return
            offset, size = offset + len(data), size - len(data)
            number = self._request(offset, size)

    def _data_of(self, number: int, deadline: float) -> bytes:
        # A server may answer in any order.
        while number not in self._early:
            answered, kind, fields = self._sftp.reply(self._unanswered, deadline)
            self._unanswered.discard(answered)
            self._early[answered] = kind, fields
        kind, fields = self._early.pop(number)
        return expected(DATA, kind, fields).string()

    def _request(self, offset: int, size: int) -> int:
        place = struct.pack(">QI", offset, size)
        number = self._sftp.request(READ, _string(self._handle) + place)
        self._unanswered.add(number)
        return number


def _string(data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + data
