"""How much hosts may send. Oracles: arithmetic, and servers that never stop talking, over real sockets."""

from __future__ import annotations

import socket
import subprocess
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import click
import pytest

from gptctl.cli.jobs import fetch
from gptctl.cli.logs import logs
from gptctl.remote import limits
from gptctl.remote.connection import MAX_OUTPUT, Connection, JumpHosts, shown_key
from gptctl.remote.host_error import HostError
from gptctl.remote.limits import room_in, shares
from gptctl.remote.master_connection import limited_run
from gptctl.remote.route import Route
from gptctl.text import parse_size, size_text


@pytest.mark.parametrize(
    ("verb", "option", "limit"),
    [
        (fetch, "max_size", limits.MAX_FETCHED),
        (fetch, "max_files", limits.MAX_FILES),
        (logs, "max_size", limits.MAX_LOGS),
    ],
)
def test_help_names_the_limits(verb: click.Command, option: str, limit: int) -> None:
    (help_text,) = [each.help for each in verb.params if isinstance(each, click.Option) and each.name == option]
    assert parse_size(str(help_text).partition("default: ")[2].rstrip(").")) == limit


def test_small_files_come_first() -> None:
    assert shares([5, 2**62, 3], 100) == [5, 92, 3]
    assert shares([5, 2**62, 3], 6) == [3, 0, 3]
    assert shares([], 10) == []


@pytest.mark.parametrize(
    ("text", "size"),
    [("0", 0), ("1000", 1000), ("2MB", 2_000_000), ("1.5 tb", 15 * 10**11), ("3GiB", 3 << 30), ("9EB", 9 * 10**18)],
)
def test_sizes(text: str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "-1", "1ZB", "ten", "1e9", "1 2", "٣", "9" * 20, "NaN", "1.5", "1.5B"])
def test_what_is_not_a_size(text: str) -> None:
    assert parse_size(text) is None


def test_sizes_are_shown_in_decimal_units() -> None:
    shown = [size_text(size) for size in (0, 1, 999, 999_999, 10**9, 4 << 60, 2**64)]
    assert shown == ["0 bytes", "1 byte", "999 bytes", "1.0 MB", "1.0 GB", "4.6 EB", "18.4 EB"]


@pytest.mark.parametrize(("disk", "free", "room"), [(100, 50, 49), (10, 5, 4.5), (10, 0.2, 0)])
def test_some_space_stays_free(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, disk: int, free: float, room: float
) -> None:
    """1 GB, or 5 % of a small disk; also if the folder does not exist yet. Oracle: arithmetic, in GB."""
    found = SimpleNamespace(f_frsize=1, f_blocks=disk * limits.GB, f_bavail=int(free * limits.GB))
    monkeypatch.setattr(limits.os, "statvfs", lambda folder: found)
    assert room_in(tmp_path / "a" / "b") == int(room * limits.GB)


def test_a_program_that_prints_without_end() -> None:
    """It is killed; one that reads nothing, or never exits, does no harm either."""
    began = time.monotonic()
    code, out, _ = limited_run(["cat", "/dev/zero"], b"", 30)
    assert (code, MAX_OUTPUT < len(out) < MAX_OUTPUT + (1 << 20)) == (-9, True)
    assert limited_run(["sh", "-c", "echo a; echo b >&2; exit 7"], b"x" * (1 << 20), 30) == (7, b"a\n", b"b\n")
    assert limited_run(["cat"], b"x" * (1 << 20), 30) == (0, b"x" * (1 << 20), b"")
    with pytest.raises(subprocess.TimeoutExpired):
        limited_run(["sleep", "100"], b"", 0.1)
    assert time.monotonic() - began < 20


GREETINGS = {
    "a line without end": b"x" * 4096,
    "lines without end": b"hello\n" * 500,
    "a packet of 4 GB": b"SSH-2.0-liar\r\n" + b"\xff" * 4096,
    "nothing": b"",
}


@pytest.mark.parametrize("greeting", GREETINGS)
def test_a_server_that_never_stops_talking(greeting: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The host counts as unreachable within its timeout, whoever asks; and it got little memory here."""
    sent, ended = [0], threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as server:

        def talk() -> None:
            while not ended.is_set():
                try:
                    peer, _ = server.accept()
                    with peer:
                        while GREETINGS[greeting] and not ended.is_set():
                            sent[0] += peer.send(GREETINGS[greeting])
                        ended.wait(10)
                except OSError:
                    continue

        threading.Thread(target=talk, daemon=True).start()
        monkeypatch.setenv("HOME", str(tmp_path))
        route = Route("liar", "127.0.0.1", server.getsockname()[1], "me", (), (), timeout=1.0)
        for connect in (Connection, shown_key):
            began = time.monotonic()
            with pytest.raises(HostError, match="liar"):
                connect(route, JumpHosts())
            assert time.monotonic() - began < 8
        ended.set()
    # What the kernel buffers is not ours.
    assert sent[0] < 20_000_000
