"""Connections over the user's running OpenSSH master (ControlMaster in the ssh config).

A host that asks for a password or a code accepts no other program than ssh itself: the user logs
in once with ssh, and gptctl uses that connection. It opens none of its own.
"""

from __future__ import annotations

import os
import socket
import subprocess
import threading
from collections.abc import Sequence
from contextlib import suppress
from typing import IO

from gptctl.deadline import Deadline
from gptctl.remote.archive import MIN_SPEED
from gptctl.remote.connection import MAX_OUTPUT, CommandResult
from gptctl.remote.host_error import HostError, shell_error
from gptctl.remote.route import Route
from gptctl.remote.scripts import command_line, output_of
from gptctl.remote.sftp import SftpReader

CONNECTION_FAILED = 255  # the exit code of ssh itself
CHECK_TIMEOUT = 5.0  # seconds; the master is a process of this machine
# Seconds to read the rest of what a program printed after its exit: a child that it started in the
# background may keep its output open.
OUTPUT_TIMEOUT = 5.0


def _user_words(route: Route) -> list[str]:
    """The ssh command for a host, as the user's own: so it finds the user's master."""
    return ["ssh", "-p", str(route.port), "-l", route.user, route.name]


def has_master(route: Route) -> bool:
    """Whether the user has a master connection to this host."""
    program, *words = _user_words(route)
    try:
        done = subprocess.run(
            [program, "-O", "check", *words],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=CHECK_TIMEOUT,
        )
    # ssh is not installed, or hangs.
    except (OSError, subprocess.TimeoutExpired):
        return False
    return done.returncode == 0


class MasterConnection:
    """The same methods as `Connection`, each in a session of the user's master."""

    def __init__(self, route: Route, limit: Deadline) -> None:
        self.route, self._limit = route, limit
        self._files: SftpReader | None = None
        self._pipe: SftpPipe | None = None
        # The master may have lost the host without noticing.
        self.run(["true"])

    @property
    def patience(self) -> float:
        """The seconds for which the host may be silent."""
        return min(self.route.patience, self._limit.left)

    def _words(self, *options: str) -> list[str]:
        program, *words = _user_words(self.route)
        # Without its master ssh must fail instead of opening a connection, or asking the user.
        only_master = ("ControlMaster=no", "BatchMode=yes", "ProxyCommand=false")
        settings = [word for option in only_master for word in ("-o", option)]
        return [program, *settings, *options, *words]

    def run(
        self, command: Sequence[str], stdin: bytes = b"", timeout: float | None = None
    ) -> CommandResult:
        """Run a command until it exits; `timeout` is for work, which may take longer."""
        words = [*self._words("-T"), command_line(command)]
        timeout = min(timeout or self.patience + len(stdin) / MIN_SPEED, self._limit.left)
        try:
            code, out, err = limited_run(words, stdin, timeout)
        except subprocess.TimeoutExpired:
            problem = f"no answer in {timeout:.3g} s over your ssh master connection"
            raise HostError(self.route.name, problem, is_lost=True, is_silent=True) from None
        # Before the exit code: a program that printed too much was killed.
        if len(out) > MAX_OUTPUT:
            raise HostError(self.route.name, f"it printed more than {MAX_OUTPUT:,} bytes")
        text = err.decode(errors="replace").strip()
        if code in (CONNECTION_FAILED, -1):
            said = text.rpartition("\n")[2] or "no message"
            problem = f"lost your ssh master connection: {said}"
            raise HostError(self.route.name, problem, is_lost=True)
        if (output := output_of(out)) is None:
            raise shell_error(self.route.name, text)
        return CommandResult(code, output, text)

    is_quiet = False  # only ssh itself knows

    def files(self, deadline: Deadline) -> SftpReader:
        """Return the SFTP session. Raise TimeoutError if the host opens none in time."""
        if self._files is None:
            pipe = SftpPipe(self._words("-s"))
            try:
                self._files = SftpReader(pipe, self.patience, deadline)
            except BaseException:  # every try would leave one more process
                pipe.close()
                raise
            self._pipe = pipe
        return self._files

    def close_files(self) -> None:
        if self._pipe:
            self._pipe.close()
        self._files = self._pipe = None

    def close(self) -> None:
        self.close_files()


def limited_run(words: Sequence[str], stdin: bytes, timeout: float) -> tuple[int, bytes, bytes]:
    """Run a program; return its exit code and what it printed. Kill it if it prints too much."""
    # A session of its own: Ctrl-C is for gptctl, which decides what becomes of a request.
    process = subprocess.Popen(
        words,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )
    assert process.stdin
    assert process.stdout
    assert process.stderr
    out, err = bytearray(), bytearray()
    work = (
        threading.Thread(target=_feed, args=(process.stdin, stdin), daemon=True),
        threading.Thread(target=_read, args=(process, process.stdout, out), daemon=True),
        threading.Thread(target=_read, args=(process, process.stderr, err), daemon=True),
    )
    for thread in work:
        thread.start()
    try:
        code = process.wait(timeout)
    except BaseException:
        process.kill()
        process.wait()
        raise
    for thread in work:
        thread.join(OUTPUT_TIMEOUT)
    return code, bytes(out), bytes(err)


def _feed(stream: IO[bytes], data: bytes) -> None:
    # The program may exit before it has read everything: its exit code says why.
    with suppress(OSError), stream:
        stream.write(data)


def _read(process: subprocess.Popen[bytes], stream: IO[bytes], output: bytearray) -> None:
    with suppress(OSError), stream:
        while data := os.read(stream.fileno(), 1 << 16):
            output += data
            # A host that never stops printing must not use up the memory here.
            if len(output) > MAX_OUTPUT:
                process.kill()
                return


class SftpPipe:
    """Input and output of `ssh -s HOST sftp`, as a socket."""

    def __init__(self, words: Sequence[str]) -> None:
        self._socket, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [*words, "sftp"],
                stdin=theirs.fileno(),
                stdout=theirs.fileno(),
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )

    def send(self, data: bytes) -> int:
        return self._socket.send(data)

    def recv(self, size: int) -> bytes:
        return self._socket.recv(size)

    def settimeout(self, seconds: float) -> None:
        self._socket.settimeout(seconds)

    def close(self) -> None:
        self._socket.close()
        self._process.kill()
        self._process.wait()
