"""Reading and following log files: real files, appended to, emptied and renamed while they are followed.

Oracles: the bytes that were written, and what splitting them at newlines gives.
"""

from __future__ import annotations

import io
import json
import os
import sys
import time
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gptctl.logs.files import FileFilter, parse_ranks
from gptctl.logs.lines import Assembler, Clock, parse_since, readable, start_of_last
from gptctl.logs.local_files import LocalLogFiles
from gptctl.logs.match import Grep
from gptctl.logs.printer import Printer, Style, show_logs
from gptctl.logs.stream import LineFilter, follow
from trainer.errors import WRONG_USAGE, UserError


def say_on_stderr(text: str) -> None:
    print(text, file=sys.stderr)


class Job:
    """The folders of a job on disk, and what is shown of them."""

    def __init__(self, root: Path) -> None:
        self.log_dir, self.run_dir = root / "run" / "logs", root / "run"
        self.files = LocalLogFiles(self.log_dir, self.run_dir)

    def path(self, name: str, attempt: int = 0) -> Path:
        folder = self.log_dir / f"attempt-{attempt}"
        folder.mkdir(parents=True, exist_ok=True)
        return folder / name

    def add(self, name: str, data: bytes | str, attempt: int = 0) -> None:
        with self.path(name, attempt).open("ab") as file:
            file.write(data if isinstance(data, bytes) else data.encode())

    def shown(self, wanted: FileFilter | None = None, lines: LineFilter | None = None, style: Style = "text") -> str:
        out = io.BytesIO()
        show_logs(self.files, wanted or FileFilter(), lines or LineFilter(), style, out, say=say_on_stderr)
        return out.getvalue().decode()


@pytest.fixture
def job(tmp_path: Path) -> Job:
    return Job(tmp_path)


# Lines


def oracle(data: bytes) -> list[str]:
    return [readable(line) for line in data.replace(b"\0", b"").split(b"\n")]


BYTES = st.lists(
    st.sampled_from([b"a", b"\n", b"\r", b"\0", "ä€".encode(), b"\xff", b"\x1b[31m", b"xyz" * 9]), max_size=60
)


@given(parts=BYTES, cuts=st.lists(st.integers(0, 300), max_size=8))
def test_any_cutting_of_the_stream_gives_the_same_lines(parts: list[bytes], cuts: list[int]) -> None:
    """Oracle: the whole stream split at newlines."""
    data = b"".join(parts)
    bounds = sorted({0, len(data), *(cut for cut in cuts if cut < len(data))})
    assembler = Assembler()
    text = b"".join(assembler.feed(data[a:b]) for a, b in pairwise(bounds)) + assembler.close()
    assert [readable(line) for line in text.split(b"\n")] == oracle(data)


@given(parts=BYTES, cuts=st.lists(st.integers(0, 300), max_size=8), longest=st.integers(1, 30))
def test_long_lines_are_cut_the_same_way_however_they_arrive(parts: list[bytes], cuts: list[int], longest: int) -> None:
    """Oracle: the rule, applied to each whole line: its newest text between two \\r, of which `longest` bytes are kept."""
    data = b"".join(parts)
    bounds = sorted({0, len(data), *(cut for cut in cuts if cut < len(data))})
    assembler = Assembler(longest)
    got = b"".join(assembler.feed(data[a:b]) for a, b in pairwise(bounds)) + assembler.close()
    expected = []
    for line in data.replace(b"\0", b"").split(b"\n"):
        if len(line) > longest:
            line = next((text for text in reversed(line.split(b"\r")) if text), b"")
            if len(line) > longest:
                line = line[:longest] + b" [%d bytes cut]" % (len(line) - longest)
        expected.append(line)
    assert got.split(b"\n") == expected


@given(data=BYTES.map(b"".join), count=st.integers(0, 12), block=st.integers(1, 40))
def test_the_start_of_the_last_lines(data: bytes, count: int, block: int) -> None:
    """Oracle: the last elements of all lines with their newlines."""
    lines = data.split(b"\n")
    whole = [line + b"\n" for line in lines[:-1]] + ([lines[-1]] if lines[-1] else [])
    expected = b"".join(whole[len(whole) - min(count, len(whole)) :])
    assert data[start_of_last(count, len(data), lambda at, size: data[at : at + size], block) :] == expected


@given(count=st.integers(1, 4), block=st.integers(1, 40), tail=st.sampled_from([b"", b"\n", b"x", b"x\n"]))
def test_a_line_without_an_end_is_searched_in_part(count: int, block: int, tail: bytes) -> None:
    """Each 100 bytes of it count as a line. Oracle: the number of bytes that were read."""
    data, asked = b"a\nb\n" + bytes(10_000) + tail, 0

    def read(at: int, size: int) -> bytes:
        nonlocal asked
        asked += size
        return data[at : at + size]

    start = start_of_last(count, len(data), read, block, longest=100)
    assert len(data) - (100 + block) * (count + 1) <= start < len(data)
    assert asked <= (100 + block) * (count + 1)


@pytest.mark.parametrize(
    "lines",
    [
        LineFilter(tail=3),
        LineFilter(),
        LineFilter(errors=True),
        LineFilter(grep=Grep("RuntimeError")),
        LineFilter(tail=3, errors=True),
    ],
)
def test_a_gap_of_terabytes_is_skipped(job: Job, lines: LineFilter) -> None:
    """`truncate` made the gap. Reading a terabyte would take minutes; the lines around it are shown."""
    job.add("workerlog.0", "first\n")
    os.truncate(job.path("workerlog.0"), 1 << 40)
    job.add("workerlog.0", "\nRuntimeError: last\n")
    began = time.monotonic()
    shown = job.shown(lines=lines).splitlines()
    assert time.monotonic() - began < 2
    assert "RuntimeError: last" in shown[-1]
    assert ("first" in shown[0]) == (lines == LineFilter())


def test_following_skips_a_gap(job: Job) -> None:
    job.add("workerlog.0", "first\n")
    ticks = 0

    def ended() -> bool:
        nonlocal ticks
        ticks += 1
        if ticks == 2:
            os.truncate(job.path("workerlog.0"), 1 << 40)
            job.add("workerlog.0", "last\n")
        return ticks == 3

    out, began = io.BytesIO(), time.monotonic()
    printer = Printer(out, "text", say=say_on_stderr)
    follow(job.files, FileFilter(), LineFilter(), printer, ended, sleep=lambda _: time.sleep(0.4))
    assert time.monotonic() - began < 10
    assert out.getvalue().split()[2::3] == [b"first", b"last"]


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        (b"\x1b[31mred\x1b[0m \x1b]0;title\x07done", "red done"),
        (b"\x1b]52;c;aGk=\x1b\\clip", "clip"),
        (b"tab\tstays, bell\x07 goes", "tab\tstays, bell goes"),
        (b"10%\r20%\r30%\r", "30%"),
        (b"\r\r", ""),
        ("bidi \u202eevil".encode(), "bidi evil"),
        (b"\xc3\x28 bad", "\ufffd( bad"),
    ],
)
def test_what_reaches_a_terminal(line: bytes, expected: str) -> None:
    """Oracle: the text without anything a terminal would obey."""
    assert readable(line) == expected


STAMPS = [
    (b"[2026-11-16 04:25:43,446] [    INFO] - x", "2026-11-16T04:25:43.446"),
    (b"\x1b[32m[2026-11-16 04:25:43,446] [    INFO]", "2026-11-16T04:25:43.446"),
    (b"[32m[2026-11-16 04:25:43,446] x", "2026-11-16T04:25:43.446"),
    (b"2026-11-16T04:25:43.1Z x", "2026-11-16T04:25:43.1+00:00"),
    (b"2026-11-16T04:25:43+08:00 x", "2026-11-16T04:25:43+08:00"),
    (b"E1116 06:54:39.123000 1234 torch/x.py:1] y", "2026-11-16T06:54:39.123"),
    (b"[rank3]:[E1116 06:54:39.123 ProcessGroupNCCL.cpp", "2026-11-16T06:54:39.123"),
    (b"W1231 23:59:59.5 year before", "2025-12-31T23:59:59.5"),
    (b"[2026-99-99 99:25:43,446] no date", None),
    (b"global step 560", None),
]


@pytest.mark.parametrize(("line", "expected"), STAMPS)
def test_the_times_that_lines_carry(line: bytes, expected: str | None) -> None:
    """Oracle: `parse_since`, that is datetime's own reading of the ISO text (padded: Python 3.10 wants 3 or 6 digits)."""
    clock = Clock(parse_since("2026-11-16T12:00:00"))
    if expected:
        head, dot, rest = expected.partition(".")
        digits = rest[: len(rest) - len(rest.lstrip("0123456789"))]
        expected = f"{head}.{digits:0<6}{rest[len(digits) :]}" if dot else expected
    assert clock.stamp(line, 0) == (pytest.approx(parse_since(expected), abs=1e-6) if expected else None)


def test_since_in_all_its_forms() -> None:
    """Oracle: arithmetic on a fixed now, which is noon of a day."""
    noon = parse_since("2026-11-16T12:00")
    assert [noon - parse_since(text, noon) for text in ("90s", "5m", "2h", "1d")] == [90, 300, 7200, 86400]
    assert noon - parse_since("07:30", noon) == 4.5 * 3600
    assert noon - parse_since("12:30", noon) == 23.5 * 3600  # today's has not come yet
    assert parse_since("2026-11-16T12:00:00Z") == 1794830400
    for nonsense in ("", "yesterday", "5 parsecs", "25:00", "-5m", "9" * 400 + "s"):
        with pytest.raises(UserError) as raised:
            parse_since(nonsense)
        assert raised.value.exit_code == WRONG_USAGE


def test_ranks_are_ranges_and_nonsense_is_refused() -> None:
    """Oracle: the members of the sets, written out."""
    ranks = parse_ranks("0,3, 8-11")
    assert [rank for rank in range(20) if any(rank in each for each in ranks)] == [0, 3, 8, 9, 10, 11]
    assert parse_ranks("0-9999999")[0].stop == 10_000_000
    for nonsense in ("", "a", "1,,2", "3-1", "-1", "0-99999999999", "1-2-3", "½", "٣"):
        with pytest.raises(UserError) as raised:
            parse_ranks(nonsense)
        assert raised.value.exit_code == WRONG_USAGE


# Reading what is there


def test_lines_are_merged_by_time_and_stay_with_their_neighbours(job: Job) -> None:
    """Oracle: the order written out by hand; a traceback stays with the line above it."""
    job.add("workerlog.0", "banner\n[2026-11-16 04:00:01,000] a\n[2026-11-16 04:00:03,000] c\n  File x\nValueError\n")
    job.add("workerlog.10", "[2026-11-16 04:00:02,000] b\n[2026-11-16 04:00:03,000] c2\n[2026-11-16 04:00:04,000] d")
    job.add("node.0.log", "I1116 04:00:02.500000 1 x] n\n")
    os.utime(job.path("node.0.log"), (1794830400, 1794830400))
    names = [line.split("] ", 1)[0] + " " + line.split()[-1] for line in job.shown().splitlines()]
    assert names == [
        *("[rank 0 banner", "[rank 0 a", "[rank 10 b", "[node 0 n", "[rank 0 c", "[rank 0 x", "[rank 0 ValueError"),
        *("[rank 10 c2", "[rank 10 d"),
    ]
    assert job.shown().startswith("[rank 0]  banner\n")


@settings(max_examples=40, deadline=None)
@given(contents=st.lists(BYTES.map(b"".join), min_size=1, max_size=4))
@pytest.mark.parametrize("follows", [False, True])
def test_raw_gives_every_line_exactly_once(
    tmp_path_factory: pytest.TempPathFactory, follows: bool, contents: list[bytes]
) -> None:
    """Oracle: the files' own lines, as a multiset; one file is the same byte for byte."""
    job = Job(tmp_path_factory.mktemp("raw"))
    for rank, data in enumerate(contents):
        job.add(f"workerlog.{rank}", data)
    out = io.BytesIO()
    if follows:
        printer = Printer(out, "raw", say=say_on_stderr)
        follow(job.files, FileFilter(), LineFilter(raw=True), printer, lambda: True)
    else:
        show_logs(job.files, FileFilter(), LineFilter(), "raw", out, say=say_on_stderr)
    if len(contents) == 1:
        assert out.getvalue() == contents[0]
    whole = [data if data.endswith(b"\n") or not data else data + b"\n" for data in contents]
    got = out.getvalue() + (b"\n" if out.getvalue() and not out.getvalue().endswith(b"\n") else b"")
    assert sorted(got.split(b"\n")) == sorted(b"".join(whole).split(b"\n"))


def test_tail_since_and_selection(job: Job) -> None:
    """Oracle: the numbers of the lines that were written."""
    for rank in range(4):
        job.add(
            f"workerlog.{rank}",
            "".join(f"[2026-11-16 04:00:{second:02},000] {rank}/{second}\n" for second in range(30)),
        )
    job.add("node.1.log", "node words\n")
    job.add("batch.log", "batch words\n")
    for path in job.path("").iterdir():
        os.utime(path, (1794830400, 1794830400))

    def words(wanted: FileFilter, lines: LineFilter = LineFilter()) -> list[str]:  # noqa: B008 (frozen)
        return [line.split()[-1] for line in job.shown(wanted, lines).splitlines()]

    assert words(FileFilter(ranks=parse_ranks("1,3")), LineFilter(tail=1)) == ["1/29", "3/29"]
    assert words(FileFilter(ranks=parse_ranks("2")), LineFilter(since=parse_since("2026-11-16T04:00:28"))) == [
        "2/28",
        "2/29",
    ]
    assert set(words(FileFilter(node=1, per_node=2), LineFilter(tail=1))) == {"2/29", "3/29", "words"}
    (job.run_dir / "attempt-0").mkdir()
    (job.run_dir / "attempt-0" / "ranks.1.jsonl").write_text('{"event":"start","rank":0,"node":1}\n{"torn')
    assert set(words(FileFilter(node=1, per_node=2), LineFilter(tail=1))) == {"0/29", "2/29", "3/29", "words"}
    os.utime(job.path("workerlog.2"), (0, 0))
    assert job.shown(FileFilter(ranks=parse_ranks("2")), LineFilter(since=parse_since("2026-11-16T04:00:28"))) == ""
    with pytest.raises(UserError):
        job.shown(FileFilter(ranks=parse_ranks("99")))


def test_the_last_lines_keep_the_time_of_a_line_that_is_not_shown(job: Job) -> None:
    """Oracle: the order by hand; the end of rank 0's traceback carries no time, the line above it does."""
    job.add("workerlog.0", "[2026-11-16 04:00:02,000] x\n  File y\nlater\n")
    job.add("workerlog.1", "[2026-11-16 04:00:01,000] earlier\n")
    assert [line.split()[-1] for line in job.shown(lines=LineFilter(tail=1)).splitlines()] == ["earlier", "later"]


def test_attempts_and_json(job: Job) -> None:
    """Oracle: the fields and prefixes, written out."""
    job.add("workerlog.0", "old\n", 0)
    job.add("workerlog.0", "[2026-11-16 04:00:01,000] new\x1b[1m\n", 1)
    job.add("batch.log", "b\n", 1)
    assert job.shown() == "[batch]  b\n[rank 0] [2026-11-16 04:00:01,000] new\n"
    assert job.shown(FileFilter(attempt=0)) == "[rank 0] old\n"
    assert job.shown(FileFilter(all_attempts=True)).startswith("[0/rank 0] old\n[1/batch]  b\n[1/rank 0] ")
    first, second = (json.loads(line) for line in job.shown(style="json").splitlines())
    assert first == {"attempt": 1, "batch": True, "time": None, "text": "b"}
    time_1 = parse_since("2026-11-16T04:00:01")
    assert second == {"attempt": 1, "rank": 0, "time": time_1, "text": "[2026-11-16 04:00:01,000] new"}


TITLE = "[2026-11-16 04:00:01,000] [    INFO] - Resolved config:"


def test_the_config_dump_is_hidden_if_asked_for(job: Job) -> None:
    """Oracle: all other lines, exactly as without hiding; the number of indented lines; the name, for a shell."""
    dump = [TITLE, "  Global.device    cpu", "  Engine.x    ", "    deeper"]
    other = [
        "before",
        "  indented",
        f"{TITLE} no",
        "  indented",
        "[2026-11-16 04:00:01,000] [    INFO] - rank 0: x",
        "  y",
    ]
    record = json.dumps({"time": "2026-11-16T04:00:01.000", "message": "Resolved config:\n  a 1\n  b 2"})
    job.add("workerlog.0", "\n".join([*other[:4], *dump, *other[4:], record, "  z", *dump[:2]]))

    def shown(hide_config_of: str) -> list[str]:
        out = io.BytesIO()
        show_logs(job.files, FileFilter(), LineFilter(), out=out, say=say_on_stderr, hide_config_of=hide_config_of)
        return out.getvalue().decode().splitlines()

    def note(number: int) -> str:
        return f"… {number} config lines hidden: gptctl logs 'a b' --raw"

    lines = [f"[rank 0] {line}" for line in other]
    assert shown("a b") == [*lines[:4], note(3), *lines[4:], note(2), "[rank 0]   z", note(1)]
    assert [line for line in shown("") if line not in lines][:4] == [f"[rank 0] {line}" for line in dump]


class Terminal(io.BytesIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("no_color", ["", "1"])
def test_colours_only_where_they_are_wanted(job: Job, monkeypatch: pytest.MonkeyPatch, no_color: str) -> None:
    """Oracle: the SGR codes around the prefix, written out; a pipe gets none (all other tests)."""
    monkeypatch.setenv("NO_COLOR", no_color)
    job.add("workerlog.0", "a\n")
    job.add("workerlog.1", "a\n")
    out = Terminal()
    show_logs(job.files, FileFilter(), LineFilter(), out=out, say=say_on_stderr)
    coloured = b"\x1b[36m[rank 0] \x1b[0ma\n\x1b[32m[rank 1] \x1b[0ma\n"
    assert out.getvalue() == (b"[rank 0] a\n[rank 1] a\n" if no_color else coloured)
