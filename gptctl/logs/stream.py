"""The lines of many files as one stream: merged by timestamp, or followed as they arrive.

Knows no transport (it reads through `LogFiles`) and no terminal (it passes lines on to a
`LineWriter`).
"""

from __future__ import annotations

import heapq
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import chain, groupby
from typing import NamedTuple, Protocol

from gptctl.logs.failed import failure_in
from gptctl.logs.files import FileFilter, LogFile, LogFiles
from gptctl.logs.lines import LONGEST_LINE, NEVER, Assembler, Clock, start_of_last
from gptctl.logs.match import Errors, Grep, Span, every_line

# Bytes per read: they stay in the processor's cache, and malloc does not map pages for them.
CHUNK = 1 << 17
MEMORY = 16 << 20  # bytes of all chunks that a merge holds at once
# Seconds between two ticks while there is output, and after there was none for a while.
BUSY, IDLE = 0.13, 0.6
BAR_EVERY = 10.0  # seconds between two states of a progress bar
ASK_EVERY = 1.0  # seconds between two checks whether the job has ended
SILENCE = 30.0  # seconds without output after which a replaced file is closed
HEAD = 256  # first bytes, compared to notice that a file was rewritten

Key = tuple[int, str, tuple[int, ...]]  # attempt, name, identity


@dataclass(frozen=True)
class LineFilter:
    """Which lines to show: the last, recent or matching ones, or errors. `raw`: unchanged."""

    tail: int | None = None
    since: float | None = None
    grep: Grep | None = None
    errors: bool = False
    raw: bool = False


class Line(NamedTuple):
    key: float  # its time or that of a line before it; lines are merged by it
    order: int  # of its file; decides between lines of the same time
    time: float | None  # the timestamp of the line itself
    text: bytes
    file: LogFile
    has_newline: bool = True  # only the last line of a file may lack it


class LineWriter(Protocol):
    def add_files(self, files: Iterable[LogFile]) -> None: ...

    def line(self, line: Line) -> None: ...

    def flush(self) -> None: ...

    def say(self, text: str) -> None: ...


class LogReader:
    """One log file, and how far it was read."""

    def __init__(
        self, files: LogFiles, file: LogFile, lines: LineFilter, from_start: bool = True
    ) -> None:
        self.file = file
        self.order = 0
        self.tick = 0  # the last one that found the file under its name
        self.active = 0.0  # when it last had new bytes
        self.bar_due = 0.0
        self._files = files
        self._lines = lines
        self._clock = Clock(file.changed)
        self._errors = Errors()
        self._restart(0)
        # A file that was not written since then cannot have a wanted line: skip reading it.
        if not from_start and lines.since is not None and file.changed < lines.since:
            self.offset = file.size
        elif not from_start and lines.tail is not None:
            self.offset = start_of_last(
                lines.tail, file.size, lambda at, size: files.read(file, at, size)
            )
            self._read_time_before()
        # This opens the file even if it is empty, so that it can be read after a rename.
        self._head = files.read(file, 0, min(HEAD, self.offset))

    def _read_time_before(self) -> None:
        """Find the time that lines without a timestamp inherit from a line that is not shown."""
        size = min(LONGEST_LINE, self.offset)
        before = self._files.read(self.file, self.offset - size, size)
        self._clock.visit(before, len(before), len(before))

    def _restart(self, offset: int) -> None:
        self.offset = offset
        self._assembler = Assembler(sys.maxsize if self._lines.raw else LONGEST_LINE)

    def blocks(self, end: int = sys.maxsize, chunk: int = CHUNK) -> Iterator[bytes]:
        """Read blocks of whole lines up to `end`, or up to the current end of the file."""
        while self.offset < end:
            data = self._files.read(self.file, self.offset, min(chunk, end - self.offset))
            if not data:
                return
            if self.offset < HEAD:
                self._head += data[: HEAD - self.offset]
            self.offset += len(data)
            # A torn file can have terabytes of NULs, which are dropped: do not read them.
            if data[0] == 0 and not self._lines.raw and not data.strip(b"\0"):
                self.offset = min(end, self._files.next_data(self.file, self.offset))
                continue
            if block := self._assembler.feed(data):
                yield block

    def read(self, end: int = sys.maxsize, chunk: int = CHUNK) -> Iterator[Line]:
        return chain.from_iterable(map(self.wanted, self.blocks(end, chunk)))

    def rest(self) -> Iterator[Line]:
        """The last line, if it has no newline."""
        line = self._assembler.close()
        return self.wanted(line) if line else iter(())

    def bar(self) -> Line:
        """The newest state of a progress bar that has not finished its line."""
        return Line(self._clock.now, self.order, None, self._assembler.newest(), self.file)

    @property
    def has_bar(self) -> bool:
        # A bar is shown before its line is complete: that would break raw output and filters.
        return self._assembler.has_bar and not (
            self._lines.raw or self._lines.grep or self._lines.errors
        )

    def wanted(self, block: bytes) -> Iterator[Line]:
        clock, since = self._clock, self._lines.since
        clock.start(block)
        for start, end in self._matches(block):
            stamp = clock.visit(block, start, end)
            # Show lines before any timestamp, since their time is unknown.
            if since is None or not NEVER < clock.now < since:
                yield Line(
                    clock.now, self.order, stamp, block[start:end], self.file, end < len(block)
                )

    def _matches(self, block: bytes) -> Iterable[Span]:
        grep = self._lines.grep
        if self._lines.errors:
            return (
                span for span in self._errors(block) if not grep or grep.has(block[slice(*span)])
            )
        return grep(block) if grep else every_line(block)

    def was_replaced(self) -> bool:
        """Whether the start of the file has changed: it was truncated and written again."""
        head = self._files.read(self.file, 0, len(self._head))
        # Nothing read means that the file cannot be reached for now.
        return head != self._head and head != b""

    def reset(self) -> Iterator[Line]:
        """Start again at the beginning; the rest of the old content becomes a line."""
        yield from self.rest()
        self._restart(0)
        self._head = b""


def merged(sources: list[LogReader], close: bool) -> Iterator[Line]:
    """Merge all lines by time, attempt by attempt; `close` adds last lines without a newline."""
    for order, source in enumerate(sources):
        source.order = order
    for _, of_attempt in groupby(sources, lambda source: source.file.attempt):
        several = list(of_attempt)
        chunk = max(1 << 14, min(CHUNK, MEMORY // len(several)))
        yield from heapq.merge(*(_through(source, chunk, close) for source in several))


def _through(source: LogReader, chunk: int, close: bool) -> Iterator[Line]:
    yield from source.read(source.file.size, chunk)
    if close:
        yield from source.rest()


def _failure_first(files: LogFiles, sources: list[LogReader]) -> Iterator[Line]:
    """Merge the lines of each attempt; the log of the first failure comes before all others."""
    # Errors have rarely a timestamp, and those of the other ranks are mostly consequences.
    for attempt, of_attempt in groupby(sources, lambda source: source.file.attempt):
        several = list(of_attempt)
        first = failure_in(files.records(attempt)).first_file
        leads = [(source.file.kind, source.file.number) == first for source in several]
        for wanted in (True, False):
            part = [source for source, lead in zip(several, leads) if lead == wanted]
            yield from merged(part, close=True)


def read_all(files: LogFiles, wanted: FileFilter, lines: LineFilter, show: LineWriter) -> int:
    """Show the lines that exist now; return the number of files."""
    chosen = wanted.now(files)
    show.add_files(chosen)
    sources = [LogReader(files, file, lines, from_start=False) for file in chosen]
    for line in _failure_first(files, sources) if lines.errors else merged(sources, close=True):
        show.line(line)
    show.flush()
    for file in chosen:
        files.release(file)
    return len(chosen)


def follow(
    files: LogFiles,
    wanted: FileFilter,
    lines: LineFilter,
    show: LineWriter,
    ended: Callable[[], bool],
    sleep: Callable[[float], None] = time.sleep,
) -> None:
    """Show lines as they arrive, until the job has ended and everything is shown."""
    follower = Follower(files, wanted, lines, show)
    pause, asked = BUSY, float("-inf")
    while True:
        begin = time.monotonic()
        over = False
        # Ask before reading: what the job wrote before it ended is then read in this tick.
        if begin - asked >= ASK_EVERY:
            over, asked = ended(), begin
        pause = BUSY if follower.tick(last=over) else min(IDLE, pause * 1.2)
        if over:
            return
        # If a tick takes long, the file system is slow: load it at most half of the time.
        rest = max(BUSY, time.monotonic() - begin)
        sleep(rest)
        files.wait(pause - rest)


class Follower:
    """The state of all files between two ticks.

    A file is identified by name and inode: after a rotation, the file with the old name is new, and
    the renamed one is read to its end.
    """

    def __init__(
        self, files: LogFiles, wanted: FileFilter, lines: LineFilter, show: LineWriter
    ) -> None:
        self._files, self._wanted, self._lines, self._show = files, wanted, lines, show
        self._sources: dict[Key, LogReader] = {}
        self._unwanted: set[Key] = set()
        self._named: dict[tuple[int, str], LogReader] = {}  # the newest source of each name
        self._bars: set[LogReader] = set()
        self._first = wanted.first_attempt(files.attempts())
        self._ticks = 0  # those that listed all files
        self._has_nameless = False

    def tick(self, last: bool = False) -> bool:
        """Show what is new; return whether there was anything. The last tick ends open lines."""
        now = time.monotonic()
        # No report tells of files that were renamed or removed and may still be written.
        written = None if last or self._has_nameless else self._files.written()
        if is_scan := written is None:
            self._ticks += 1
        known, new = self._sorted(self._files.scan(self._first) if written is None else written)
        chosen = self._chosen(new) if new else []
        nameless: list[LogReader] = []
        if is_scan and len(known) < len(self._sources):
            nameless = [source for source in self._sources.values() if source.tick != self._ticks]
        self._has_nameless = bool(nameless)
        news = [self._drain(source, now) for source in nameless]
        grown = [source for source in known if last or source.file.size != source.offset]
        # Show new files before the rest of their attempt: a rank writes its lines before torchrun
        # reports its exit. Lines of earlier attempts come before both.
        newest = chosen[-1].attempt if chosen else -1
        news += [
            self._catch_up(source, now, last) for source in grown if source.file.attempt < newest
        ]
        if chosen:
            news.append(self._begin(chosen, now))
        news += [
            self._catch_up(source, now, last) for source in grown if source.file.attempt >= newest
        ]
        self._show_bars(now)
        if last:
            for source in list(self._sources.values()):
                self._finish(source)
        self._show.flush()
        return any(news)

    def _sorted(self, listed: Iterable[LogFile]) -> tuple[list[LogReader], list[LogFile]]:
        """Split files into known sources, updated to their new size, and new files."""
        known, new = [], []
        for file in listed:
            source = self._named.get((file.attempt, file.name))
            if not source or source.file.identity != file.identity:
                source = self._sources.get(_key(file))
            if source:
                source.file, source.tick = file, self._ticks
                known.append(source)
            elif _key(file) not in self._unwanted:
                new.append(file)
        return known, new

    def _drain(self, source: LogReader, now: float) -> bool:
        """Read a renamed or removed file: a process that has it open may still write to it."""
        had_news = self._pass_on(source, source.read(), now)
        replaced = self._named[_name(source.file)] is not source
        if replaced and now - source.active > SILENCE:
            self._finish(source)
        return had_news

    def _catch_up(self, source: LogReader, now: float, last: bool) -> bool:
        file = source.file
        if last:
            # On NFS, only a newly opened file is sure to show what other hosts wrote.
            self._files.release(file)
        if file.size < source.offset or source.was_replaced():
            self._show.say(f"{file.name} was truncated: reading it from the start")
            self._pass_on(source, source.reset(), now)
        return self._pass_on(source, source.read(sys.maxsize if last else file.size), now)

    def _chosen(self, new: list[LogFile]) -> list[LogFile]:
        chosen = self._wanted.choose(self._files, new)
        self._unwanted |= {
            _key(file) for file in {*new} - {*chosen} if self._wanted.is_placed(self._files, file)
        }
        self._show.add_files(chosen)
        return chosen

    def _begin(self, chosen: list[LogFile], now: float) -> bool:
        """Show new files, merged by time: the order in which their lines arrived is unknown."""
        for file in chosen:
            if _name(file) in self._named:
                self._show.say(f"{file.name} was replaced: reading the new file")
            source = LogReader(self._files, file, self._lines, from_start=self._ticks > 1)
            self._sources[_key(file)] = self._named[_name(file)] = source
            source.active = now
        begun = [self._sources[_key(file)] for file in chosen]
        for line in merged(begun, close=False):
            self._show.line(line)
        for source in begun:
            self._pass_on(source, (), now)
        self._close_old_attempts(chosen[-1].attempt)
        return True

    def _close_old_attempts(self, newest: int) -> None:
        """Close all attempts but the newest two: the last but one may still write a few lines."""
        self._first = max(self._first, newest - 1)
        for source in [
            source for source in self._sources.values() if source.file.attempt < self._first
        ]:
            self._finish(source)

    def _pass_on(self, source: LogReader, lines: Iterable[Line], now: float) -> bool:
        before = source.offset
        for line in lines:
            self._show.line(line)
        if source.has_bar and source not in self._bars:
            source.bar_due = now + BAR_EVERY
            self._bars.add(source)
        if source.offset != before:
            source.active = now
        return source.offset != before

    def _show_bars(self, now: float) -> None:
        self._bars = {source for source in self._bars if source.has_bar}
        for source in self._bars:
            if now >= source.bar_due:
                self._show.line(source.bar())
                source.bar_due = now + BAR_EVERY

    def _finish(self, source: LogReader) -> None:
        for line in source.rest():
            self._show.line(line)
        self._files.release(source.file)
        del self._sources[_key(source.file)]
        if self._named[_name(source.file)] is source:
            del self._named[_name(source.file)]


def _name(file: LogFile) -> tuple[int, str]:
    return file.attempt, file.name


def _key(file: LogFile) -> Key:
    return file.attempt, file.name, file.identity
