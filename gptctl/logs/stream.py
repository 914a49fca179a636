"""Lines of many files as one stream: merged by the times they carry, or followed in the order of their arrival.

Knows no transport (it reads through `LogFiles`) and no terminal (it hands lines to a `Show`).
"""

from __future__ import annotations

import heapq
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import groupby
from typing import NamedTuple, Protocol

from gptctl.logs.files import LogFile, LogFiles, Wanted
from gptctl.logs.lines import LONGEST_LINE, Assembler, Clock, start_of_last
from gptctl.logs.match import Errors, Grep, Span, every_line

CHUNK = 1 << 20
MEMORY = 16 << 20  # of all the chunks that a merge holds at once
BUSY, IDLE = (
    0.25,
    0.6,
)  # seconds between two looks while there is output, and when there was none for a while
BAR_EVERY = 10.0  # seconds between two states of a progress bar
ASK_EVERY = 1.0  # seconds between two questions whether the job has ended
SILENCE = 30.0  # seconds after which nothing more is expected of a file that lost its name
HEAD = 256  # first bytes by which a file is known again

Key = tuple[int, str, tuple[int, ...]]  # attempt, name, identity


@dataclass(frozen=True)
class Lines:
    """Which lines of the chosen files: the last, the recent, the matching ones, errors; raw leaves them as they are."""

    tail: int | None = None
    since: float | None = None
    grep: Grep | None = None
    errors: bool = False
    raw: bool = False


class Line(NamedTuple):
    key: float  # its time or that of the lines before it: what a merge compares
    order: int  # of its file, for lines of the same time
    time: float | None  # what the line itself carries
    text: bytes
    file: LogFile
    has_newline: bool = True  # only the last line of a file may lack it


class Show(Protocol):
    def expect(self, files: Iterable[LogFile]) -> None: ...

    def line(self, line: Line) -> None: ...

    def flush(self) -> None: ...

    def say(self, text: str) -> None: ...


class Source:
    """One log file as far as it was read."""

    def __init__(
        self, files: LogFiles, file: LogFile, lines: Lines, from_start: bool = True
    ) -> None:
        self.file = file
        self.order = 0
        self.look = 0  # the last one that found the file under its name
        self.active = 0.0  # when it last had something
        self.bar_due = 0.0
        self._files = files
        self._lines = lines
        self._clock = Clock(file.changed)
        self._errors = Errors()
        self._restart(0)
        if not from_start and lines.since is not None and file.changed < lines.since:
            self.offset = file.size
        elif not from_start and lines.tail is not None:
            self.offset = start_of_last(
                lines.tail, file.size, lambda at, size: files.read(file, at, size)
            )
            self._look_back()
        self._head = files.read(
            file, 0, min(HEAD, self.offset)
        )  # opens it, even if it is still empty

    def _look_back(self) -> None:
        """Lines without a time belong with a line before them, even if that one is not read."""
        size = min(LONGEST_LINE, self.offset)
        before = self._files.read(self.file, self.offset - size, size)
        self._clock.visit(before, len(before), len(before))

    def _restart(self, offset: int) -> None:
        self.offset = offset
        self._assembler = Assembler(sys.maxsize if self._lines.raw else LONGEST_LINE)

    def blocks(self, end: int = sys.maxsize, chunk: int = CHUNK) -> Iterator[bytes]:
        """Whole lines up to `end`, or up to where the file ends now."""
        while self.offset < end:
            data = self._files.read(self.file, self.offset, min(chunk, end - self.offset))
            if not data:
                return
            if self.offset < HEAD:
                self._head += data[: HEAD - self.offset]
            self.offset += len(data)
            if block := self._assembler.feed(data):
                yield block

    def read(self, end: int = sys.maxsize, chunk: int = CHUNK) -> Iterator[Line]:
        return (line for block in self.blocks(end, chunk) for line in self.wanted(block))

    def rest(self) -> Iterator[Line]:
        """The last line, whose newline never came."""
        line = self._assembler.close()
        return self.wanted(line) if line else iter(())

    def bar(self) -> Line:
        """The newest state of a progress bar that no newline has ended."""
        return Line(self._clock.now, self.order, None, self._assembler.newest(), self.file)

    @property
    def has_bar(self) -> bool:
        return (
            not (self._lines.raw or self._lines.grep or self._lines.errors)
            and self._assembler.has_bar
        )

    def wanted(self, block: bytes) -> Iterator[Line]:
        clock, since = self._clock, self._lines.since
        clock.start(block)
        for start, end in self._matches(block):
            stamp = clock.visit(block, start, end)
            if since is None or not float("-inf") < clock.now < since:
                yield Line(
                    clock.now, self.order, stamp, block[start:end], self.file, end < len(block)
                )

    def _matches(self, block: bytes) -> Iterator[Span]:
        grep = self._lines.grep
        if self._lines.errors:
            return (
                span for span in self._errors(block) if not grep or grep.has(block[slice(*span)])
            )
        return grep(block) if grep else every_line(block)

    def was_replaced(self) -> bool:
        """Whether the file now begins otherwise: emptied and filled again since the last look."""
        head = self._files.read(self.file, 0, len(self._head))
        return head != self._head and head != b""  # nothing: out of reach for now

    def reset(self) -> Iterator[Line]:
        """Begins anew; what was left of the old content is a line."""
        yield from self.rest()
        self._restart(0)
        self._head = b""


def merged(sources: list[Source], close: bool) -> Iterator[Line]:
    """All lines by their times, attempt by attempt; `close` gives last lines without a newline, too."""
    for order, source in enumerate(sources):
        source.order = order
    for _, of_attempt in groupby(sources, lambda source: source.file.attempt):
        several = list(of_attempt)
        chunk = max(1 << 14, min(CHUNK, MEMORY // len(several)))
        yield from heapq.merge(*(_through(source, chunk, close) for source in several))


def _through(source: Source, chunk: int, close: bool) -> Iterator[Line]:
    yield from source.read(source.file.size, chunk)
    if close:
        yield from source.rest()


def read_all(files: LogFiles, wanted: Wanted, lines: Lines, show: Show) -> int:
    """Shows what is there now; gives the number of files it was taken from."""
    chosen = wanted.now(files)
    show.expect(chosen)
    sources = [Source(files, file, lines, from_start=False) for file in chosen]
    for line in merged(sources, close=True):
        show.line(line)
    show.flush()
    for file in chosen:
        files.release(file)
    return len(chosen)


def follow(
    files: LogFiles,
    wanted: Wanted,
    lines: Lines,
    show: Show,
    ended: Callable[[], bool],
    sleep: Callable[[float], None] = time.sleep,
) -> None:
    """Shows lines as they come until the job has ended and everything is shown."""
    follower = Follower(files, wanted, lines, show)
    pause, asked = BUSY, float("-inf")
    while True:
        begin = time.monotonic()
        over = False
        if begin - asked >= ASK_EVERY:
            over, asked = ended(), begin
        pause = BUSY if follower.look(last=over) else min(IDLE, pause * 1.2)
        if over:
            return
        sleep(
            max(pause, time.monotonic() - begin)
        )  # a slow file system gets as much rest as it had work


class Follower:
    """What is known of the files between two looks. A file is known by its name and identity, so that a file that took
    another's name is a new one, and the old one is read to its end."""

    def __init__(self, files: LogFiles, wanted: Wanted, lines: Lines, show: Show) -> None:
        self._files, self._wanted, self._lines, self._show = files, wanted, lines, show
        self._sources: dict[Key, Source] = {}
        self._unwanted: set[Key] = set()
        self._named: dict[tuple[int, str], Source] = {}  # the newest source of each name
        self._bars: set[Source] = set()
        self._first = wanted.first_attempt(files.attempts())
        self._looks = 0

    def look(self, last: bool = False) -> bool:
        """One tick; says whether there was anything new. The last one reads to the very end and closes open lines."""
        self._looks += 1
        now = time.monotonic()
        known, new = self._sorted(self._files.scan(self._first))
        chosen = self._chosen(new) if new else []
        nameless: list[Source] = []
        if len(known) < len(self._sources):
            nameless = [source for source in self._sources.values() if source.look != self._looks]
        news = [self._drain(source, now) for source in nameless]
        grown = [source for source in known if last or source.file.size != source.offset]
        # What a new file holds came before the end that it has in a file of the same attempt, such as torchrun's.
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

    def _sorted(self, listed: Iterable[LogFile]) -> tuple[list[Source], list[LogFile]]:
        """Known sources, with their new size, and files that are new."""
        known, new = [], []
        for file in listed:
            source = self._named.get((file.attempt, file.name))
            if not source or source.file.identity != file.identity:
                source = self._sources.get(_key(file))
            if source:
                source.file, source.look = file, self._looks
                known.append(source)
            elif _key(file) not in self._unwanted:
                new.append(file)
        return known, new

    def _drain(self, source: Source, now: float) -> bool:
        """A file that lost its name may still be written to, by a process that has it open."""
        had_news = self._pass_on(source, source.read(), now)
        replaced = self._named[_name(source.file)] is not source
        if replaced and now - source.active > SILENCE:
            self._finish(source)
        return had_news

    def _catch_up(self, source: Source, now: float, last: bool) -> bool:
        file = source.file
        if last:
            self._files.release(
                file
            )  # over NFS only a fresh descriptor is sure to see what dead processes wrote
        if file.size < source.offset or source.was_replaced():
            self._show.say(f"{file.name} was emptied: reading it from its start")
            self._pass_on(source, source.reset(), now)
        return self._pass_on(source, source.read(sys.maxsize if last else file.size), now)

    def _chosen(self, new: list[LogFile]) -> list[LogFile]:
        chosen = self._wanted.choose(self._files, new)
        self._unwanted |= {
            _key(file) for file in {*new} - {*chosen} if self._wanted.is_sure(self._files, file)
        }
        self._show.expect(chosen)
        return chosen

    def _begin(self, chosen: list[LogFile], now: float) -> bool:
        """New files, merged by time: what they hold already has lost the order of its arrival."""
        for file in chosen:
            if _name(file) in self._named:
                self._show.say(f"{file.name} was replaced: reading the new file")
            source = Source(self._files, file, self._lines, from_start=self._looks > 1)
            self._sources[_key(file)] = self._named[_name(file)] = source
            source.active = now
        begun = [self._sources[_key(file)] for file in chosen]
        for line in merged(begun, close=False):
            self._show.line(line)
        for source in begun:
            self._pass_on(source, (), now)
        self._leave_old_attempts(chosen[-1].attempt)
        return True

    def _leave_old_attempts(self, newest: int) -> None:
        """The one before the newest may have last words; those before it do not."""
        self._first = max(self._first, newest - 1)
        for source in [
            source for source in self._sources.values() if source.file.attempt < self._first
        ]:
            self._finish(source)

    def _pass_on(self, source: Source, lines: Iterable[Line], now: float) -> bool:
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

    def _finish(self, source: Source) -> None:
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
