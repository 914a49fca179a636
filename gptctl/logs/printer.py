"""Write lines to a stream: with a prefix that names the rank, as JSON, or raw.

Messages that are not log lines go to the given `say`.
"""

from __future__ import annotations

import json
import os
import shlex
import sys
from collections.abc import Iterable
from dataclasses import replace
from typing import BinaryIO, Literal

from gptctl.logs.config_hider import ConfigHider
from gptctl.logs.files import FileFilter, LogFile, LogFiles
from gptctl.logs.lines import readable
from gptctl.logs.stream import Line, LineFilter, LineWriter, read_all
from gptctl.reporting import Say
from gptctl.text import clean
from trainer.errors import UserError

Style = Literal["text", "json", "raw"]
WRITE_AT = 1000  # lines per write: one system call for each line would be slow
_COLOURS = (36, 32, 33, 35, 34, 96, 92, 93, 95, 94, 31, 91)  # one per rank, in turn
_BOLD = 1  # nodes and the batch log

Origin = tuple[int, str, int]  # attempt, kind, number: where a line comes from


def hidden_text(what: str, job: str) -> str:
    """Say what a terminal does not show, and which command shows it."""
    return f"… {what} hidden: gptctl logs {shlex.quote(job)} --raw"


def show_logs(
    files: LogFiles,
    wanted: FileFilter,
    lines: LineFilter,
    style: Style = "text",
    out: BinaryIO | None = None,
    *,
    say: Say,
    hide_config_of: str = "",
) -> None:
    """Print the lines that exist now.

    `hide_config_of` is the job or file whose config dump is hidden; if empty, nothing is hidden.
    """
    lines = replace(lines, raw=style == "raw")
    # Lines go to the buffer below stdout: text printed before must come first.
    sys.stdout.flush()
    printer = Printer(out or sys.stdout.buffer, style, say=say)
    show: LineWriter = printer
    if hide_config_of:
        show = ConfigHider(
            printer, report=lambda what: printer.text(hidden_text(what, hide_config_of))
        )
    if not read_all(files, wanted, lines, show):
        raise UserError(
            "no log file matches",
            "`gptctl logs --list` lists the log files; a pending job has none yet",
        )


class Printer:
    def __init__(
        self,
        out: BinaryIO,
        style: Style = "text",
        coloured: bool | None = None,
        *,
        say: Say,
    ) -> None:
        self._out, self._style, self._say = out, style, say
        self._coloured = (
            out.isatty() and not os.environ.get("NO_COLOR") if coloured is None else coloured
        )
        self._held: list[bytes] = []
        self._line_is_open = False  # the last raw line had no newline
        self._names: dict[Origin, str] = {}
        self._prefixes: dict[Origin, str] = {}

    def add_files(self, files: Iterable[LogFile]) -> None:
        """Make the prefixes of these files, all of the same width."""
        # Computed once per file, not per line. They name the attempt only if there are several.
        self._names.update({_origin(file): file.label for file in files})
        several = len({attempt for attempt, _, _ in self._names}) > 1
        names = {
            who: f"[{who[0]}/{name}]" if several else f"[{name}]"
            for who, name in self._names.items()
        }
        width = max(map(len, names.values()), default=0)
        self._prefixes = {
            who: self._painted(who, f"{name:<{width}} ") for who, name in names.items()
        }

    def _painted(self, who: Origin, name: str) -> str:
        _, kind, number = who
        if kind == "file":  # a single file needs no prefix
            return ""
        colour = _COLOURS[number % len(_COLOURS)] if kind == "rank" else _BOLD
        return f"\x1b[{colour}m{name}\x1b[0m" if self._coloured else name

    def line(self, line: Line) -> None:
        if self._style == "raw":
            # A file whose last line has no newline must not run into the next file's line.
            self._held.append(
                (b"\n" if self._line_is_open else b"")
                + line.text
                + (b"\n" if line.has_newline else b"")
            )
            self._line_is_open = not line.has_newline
        elif self._style == "json":
            self._held.append(_as_json(line).encode() + b"\n")
        else:
            self._held.append(
                f"{self._prefixes[_origin(line.file)]}{readable(line.text)}\n".encode()
            )
        if len(self._held) >= WRITE_AT:
            self._write()

    def text(self, text: str) -> None:
        """Write a line without a prefix."""
        self._held.append(f"{clean(text)}\n".encode())

    def flush(self) -> None:
        if self._held:
            self._write()
            self._out.flush()

    def say(self, text: str) -> None:
        # Lines written before must appear before the message.
        self.flush()
        self._say(text)

    def _write(self) -> None:
        data = b"".join(self._held)
        self._held.clear()
        self._out.write(data)


def _origin(file: LogFile) -> Origin:
    return file.attempt, file.kind, file.number


def _as_json(line: Line) -> str:
    file = line.file
    who = {
        file.kind: file.number
        if file.kind in ("rank", "node")
        else True
        if file.kind == "batch"
        else file.name
    }
    return json.dumps(
        {"attempt": file.attempt, **who, "time": line.time, "text": readable(line.text)},
        ensure_ascii=False,
    )
