"""Following by what the kernel reports. Real files; faults that the kernel itself makes.

Oracles: the lines that were written; whether a tick may list all files.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from gptctl.logs import log_watch
from tests.conftest import ROOT
from tests.unit.test_logs import Job
from tests.unit.test_logs_follow import Watch

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="inotify is a part of Linux")


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Job:
    monkeypatch.setattr(log_watch, "SCAN_EVERY", 1e9)
    return Job(tmp_path)


def trusting(job: Job) -> Watch:
    """A follower that has seen a report about a line of rank 0."""
    watch = Watch(job)
    job.add("workerlog.0", "start\n")
    watch.look()
    job.files.wait(0)
    assert watch.look() == []
    assert job.files.written() is None  # nothing was reported yet that could be compared
    job.add("workerlog.0", "reported\n")
    assert watch.look() == ["reported"]
    assert job.files.written() is not None
    return watch


def test_a_written_file_is_found_without_listing_all(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    """Names that are not of logs change nothing, whatever they contain."""
    watch = trusting(job)
    monkeypatch.setattr(job.files, "scan", lambda first: pytest.fail("all files were listed"))
    for name in (b"a\nb", b"\xff\xfe", b"x" * 255, b"workerlog.0\n", b"\x1b[2J"):
        (job.log_dir / "attempt-0" / os.fsdecode(name)).write_bytes(b"not a log\n")
    job.add("workerlog.0", "one\nhalf")
    assert watch.look() == ["one"]
    job.add("workerlog.0", " a line\n")
    assert watch.look() == ["half a line"]
    job.path("workerlog.0").write_text("short\n")
    assert watch.look() == ["short"]
    assert watch.look() == []


def test_changes_of_names_are_noticed(job: Job) -> None:
    """New, renamed, replaced and removed files, a new attempt, and a folder that replaces another one."""
    watch, folder = trusting(job), job.log_dir / "attempt-0"
    job.add("workerlog.1", "new\n")
    assert watch.look() == ["new"]
    job.add("workerlog.1", "rest\n")
    job.path("workerlog.1").rename(folder / "workerlog.1.old")
    job.add("workerlog.1", "replaced\n")
    assert watch.look() == ["rest", "replaced"]
    with (folder / "workerlog.1.old").open("a") as late:
        late.write("late\n")
    assert watch.look() == ["late"]
    job.path("workerlog.0").unlink()
    assert watch.look() == []
    job.add("workerlog.0", "back\n")
    assert watch.look() == ["back"]
    job.add("workerlog.0", "attempt 1\n", 1)
    assert watch.look() == ["attempt 1"]
    job.add("workerlog.0", "more\n", 1)
    job.add("workerlog.2", "", 0)
    job.add("workerlog.1", "last words\n", 0)
    assert watch.look() == ["last words", "more"]


def test_a_folder_that_replaces_another(job: Job) -> None:
    """Writes to the old folder are no news of the new one."""
    watch = trusting(job)
    away = job.log_dir / "away"
    (job.log_dir / "attempt-0").rename(away)
    job.add("workerlog.0", "other folder\n")
    assert watch.look() == ["other folder"]
    job.add("workerlog.0", "more\n")
    assert watch.look() == ["more"]
    with (away / "workerlog.0").open("a") as old:
        old.write("still written\n")
    job.add("workerlog.0", "and more\n")
    assert sorted(watch.look()) == ["and more", "still written"]
    shutil.rmtree(job.log_dir)
    assert watch.look() == []
    job.add("workerlog.0", "all folders are new\n")
    job.files._watch._scanned = 0  # type: ignore[union-attr] # as after SCAN_EVERY: nobody watches above log_dir
    assert watch.look() == ["all folders are new"]


def test_growth_without_a_report_ends_the_trust(job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel reports a write under the name that was opened, here one in another folder, as if another host wrote."""
    watch = trusting(job)
    other = tmp_path / "other name"
    other.hardlink_to(job.path("workerlog.0"))

    def write(text: str) -> None:
        with other.open("a") as file:
            file.write(text)

    write("unreported\n")
    assert watch.look() == []
    monkeypatch.setattr(log_watch, "SCAN_EVERY", 0)
    assert watch.look() == ["unreported"]
    monkeypatch.setattr(log_watch, "SCAN_EVERY", 1e9)
    for number in range(3):  # from now on, every tick looks at every file
        write(f"line {number}\n")
        assert watch.look() == [f"line {number}"]
        assert job.files.written() is None
    assert job.files._watch._reports is None  # type: ignore[union-attr]


def test_nothing_is_trusted_before_a_report(job: Job, tmp_path: Path) -> None:
    """No write to this file is reported: it was only opened under its other name."""
    watch = Watch(job)
    job.add("workerlog.0", "start\n")
    (tmp_path / "other name").hardlink_to(job.path("workerlog.0"))
    with (tmp_path / "other name").open("a", buffering=1) as other:
        assert watch.look() == ["start"]
        job.files.wait(0)
        for number in range(4):
            watch.look()
            other.write(f"line {number}\n")
            assert watch.look() == [f"line {number}"]


def test_too_many_reports(job: Job) -> None:
    """More than the kernel keeps: it drops the rest, and says so."""
    most = int(Path("/proc/sys/fs/inotify/max_queued_events").read_text())
    if most > 50_000:
        pytest.skip("the kernel keeps too many reports to fill their queue")
    watch = trusting(job)
    job.add("workerlog.1", "")
    watch.look()
    with job.path("workerlog.0").open("ab", 0) as zero, job.path("workerlog.1").open("ab", 0) as one:
        for _ in range(most // 2 + 10):  # alternating: the kernel merges equal reports
            zero.write(b".")
            one.write(b".")
    job.add("workerlog.2", "new\n")
    assert watch.look() == ["new"]
    job.add("workerlog.0", "\n")
    assert len(watch.look()[0]) > most // 2
    assert job.files.written() is not None  # trusted as before


def test_waiting_ends_with_a_report(job: Job) -> None:
    trusting(job)
    timer = threading.Timer(0.1, job.add, ("workerlog.0", "now\n"))
    begin = time.monotonic()
    timer.start()
    job.files.wait(30)
    assert 0.05 < time.monotonic() - begin < 15


NO_WATCHES = """
import sys
from pathlib import Path
from gptctl.logs import stream
from gptctl.logs.files import FileFilter
from gptctl.logs.local_files import LocalLogFiles
from gptctl.logs.printer import Printer
stream.ASK_EVERY = 0
folder, ticks = Path(sys.argv[1]), 0
files = LocalLogFiles(folder, folder)
def ended():
    global ticks
    ticks += 1
    with (folder / "attempt-0" / "workerlog.0").open("a") as file:
        file.write(f"line {ticks}\\n")
    return ticks == 3
stream.follow(files, FileFilter(), stream.LineFilter(), Printer(sys.stdout.buffer, say=print), ended)
assert files._watch._reports is None
"""


@pytest.mark.parametrize("limit", ["max_inotify_watches", "max_inotify_instances"])
def test_without_watches_files_are_polled(job: Job, limit: str) -> None:
    """In a user namespace whose limit is 0. Oracle: the lines that the child itself wrote."""
    job.add("workerlog.0", "line 0\n")
    lower = ["unshare", "--user", "--map-root-user", "sh", "-c", f'echo 0 > /proc/sys/user/{limit} && exec "$@"', "sh"]
    if not shutil.which("unshare") or subprocess.run([*lower, "true"], capture_output=True, check=False).returncode:
        pytest.skip("no user namespaces")
    result = subprocess.run(
        [*lower, sys.executable, "-c", NO_WATCHES, str(job.log_dir)],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        timeout=30,
        check=False,
    )
    assert result.stderr == ""
    assert result.stdout == "".join(f"[rank 0] line {number}\n" for number in range(4))
