"""The reader of rank_times.jsonl. Oracle: the numbers that the test wrote."""

from __future__ import annotations

import json
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import pytest

from gptctl.engine.file_reading import lines_of
from gptctl.jobs.rank_times import RankTimes, newest_rank_times, rank_times
from gptctl.jobs.store import JobRecord


@pytest.fixture
def job(tmp_path: Path) -> Callable[[str], JobRecord]:
    def with_file(text: str) -> JobRecord:
        (tmp_path / "rank_times.jsonl").write_text(text)
        run = str(tmp_path)
        return JobRecord("gpt-3f9a2c", "gpt", 0.0, "local", "local", run, run, 1, 2, 2, output_dir=run)

    return with_file


def line(step: int, *own_ms: float, attempt: int = 0, job: str | None = None, time: float = 5.0) -> str:
    fields = {"step": step, "own_ms": list(own_ms), "time": time, "attempt": attempt}
    return json.dumps(fields | ({"job": job} if job else {})) + "\n"


def test_every_step_in_order(job: Callable[[str], JobRecord]) -> None:
    record = job(line(1, 10.0, 12.5) + line(2, 11.0, 13.0) + line(2, 9.0, 8.0, attempt=1))
    expected = [
        RankTimes(0, 1, 5.0, [10.0, 12.5]),
        RankTimes(0, 2, 5.0, [11.0, 13.0]),
        RankTimes(1, 2, 5.0, [9.0, 8.0]),
    ]
    assert list(rank_times(record)) == expected
    assert newest_rank_times(record) == expected[-1]
    assert expected[0].median == 11.25


def test_lines_of_other_jobs_and_damaged_ones_are_skipped(job: Callable[[str], JobRecord]) -> None:
    bad = [
        '{"step": 3}\n', "[]\n", "garbage\n", '{"step": -1, "own_ms": [1], "time": 1}\n', '{"step": 3, "own_ms": [], "time": 1}\n',
        '{"step": 3, "own_ms": ["x"], "time": 1}\n', '{"step": 3, "own_ms": [true], "time": 1}\n',
        '{"step": 3, "own_ms": [1e400], "time": 1}\n', '{"step": 3, "own_ms": [1.0], "time": 1e300}\n',
        line(9, 1.0, job="another-3f9a2c"), '{"step": 4, "own_ms": [1.0, 2.0], "ti',
    ]  # fmt: skip
    record = job(line(7, 1.0, 2.0) + "".join(bad))
    assert list(rank_times(record)) == [RankTimes(0, 7, 5.0, [1.0, 2.0])]
    assert newest_rank_times(record) == RankTimes(0, 7, 5.0, [1.0, 2.0])


def test_nothing_recorded(job: Callable[[str], JobRecord], tmp_path: Path) -> None:
    record = job("")
    assert list(rank_times(record)) == []
    assert newest_rank_times(record) is None
    assert newest_rank_times(record._replace(output_dir="")) is None
    assert list(rank_times(record._replace(output_dir=str(tmp_path / "missing")))) == []


@pytest.mark.parametrize("chunk", [1, 3, 1 << 20])
@pytest.mark.parametrize(
    "text", [b"", b"a\nbb\n\nccc", b"a\nbb\nccc\n", b"toolongline\nb\n", b"b\ntoolongline", b"\n\n"]
)
def test_lines_of_a_file_cut_anywhere(tmp_path: Path, text: bytes, chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Oracle: bytes.split."""
    monkeypatch.setattr("gptctl.engine.file_reading.CHUNK", chunk)
    (tmp_path / "file").write_bytes(text)
    expected = [each for each in text.split(b"\n") if len(each) <= 5 and each]
    found = [each for each in lines_of(tmp_path / "file", 1000, 5) if each]
    assert found == expected
    # Of the last bytes, the first line is incomplete.
    assert [each for each in lines_of(tmp_path / "file", 4, 5) if each] == [
        each for each in text[-4:].split(b"\n")[len(text) > 4 :] if each
    ]


def test_a_large_file_takes_little_memory(job: Callable[[str], JobRecord]) -> None:
    text = line(1, *[123.45] * 1024)
    record = job(text * 1500)  # 12 MB
    tracemalloc.start()
    try:
        assert sum(1 for _ in rank_times(record)) == 1500
        assert tracemalloc.get_traced_memory()[1] < 6e6
    finally:
        tracemalloc.stop()
