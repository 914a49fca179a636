"""From bytes to lines: assemble whole lines, read their timestamps, find the last N lines.

Knows bytes, not files. Lines stay bytes, for speed; only `readable` turns them into text.
"""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Callable
from datetime import datetime, timedelta, timezone
from functools import lru_cache

from gptctl.text import clean
from trainer.errors import WRONG_USAGE, UserError

LONGEST_LINE = 64 << 10  # bytes; limits the memory that one file can take
LONGEST_SEARCHED = 1 << 20  # bytes without a newline; the line of a progress bar can have as many
NEVER = float("-inf")  # the time of lines before any timestamp
MAX_LINES_SEARCHED = 1000  # for the nearest timestamp

# The trainer's and ISO's `2026-11-16 04:25:43,446`, perhaps in brackets, in colour or first in a
# JSON object; and glog's `E1116 06:54:39.123000`.
_STAMP = re.compile(
    rb"(?:\x1b?\[[\d;]*m)*(?:\[rank\d+\]: ?)?(?:\[|\{\"time\": \")?"
    rb"(?:(\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d)(?:[.,](\d{1,9}))?(Z|[+-]\d\d:?\d\d)?"
    rb"|[IWEF](\d{4} \d\d:\d\d:\d\d)(?:\.(\d{1,9}))?\b)"
)


class Assembler:
    """Takes chunks of a file and returns blocks of whole lines, however the file is cut in chunks.

    NULs (the gaps of a torn file) are dropped. To bound memory, a line over `longest` bytes is cut:
    only the newest state of its progress bar is kept, or its start and the number of bytes cut.
    """

    def __init__(self, longest: int = LONGEST_LINE) -> None:
        self._longest = longest
        # The bytes after the last newline; of a long line, its newest text between two \r.
        self._open = bytearray()
        self._long = False
        self._cut = 0  # bytes of that text that were not kept
        self._over = False  # a \r came after it: the next byte starts a new text

    def feed(self, data: bytes) -> bytes:
        # maxsize means raw: every byte is kept.
        if b"\0" in data and self._longest != sys.maxsize:
            data = data.replace(b"\0", b"")
        # Most reads of a followed file are a few whole lines.
        if not self._open and not self._long and len(data) <= self._longest and data[-1:] == b"\n":
            return data
        end = data.rfind(b"\n") + 1
        if not end:
            self._extend(data)
            return b""
        begin = data.find(b"\n") + 1 if self._open or self._long else 0
        if begin:
            self._extend(data[: begin - 1])
        first = self.close() + b"\n" if begin else b""
        self._extend(data[end:])
        # One copy of the chunk, not two: copying takes longer than searching it.
        return self._shortened(b"".join((first, memoryview(data)[begin:end])), len(first))

    def close(self) -> bytes:
        """Return the rest: a line without a newline."""
        line = self.newest()
        self._open.clear()
        self._long, self._cut, self._over = False, 0, False
        return line

    def newest(self) -> bytes:
        return bytes(self._open) + (b" [%d bytes cut]" % self._cut if self._cut else b"")

    @property
    def has_bar(self) -> bool:
        return self._over or b"\r" in self._open

    def _extend(self, data: bytes) -> None:
        if not self._long and len(self._open) + len(data) <= self._longest:
            self._open += data
            return
        if not self._long:
            data, self._long = bytes(self._open) + data, True
            self._open.clear()
        for number, text in enumerate(data.split(b"\r")):
            self._over = self._over or number > 0
            if text and self._over:
                self._open.clear()
                self._cut, self._over = 0, False
            room = self._longest - len(self._open)
            self._open += text[:room]
            self._cut += max(0, len(text) - room)

    def _shortened(self, block: bytes, position: int) -> bytes:
        """Cut the long lines of a block, from `position` on."""
        # Jump from newline to newline, each time as far as a line may reach: few steps per block.
        while len(block) - position > self._longest:
            end = block.rfind(b"\n", position, position + self._longest + 1)
            if end < 0:
                end = block.find(b"\n", position)
                one = Assembler(self._longest)
                one._extend(block[position:end])
                line = one.close()
                block = block[:position] + line + block[end:]
                end = position + len(line)
            position = end + 1
        return block


def readable(line: bytes) -> str:
    """Make a line safe for a terminal: no control sequences, only the newest state of a bar."""
    if b"\r" in line:
        line = next((text for text in reversed(line.split(b"\r")) if text), b"")
    text = line.decode("utf-8", "replace")
    # Almost all lines are printable, and isprintable is much faster than cleaning.
    return text if text.isprintable() else clean(text)


class Clock:
    """The timestamps of one file's lines, read in order."""

    def __init__(self, changed: float) -> None:
        self.now = NEVER  # the time of the last visited line
        self._changed = changed
        self._seen = 0

    def start(self, block: bytes) -> None:
        """Start a block. Lines before the first timestamp of a file get that timestamp."""
        self._seen = 0
        if self.now == NEVER:
            position = 0
            for _ in range(MAX_LINES_SEARCHED):
                if (stamp := self.stamp(block, position)) is not None:
                    self.now = stamp
                    return
                position = block.find(b"\n", position) + 1
                if not position:
                    return

    def visit(self, block: bytes, start: int, end: int) -> float | None:
        """Return the timestamp of a line; set `now` to it, or to the nearest one before."""
        stamp = nearest = self.stamp(block, start)
        # Search backwards only to the last visited line: no line is looked at twice.
        before, walk = start, 0
        while nearest is None and before > self._seen and walk < MAX_LINES_SEARCHED:
            before = block.rfind(b"\n", 0, before - 1) + 1
            nearest = self.stamp(block, before)
            walk += 1
        if nearest is not None:
            self.now = nearest
        self._seen = end + 1
        return stamp

    def stamp(self, block: bytes, position: int) -> float | None:
        found = _STAMP.match(block, position)
        if not found:
            return None
        moment, fraction, zone, glog, glog_fraction = found.groups()
        seconds = _seconds(moment, zone) if moment else _glog_seconds(glog, self._changed)
        part = fraction or glog_fraction
        return seconds if seconds is None or not part else seconds + int(part) / 10 ** len(part)


# Cached: many lines of many ranks have the same second.
@lru_cache(maxsize=4096)
def _seconds(moment: bytes, zone: bytes | None) -> float | None:
    try:
        when = datetime.fromisoformat(moment.decode())
        if zone:
            sign, digits = zone[:1], zone[1:].replace(b":", b"")
            east = timedelta(hours=int(digits[:2] or 0), minutes=int(digits[2:] or 0))
            when = when.replace(tzinfo=timezone(-east if sign == b"-" else east))
        return when.timestamp()
    except (ValueError, OverflowError):
        return None


@lru_cache(maxsize=4096)
def _glog_seconds(moment: bytes, changed: float) -> float | None:
    """Parse a time of glog, which has no year."""
    # Take the latest year in which the time is not after the file's last change. One day of
    # tolerance allows for time zones and clocks that differ.
    year = time.localtime(changed).tm_year
    for candidate in (year + 1, year, year - 1):
        text = b"%d-%b-%b %b" % (candidate, moment[:2], moment[2:4], moment[5:])
        seconds = _seconds(text, None)
        if seconds is not None and seconds < changed + 86400:
            return seconds
    return None


def parse_since(text: str, now: float | None = None, option: str = "--since") -> float:
    """Parse `90s`, `5m`, `2h`, `1d` (ago), `07:30` (of the last 24 hours) or an ISO 8601 time."""
    now = time.time() if now is None else now
    if found := re.fullmatch(r"(\d{1,9})([smhd])", text.strip(), re.ASCII):
        return now - int(found[1]) * {"s": 1, "m": 60, "h": 3600, "d": 86400}[found[2]]
    try:
        if re.fullmatch(r"\d\d:\d\d(:\d\d)?", text.strip(), re.ASCII):
            today = datetime.fromtimestamp(now).replace(microsecond=0)
            hour, minute, second = (int(part) for part in (text.strip() + ":00").split(":")[:3])
            when = today.replace(hour=hour, minute=minute, second=second)
            return (when - timedelta(days=when.timestamp() > now)).timestamp()
        # Python 3.10 does not accept Z.
        return datetime.fromisoformat(re.sub("Z$", "+00:00", text.strip())).timestamp()
    except (ValueError, OverflowError):
        raise UserError(
            f"{option} {text[:60]!r}: invalid time",
            "write how long ago (90s, 5m, 2h, 1d), a time (07:30) or a date (2026-11-16T07:30)",
            WRONG_USAGE,
        ) from None


def start_of_last(
    count: int,
    size: int,
    read: Callable[[int, int], bytes],
    block: int = 1 << 16,
    longest: int = LONGEST_SEARCHED,
) -> int:
    """Find the offset of the last `count` lines; `read` takes an offset and a size.

    Of a longer line, each `longest` bytes count as a line: a file may have terabytes of NULs.
    """
    # Read backwards: the file may have gigabytes before these lines.
    if count <= 0:
        return size
    end, missing, without_newline = size, count, 0
    while end > 0:
        begin = max(0, end - block)
        data = read(begin, end - begin)
        if end == size and data.endswith(b"\n"):
            missing += 1  # the newline at the end of the file belongs to the last line
        newlines = data.count(b"\n")
        if newlines >= missing:
            position = len(data)
            for _ in range(missing):
                position = data.rfind(b"\n", 0, position)
            return begin + position + 1
        missing -= newlines
        without_newline = data.find(b"\n") if newlines else without_newline + end - begin
        if without_newline >= longest:
            without_newline, missing = 0, missing - 1
            if not missing:
                return begin
        end = begin
    return 0
