"""Following log files that grow, are emptied, renamed, and come and go. Real files; mostly one look at a time.

Oracles: the lines that were written, in the order they were written.
"""

from __future__ import annotations

import io
import os
import resource
import subprocess
import sys
import threading
import time
from itertools import pairwise
from pathlib import Path

import pytest

from gptctl.logs import stream
from gptctl.logs.files import FileFilter, LogFile, parse_ranks
from gptctl.logs.lines import LONGEST_LINE
from gptctl.logs.match import Grep
from gptctl.logs.printer import Printer, Style
from gptctl.logs.stream import Follower, LineFilter, follow
from tests.conftest import ROOT
from tests.unit.test_logs import Job, say_on_stderr


@pytest.fixture
def job(tmp_path: Path) -> Job:
    return Job(tmp_path)


class Watch:
    """A follower with its output, stepped by hand."""

    def __init__(
        self, job: Job, lines: LineFilter | None = None, style: Style = "text", wanted: FileFilter | None = None
    ):
        self.out = io.BytesIO()
        printer = Printer(self.out, style, say=say_on_stderr)
        self.follower = Follower(job.files, wanted or FileFilter(), lines or LineFilter(), printer)

    def look(self, last: bool = False) -> list[str]:
        """What one look shows, without prefixes."""
        begin = self.out.tell()
        self.follower.tick(last)
        return [line.split("] ", 1)[-1] for line in self.out.getvalue()[begin:].decode().splitlines()]


def test_a_line_is_shown_when_its_newline_has_come(job: Job) -> None:
    """Oracle: no part of a line or of a character is ever shown; the last line is, at the end."""
    watch = Watch(job)
    assert watch.look() == []  # a pending job: not even the folder exists
    euro = "€uro\n".encode()
    job.add("workerlog.0", b"one\ntw" + euro[:2])
    assert watch.look() == ["one"]
    assert watch.look() == []
    job.add("workerlog.0", euro[2:] + b"last")
    assert watch.look() == ["tw€uro"]
    assert watch.look(last=True) == ["last"]


def test_new_ranks_and_attempts_are_picked_up(job: Job) -> None:
    """Oracle: the lines written; an old attempt's last words still come, its start does not."""
    job.add("workerlog.0", "attempt 0\n", 0)
    job.add("workerlog.0", "attempt 1\n", 1)
    watch = Watch(job)
    assert watch.look() == ["attempt 1"]
    job.add("workerlog.1", "rank 1\n", 1)
    assert watch.look() == ["rank 1"]
    job.add("workerlog.0", "attempt 2\n", 2)
    job.add("workerlog.0", "last words\n", 1)
    assert watch.look() == ["last words", "attempt 2"]
    assert b"[1/rank 0] last words\n" in watch.out.getvalue()
    job.add("workerlog.1", "open end", 1)
    job.add("workerlog.0", "attempt 3\n", 3)
    assert watch.look() == ["attempt 3", "open end"]


def test_all_attempts_and_tail_at_the_start(job: Job) -> None:
    """Oracle: the last line of what was there, and everything that came later."""
    for attempt in range(3):
        job.add("workerlog.0", f"a{attempt}\nb{attempt}\n", attempt)
    watch = Watch(job, LineFilter(tail=1), wanted=FileFilter(all_attempts=True))
    assert watch.look() == ["b0", "b1", "b2"]
    job.add("workerlog.7", "c\nd\n", 2)
    assert watch.look() == ["c", "d"]


@pytest.mark.parametrize("head", ["", "p" * 2 * stream.HEAD + "\n"])
def test_an_emptied_file_is_read_from_its_start(job: Job, capsys: pytest.CaptureFixture[str], head: str) -> None:
    """Oracle: the lines before and after; what was half written is not lost; one word about it on stderr."""
    watch = Watch(job)
    job.add("workerlog.0", f"{head}before 1\nbefore 2\nhalf")
    assert watch.look() == [*head.split(), "before 1", "before 2"]
    job.path("workerlog.0").write_text(f"{head}after\n")
    assert watch.look() == ["half", *head.split(), "after"]
    assert capsys.readouterr().err.count("workerlog.0 was truncated") == 1


def test_a_file_that_was_emptied_and_refilled_beyond_is_noticed(job: Job, capsys: pytest.CaptureFixture[str]) -> None:
    """Oracle: every line of the new content, though the file never looked shorter."""
    watch = Watch(job)
    job.add("workerlog.0", "old 1\nold 2\n")
    watch.look()
    job.path("workerlog.0").write_bytes(b"".join(b"new %d\n" % number for number in range(100)))
    assert watch.look() == [f"new {number}" for number in range(100)]
    assert capsys.readouterr().err.count("was truncated") == 1


def test_a_renamed_file_is_read_to_its_end_before_the_new_one(job: Job, capsys: pytest.CaptureFixture[str]) -> None:
    """Oracle: the lines written; the old descriptor's writer is heard even after the new file has appeared."""
    watch = Watch(job)
    path = job.path("workerlog.0")
    with path.open("ab", buffering=0) as writer:
        writer.write(b"one\n")
        assert watch.look() == ["one"]
        writer.write(b"two\n")
        path.rename(path.with_name("workerlog.0.1"))
        job.add("workerlog.0", "three\n")
        assert watch.look() == ["two", "three"]
        writer.write(b"late\n")
        job.add("workerlog.0", "four\n")
        assert watch.look() == ["late", "four"]
    assert watch.look(last=True) == []
    assert capsys.readouterr().err.count("was replaced") == 1


def test_a_removed_file_is_read_to_its_end_and_may_come_back(job: Job) -> None:
    """Oracle: the lines written, none of them twice."""
    watch = Watch(job)
    job.add("workerlog.0", "one\n")
    assert watch.look() == ["one"]
    job.add("workerlog.0", "two\n")
    away = job.log_dir / "away"
    job.path("workerlog.0").rename(away)
    assert watch.look() == ["two"]
    away.rename(job.path("workerlog.0"))
    job.add("workerlog.0", "three\n")
    assert watch.look() == ["three"]


def test_a_progress_bar_is_shown_now_and_then(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    """Oracle: the newest state, when BAR_EVERY has passed; then the final one; in raw nothing before the newline."""
    monkeypatch.setattr(stream, "BAR_EVERY", 0.05)
    watch, raw = Watch(job), Watch(job, LineFilter(raw=True), "raw")
    job.add("workerlog.0", "start\n 1%\r 2%\r")
    assert watch.look() == ["start"]
    time.sleep(0.06)
    job.add("workerlog.0", " 3%\r")
    assert watch.look() == [" 3%"]
    assert watch.look() == []
    job.add("workerlog.0", "100%\n")
    assert watch.look() == ["100%"]
    raw.look()
    assert raw.out.getvalue() == job.path("workerlog.0").read_bytes()


def test_a_huge_line_is_capped_in_bounded_memory(job: Job) -> None:
    """Oracle: how many bytes were written beyond the cap; the memory that tracemalloc counts."""
    import tracemalloc

    watch = Watch(job)
    job.add("workerlog.0", "")
    watch.look()
    tracemalloc.start()
    for _ in range(10):
        job.add("workerlog.0", b"x" * 1_000_000)
        assert watch.look() == []
    job.add("workerlog.0", "\nnext\n")
    capped, following = watch.look()
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert following == "next"
    assert capped == "x" * LONGEST_LINE + f" [{10_000_000 - LONGEST_LINE} bytes cut]"
    assert peak < 5_000_000


def test_nul_gaps_and_control_sequences_never_reach_the_output(job: Job) -> None:
    """Oracle: the text between them."""
    watch = Watch(job)
    job.add("workerlog.0", b"\0" * 200_000 + b"after the gap\n\x1b]0;title\x07\x1b[2Jsafe\n")
    assert watch.look() == ["after the gap", "safe"]


def test_grep_while_following(job: Job) -> None:
    """Oracle: the matching lines of those written."""
    watch = Watch(job, LineFilter(grep=Grep("^b.*r$")))
    job.add("workerlog.0", "bar\nbaz\nfoo bar\nb")
    assert watch.look() == ["bar"]
    job.add("workerlog.0", "eer\n")
    assert watch.look() == ["beer"]


def test_ranks_that_are_not_wanted_are_not_read(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    """Oracle: the reads that the files were asked for."""
    read: list[str] = []
    real = job.files.read

    def noted(file: LogFile, offset: int, size: int) -> bytes:
        read.append(file.name)
        return real(file, offset, size)

    monkeypatch.setattr(job.files, "read", noted)
    watch = Watch(job, wanted=FileFilter(ranks=parse_ranks("1")))
    for name in ("workerlog.0", "workerlog.1", "node.0.log", "other.txt"):
        job.add(name, f"{name}\n")
    assert watch.look() == ["workerlog.1"]
    assert set(read) == {"workerlog.1"}


def test_the_end_of_the_job_ends_the_following(job: Job) -> None:
    """Oracle: everything written before the end is shown; `ended` is asked at most once a second."""
    asked: list[float] = []
    over = threading.Event()

    def ended() -> bool:
        asked.append(time.monotonic())
        return over.is_set()

    out = io.BytesIO()
    printer = Printer(out, "raw", say=say_on_stderr)
    arguments = (job.files, FileFilter(), LineFilter(raw=True), printer, ended)
    thread = threading.Thread(target=follow, args=arguments)
    thread.start()
    for number in range(150):
        job.add("workerlog.0", f"line {number}\n")
        time.sleep(0.01)
    job.add("workerlog.0", "no newline")
    over.set()
    thread.join(10)
    assert not thread.is_alive()
    assert out.getvalue() == job.path("workerlog.0").read_bytes()
    assert all(later - earlier >= 0.99 for earlier, later in pairwise(asked))


def test_the_last_look_does_not_trust_a_stale_size(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    """NFS may tell an old size for a while; it is played here by a scan that repeats itself. Oracle: the lines written."""
    watch = Watch(job)
    job.add("workerlog.0", "one\n")
    assert watch.look() == ["one"]
    stale = job.files.scan()
    monkeypatch.setattr(job.files, "scan", lambda first: stale)
    job.add("workerlog.0", "two\n")
    assert watch.look() == []
    assert watch.look(last=True) == ["two"]


FEW = """
import sys
from pathlib import Path
from gptctl.logs.files import FileFilter
from gptctl.logs.local_files import LocalLogFiles
from gptctl.logs.printer import Printer
from gptctl.logs.stream import LineFilter, follow
folder = Path(sys.argv[1])
def ended():
    if not (folder / "rotated").exists():
        return False
    for rank in range(100):
        with (folder / "attempt-0" / f"workerlog.{rank}").open("a") as file:
            file.write(f"more {rank}\\n")
    return True
printer = Printer(sys.stdout.buffer, say=lambda text: print(text, file=sys.stderr))
follow(LocalLogFiles(folder, folder), FileFilter(), LineFilter(), printer, ended)
"""


def test_fewer_descriptors_than_files(job: Job) -> None:
    """A child may open 40 files and follows 100, two of which are rotated. Oracle: the lines written, each once."""
    for rank in range(100):
        job.add(f"workerlog.{rank}", f"first {rank}\n")
    child = subprocess.Popen(
        [sys.executable, "-c", FEW, str(job.log_dir)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (40, 40)),
    )
    assert child.stdout
    lines = [child.stdout.readline() for _ in range(100)]
    for rank in (0, 99):
        job.add(f"workerlog.{rank}", f"rest {rank}\n")
        job.path(f"workerlog.{rank}").rename(job.path(f"workerlog.{rank}.1"))
        job.add(f"workerlog.{rank}", f"new {rank}\n")
    (job.log_dir / "rotated").touch()
    rest, errors = child.communicate(timeout=20)
    written = [f"{word} {rank}" for rank in range(100) for word in ("first", "more")]
    written += [f"{word} {rank}" for rank in (0, 99) for word in ("rest", "new")]
    shown = [line.split("] ", 1)[1].strip() for line in [*lines, *rest.splitlines()]]
    assert sorted(shown) == sorted(written)
    assert errors.count("was replaced") == 2
    assert errors.count("\n") == 2
