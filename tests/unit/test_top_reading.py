"""How `gptctl top` reads jobs. Oracles: what the tests wrote, and the readers of `plot` and `cost`."""

from __future__ import annotations

import json
import os
import time
import tracemalloc
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from gptctl.backends import Backends, JobState
from gptctl.engine.job_result import UNKNOWN
from gptctl.jobs import appended_file, job_reading, top_collector
from gptctl.jobs.appended_file import AppendedFile
from gptctl.jobs.costs import EarlierSteps, ledger_of_job
from gptctl.jobs.job_reading import JobReader, rank_log
from gptctl.jobs.live_rows import LiveRows
from gptctl.jobs.run_metrics import whole_run
from gptctl.jobs.store import JobRecord, Store
from gptctl.jobs.timeline import Event
from gptctl.jobs.top_collector import TopCollector, Wanted
from gptctl.jobs.top_snapshot import detail_of, event_text, summary_of, without_most_exits
from gptctl.jobs.training_progress import progress_of
from tests.job_records import add_job

RUNNING = JobState("RUNNING")


def row(step: int, job: str = "gpt-1", **facts: Any) -> str:
    values = {"step": step, "loss": 5.0 - step / 1000, "step_time": 0.1, "tokens_per_second": 1000.0, "attempt": 0}
    return json.dumps({**values, "job": job, "time": 1000.0 + step, "max_steps": 500, **facts}) + "\n"


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Store:
    monkeypatch.setenv("GPTCTL_HOME", str(tmp_path / "home"))
    return Store(tmp_path / "home")


@pytest.fixture
def job(tmp_path: Path, store: Store) -> JobRecord:
    return add_job(tmp_path, "gpt-1", "RUNNING")


def test_only_new_lines_are_read(tmp_path: Path) -> None:
    path = tmp_path / "file"
    file = AppendedFile(path, 100)
    assert file.new_lines() == (b"", False), "not there yet"
    path.write_bytes(b"one\ntwo\nthr")
    assert file.new_lines() == (b"one\ntwo\n", True)
    assert file.new_lines() == (b"", False)
    with path.open("ab") as stream:
        stream.write(b"ee\nfour\n")
    assert file.new_lines() == (b"three\nfour\n", False)
    path.write_bytes(b"new\n")
    assert file.new_lines() == (b"new\n", True), "shorter: another file"
    (tmp_path / "other").write_bytes(b"replaced\n" * 2)
    os.replace(tmp_path / "other", path)
    assert file.new_lines() == (b"replaced\n" * 2, True)


def test_of_a_large_file_the_end_is_read(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"".join(b"line %03d\n" % number for number in range(200)))
    file = AppendedFile(path, 100)
    assert file.new_lines().data == b"".join(b"line %03d\n" % number for number in range(189, 200))


def test_an_endless_line_is_not_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(appended_file, "LONGEST_LINE", 50)
    path = tmp_path / "file"
    path.write_bytes(b"x" * 5000)
    file = AppendedFile(path, 100)
    assert [file.new_lines().data for _ in range(3)] == [b""] * 3
    assert file._offset == 5000
    with path.open("ab") as stream:
        stream.write(b"its end\nnext\n")
    assert file.new_lines().data == b"next\n"


@pytest.mark.parametrize("kind", ["missing", "folder", "fifo"])
def test_what_is_no_file_is_empty(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "file"
    if kind == "folder":
        path.mkdir()
    if kind == "fifo":
        os.mkfifo(path)
    assert AppendedFile(path, 100).new_lines() == (b"", False)


@pytest.mark.parametrize("is_numbered", [True, False])
def test_rows_are_those_of_plot(job: JobRecord, is_numbered: bool) -> None:
    """In whatever pieces they arrive; also when a later attempt trains steps again, and in the files of older versions,
    which do not number attempts."""
    file = Path(job.output_dir, "metrics.jsonl")
    first, second = ({"attempt": number if is_numbered else None} for number in (0, 1))
    text = "".join([row(step, **first) for step in (1, 2, 3, 4)] + [row(step, **second) for step in (3, 4, 5)])
    rows = LiveRows(job, 1 << 20, 1000)
    with file.open("a") as stream:
        for start in range(0, len(text), 97):
            stream.write(text[start : start + 97])
            stream.flush()
            rows.refresh()
    expected = [(each["step"], each["attempt"], each["loss"]) for each in whole_run([job])]
    assert [(each["step"], each["attempt"], each["loss"]) for each in rows.run] == expected
    assert [each["attempt"] for each in rows.rows] == [0] * 4 + [1] * 3


def test_old_steps_are_thinned_out(job: JobRecord) -> None:
    file, rows = Path(job.output_dir, "metrics.jsonl"), LiveRows(job, 1 << 20, 1000)
    with file.open("a") as stream:
        for start in range(1, 10_001, 100):
            stream.write("".join(row(step) for step in range(start, start + 100)))
            stream.flush()
            rows.refresh()
    assert len(rows.run) <= 1000 + 200
    steps = [each["step"] for each in rows.run]
    assert (steps[0], steps[-1]) == (1, 10_000)
    assert steps[-100:] == list(range(9901, 10_001)), "recent ones are complete"


def test_what_a_view_must_not_miss_is_kept(job: JobRecord) -> None:
    """Spikes, evaluations, and the last step before a restart, whatever is thinned out."""
    file, rows = Path(job.output_dir, "metrics.jsonl"), LiveRows(job, 1 << 22, 200)
    steps = [(step, 0) for step in range(1, 5004)] + [(step, 1) for step in range(4001, 9000)]
    losses = {(1234, 0): 99.0, (7777, 1): -99.0}
    lines = [row(step, attempt=attempt, loss=losses.get((step, attempt), 2.0)) for step, attempt in steps]
    evaluation = {"job": job.id, "step": 3001, "valid_loss": 1.5, "attempt": 0, "time": 4001.5}
    lines.insert(3001, json.dumps(evaluation) + "\n")
    with file.open("a") as stream:
        for start in range(0, len(lines), 700):
            stream.write("".join(lines[start : start + 700]))
            stream.flush()
            rows.refresh()
    kept = {(each["step"], each["attempt"]) for each in rows.rows}
    assert len(rows.rows) < 500
    assert {*losses, (5003, 0), (3001, 0), (8999, 1)} <= kept
    assert 1.5 in [each.get("valid_loss") for each in rows.rows]


def test_a_script_may_log_on_its_last_rank(tmp_path: Path, store: Store) -> None:
    """The time of its last step is that of the log that has steps."""
    script = add_job(tmp_path, "gpt-2", "RUNNING")._replace(output_dir="", world=4)
    logs = Path(script.log_dir, "attempt-0")
    logs.mkdir(parents=True)
    (logs / "workerlog.0").write_text("no step\n")
    (logs / "workerlog.3").write_text(SCRIPT_LINE)
    os.utime(logs / "workerlog.3", (2000.0, 2000.0))
    reading = JobReader(script, EarlierSteps(store)).read(RUNNING)
    assert (reading.run[-1]["step"], reading.changed) == (7, 2000.0)
    found = progress_of(script, is_over=False)
    assert found
    assert (found.step, found.updated) == (7, 2000.0), "as `list` shows it"


@pytest.mark.parametrize("until", [None, 9e9])
def test_a_whole_log_has_its_first_line(job: JobRecord, until: float | None) -> None:
    """Longer than what is read live, shorter than what is read of the past; a cut log has no part of a line."""
    log = Path(job.log_dir, "attempt-0", "workerlog.0")
    log.parent.mkdir(parents=True)
    log.write_text("".join(f"[2026-11-16 04:25:{n:02},000] [    INFO] - {n} {'x' * 1000}\n" for n in range(30)))
    numbers = [int(each.text.split()[5]) for each in rank_log(job, 0, until=until).lines]
    assert numbers == list(range(0 if until else 15, 30))


SCRIPT_LINE = (
    "[2026-11-16 04:25:43,446] [    INFO] - global step 7, epoch: 0, batch: 6, loss: 1.820000000, avg_reader_cost: 0.00100 sec, "
    "avg_batch_cost: 0.25000 sec, speed: 4.00 step/s, ips_total: 4096 tokens/s, ips: 2048 tokens/s, learning rate: 5.00000e-05\n"
)


def test_a_script_is_read_from_its_log(tmp_path: Path, store: Store) -> None:
    script = add_job(tmp_path, "gpt-2", "RUNNING")._replace(output_dir="")
    logs = Path(script.log_dir, "attempt-0")
    logs.mkdir(parents=True)
    (logs / "workerlog.0").write_text(SCRIPT_LINE)
    reading = JobReader(script, EarlierSteps(store), is_detailed=True).read(RUNNING, rank=0)
    shown = detail_of(reading, time.time())
    assert (shown.summary.step, shown.summary.loss, shown.summary.tokens_per_second) == (7, 1.82, 4096.0)
    assert [each.text for each in shown.log.lines] == [SCRIPT_LINE.rstrip()] if shown.log else False


def test_goodput_is_that_of_cost(job: JobRecord, store: Store) -> None:
    events = [{"event": "started", "time": 1000.0, "nodes": 1, "per_node": 1}, {"event": "end", "time": 1010.0}]
    Path(job.local_dir, "events.jsonl").write_text("".join(json.dumps(each) + "\n" for each in events))
    first = {"event": "first step", "time": 1000.5, "attempt": 0, "resumed": 0}
    Path(job.output_dir, "events.jsonl").write_text(json.dumps(first) + "\n")
    Path(job.output_dir, "metrics.jsonl").write_text("".join(row(step, step_time=0.9) for step in range(1, 9)))
    reading = JobReader(job, EarlierSteps(store)).read(JobState("COMPLETED"))
    expected = ledger_of_job(job, "COMPLETED", EarlierSteps(store), time.time()).goodput
    assert expected
    assert expected > 0.5
    assert summary_of(reading, time.time()).goodput == pytest.approx(expected)


def test_goodput_of_a_long_run_that_was_restarted_is_that_of_cost(job: JobRecord, store: Store) -> None:
    """The first attempt came to step 7,003, the second one trains again from step 5,001 on."""
    events: list[dict[str, Any]] = [
        {"event": "started", "time": 1000.0, "nodes": 1, "per_node": 1},
        {"event": "attempt", "time": 1000.0, "attempt": 0},
        {"event": "attempt", "time": 8010.0, "attempt": 1},
        {"event": "end", "time": 12_100.0},
    ]
    firsts = [
        {"event": "first step", "time": 1001.0, "attempt": 0, "resumed": 0},
        {"event": "first step", "time": 8020.0, "attempt": 1, "resumed": 5000},
    ]
    for folder, found in ((job.local_dir, events), (job.output_dir, firsts)):
        Path(folder, "events.jsonl").write_text("".join(json.dumps(each) + "\n" for each in found))
    text = "".join(row(step, step_time=0.9) for step in range(1, 7004))
    text += "".join(row(step, step_time=0.9, attempt=1, time=3025.0 + step) for step in range(5001, 9001))
    Path(job.output_dir, "metrics.jsonl").write_text(text)
    reading = JobReader(job, EarlierSteps(store)).read(JobState("COMPLETED"))
    assert len(reading.timeline.rows) < 3000, "thinned out"
    ledger = ledger_of_job(job, "COMPLETED", EarlierSteps(store), time.time())
    assert ledger.gpu_seconds["repeated"] > 1700
    assert reading.goodput == pytest.approx(ledger.goodput, abs=1e-4)


GARBAGE = [b"", b"\0" * 5000, b"{" * 5000, os.urandom(20_000), b"[]\n" * 3000, b'{"step": 1e999, "time": -5}\n' * 50]
GARBAGE += [
    b'{"step": 3, "loss": "x", "time": [], "attempt": -7, "ips_total": {}}\n',
    b'{"event": {}, "time": 1e400}\n' * 9,
]
GARBAGE += [
    b'{"event": "rank exit", "attempt": 0, "time": 5, "rank": [1], "how": {"a": 1}}\n{"event": "\x1b[2J", "time": 7}\n'
]
GARBAGE += [b'{"step": 3, "own_ms": [1, 2], "time": 5}\n{"step": 4, "loss": 2.5, "time": 9e10, "max_steps": 0}\n']


@pytest.mark.parametrize("data", GARBAGE)
@pytest.mark.parametrize("state", ["PENDING", "RUNNING", "LOST"])
def test_damaged_files_are_no_error(tmp_path: Path, job: JobRecord, store: Store, data: bytes, state: str) -> None:
    for name in ("metrics.jsonl", "metrics.repeated.jsonl", "rank_times.jsonl", "events.jsonl"):
        Path(job.output_dir, name).write_bytes(data)
    for name in ("events.jsonl", "config.json", "attempt-0/ranks.0.jsonl", "attempt-0/last-step", "alive.json"):
        Path(job.local_dir, name).write_bytes(data)
    logs = Path(job.log_dir, "attempt-0")
    logs.mkdir(parents=True)
    (logs / "workerlog.0").write_bytes(data)
    for at in (None, 0.0, 5.0, time.time()):
        collector = TopCollector(store, Backends(print), None, at)
        collector.ask()
        collector._states["gpt-1"] = JobState(state)
        shown = collector.snapshot(Wanted("gpt-1", 0))
        json.dumps(shown.as_json(), allow_nan=False)


def test_a_huge_file_takes_little_memory(job: JobRecord, store: Store) -> None:
    """Sparse: gigabytes of NULs, and rows at the end."""
    for name in ("metrics.jsonl", "events.jsonl", "rank_times.jsonl"):
        with Path(job.output_dir, name).open("wb") as stream:
            stream.truncate(2 << 30)
            stream.seek(0, 2)
            stream.write(b"\n" + row(9).encode())
    reader = JobReader(job, EarlierSteps(store), is_detailed=True)
    began = time.process_time()
    tracemalloc.start()
    try:
        assert reader.read(RUNNING).run[-1]["step"] == 9
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 100 << 20
    assert time.process_time() - began < 5


def test_expensive_parts_are_read_seldom(job: JobRecord, store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    original = job_reading.timeline_of
    monkeypatch.setattr(job_reading, "timeline_of", lambda *words: calls.append(1) or original(*words))
    reader, file = JobReader(job, EarlierSteps(store)), Path(job.output_dir, "metrics.jsonl")
    for step in range(1, 20):
        with file.open("a") as stream:
            stream.write(row(step))
        assert reader.read(RUNNING).run[-1]["step"] == step
    assert len(calls) == 1
    reader.read(JobState("COMPLETED"))
    assert len(calls) == 2, "a new state is shown with all of its events"


def test_a_job_without_a_folder(tmp_path: Path, store: Store) -> None:
    gone = JobRecord("gpt-9", "gpt", 5.0, "x", "local", str(tmp_path / "no"), str(tmp_path / "no/logs"), 1, 1, 1)
    reading = JobReader(gone, EarlierSteps(store), is_detailed=True).read(JobState("COMPLETED"), rank=0)
    shown = detail_of(reading, 10.0)
    assert (shown.summary.step, shown.summary.goodput, shown.events[0].text) == (None, None, "submitted")


def test_a_thousand_exits_are_told_by_few() -> None:
    exits = [Event("rank exit", 5.0, 0, {"rank": rank, "how": "SIGTERM"}) for rank in range(1000)]
    well = [Event("rank exit", 6.0, 0, {"rank": 0, "how": "exit 0"})]
    assert without_most_exits([*exits, *well]) == exits[:3]
    assert event_text(exits[0]) == "rank 0 exited: SIGTERM"
    assert event_text(Event("of a newer version", 5.0, 0, {})) == "of a newer version"


def test_all_jobs_newest_first(tmp_path: Path, store: Store) -> None:
    for number in range(40):
        add_job(tmp_path, f"gpt-{number:02}", days=float(40 - number))
    collector = TopCollector(store, Backends(print), None, None)
    collector.ask()
    shown = collector.snapshot(Wanted())
    assert [each.job for each in shown.jobs] == [f"gpt-{number:02}" for number in range(39, 9, -1)]
    assert {each.state for each in shown.jobs} == {"COMPLETED"}
    # Ended jobs are read once.
    for each in range(10, 40):
        assert (f"gpt-{each:02}", False) not in collector._readers


def test_cancel_says_what_happened(tmp_path: Path, store: Store) -> None:
    add_job(tmp_path, "gpt-1")
    collector = TopCollector(store, Backends(print), None, None)
    collector.ask()
    assert collector.cancel("gpt-1") == "gpt-1 has already ended"
    assert collector.cancel("gpt-none") == "no job gpt-none"


def test_states_of_the_past_are_asked_for_until_all_are_known(
    job: JobRecord, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = [UNKNOWN, UNKNOWN, "RUNNING", "FAILED"]
    monkeypatch.setattr(
        top_collector, "known_states", lambda records, *_: {each.id: JobState(answers.pop(0)) for each in records}
    )
    collector = TopCollector(store, Backends(print), job, time.time())
    for expected in ("UNKNOWN", "UNKNOWN", "RUNNING", "RUNNING", "RUNNING"):
        collector.ask()
        assert collector._states["gpt-1"].state == expected
    assert answers == ["FAILED"]


def test_the_past_is_read_once(job: JobRecord, store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    Path(job.output_dir, "metrics.jsonl").write_text("".join(row(step) for step in range(1, 9)))
    times = "".join(
        json.dumps({"step": step, "own_ms": [step, 2.0], "time": 1000.0 + step}) + "\n" for step in range(1, 9)
    )
    Path(job.output_dir, "rank_times.jsonl").write_text(times)
    stamps = {moment: datetime.fromtimestamp(moment).isoformat(" ") for moment in (1003, 1004, 1005)}
    logs = Path(job.log_dir, "attempt-0")
    logs.mkdir(parents=True)
    for rank in (0, 1):
        text = "".join(f"[{stamp},000] [    INFO] - -{moment % 10}\n" for moment, stamp in stamps.items())
        (logs / f"workerlog.{rank}").write_text(text)
    record = job._replace(created=900.0)
    collector = TopCollector(store, Backends(print), record, 1004.5)
    collector.ask()
    reads = []
    original = job_reading.rank_times
    monkeypatch.setattr(job_reading, "rank_times", lambda record: reads.append(1) or original(record))
    for wanted in (Wanted("gpt-1", 0), Wanted("gpt-1", 1), Wanted("gpt-1", 0)):
        found = collector.snapshot(wanted).detail
        assert found
        assert found.ranks
        assert (found.summary.step, found.ranks.step, found.ranks.own_ms) == (4, 4, [4, 2.0])
        assert found.log
        assert (found.log.rank, [each.text[-2:] for each in found.log.lines]) == (wanted.rank, ["-3", "-4"])
    assert len(reads) == 1
    assert (
        TopCollector(store, Backends(print), job._replace(created=2000.0), 1004.5).snapshot(Wanted("gpt-1")).jobs == ()
    )
