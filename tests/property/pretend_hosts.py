"""Hosts of an ssh job that answer anything. Below the connection nothing is real, above it everything is.

A host answers as a real one would, and then `Mutator` damages what it says: bytes, values, sizes, names.
"""

from __future__ import annotations

import json
import random
import stat
import struct
from collections.abc import Sequence
from typing import Any

from gptctl.deadline import Deadline
from gptctl.remote import sftp
from gptctl.remote.connection import CommandResult
from gptctl.remote.route import Route
from gptctl.remote.sftp import SftpReader

HUGE = 2**62
VALUES: tuple[Any, ...] = (
    *(None, True, False, 0, -1, 2**31, 10**400, 1.5, "", "x", "COMPLETED", "FAILED", "\ud800", "\x1b[2J\nrow"),
    *([], [[]], {}, ["COMPLETED", ""], ["COMPLETED", "", 1, {"rank": {}}], {"pid": 1, "host": "h", "boot": "b"}),
    *("a" * 5_000, {"abandoned": True}, {"state": "COMPLETED"}, [None] * 1000),
)
TEXTS = (
    *(b"", b"\0", b"{}", b"[]", b"null", b"NaN", b"Infinity", b"1e999", b"-", b"\xff\xfe", b'{"a": NaN}'),
    *(b"[" * 20_000, b'{"a":' * 5_000, b"9" * 5_000, b'"\\ud800"', b'{"left": []', b"{} {}", b"\n\n{}\n"),
)
NAMES = (
    *(b"..", b".", b"", b"/etc/passwd", b"../../x", b"a/b", b"\xff", b"x" * 300, b"\0", b"attempt-999999999"),
    *(b"attempt-00", b"workerlog.0", b"workerlog.99999999", b"node.0.exit", b"result.json", b"\n", b"\x1b[2J"),
)


class Mutator:
    """Damages what a host says; the same seed gives the same damage."""

    def __init__(self, seed: str, rate: float) -> None:
        self.random, self.rate = random.Random(seed), rate

    def hits(self) -> bool:
        return self.random.random() < self.rate

    def answer(self, value: Any) -> bytes:
        """The text of an answer, damaged as JSON or as bytes."""
        if self.hits():
            value = self._changed(value)
        text = json.dumps(value).encode()
        return self.data(text) if self.hits() else text

    def extended(self, value: dict[str, Any]) -> dict[str, Any]:
        """This object, with keys that mean something elsewhere."""
        keys = [key for key in ("scheduler_id", "abandoned", "host", "unsent", "x" * 100) if self.hits()]
        return {**value, **{key: self.random.choice(VALUES) for key in keys}}

    def _changed(self, value: Any) -> Any:
        if isinstance(value, dict) and value and self.random.random() < 0.9:
            key = self.random.choice(list(value))
            changed = {**value, key: self._changed(value[key])}
            if self.random.random() < 0.1:
                del changed[key]
            return changed
        return self.random.choice(VALUES)

    def data(self, data: bytes) -> bytes:
        at = self.random.randrange(len(data) + 1)
        match self.random.randrange(6):
            case 0:
                return self.random.choice(TEXTS)
            case 1:
                return data[:at]
            case 2:
                return data[:at] + self.random.randbytes(4) + data[at:]
            case 3:
                return data[:at] + bytes([self.random.randrange(256)]) + data[at + 1 :]
            case 4:
                return data + data
            case _:
                return data[:at] + data[at + self.random.randrange(8) :]


class PretendHost:
    """An open connection to a host with some files. Everything that it sends goes through its mutator."""

    def __init__(self, route: Route, files: dict[str, bytes], answers: dict[str, Any], mutator: Mutator) -> None:
        self.route, self.tree, self.answers, self.mutator = route, files, answers, mutator
        self.said: dict[str, tuple[int, bytes]] = {}  # exit code and output of the last commands
        self.sent_files: list[bytes] = []
        self._files: SftpReader | None = None

    def run(self, command: Sequence[str], stdin: bytes = b"", timeout: float = 60) -> CommandResult:
        verb = next((word for word in command if word in self.answers), "other")
        code = self.mutator.random.choice((0, 1, 66, 75, -1, 255)) if self.mutator.hits() else 0
        self.said[verb] = code, self.mutator.answer(self.answers.get(verb, {}))
        return CommandResult(code, self.said[verb][1], "problem" if code else "")

    is_quiet = False

    def files(self, deadline: Deadline) -> SftpReader:
        self._files = self._files or SftpReader(PretendSftp(self), 10.0)
        return self._files

    def close_files(self) -> None:
        self._files = None

    def close(self) -> None:
        self._files = None


class PretendSftp:
    """An SFTP server without a network: each request is answered at once."""

    def __init__(self, host: PretendHost) -> None:
        self._host, self._mutator = host, host.mutator
        self._handles: list[str] = []
        self._listed: set[int] = set()
        self._out = bytearray()

    def settimeout(self, seconds: float) -> None:
        return

    def close(self) -> None:
        return

    def recv(self, size: int) -> bytes:
        data = bytes(self._out[:size])
        del self._out[:size]
        return data  # nothing: the host has closed the connection

    def send(self, data: bytes) -> int:
        kind, request = data[4], data[5:]
        reply = _packet(sftp.VERSION_REPLY, request[:4]) if kind == sftp.INIT else self._reply(kind, request)
        self._out += self._mutator.data(reply) if self._mutator.hits() and self._mutator.hits() else reply
        return len(data)

    def _reply(self, kind: int, request: bytes) -> bytes:
        number, rest = request[:4], request[4:]
        size = int.from_bytes(rest[:4], "big")
        target, rest = rest[4 : 4 + size], rest[4 + size :]
        if kind in (sftp.OPEN, sftp.OPEN_FOLDER, sftp.STAT):
            return self._named(kind, number, target.decode(errors="replace"))
        if kind == sftp.CLOSE:
            return _status(number, 0)
        handle = int.from_bytes(target, "big")
        path = self._handles[handle] if handle < len(self._handles) else ""
        if kind == sftp.READ_FOLDER:
            if handle in self._listed and not self._mutator.hits():
                return _status(number, sftp.END_OF_FILE)
            self._listed.add(handle)
            return self._names(number, path)
        offset, length = struct.unpack(">QI", rest)
        data = self._host.tree.get(path, b"")[offset : offset + length]
        data = self._mutator.data(data) if self._mutator.hits() else data
        self._host.sent_files.append(data)
        return _packet(sftp.DATA, number + _string(data)) if data else _status(number, sftp.END_OF_FILE)

    def _named(self, kind: int, number: bytes, path: str) -> bytes:
        is_folder = any(name.startswith(f"{path}/") for name in self._host.tree)
        if path not in self._host.tree and not is_folder:
            return _status(number, sftp.NO_SUCH_FILE)
        if kind == sftp.STAT:
            return _packet(sftp.ATTRIBUTES, number + self._attributes(path))
        self._handles.append(path)
        return _packet(sftp.HANDLE, number + _string((len(self._handles) - 1).to_bytes(4, "big")))

    def _names(self, number: bytes, folder: str) -> bytes:
        inside = {name[len(folder) + 1 :].split("/")[0] for name in self._host.tree if name.startswith(f"{folder}/")}
        names = [(name.encode(), self._attributes(f"{folder}/{name}")) for name in sorted(inside)]
        if self._mutator.hits() or not names:
            names.append((self._mutator.random.choice(NAMES), self._attributes("")))
        parts = [_string(name) + _string(b"") + attributes for name, attributes in names]
        return _packet(sftp.NAME, number + struct.pack(">I", len(parts)) + b"".join(parts))

    def _attributes(self, path: str) -> bytes:
        mode = (stat.S_IFREG if path in self._host.tree else stat.S_IFDIR) | 0o600
        size = len(self._host.tree.get(path, b""))
        if self._mutator.hits():
            mode = self._mutator.random.choice((mode, stat.S_IFLNK, stat.S_IFREG, stat.S_IFIFO, 0, 2**32 - 1))
            size = self._mutator.random.choice((size, 0, size + 1, HUGE, 2**64 - 1))
        flags = sftp.HAS_SIZE | sftp.HAS_MODE | sftp.HAS_TIMES
        return struct.pack(">IQIII", flags, size, mode, 0, 1_700_000_000)


def _packet(kind: int, content: bytes) -> bytes:
    return struct.pack(">IB", len(content) + 1, kind) + content


def _string(data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + data


def _status(number: bytes, code: int) -> bytes:
    return _packet(sftp.STATUS, number + struct.pack(">I", code) + _string(b"") + _string(b""))
