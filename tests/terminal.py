"""A terminal for tests: runs a command on a pty, and tells what a person would see on the screen."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import select
import struct
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Callable
from pathlib import Path

GPTCTL = str(Path(sys.executable).with_name("gptctl"))
_TOKEN = re.compile(r"\x1b\[([0-9;?]*)([A-Za-z])|\r|\n|[^\x1b\r\n]")


class Screen:
    """The lines of a terminal of this width, scrolled ones included. Knows the few sequences that gptctl may use;
    any other is a mistake."""

    def __init__(self, columns: int) -> None:
        self.columns, self.lines, self.row, self.column = columns, [""], 0, 0

    def feed(self, text: str) -> None:
        end = 0
        for token in _TOKEN.finditer(text):
            assert token.start() == end, f"unknown sequence: {text[end : end + 20]!r}"
            end = token.end()
            self._obey(token)
        assert end == len(text), f"unknown sequence: {text[end : end + 20]!r}"

    def _obey(self, token: re.Match[str]) -> None:
        if token[0] == "\r":
            self.column = 0
        elif token[0] == "\n":
            self.row += 1
            self.lines += [""] * (self.row + 1 - len(self.lines))
        elif token[2] == "J":
            self.lines[self.row] = self.lines[self.row][: self.column]
            del self.lines[self.row + 1 :]
        elif token[2]:
            assert token[2] == "m", f"unknown sequence: {token[0]!r}"
        else:
            self._put(token[0])

    def _put(self, character: str) -> None:
        if self.column == self.columns:  # a full line wraps when the next character comes
            self.row, self.column = self.row + 1, 0
            self.lines += [""] * (self.row + 1 - len(self.lines))
        line = f"{self.lines[self.row]:<{self.column}}"
        self.lines[self.row] = line[: self.column] + character + line[self.column + 1 :]
        self.column += 1


class Run:
    """A command on a terminal of its own."""

    def __init__(self, *command: str, cwd: Path, columns: int = 80, **env: str) -> None:
        self.terminal, inside = pty.openpty()
        self.columns, self.shown = columns, b""
        self.resize(columns)
        env = {**os.environ, "HOME": str(cwd / "home"), "TERM": "xterm-256color", **env}
        env.pop("COLUMNS", None)
        self.child = subprocess.Popen(
            command, cwd=cwd, env=env, stdin=inside, stdout=inside, stderr=inside, preexec_fn=_own_terminal
        )
        os.close(inside)

    def resize(self, columns: int) -> None:
        fcntl.ioctl(self.terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))

    def read_until(self, text: str, seconds: float = 40) -> None:
        deadline = time.monotonic() + seconds
        while text.encode() not in self.shown:
            assert self._read(deadline), self.shown.decode(errors="replace")

    def finish(self, seconds: float = 60) -> int:
        """Reads to the end; the exit code."""
        deadline = time.monotonic() + seconds
        while self._read(deadline):
            pass
        return self.child.wait(max(1.0, deadline - time.monotonic()))

    def press(self, keys: bytes) -> None:
        os.write(self.terminal, keys)

    def _read(self, deadline: float) -> bool:
        ready, _, _ = select.select([self.terminal], [], [], max(0.0, deadline - time.monotonic()))
        assert ready, f"nothing more is shown: {self.shown.decode(errors='replace')}"
        try:
            piece = os.read(self.terminal, 65536)
        except OSError:  # the command has closed its terminal
            return False
        self.shown += piece
        return bool(piece)

    @property
    def text(self) -> str:
        return self.shown.decode()

    def screen(self) -> list[str]:
        """The lines that are left when the command has ended."""
        screen = Screen(self.columns)
        screen.feed(self.text)
        return [line.rstrip() for line in screen.lines]


class FullScreen:
    """A program in full screen, on a terminal of its own and perhaps on another machine. What it shows is read beside the
    test, so that it never waits for the test."""

    def __init__(self, start: Callable[..., subprocess.Popen[str]], columns: int = 100) -> None:
        """`start` runs the program, with its three streams as keyword arguments."""
        self.terminal, inside = pty.openpty()
        fcntl.ioctl(self.terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
        # The user of the program may be another one than that of the test.
        os.chmod(os.ttyname(inside), 0o666)
        self.process = start(stdin=inside, stdout=inside, stderr=inside)
        os.close(inside)
        self._shown = bytearray()
        threading.Thread(target=self._drain, daemon=True).start()

    def _drain(self) -> None:
        while True:
            try:
                self._shown += os.read(self.terminal, 1 << 16)
            except OSError:  # the program has closed its terminal
                return

    @property
    def text(self) -> str:
        return without_sequences(bytes(self._shown))

    def press(self, keys: bytes) -> None:
        os.write(self.terminal, keys)


def without_sequences(shown: bytes) -> str:
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", shown.decode(errors="replace"))


def _own_terminal() -> None:
    os.setsid()
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)
