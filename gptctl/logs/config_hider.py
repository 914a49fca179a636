"""Print lines without the config dump, whose hundred lines would fill a terminal.

Unlike `terminal_view.py`, it leaves all other lines as they are.
"""

from __future__ import annotations

from collections.abc import Iterable

from gptctl.logs.condense import CONFIG_LINES, Hidden, OpenConfig, json_record
from gptctl.logs.files import LogFile
from gptctl.logs.lines import readable
from gptctl.logs.stream import Line, LineWriter
from gptctl.reporting import Say
from trainer.logline import CONFIG_TITLE, PREFIX, is_config_title


class ConfigHider:
    """A `LineWriter` that passes all other lines on, and reports how many it has hidden."""

    def __init__(self, printer: LineWriter, report: Say) -> None:
        self._printer, self._report = printer, report
        self._open: dict[tuple[int, str], OpenConfig] = {}  # by attempt and file name

    def add_files(self, files: Iterable[LogFile]) -> None:
        self._printer.add_files(files)

    def line(self, line: Line) -> None:
        key = line.file.attempt, line.file.name
        if key in self._open:
            if self._open[key].takes(readable(line.text)):
                return
            self._close(key)
        # Search the bytes first: a log has millions of lines, and few of them are titles.
        if CONFIG_TITLE.encode() not in line.text or not self._hides(readable(line.text), key):
            self._printer.line(line)

    def flush(self) -> None:
        for key in list(self._open):
            self._close(key)
        self._printer.flush()

    def say(self, text: str) -> None:
        self._printer.say(text)

    def _hides(self, text: str, key: tuple[int, str]) -> bool:
        """Whether a dump begins with this line; it is then open, or already reported."""
        if (record := json_record(text)) and is_config_title(record[0]):
            # The JSON style writes the dump in one line: no other line belongs to it.
            self._report(f"{len(record) - 1:,} {CONFIG_LINES}")
            return True
        stamp = PREFIX.match(text)
        if stamp and is_config_title(text[stamp.end() :]):
            self._open[key] = OpenConfig()
        return key in self._open

    def _close(self, key: tuple[int, str]) -> None:
        for piece in self._open.pop(key).pieces():
            if isinstance(piece, Hidden):
                self._report(f"{piece.num_lines:,} {piece.what}")
