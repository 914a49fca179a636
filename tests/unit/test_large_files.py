"""Files of metrics and events of any size and content. Oracles: what the operating system counted as the peak memory of
the child, and the numbers that were written."""

from __future__ import annotations

import json
import os
import random
import resource
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from gptctl.jobs.recorded_files import newest_rows, recorded_rows, rows_of_file
from gptctl.jobs.store import JobRecord
from gptctl.logs.row_sample import MOST_ROWS, sample_of
from tests.job_records import add_job

MOST_MB = 300
LINE = {
    "max_steps": 10**9, "epoch": 0, "samples": 1, "tokens": 1024, "lr": 1e-4, "grad_norm": 0.53214123, "loss_scale": 1.0,
    "tokens_per_second": 123456.7, "step_time": 0.5, "reader_time": 0.001, "compute_time": 0.4, "wait_time": 0.05,
    "optimizer_time": 0.012345, "memory": 1234567890, "mfu": 0.4321,
}  # fmt: skip


def metrics(file: Path, rows: int, begin: float) -> None:
    """A row for every second step, each of which took half a second. The highest loss is at one odd place."""
    rest = json.dumps(LINE)[1:]
    with file.open("a") as stream:
        for number in range(1, rows + 1):
            loss = 99.0 if number == rows // 3 + 1 else 2 + 1 / number
            times = f'"time": {begin + number}, "clock": {50.0 + number}, "attempt": 0'
            stream.write(f'{{"step": {2 * number}, "loss": {loss!r}, {times}, {rest}\n')


def events(record: JobRecord, ended: float) -> None:
    own = [{"event": "started", "attempt": -1, "time": record.created, "nodes": 1, "per_node": 1}, {"event": "attempt", "attempt": 0, "time": record.created}]  # fmt: skip
    (record.run_folder / "events.jsonl").write_text(
        "".join(json.dumps(each) + "\n" for each in [*own, {"event": "end", "attempt": 0, "time": ended}])
    )
    first = {"event": "first step", "attempt": 0, "time": record.created, "step": 1, "resumed": 0, "job": record.id}
    Path(record.output_dir, "events.jsonl").write_text(json.dumps(first) + "\n")


# Not of getrusage: there, a child begins with the peak of the process that started it.
PEAK = """
import re, sys
from gptctl.cli import cli
sys.argv[0] = "gptctl"
try:
    cli(sys.argv[1:])
finally:
    peak = re.search(r"VmHWM:\\s+(\\d+) kB", open("/proc/self/status").read())
    print("PEAK", int(peak[1]) // 1024, file=sys.stderr)
"""


def gptctl(home: Path, *words: str) -> tuple[str, int, float]:
    """Run a verb; return its output, its peak memory in MB, and its CPU seconds."""
    began = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(
        [sys.executable, "-c", PEAK, *words],
        capture_output=True,
        text=True,
        env={**os.environ, "GPTCTL_HOME": str(home)},
    )
    assert "Traceback" not in done.stderr, done.stderr
    ended = resource.getrusage(resource.RUSAGE_CHILDREN)
    peak = int(done.stderr.rpartition("PEAK ")[2])
    return done.stdout, peak, ended.ru_utime + ended.ru_stime - began.ru_utime - began.ru_stime


def words_for(verb: str, job: str, other: str) -> list[str]:
    jobs = {"list": ["--all"], "diff": [job, other]}.get(verb, [job])
    return [verb, *jobs, "--json"]


@pytest.mark.long
def test_a_gigabyte_of_metrics(tmp_path: Path) -> None:
    """Every verb stays below 300 MB; what is shown at once reads the end only. The accounts are those of each step."""
    rows = 2_300_000
    one, other = (add_job(tmp_path, name, days=40, ran=rows + 10.0) for name in ("a-000001", "b-000001"))
    file = Path(one.output_dir, "metrics.jsonl")
    metrics(file, rows, one.created)
    assert file.stat().st_size > 900_000_000
    os.link(file, Path(other.output_dir, "metrics.jsonl"))
    for record in (one, other):
        events(record, record.created + rows + 10)
    found = {}
    for verb in ("status", "list", "why", "cost", "plot", "diff"):
        text, peak, seconds = gptctl(tmp_path / "home", *words_for(verb, one.id, other.id))
        print(f"{verb}: {peak} MB, {seconds:.1f} s")
        assert peak <= MOST_MB, verb
        assert seconds < (3 if verb in ("status", "list", "why") else 300), verb
        found[verb] = json.loads(text)
    assert found["status"]["progress"]["step"] == 2 * rows
    (curve,) = found["plot"]
    assert (max(curve["values"]), curve["steps"][-1]) == (99.0, 2 * rows)
    assert MOST_ROWS // 4 < len(curve["steps"]) <= MOST_ROWS + 200
    (attempt,) = found["cost"]["rows"][0]["attempts"]
    assert attempt["accounts"]["data"] == pytest.approx(2 * rows * 0.001, rel=1e-3)
    assert attempt["accounts"]["wait"] == pytest.approx(2 * rows * 0.05, rel=1e-3)
    assert attempt["accounts"]["compute"] == pytest.approx(2 * rows * (0.5 - 0.051), rel=1e-3)


def hole(stream: Any, size: int) -> None:
    """What a crash of a machine leaves of a file whose length was written before its bytes."""
    stream.seek(size, os.SEEK_CUR)


def garbage(stream: Any, size: int) -> None:
    chance = random.Random(1)
    for _ in range(size >> 20):
        stream.write(chance.randbytes(1 << 20))


def one_line(stream: Any, size: int) -> None:
    stream.write(b'{"step": 3, "loss": "' + b"x" * size + b'"}\n')


def bombs(stream: Any, size: int) -> None:
    for _ in range(20):
        stream.write(b'{"step": 3, "a": ' + b"[" * 500_000 + b"\n")
        stream.write(b'{"step": 3, "a": ' + b"[" * 900 + b"]" * 900 + b"}\n")


DAMAGE = [(hole, 256 << 20), (garbage, 24 << 20), (one_line, 100 << 20), (bombs, 0)]


@pytest.mark.parametrize(("damage", "size"), DAMAGE, ids=[damage.__name__ for damage, _ in DAMAGE])
def test_good_rows_around_damage(tmp_path: Path, damage: Any, size: int) -> None:
    """Rows before and after it are found; the peak is that of a process of its own."""
    record = add_job(tmp_path, "a-000001")
    with Path(record.output_dir, "metrics.jsonl").open("wb") as stream:
        stream.write(b'{"step": 1, "loss": 4.0, "time": 5}\n')
        damage(stream, size)
        stream.write(b'\n{"step": 2, "loss": 3.0, "time": 6}\n')
    os.link(Path(record.output_dir, "metrics.jsonl"), Path(record.output_dir, "events.jsonl"))
    text, peak, _ = gptctl(tmp_path / "home", "plot", record.id, "--json")
    (curve,) = json.loads(text)
    assert (curve["values"][0], curve["values"][-1]) == (4.0, 3.0)
    assert peak <= 150
    began = time.process_time()
    rows, _ = newest_rows(record)
    assert [row["step"] for row in rows][-1:] == [2]
    assert time.process_time() - began < 1
    text, peak, _ = gptctl(tmp_path / "home", "cost", record.id, "--json")
    assert peak <= 150
    assert json.loads(text)


def test_a_gigabyte_of_events(tmp_path: Path) -> None:
    """Of a sparse file only the end has events: as many as fit, and each as short as can be."""
    record = add_job(tmp_path, "a-000001")
    short = b'{"event":"failure","time":5,"attempt":0}\n'
    for file in (record.run_folder / "events.jsonl", Path(record.output_dir, "events.jsonl")):
        with file.open("wb") as stream:
            stream.seek(1 << 30)
            stream.write(b"\n" + short * ((20 << 20) // len(short)))
    for verb in ("cost", "status", "why"):
        text, peak, seconds = gptctl(tmp_path / "home", verb, record.id, "--json")
        json.loads(text)
        assert peak <= MOST_MB, verb
        assert seconds < 30, verb


def row(step: int, loss: float = 1.0, attempt: int = 0, **more: Any) -> dict[str, Any]:
    return {"step": step, "attempt": attempt, "loss": loss, "speed": 1.0, **more}


def test_a_few_rows_are_all_kept() -> None:
    rows = [row(step) for step in (5, 7, 9, 3, 4, 4)]
    assert sample_of(iter(rows), 6).rows() == rows


def test_two_long_runs_keep_the_same_steps() -> None:
    """Although one resumed elsewhere, and is longer: a comparison needs common steps."""
    one, other = (sample_of(map(row, steps), 100).rows() for steps in (range(1, 1000), range(7, 1500)))
    common = {each["step"] for each in one} & {each["step"] for each in other}
    assert len(common) > 20
    assert max(len(one), len(other)) <= 110


def test_what_a_summary_must_not_miss_is_kept() -> None:
    """The spike at step 333, the evaluation at 501, where the first attempt ended (777), and the last row (1,499)."""
    rows = [row(step, 99.0 if step == 333 else 1 / step) for step in range(1, 778)]
    rows.insert(501, {"step": 501, "attempt": 0, "valid_loss": 2.0})
    rows += [row(step, attempt=1) for step in range(701, 1500)]
    kept = sample_of(rows, 100).rows()
    assert [each for each in kept if each in (rows[332], rows[501], rows[777], rows[-1])] == [rows[332], rows[501], rows[777], rows[-1]]  # fmt: skip
    assert [each["attempt"] for each in kept] == sorted(each["attempt"] for each in kept)


@pytest.mark.parametrize("step", [0, 3, 1 << 39])
def test_the_same_step_again_and_again(step: int) -> None:
    """As only a damaged file has it: the newest ones are kept, in bounded memory."""
    rows = [row(step, number) for number in range(5000)]
    kept = sample_of(rows, 100).rows()
    assert len(kept) <= 120
    assert kept[-1] == rows[-1]


def test_it_is_said_what_is_left_out(tmp_path: Path) -> None:
    """On stderr, in a short file with 100,001 records; one with 100,000 has them all."""
    for rows, expected in (
        (MOST_ROWS, ""),
        (MOST_ROWS + 1, f"{MOST_ROWS + 1:,} records: of most, one step in 2 is used"),
    ):
        file = tmp_path / "metrics.jsonl"
        file.write_text("".join(f'{{"step":{step},"loss":1,"step_time":1}}\n' for step in range(rows)))
        told: list[str] = []
        found = rows_of_file(file, say=told.append)
        assert "".join(told).partition("has ")[2].startswith(expected)
        assert bool(told) == bool(expected) == (len(found) < rows)


def test_values_are_limited_too() -> None:
    kept = sample_of(
        [row(step, **{f"x{step}.{n}": 1.0 for n in range(100)}) for step in range(1, 500)], 400, 10_000
    ).rows()
    assert sum(map(len, kept)) < 20_000


ODD = ["5", True, None, float("nan"), float("inf"), -1, 1e308, 10**400, [], {"a": []}, "\ud800", "x" * 100_000]


@pytest.mark.parametrize("name", ["step", "loss", "attempt", "time", "clock", "job", "step_time", "max_steps", "resumed_from", "event"])  # fmt: skip
def test_any_value_anywhere(tmp_path: Path, name: str) -> None:
    """Numbers as text, booleans, NaN, bombs, invalid UTF-8 and NUL bytes: the good rows are found, and verbs answer."""
    record = add_job(tmp_path, "a-000001", ran=1000)
    good = {"loss": 2.0, "time": record.created + 5, "clock": 5.0, "attempt": 0, "step_time": 0.5, "job": record.id}
    lines = [json.dumps({"step": 4, **good, name: value}).encode() for value in ODD]
    lines += [b"\xff\xfe{", b"\0" * 50, b'{"step": 4, "loss": 1\0}', b'{"step": 6, "lo', json.dumps({"step": 6, **good}).encode()]  # fmt: skip
    for file in ("metrics.jsonl", "events.jsonl"):
        Path(record.output_dir, file).write_bytes(b"\n".join(lines) + b"\n")
    (record.run_folder / "events.jsonl").write_bytes(b"\n".join(lines) + b"\n")
    assert recorded_rows(record)[-1]["step"] == 6
    for verb in ("status", "cost", "why"):
        text, _, _ = gptctl(tmp_path / "home", verb, record.id, "--json")
        json.loads(text, parse_constant=pytest.fail)
