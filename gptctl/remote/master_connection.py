"""Connections over the user's running OpenSSH master (ControlMaster in the ssh config).

A host that asks for a password or a code accepts no other program than ssh itself: the user logs
in once with ssh, and gptctl uses that connection. It opens none of its own.
"""

from __future__ import annotations

import socket
import subprocess
from collections.abc import Sequence

from gptctl.remote.connection import (
    ANSWER_TIMEOUT,
    MAX_OUTPUT,
    CommandResult,
    Files,
    files_over,
)
from gptctl.remote.host_error import HostError
from gptctl.remote.listing import Entry, listed
from gptctl.remote.route import Route
from gptctl.remote.scripts import command_line, output_of

CONNECTION_FAILED = 255  # the exit code of ssh itself
CHECK_TIMEOUT = 5.0  # seconds; the master is a process of this machine


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

    def __init__(self, route: Route) -> None:
        self.route = route
        self._files: Files | None = None
        self._pipe: SftpPipe | None = None
        # The master may have lost the host without noticing.
        self.run(["true"], timeout=route.timeout)

    def _words(self, *options: str) -> list[str]:
        program, *words = _user_words(self.route)
        # Without its master ssh must fail instead of opening a connection, or asking the user.
        only_master = ("ControlMaster=no", "BatchMode=yes", "ProxyCommand=false")
        settings = [word for option in only_master for word in ("-o", option)]
        return [program, *settings, *options, *words]

    def run(
        self, command: Sequence[str], stdin: bytes = b"", timeout: float = ANSWER_TIMEOUT
    ) -> CommandResult:
        """Run a command until it exits."""
        words = [*self._words("-T"), command_line(command)]
        try:
            # A session of its own: Ctrl-C is for gptctl, which decides what becomes of a request.
            done = subprocess.run(
                words, input=stdin, capture_output=True, timeout=timeout, start_new_session=True
            )
        except subprocess.TimeoutExpired:
            problem = f"no answer in {timeout:.0f} s over your ssh master connection"
            raise HostError(self.route.name, problem, is_lost=True) from None
        err = done.stderr.decode(errors="replace").strip()
        if done.returncode in (CONNECTION_FAILED, -1):
            said = err.rpartition("\n")[2] or "no message"
            problem = f"lost your ssh master connection: {said}"
            raise HostError(self.route.name, problem, is_lost=True)
        if len(done.stdout) > MAX_OUTPUT:
            raise HostError(self.route.name, f"it printed more than {MAX_OUTPUT:,} bytes")
        return CommandResult(done.returncode, output_of(done.stdout), err)

    @property
    def files(self) -> Files:
        if self._files is None:
            self._pipe = SftpPipe(self._words("-s"))
            self._files = files_over(self._pipe)
        return self._files

    def listed(self, folder: str) -> list[Entry]:
        """List a folder, including names that are not UTF-8; return nothing if it is missing."""
        return listed(self.files, self.run, folder)

    def close(self) -> None:
        if self._pipe:
            self._pipe.close()


class SftpPipe:
    """Input and output of `ssh -s HOST sftp`, as paramiko uses a socket."""

    def __init__(self, words: Sequence[str]) -> None:
        self._socket, theirs = socket.socketpair()
        # So that reading fails instead of waiting forever.
        self._socket.settimeout(ANSWER_TIMEOUT)
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

    def get_name(self) -> str:
        """Paramiko uses it in the messages that it logs."""
        return "sftp"

    def close(self) -> None:
        self._socket.close()
        self._process.kill()
        self._process.wait()
