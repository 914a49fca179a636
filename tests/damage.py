"""What a bad disk, a careless user or a hostile host can make of a file: used by the tests of all readers.

A case replaces one file. `JSON_CASES` are for files with a JSON object: a reader must give up on every one of them,
except those in `HARMLESS`, at once and without an exception that it does not declare.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from pathlib import Path

Case = Callable[[Path], None]
MANY = 100_000


def _with(data: bytes) -> Case:
    def damage(file: Path) -> None:
        _clear(file)
        file.write_bytes(data)

    return damage


def _clear(file: Path) -> None:
    if file.is_dir() and not file.is_symlink():
        file.rmdir()
    file.unlink(missing_ok=True)


def _fifo(file: Path) -> None:
    _clear(file)
    os.mkfifo(file)


def _socket(file: Path) -> None:
    _clear(file)
    # A path in a sockaddr has at most 107 bytes: bind in the folder itself, through its descriptor.
    folder = os.open(file.parent, os.O_RDONLY)
    try:
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(f"/proc/self/fd/{folder}/{file.name}")
    finally:
        os.close(folder)


def _folder(file: Path) -> None:
    _clear(file)
    file.mkdir()


def _link_to(target: str) -> Case:
    def damage(file: Path) -> None:
        _clear(file)
        file.symlink_to(target)

    return damage


def _link_loop(file: Path) -> None:
    _clear(file)
    file.symlink_to(file.name)


def _sparse(file: Path) -> None:
    _clear(file)
    with open(file, "wb") as stream:
        stream.truncate(1 << 40)


NO_FILES: dict[str, Case] = {
    "fifo": _fifo,
    "socket": _socket,
    "folder": _folder,
    "link to /dev/zero": _link_to("/dev/zero"),
    "link to /dev/null": _link_to("/dev/null"),
    "dangling link": _link_to("nothing-is-here"),
    "link loop": _link_loop,
    "huge sparse file": _sparse,
}
TEXTS: dict[str, bytes] = {
    "empty": b"",
    "blank": b" \n\n",
    "NULs": b"\0" * 4096,
    "invalid UTF-8": b'{"a": "\xff\xfe"' + b"\x80" * 10,
    "UTF-16": '{"a": 1}'.encode("utf-16"),
    "half": b'{"state": "COMPL',
    "text": b"Permission denied\n",
    "list": b"[]",
    "number": b"17",
    "null": b"null",
    "deep list": b"[" * MANY,
    "deep object": b'{"a":' * MANY + b"1" + b"}" * MANY,
    "just too deep": b'{"a":' * 101 + b"1" + b"}" * 101,
    "nested 900 times": b'{"a":' + b"[" * 900 + b"]" * 900 + b"}",
    "NaN": b'{"a": NaN}',
    "Infinity": b'{"a": [-Infinity]}',
    "1e999": b'{"a": 1e999}',
    "huge integer": b'{"a": ' + b"9" * 5000 + b"}",
    "million digits": b'{"a": ' + b"9" * 1_000_000 + b"}",
    "more than 64 bits": b'{"a": 9223372036854775808}',
    "too many bits, negative": b'{"a": -9223372036854775809}',
    "long fraction": b'{"a": ' + b"9" * 400 + b".5}",
}
# Text -> what a reader makes of it.
HARMLESS: dict[bytes, dict[str, object]] = {
    rb'{"a": "\ud800"}': {"a": "\ufffd"},
    rb'{"\udfff": "x\udc00\ud800y"}': {"\ufffd": "x\ufffd\ufffdy"},
    rb'{"a": "\ud83d\ude00"}': {"a": "\U0001f600"},
    rb'{"a": "\\ud800"}': {"a": r"\ud800"},
    b'{"a": "\xff"}': {"a": "\ufffd"},
    b'{"a": 9223372036854775807, "b": -9223372036854775808}': {"a": (1 << 63) - 1, "b": -(1 << 63)},
    b'{"a": 1e300, "b": 1234567890123456789}': {"a": 1e300, "b": 1234567890123456789},
    b'{"a": ' + b"[" * 98 + b"]" * 98 + b', "b": "[[[["}': {},  # deep, but not too deep; its value is not compared
}
JSON_CASES: dict[str, Case] = {**NO_FILES, **{name: _with(data) for name, data in TEXTS.items()}}
