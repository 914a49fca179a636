"""Read the events of a chrome trace one by one, in constant memory.

The format: an object with the key `traceEvents`, or only its array of events; also compressed with
gzip. Whatever the file is, reading it ends, and raises OSError or DamagedFile if it is not a trace.
"""

from __future__ import annotations

import codecs
import gzip
import json
import os
import re
import zlib
from collections.abc import Callable, Iterator
from io import BufferedReader
from pathlib import Path
from typing import Any

from gptctl.engine.file_reading import DamagedFile, open_at_once

CHUNK = 1 << 20  # bytes that are read at once
LARGEST_TRACE = 32 << 30  # bytes, uncompressed: more would take ten minutes to read
LONGEST_EVENT = 1 << 20  # characters; those of torch have a few hundred
LONGEST_VALUE = 64 << 20  # characters of another value, such as the ranks of all process groups
MOST_KEYS = 1000  # of the outer object; torch writes about ten
EVENTS = "traceEvents"
MAGIC = b"\x1f\x8b"  # of gzip
Event = dict[str, Any]
Source = BufferedReader | gzip.GzipFile
Read = Callable[[int], None]  # takes the number of bytes read from the file since the last call

_SPACE = re.compile(r"[ \t\n\r]*")


class TraceReader:
    """Reads one trace. `facts` has the other keys of its object as far as it has been read."""

    def __init__(self, file: Path, done: Read = lambda size: None) -> None:
        self.facts: dict[str, Any] = {}
        self._file, self._done = file, done

    def events(self) -> Iterator[Event]:
        """Yield the events, all of which are objects; raise OSError or DamagedFile."""
        with open(self._file, "rb", opener=open_at_once) as raw:
            is_packed = raw.read(len(MAGIC)) == MAGIC
            raw.seek(0)
            source: Source = gzip.GzipFile(fileobj=raw) if is_packed else raw
            yield from self._all(_JsonText(source, raw, self._done))

    def _all(self, text: _JsonText) -> Iterator[Event]:
        if text.peek() == "[":
            yield from _events(text)
            return
        text.skip("{")
        for _ in range(MOST_KEYS):
            key = text.value(LONGEST_EVENT)
            if not isinstance(key, str):
                raise DamagedFile("not a chrome trace: a key is not a text")
            text.skip(":")
            if key == EVENTS:
                yield from _events(text)
            else:
                self.facts[key] = text.value(LONGEST_VALUE)
            if text.skip(",}") == "}":
                return
        raise DamagedFile(f"not a chrome trace: more than {MOST_KEYS} keys")


def _events(text: _JsonText) -> Iterator[Event]:
    text.skip("[")
    if text.peek() == "]":
        text.skip("]")
        return
    while True:
        event = text.value(LONGEST_EVENT)
        if not isinstance(event, dict):
            raise DamagedFile("not a chrome trace: an event is not an object")
        yield event
        if text.skip(",]") == "]":
            return


class _JsonText:
    """A window that moves over a JSON text."""

    def __init__(self, source: Source, raw: BufferedReader, done: Read) -> None:
        """`raw`: the file that `source` reads; its position is the progress."""
        self._source, self._left = source, LARGEST_TRACE
        self._raw, self._done, self._reported = raw, done, 0
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        # NaN is not JSON, but some versions of torch write it into fields that nobody reads here.
        self._json = json.JSONDecoder(parse_constant=lambda name: None)
        self._text, self._at = "", 0

    def _more(self, size: int = 0) -> bool:
        """Read on, `size` bytes or a chunk; return False at the end of the file."""
        try:
            data = self._source.read(max(size, CHUNK))
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            raise DamagedFile(f"damaged gzip data: {error}") from None
        self._done(self._raw.tell() - self._reported)
        self._reported = self._raw.tell()
        self._left -= len(data)
        if self._left < 0:
            raise DamagedFile(f"larger than {LARGEST_TRACE:,} bytes")
        self._text = self._text[self._at :] + self._utf8.decode(data)
        self._at = 0
        return bool(data)

    def peek(self) -> str:
        """The next character that is not a space; raise DamagedFile at the end of the file."""
        while True:
            found = _SPACE.match(self._text, self._at)
            self._at = found.end() if found else self._at
            if self._at < len(self._text):
                return self._text[self._at]
            if not self._more():
                raise DamagedFile("not complete: it ends in the middle")

    def skip(self, characters: str) -> str:
        """Skip the next character, which must be one of these, and return it."""
        found = self.peek()
        if found not in characters:
            raise DamagedFile(f"not a chrome trace: {found!r} instead of {characters!r}")
        self._at += 1
        return found

    def value(self, longest: int) -> Any:
        """Parse the next value."""
        self.peek()
        while True:
            try:
                value, end = self._json.raw_decode(self._text, self._at)
                # A number at the end of the window may continue after it.
                if end < len(self._text):
                    self._at = end
                    return value
            except RecursionError:
                raise DamagedFile("nested too deep") from None
            except json.JSONDecodeError:
                # Not complete in this window, or not JSON: the limit decides.
                if len(self._text) - self._at > longest:
                    raise DamagedFile("not valid JSON, or a value is too long") from None
            except ValueError:  # Python refuses integers of more than 4,300 digits
                raise DamagedFile("a number has too many digits") from None
            # Twice as much for each attempt: chunk by chunk, they would take quadratic time.
            if not self._more(len(self._text) - self._at):
                raise DamagedFile("not complete: it ends in the middle")


def trace_size(file: Path) -> int:
    """The bytes that reading a trace reports; 0 if it cannot be read."""
    try:
        return os.stat(file).st_size
    except OSError:
        return 0
