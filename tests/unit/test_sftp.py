"""Reading files over SFTP. Oracles: the files, which OpenSSH's own server reads; and what lying servers were made to send."""

from __future__ import annotations

import os
import socket
import struct
import subprocess
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from gptctl.deadline import Deadline
from gptctl.remote import sftp
from gptctl.remote.copy_files import Part
from gptctl.remote.host_sync import _append
from gptctl.remote.sftp import Fields, InvalidReply, OutOfTime, ReadFailed, SftpReader, TooManyEntries

SERVER = "/usr/lib/openssh/sftp-server"
ODD = b"".join(bytes([code]) for code in range(1, 256) if code != ord("/"))


@contextmanager
def served() -> Iterator[SftpReader]:
    if not os.path.exists(SERVER):
        pytest.skip(f"{SERVER} is missing")
    ours, theirs = socket.socketpair()
    with ours, subprocess.Popen([SERVER], stdin=theirs, stdout=theirs) as process:
        theirs.close()
        yield SftpReader(ours, 20.0)
        ours.close()
        process.wait(10)


def test_files_arrive_as_they_are(tmp_path: Path) -> None:
    """Whatever their names and sizes; also a part, and after a copy that was given up."""
    content = os.urandom(5_000_001)
    (tmp_path / "large").write_bytes(content)
    names = [ODD[:255], ODD[-20:], b"\xff\xfe", b"x" * 255, "名".encode()]
    for name in names:
        Path(os.fsdecode(os.fsencode(tmp_path) + b"/" + name)).write_bytes(name)
    with served() as files:
        found = {entry.name: entry for entry in files.listed(str(tmp_path))}
        assert sorted(map(os.fsencode, found)) == sorted([*names, b"large"])
        assert found["large"].size == len(content)
        for name in names:
            with files.open(f"{tmp_path}/{os.fsdecode(name)}") as source:
                assert source.read(1000) == name
        with files.open(f"{tmp_path}/large") as source:
            given_up = source.chunks(0, len(content))
            assert content.startswith(next(given_up))
            given_up.close()  # type: ignore[attr-defined]
            assert b"".join(source.chunks(70_000, len(content))) == content[70_000:]
            assert b"".join(source.chunks(len(content) - 10, 1 << 60)) == content[-10:]
        assert files.stat(f"{tmp_path}/large").size == len(content)


@pytest.mark.parametrize("kept", [0, 3, 40])
@pytest.mark.parametrize("grows", [False, True], ids=["shorter", "longer"])
def test_a_file_that_was_replaced_is_copied_again(tmp_path: Path, kept: int, grows: bool) -> None:
    """As the trainer does on resume: it keeps the first lines, and goes on from there. Oracle: the file, byte for byte.
    A copy that was interrupted is continued, unless the file was replaced once more."""
    file, copy = tmp_path / "metrics.jsonl", tmp_path / "here" / "metrics.jsonl"

    def lines(first: int, last: int, name: str) -> str:
        return "".join(f'{{"step": {step}, "loss": "{name}", "time": {step / 7}}}\n' for step in range(first, last))

    def copied(size: int | None = None) -> str:
        _append(files, Part(str(file), copy, file.stat().st_size if size is None else size, 0))
        return copy.read_text()

    with served() as files:
        file.write_text(lines(0, 50, "a"))
        assert copied(1001) == file.read_text()[:1001]
        assert copied() == file.read_text()
        file.write_text(lines(0, kept, "a") + lines(kept, 5000 if grows else 45, "b"))
        # The command that began this copy had no time for all of it.
        copy.with_name("metrics.jsonl.again").write_text(file.read_text()[:700])
        assert copied() == file.read_text()
        copy.with_name("metrics.jsonl.again").write_text(lines(0, 30, "of yet another file"))
        file.write_text(lines(0, kept, "a") + lines(kept, 6000, "c"))
        assert copied() == file.read_text()
        file.write_text(file.read_text() + "more\n")
        assert copied() == file.read_text()
    assert os.listdir(copy.parent) == ["metrics.jsonl"]


def test_what_cannot_be_read(tmp_path: Path) -> None:
    with served() as files:
        assert files.listed(f"{tmp_path}/missing") == []
        with pytest.raises(FileNotFoundError):
            files.open(f"{tmp_path}/missing")
        with pytest.raises(ReadFailed), files.open(str(tmp_path)) as source:
            source.read(10)
        for number in range(30):
            (tmp_path / str(number)).touch()
        with pytest.raises(TooManyEntries):
            files.listed(str(tmp_path), 29)
        assert len(files.listed(str(tmp_path), 30)) == 30


def packet(kind: int, content: bytes) -> bytes:
    return struct.pack(">IB", len(content) + 1, kind) + content


def string(data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + data


def number(value: int) -> bytes:
    return struct.pack(">I", value)


class Liar:
    """Answers each request with what `answer(kind, number)` returns."""

    def __init__(self, answer: Callable[[int, bytes], bytes]) -> None:
        self.ours, self._theirs = socket.socketpair()
        self._answer = answer
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        stream = self._theirs.makefile("rb")
        try:
            while head := stream.read(5):
                size, kind = struct.unpack(">IB", head)
                request = stream.read(size - 1)
                hello = packet(sftp.VERSION_REPLY, number(3))
                self._theirs.sendall(hello if kind == sftp.INIT else self._answer(kind, request[:4]))
        except (OSError, struct.error):
            return


HANDLE = {sftp.OPEN, sftp.OPEN_FOLDER}
LIES: dict[str, Callable[[bytes], bytes]] = {
    "2^32 names": lambda asked: packet(sftp.NAME, asked + number(2**32 - 1)),
    "no names": lambda asked: packet(sftp.NAME, asked + number(0)),
    "2^32 attributes": lambda asked: packet(
        sftp.NAME, asked + number(1) + string(b"a") + string(b"") + number(sftp.HAS_MORE) + number(2**32 - 1)
    ),
    "a name of 256 bytes": lambda asked: packet(
        sftp.NAME, asked + number(1) + string(b"n" * 256) + string(b"") + number(0)
    ),
    "4 GB reply": lambda asked: b"\xff" * 100,
    "empty reply": lambda asked: number(0),
    "short reply": lambda asked: packet(sftp.NAME, asked[:2]),
    "name cut off": lambda asked: packet(sftp.NAME, asked + number(1) + string(b"name" * 5)[:-3]),
    "another kind": lambda asked: packet(sftp.DATA, asked + string(b"x")),
    "another number": lambda asked: packet(sftp.NAME, number(77777) + number(0)),
    "too much data": lambda asked: packet(sftp.DATA, asked + string(b"x" * 40_000)),
    "no data": lambda asked: packet(sftp.DATA, asked + string(b"")),
    "unknown kind": lambda asked: packet(250, asked),
    "unknown status": lambda asked: packet(sftp.STATUS, asked + number(99) + string(b"\x1b[2J" * 1000)),
}


USES: tuple[Callable[[SftpReader], object], ...] = (
    lambda files: files.listed("a"),
    lambda files: files.open("a").read(5),
)


# For a request to read, `another kind` is the right one.
@pytest.mark.parametrize(
    ("lie", "use"), [(lie, use) for lie in LIES for use in USES if (lie, use) != ("another kind", USES[1])]
)
def test_lies_end_at_once(lie: str, use: Callable[[SftpReader], object]) -> None:
    """Each is one of two exceptions that stand for the host, within a second."""

    def answer(kind: int, asked: bytes) -> bytes:
        return packet(sftp.HANDLE, asked + string(b"h")) if kind in HANDLE else LIES[lie](asked)

    files = SftpReader(Liar(answer).ours, 20.0)
    began = time.process_time()
    with pytest.raises((InvalidReply, ReadFailed)) as caught:
        use(files)
    assert time.process_time() - began < 1
    assert "\x1b" not in str(caught.value)


def test_a_listing_without_end() -> None:
    entries = [string(b"name") + string(b"") + number(0)] * 100

    def answer(kind: int, asked: bytes) -> bytes:
        if kind in HANDLE:
            return packet(sftp.HANDLE, asked + string(b"h"))
        return packet(sftp.NAME, asked + number(100) + b"".join(entries))

    with pytest.raises(TooManyEntries):
        SftpReader(Liar(answer).ours, 20.0).listed("a", 10_000)


def test_a_listing_of_long_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few names, and with each of them a line that nobody reads."""
    monkeypatch.setattr(sftp, "MAX_LISTING", 1_000_000)
    sent = []

    def answer(kind: int, asked: bytes) -> bytes:
        if kind in HANDLE:
            return packet(sftp.HANDLE, asked + string(b"h"))
        sent.append(kind)
        return packet(sftp.NAME, asked + number(1) + string(b"n") + string(b"l" * 200_000) + number(0))

    with pytest.raises(InvalidReply, match="more than 1,000,000 bytes"):
        SftpReader(Liar(answer).ours, 20.0).listed("a")
    assert len(sent) == 5


def test_one_deadline_for_many_slow_replies() -> None:
    """Each reply is in time, and all together are not; without a deadline they would be."""

    def answer(kind: int, asked: bytes) -> bytes:
        time.sleep(0.1)
        return packet(sftp.HANDLE, asked + string(b"h")) if kind in HANDLE else packet(sftp.STATUS, asked + number(1))

    files = SftpReader(Liar(answer).ours, 20.0)
    began = time.monotonic()
    with files.within(Deadline(0.5)), pytest.raises(OutOfTime):
        deque(files.listed("a") for _ in range(100))
    assert time.monotonic() - began < 2
    assert SftpReader(Liar(answer).ours, 20.0).listed("a") == []


@pytest.mark.parametrize("drips", [b"\0", b""])
def test_a_reply_that_drips_or_never_comes(drips: bytes) -> None:
    """Bytes that arrive one by one do not extend the deadline."""
    ours, theirs = socket.socketpair()
    theirs.sendall(packet(sftp.VERSION_REPLY, number(3)))
    files = SftpReader(ours, 0.4)
    ended = threading.Event()

    def drip() -> None:
        while drips and not ended.wait(0.1):
            theirs.send(drips)

    threading.Thread(target=drip, daemon=True).start()
    theirs.sendall(number(5000))
    began = time.monotonic()
    with pytest.raises(TimeoutError):
        files.listed("a")
    ended.set()
    assert 0.3 < time.monotonic() - began < 3


def test_data_one_byte_at_a_time() -> None:
    """It is the file, as long as it arrives in time."""
    content = bytes(range(200))

    def answer(kind: int, asked: bytes) -> bytes:
        answer.at += kind == sftp.READ  # type: ignore[attr-defined]
        kinds = {sftp.READ: packet(sftp.DATA, asked + string(content[answer.at - 1 : answer.at]))}  # type: ignore[attr-defined]
        return kinds.get(kind, packet(sftp.HANDLE, asked + string(b"h")))

    answer.at = 0  # type: ignore[attr-defined]
    with SftpReader(Liar(answer).ours, 20.0).open("a") as source:
        assert source.read(200) == content


def test_fields_never_read_beyond_the_end() -> None:
    for size in range(30):
        with pytest.raises(InvalidReply):
            list(Fields(number(1) + b"\xff" * size).entries())
