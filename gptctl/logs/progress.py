"""How far a training has come, on the last line of a terminal, below the log lines that go by."""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterable
from typing import BinaryIO

from gptctl.logs.files import LogFile
from gptctl.logs.stream import Line, Show
from trainer.logline import TrainLine, parse_train_line

_CLEAR = b"\r\x1b[K"
_BAR = 24


class ProgressLine:
    """Shows lines as another does, and keeps one below them up to date."""

    def __init__(self, show: Show, out: BinaryIO, total: int) -> None:
        self._show, self._out, self._total = show, out, total
        self._latest: TrainLine | None = None
        self._drawn = b""

    def expect(self, files: Iterable[LogFile]) -> None:
        self._show.expect(files)

    def line(self, line: Line) -> None:
        if b"global step" in line.text and (
            found := parse_train_line(line.text.decode(errors="replace"))
        ):
            self._latest = found
        self._erase()
        self._show.line(line)

    def flush(self) -> None:
        self._show.flush()
        if not self._drawn and self._latest:
            width = shutil.get_terminal_size().columns - 1
            self._drawn = progress_text(self._latest, self._total)[:width].encode()
            self._out.write(self._drawn)
            self._out.flush()

    def say(self, text: str) -> None:
        self._erase()
        self._show.say(text)

    def close(self) -> None:
        self._erase()
        self._out.flush()

    def _erase(self) -> None:
        if self._drawn:
            self._out.write(_CLEAR)
            self._drawn = b""


def progress_text(line: TrainLine, total: int) -> str:
    """`step 560/1000 ━━━━━━━━━━━━━───────────  56 %  loss 1.8237  11.0 step/s  0:40 left`"""
    share = min(1.0, line.step / total) if total else 0.0
    done = round(share * _BAR)
    left = (total - line.step) / line.speed if line.speed > 0 and total > line.step else 0.0
    clock = time.strftime("%H:%M:%S" if left >= 3600 else "%M:%S", time.gmtime(left))
    bar = "━" * done + "─" * (_BAR - done)
    return f"step {line.step}/{total} {bar} {share:4.0%}  loss {line.loss:.4f}  {line.speed:.1f} step/s  {clock} left"
