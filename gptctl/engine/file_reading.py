"""Read files that may be missing, incomplete or damaged, or come from another host.

The only place in gptctl that opens and parses such files. Whatever a file is, reading it returns at
once, takes bounded memory, and gives values that can be formatted, sorted and written again.
`trainer` has a reader of its own that behaves in the same way.
"""

from __future__ import annotations

import errno
import json
import math
import os
import re
import stat
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import Any, NoReturn, TypeGuard

LATEST_TIME = 1e11  # seconds since the epoch; some platforms have no date after the year 5000
LARGEST = 16 << 20  # bytes; more than any record of a job has, and parsed within a second
CHUNK = 1 << 20  # bytes that are read at once of a large file
LONGEST_LINE = 1 << 20  # bytes; the longest record of a trainer has a thousandth of that
DEEPEST = 100  # levels of JSON; a config may have 32, which `written.json` wraps twice
MOST_VALUES = 1_000_000  # in one text: empty lists need 30 times the memory of their text
MOST_INVALID = 1000  # lines in a row of a JSON-lines file; a killed writer leaves one or two
SHORTEST_RECORD = 7  # bytes: less says nothing
# Problems that say nothing about the content: the file is missing, or was removed meanwhile.
MISSING = (errno.ENOENT, errno.ENOTDIR, errno.ESTALE)
# Not a file at all: gptctl writes no links, FIFOs, sockets or folders under the names of its files.
NO_FILE = (errno.ELOOP, errno.ENXIO, errno.EISDIR)
MOST_NOTICED = 100  # files; more would not be read, and a bad disk may have millions
Opener = Callable[[str, int], int]

# Only texts with these, once every digit is a 0, can have an integer of more than 64 bits or an
# infinite number. Ten times as fast as a regular expression: lines of a thousand numbers are usual.
_AS_ZEROS = bytes.maketrans(b"123456789E", b"000000000e")
_LARGE_NUMBERS = (b"0" * 19, b"e000")
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")
# Every escape from the left, so that `\\ud800` (an escaped backslash) is not mistaken for one.
_ESCAPE = re.compile(
    r"\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}"  # a pair: one character
    r"|(\\u[dD][89a-fA-F][0-9a-fA-F]{2})"
    r"|\\.",
    re.DOTALL,
)
# As Python's own json module writes them.
_NOT_FINITE = re.compile(rb"([:\[,] ?)-?(?:NaN|Infinity)\b")
_LINE = re.compile(rb"^\{.*", re.MULTILINE)  # of a JSON-lines file: an object


class DamagedFile(ValueError):
    """A file that is not what gptctl writes. The text says what is wrong with it."""


# Damaged files that this process has ignored, with the reason, so that a command can name them.
noticed: dict[str, str] = {}


def notice(file: Path | str, reason: str) -> None:
    """Remember a damaged file that was ignored."""
    if len(noticed) < MOST_NOTICED:
        noticed.setdefault(str(file), reason)


def open_at_once(path: str, flags: int) -> int:
    """Open a file as `open` does, but raise OSError for anything that is not a regular file.

    A FIFO would block forever, and a device such as /dev/zero never ends.
    """
    try:
        descriptor = os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC, 0o600)
    except OSError as error:
        # A socket, or a FIFO that nobody reads: the system says "No such device".
        if error.errno == errno.ENXIO:
            raise OSError(errno.ENXIO, "not a regular file", path) from None
        raise
    mode = os.fstat(descriptor).st_mode
    if stat.S_ISREG(mode):
        return descriptor
    os.close(descriptor)
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, "a folder, not a file", path)
    raise OSError(errno.ENXIO, "not a regular file", path)


def open_no_link(path: str, flags: int) -> int:
    """As `open_at_once`, but raise OSError for a symbolic link, too."""
    return open_at_once(path, flags | os.O_NOFOLLOW)


def append_line(file: Path, line: str) -> None:
    """Append a line in one write, so that those of two processes do not mix. Raises OSError."""
    descriptor = open_no_link(str(file), os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    try:
        # With a line end before it, too: a crash may have left a part of the last line.
        os.write(descriptor, f"\n{line}\n".encode())
    finally:
        os.close(descriptor)


def read_text(file: Path, most: int = LARGEST) -> str:
    """Return the start of a text file; empty if it is missing, unreadable or not a file."""
    return read_bytes(file, most).decode("utf-8", "replace")


def read_bytes(file: Path, most: int = LARGEST) -> bytes:
    # A missing file counts as empty: most files exist only in a part of a job's life.
    try:
        with open(file, "rb", opener=open_at_once) as stream:
            return stream.read(most)
    except OSError as error:
        notice_error(file, error)
        return b""


def read_tail(file: Path, most: int, start: int = 0) -> bytes:
    """Return the end of a file, from `start` on at the earliest; empty if it cannot be read."""
    try:
        with open(file, "rb", opener=open_at_once) as stream:
            size = stream.seek(0, os.SEEK_END)
            stream.seek(max(start if 0 <= start <= size else 0, size - most))
            return stream.read(most)
    except OSError as error:
        notice_error(file, error)
        return b""


def lines_of(file: Path, most: int, longest: int) -> Iterator[bytes]:
    """Yield the whole lines of a file's last bytes, in little memory; skip those that are longer.

    For files that are too large to be read at once.
    """
    rest, is_cut = b"", False
    try:
        with open(file, "rb", opener=open_at_once) as stream:
            size = stream.seek(0, os.SEEK_END)
            # The first line is incomplete, unless it begins the file.
            is_cut = size > most
            stream.seek(max(0, size - most))
            while data := stream.read(min(CHUNK, size - stream.tell())):
                *lines, rest = _without_empty_lines(rest + data).split(b"\n")
                yield from (line for line in lines[int(is_cut) :] if len(line) <= longest)
                is_cut = is_cut and not lines
                if len(rest) > longest:
                    rest, is_cut = b"", True
    except OSError as error:
        notice_error(file, error)
    if rest and not is_cut and len(rest) <= longest:
        yield rest


def _without_empty_lines(data: bytes) -> bytes:
    # Halved each time: a damaged file can have a million of them in a row.
    while b"\n\n" in data:
        data = data.replace(b"\n\n", b"\n")
    return data


def size_of(file: Path) -> int:
    """Return the size of a file in bytes; 0 if it is missing."""
    try:
        return os.stat(file).st_size
    except OSError:
        return 0


def load_bytes(file: Path, most: int = LARGEST, opener: Opener = open_at_once) -> bytes:
    """Return a whole file. Raise OSError if it cannot be read, DamagedFile if it is too large."""
    with open(file, "rb", opener=opener) as stream:
        data = stream.read(most + 1)
    if len(data) > most:
        raise DamagedFile(f"larger than {most:,} bytes")
    return data


def read_json(file: Path, most: int = LARGEST) -> dict[str, Any] | None:
    """Return the JSON object in a file, or None if it is missing or damaged."""
    try:
        return load_json(file, most)
    except DamagedFile as error:
        notice(file, str(error))
    except OSError as error:
        notice_error(file, error)
    return None


def load_json(
    file: Path,
    most: int = LARGEST,
    opener: Opener = open_at_once,
    most_values: int = MOST_VALUES,
) -> dict[str, Any]:
    """Return the JSON object in a file; raise OSError or DamagedFile."""
    value = load_value(load_bytes(file, most, opener), most_values)
    if not isinstance(value, dict):
        raise DamagedFile("not a JSON object")
    return value


def parse_json(text: str | bytes) -> dict[str, Any] | None:
    """Return a JSON object, or None if the text is anything else."""
    try:
        value = load_value(text)
    except DamagedFile:
        return None
    return value if isinstance(value, dict) else None


def load_value(text: str | bytes, most_values: int = MOST_VALUES) -> Any:
    """Return any JSON value; raise DamagedFile unless everything in it can be used safely."""
    text = text.decode("utf-8", "replace") if isinstance(text, bytes) else text
    # At least as many as there are: some of these characters may be in strings.
    if len(text) > most_values and sum(map(text.count, "[{,")) > most_values:
        raise DamagedFile(f"more than {most_values:,} values")
    # Lone surrogates are valid in JSON, but can be neither printed nor written.
    if _SURROGATE.search(text):
        text = _ESCAPE.sub(lambda found: r"\ufffd" if found[1] else found[0], text)
    try:
        value = (_careful if _may_have_large_numbers(text) else _decoder)().decode(text)
    except DamagedFile:
        raise
    except RecursionError:
        raise DamagedFile(f"nested more than {DEEPEST} levels deep") from None
    except ValueError:
        raise DamagedFile("empty" if not text.strip() else "not valid JSON") from None
    # Python can parse about a thousand levels, but whatever walks through them may not.
    if text.count("[") + text.count("{") > DEEPEST and _is_too_deep(value):
        raise DamagedFile(f"nested more than {DEEPEST} levels deep")
    return value


def load_own_value(data: bytes) -> Any:
    """Return a JSON value that gptctl wrote from checked values, if its checksum is right."""
    # Without the checks of `load_value`, which take longer than the reading.
    return json.loads(data)


def _may_have_large_numbers(text: str) -> bool:
    digits = text.encode("utf-8", "surrogatepass").translate(_AS_ZEROS, b"+")
    return any(each in digits for each in _LARGE_NUMBERS)


@cache
def _decoder() -> json.JSONDecoder:
    # Making one takes longer than decoding a line.
    return json.JSONDecoder(parse_constant=_refuse_constant)


@cache
def _careful() -> json.JSONDecoder:
    return json.JSONDecoder(parse_constant=_refuse_constant, parse_int=_integer, parse_float=_float)


def json_lines(data: bytes) -> Iterator[dict[str, Any]]:
    """Return the objects of a JSON-lines file; skip incomplete and invalid lines."""
    return _objects(line[0] for line in _LINE.finditer(data))


def records_of(
    file: Path, most: int, longest: int = LONGEST_LINE, job: str = ""
) -> Iterator[dict[str, Any]]:
    """As `json_lines`, of the last bytes of a file of any size, in little memory.

    `job`: leave out most lines that name another one, without parsing them.
    """
    lines = lines_of(file, most, longest)
    if job:
        # A chain of thirty jobs writes to one file, and each of them reads all of it.
        own = json.dumps(job).encode()
        lines = (line for line in lines if own in line or b'"job"' not in line)
    return _objects((line for line in lines if line.startswith(b"{")), file)


def _objects(lines: Iterable[bytes], file: Path | None = None) -> Iterator[dict[str, Any]]:
    # One by one: whoever needs only a part of each must not keep all of them in memory.
    invalid = 0
    for line in lines:
        value = parse_record(line)
        if value is not None and len(line) >= SHORTEST_RECORD:
            invalid = 0
            yield value
        elif (invalid := invalid + 1) > MOST_INVALID:
            if file:
                notice(
                    file, f"more than {MOST_INVALID:,} invalid lines in a row: the rest is ignored"
                )
            return


def parse_record(line: bytes) -> dict[str, Any] | None:
    """As `parse_json`, but numbers that are not finite are None: other programs write them."""
    return parse_json(
        _NOT_FINITE.sub(rb"\1null", line) if b"NaN" in line or b"Inf" in line else line
    )


def is_time(value: object) -> TypeGuard[float]:
    """Whether this is a number that can be a time, in seconds since the epoch."""
    # Other values, such as NaN or 1e400, cannot be formatted as a date.
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return is_number and 0 <= value < LATEST_TIME  # type: ignore[operator]


def is_whole(value: object, low: int, below: int) -> TypeGuard[int]:
    """Whether this is an integer in a range; `true` is not."""
    return isinstance(value, int) and not isinstance(value, bool) and low <= value < below


def _is_too_deep(value: Any) -> bool:
    # Level by level: a recursive function would need the depth that it must not find.
    level = [value]
    for _ in range(DEEPEST):
        level = [item for each in level for item in _inside(each) if isinstance(item, (dict, list))]
        if not level:
            return False
    return True


def _inside(value: Any) -> Iterable[Any]:
    return value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()


def _integer(digits: str) -> int:
    # By length first: converting a million digits would take minutes.
    if len(digits) > 20 or not -(1 << 63) <= (value := int(digits)) < 1 << 63:
        raise DamagedFile("a number has more than 64 bits")
    return value


def _float(digits: str) -> float:
    if not math.isfinite(value := float(digits)):
        raise DamagedFile("a number is infinite")
    return value


def _refuse_constant(name: str) -> NoReturn:
    raise DamagedFile(f"{name} is not a number")


def notice_error(file: Path, error: OSError) -> None:
    if error.errno not in MISSING:
        notice(file, error.strerror or str(error))
