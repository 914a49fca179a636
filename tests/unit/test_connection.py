"""What a host sends over ssh, and where it goes. Oracle: paramiko's own server, made to break the limits."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import paramiko
import pytest

from gptctl.backends import Backends
from gptctl.deadline import Deadline
from gptctl.jobs.damage import new_notes
from gptctl.remote.connection import MAX_GREETING, Connection, _transport_over
from gptctl.remote.copy_files import Part
from gptctl.remote.fetch import _resume_copy
from gptctl.remote.host_sync import _append
from gptctl.remote.parallel import in_parallel
from gptctl.remote.sftp import InvalidReply

WINDOW = 1 << 16  # bytes that the client asks for
KEY = paramiko.ECDSAKey.generate(bits=256)


class AcceptAll(paramiko.ServerInterface):
    def check_auth_none(self, username: str) -> int:
        return paramiko.AUTH_SUCCESSFUL

    def get_allowed_auths(self, username: str) -> str:
        return "none"

    def check_channel_request(self, kind: str, chanid: int) -> int:
        return paramiko.OPEN_SUCCEEDED


@pytest.fixture
def sockets() -> Iterator[tuple[socket.socket, socket.socket]]:
    ours, theirs = socket.socketpair()
    yield ours, theirs
    ours.close()
    theirs.close()


@pytest.fixture
def channels(sockets: tuple[socket.socket, socket.socket]) -> Iterator[tuple[Any, Any]]:
    """Both ends of a channel: ours, and that of the host."""
    ours, theirs = sockets
    server = paramiko.Transport(theirs)
    server.add_server_key(KEY)
    server.start_server(event=threading.Event(), server=AcceptAll())
    client = _transport_over(ours, default_window_size=WINDOW)
    client.start_client(timeout=10)
    client.auth_none("user")
    channel = client.open_session()
    channel.settimeout(10)
    yield channel, server.accept(10)
    client.close()
    server.close()


def test_all_that_was_asked_for_arrives(channels: tuple[Any, Any]) -> None:
    """Ten windows of data, read as they arrive, do not count as too much."""
    here, there = channels
    threading.Thread(target=there.sendall, args=(bytes(10 * WINDOW),), daemon=True).start()
    read = 0
    while read < 10 * WINDOW:
        read += len(here.recv(1 << 15))
    assert here.transport.is_active()


@pytest.mark.parametrize("send", ["sendall", "sendall_stderr"])
def test_more_data_than_was_asked_for_ends_the_connection(send: str, channels: tuple[Any, Any]) -> None:
    here, there = channels
    there.out_window_size = 1 << 30
    with pytest.raises((OSError, EOFError)):  # the host notices the end of the connection
        getattr(there, send)(bytes(100 * WINDOW))
    here.transport.join(10)
    assert "more data than it was asked for" in str(here.transport.get_exception())
    assert len(here.in_buffer) + len(here.in_stderr_buffer) < 2 * WINDOW


def test_an_invalid_message_is_an_error_of_ssh(channels: tuple[Any, Any]) -> None:
    """paramiko itself would raise what its parser raised, here a UnicodeDecodeError."""
    here, there = channels
    message = paramiko.Message()
    message.add_byte(paramiko.common.cMSG_CHANNEL_REQUEST)
    message.add_int(there.remote_chanid)
    message.add_string(b"\xff\xff")
    message.add_boolean(False)
    there.transport._send_user_message(message)
    here.transport.join(10)
    error = here.transport.get_exception()
    assert isinstance(error, paramiko.SSHException)
    assert "it sent an invalid message" in str(error)


def test_a_greeting_without_end_ends_the_connection(sockets: tuple[socket.socket, socket.socket]) -> None:
    ours, theirs = sockets
    threading.Thread(target=_flood, args=(theirs,), daemon=True).start()
    with pytest.raises(paramiko.SSHException, match=f"more than {MAX_GREETING:,} bytes"):
        _transport_over(ours).start_client(timeout=10)


def _flood(sock: socket.socket) -> None:
    try:
        while True:
            sock.sendall(bytes(1 << 14))
    except OSError:
        return


class NoSftp:
    """A transport whose server answers everything with text: a shell that prints in its start-up file."""

    def __init__(self) -> None:
        self.channels: list[socket.socket] = []
        self.theirs: list[socket.socket] = []

    def close(self) -> None:
        pass

    def open_session(self, timeout: float) -> Any:
        ours, theirs = socket.socketpair()
        theirs.sendall(b"Welcome to this host!\n" * 10)
        channel = SimpleNamespace(
            **{name: getattr(ours, name) for name in ("send", "recv", "settimeout", "close", "fileno")},
            invoke_subsystem=lambda name: None,
        )
        self.channels.append(ours)
        self.theirs.append(theirs)
        return channel


def test_a_session_that_is_not_sftp_is_closed() -> None:
    """Followers try again and again, and sshd allows ten sessions."""
    connection: Any = object.__new__(Connection)
    connection.route = SimpleNamespace(name="gpu1", patience=5.0)
    connection._limit, connection._files = Deadline(), None
    connection._watch = SimpleNamespace(has_given_up=False)
    transport = NoSftp()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Connection, "_transport", transport)
        for _ in range(3):
            with pytest.raises(InvalidReply):
                connection.files(Deadline())
    assert [channel.fileno() for channel in transport.channels] == [-1] * 3


def test_a_command_has_one_backend_of_a_kind() -> None:
    """However many threads ask for it: it holds the connections to the hosts."""
    for kind in ("ssh", "slurm"):
        backends = Backends(lambda text: None)
        started = threading.Barrier(8)

        def of(number: int, kind: str = kind, backends: Any = backends, started: Any = started) -> Any:
            started.wait(10)
            return backends.of(kind)

        assert len({id(found) for found in in_parallel(of, range(8))}) == 1


@pytest.mark.parametrize("kind", ["log", "fetch"])
def test_a_pipe_in_the_place_of_a_copy_blocks_nothing(kind: str, tmp_path: Path) -> None:
    """Copies are appended to, and whoever can write to the run folder can put a FIFO there."""
    os.mkfifo(tmp_path / "copy")
    part = Part("/there/log", tmp_path / "copy", 10, 0)
    files: Any = None
    host: Any = SimpleNamespace(files=lambda: nullcontext(SimpleNamespace()))
    copy = {
        "log": lambda: _append(files, part),
        "fetch": lambda: _resume_copy(host, part, tmp_path / "copy", lambda size: None),
    }
    with pytest.raises(OSError, match="not a regular file"):
        copy[kind]()


def test_every_damaged_file_is_named_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GPTCTL_HOME", str(tmp_path))
    noticed = {f"/runs/{number}": "not JSON" for number in range(12)}
    said = [note for _ in range(4) for note in new_notes(noticed)]
    named = [note for note in said if "more damaged" not in note]
    assert named == [f"ignored {path}: {reason}" for path, reason in noticed.items()]
    assert said[5] == "ignored 7 more damaged files"
