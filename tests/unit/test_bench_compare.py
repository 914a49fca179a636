"""Rows of bench.json and their comparison. Oracles: changes that are made on purpose, in made-up noise and in real work."""

from __future__ import annotations

import json
import random
import time
from pathlib import Path
from typing import Any

import pytest

from tests.bench import compare, recorder
from tests.bench.recorder import record


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "bench.json"
    monkeypatch.setenv("BENCH_FILE", str(path))
    return path


def rows(file: Path) -> dict[str, Any]:
    found: dict[str, Any] = recorder.load(file)["rows"]
    return found


def noisy(mean: float, noise: float, rounds: int, seed: int) -> list[float]:
    rng = random.Random(seed)
    return [mean * rng.uniform(1 - noise, 1 + noise) for _ in range(rounds)]


def test_a_row_has_all_rounds_their_ratio_and_the_machine(file: Path) -> None:
    record("step", ours=[2.0, 3.0, 4.0], peer=[1.0, 1.0, 1.0], goal=2.5)
    row = rows(file)["step"]
    assert (row["ours"], row["peer"], row["ratio"], row["goal"]) == ([2.0, 3.0, 4.0], [1.0] * 3, 3.0, 2.5)
    assert row["load"] >= 0
    assert recorder.load(file)["machine"]["torch"]
    assert set(recorder.load(file)["machine"]) == {"cpu", "cores", "python", "torch"}


def test_running_again_replaces_a_row_or_adds_rounds(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    record("other", ours=[1])
    record("step", ours=[1, 2], peer=[1, 1])
    record("step", ours=[3, 4], peer=[1, 1])
    assert rows(file)["step"]["ours"] == [3, 4]
    monkeypatch.setenv("BENCH_MORE", "1")
    record("step", ours=[5], peer=[1])
    assert (rows(file)["step"]["ours"], rows(file)["step"]["ratio"]) == ([3, 4, 5], 4)
    assert rows(file)["other"]["ours"] == [1]


@pytest.mark.parametrize(
    ("factor", "noise", "rounds", "verdict"),
    [
        (1.2, 0.03, 5, "worse"),
        (0.8, 0.03, 5, "better"),
        (1.0, 0.01, 5, "same"),
        (1.02, 0.005, 9, "same"),  # beyond noise, but nobody cares
        (1.1, 0.3, 5, "too noisy"),
        (1.1, 0.1, 60, "worse"),  # more rounds find what few cannot
        (2.0, 0.01, 2, "too noisy"),  # nobody knows how two rounds vary
    ],
)
def test_verdicts(factor: float, noise: float, rounds: int, verdict: str) -> None:
    change = compare.change_of(noisy(1, noise, rounds, 1), noisy(factor, noise, rounds, 2))
    assert change.verdict == verdict
    # A rate that falls is as bad as a time that rises.
    rates = [[1 / each for each in noisy(mean, noise, rounds, seed)] for mean, seed in ((1, 1), (factor, 2))]
    assert compare.change_of(*rates, more_is_better=True).verdict == verdict


def test_noise_alone_is_rarely_called_a_change() -> None:
    pairs = [(noisy(1, 0.1, 5, 2 * n), noisy(1, 0.1, 5, 2 * n + 1)) for n in range(30)]
    verdicts = [compare.change_of(old, new).verdict for old, new in pairs]
    assert verdicts.count("worse") + verdicts.count("better") <= 1


def test_the_rounds_that_are_asked_for_are_enough() -> None:
    """The advice for few rounds, followed as often as it is given."""
    rounds, verdicts = 5, []
    for _ in range(3):
        change = compare.change_of(noisy(1, 0.1, rounds, 1), noisy(1, 0.1, rounds, 2))
        verdicts.append(change.verdict)
        rounds += change.more_rounds
    assert (verdicts[0], verdicts[-1]) == ("too noisy", "same")
    assert rounds < 1000


def written(folder: Path, name: str, monkeypatch: pytest.MonkeyPatch, factor: float = 1.0) -> str:
    monkeypatch.setenv("BENCH_FILE", str(folder / name))
    record("step", ours=noisy(factor, 0.01, 5, 1), peer=noisy(1, 0.01, 5, 2))
    record("rate", ours=noisy(100 / factor, 0.01, 5, 3), more_is_better=True)
    return str(folder / name)


def test_two_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    old, same, slow = (written(tmp_path, name, monkeypatch, f) for name, f in (("a", 1), ("b", 1.01), ("c", 1.5)))
    record("new one", ours=[1.0])
    assert compare.main([old, same]) == 0
    assert capsys.readouterr().out.endswith("0 worse, 0 better, 2 same, 0 too noisy\n")
    assert compare.main([old, slow]) == 1
    out = capsys.readouterr().out
    assert "new one  only in the new file" in out
    assert out.endswith("2 worse, 0 better, 0 same, 0 too noisy\n")
    assert compare.main([slow, old]) == 0
    assert "2 better" in capsys.readouterr().out


def test_another_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Ratios are compared; seconds of another machine say nothing."""
    old, new = written(tmp_path, "a", monkeypatch), written(tmp_path, "b", monkeypatch, 1.5)
    found = json.loads(Path(old).read_text())
    Path(old).write_text(json.dumps({**found, "machine": {"cpu": "another"}}))
    assert compare.main([old, new]) == 1
    out = capsys.readouterr().out
    assert "note: different machines" in out
    assert "rate  not compared" in out
    assert "1 worse" in out


@pytest.mark.parametrize("text", [None, "", "[]", "{}", '{"machine": 1, "rows": {"step": {"ours": []}}}'])
def test_a_file_that_cannot_be_compared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], text: str | None
) -> None:
    good, bad = written(tmp_path, "a", monkeypatch), tmp_path / "bad"
    if text is not None:
        bad.write_text(text)
    assert compare.main([good, str(bad)]) == 2
    assert "error: cannot compare" in capsys.readouterr().err


def test_real_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Real CPU seconds: of sorting the same list, and then a list that is five times as long."""

    def cpu_of_sorting(count: int) -> float:
        numbers = random.Random(1).choices(range(1 << 30), k=count)
        began = time.process_time()
        for _ in range(5):
            sorted(numbers)
        return time.process_time() - began

    files = []
    for name, count in (("a", 1000), ("b", 5000)):
        monkeypatch.setenv("BENCH_FILE", str(tmp_path / name))
        pairs = [(cpu_of_sorting(count), cpu_of_sorting(1000)) for _ in range(7)]
        record("sorting", ours=[mine for mine, _ in pairs], peer=[peer for _, peer in pairs])
        files.append(str(tmp_path / name))
    assert compare.main(files) == 1
    assert "sorting" in capsys.readouterr().out
    assert compare.main([files[0], files[0]]) == 0
