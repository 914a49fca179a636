"""Charts, and the rows of a run over several jobs. Oracles: the points that must be drawn, the size of the window."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from gptctl.cli.chart import ChartSize, Curve, draw, legend, step_ticks
from gptctl.jobs.resume import lineage
from gptctl.jobs.run_metrics import each_attempt, file_rows, job_rows, whole_run
from gptctl.logs.files import FileFilter
from gptctl.text import clean
from trainer.errors import UserError
from trainer.logline import TrainLine, evaluation_line

FALLING = Curve("gpt-1", range(1, 101), [5 - step / 25 for step in range(1, 101)])
FLAT = Curve("gpt-2", range(1, 51), [3.0] * 50)


@pytest.mark.parametrize("width", [40, 80, 120])
@pytest.mark.parametrize("coloured", [True, False])
def test_a_chart_fits_its_window(width: int, coloured: bool) -> None:
    text = draw("loss", [FALLING, FLAT], ChartSize(width, 22), coloured)
    lines = clean(text).rstrip("\n").split("\n")
    assert max(map(len, lines)) <= width
    assert len(lines) <= 22
    assert ("\x1b" in text) == coloured
    assert lines[-2].endswith("gpt-1  1 at step 100")
    assert lines[-1].endswith("gpt-2  3 at step 50")
    # Curves that cannot be told by colour have characters of their own.
    assert coloured or {"*", "+"} <= set("".join(lines[:-2]))


def test_a_falling_curve_falls() -> None:
    """Oracle: the column of the curve in each line moves to the right."""
    lines = draw("loss", [FALLING], ChartSize(60, 20), coloured=False).split("\n")
    first = [min(found) for line in lines if (found := [n for n, c in enumerate(line) if "\u2801" <= c <= "\u28ff"])]
    assert len(first) > 10
    assert first[:-1] == sorted(first[:-1])


@pytest.mark.parametrize("curve", [Curve("a", [5], [2.0]), Curve("a", [1, 2], [0.0, 0.0])])
def test_the_smallest_curves_are_drawn(curve: Curve) -> None:
    assert "at step" in draw("loss", [curve], ChartSize(40, 10), coloured=False)


def test_ticks_are_steps() -> None:
    assert step_ticks([FALLING, FLAT]) == [1, 25, 50, 75, 100]
    assert step_ticks([Curve("a", [3, 4], [0.0, 1.0])]) == [3, 4]


def test_the_legend_tells_the_last_value() -> None:
    assert legend([FALLING], coloured=False) == ["⠤⠤ gpt-1  1 at step 100"]


@pytest.mark.parametrize("installed", [None, SimpleNamespace()])
def test_plotext_is_missing_or_another_version(monkeypatch: pytest.MonkeyPatch, installed: Any) -> None:
    monkeypatch.setitem(sys.modules, "plotext", installed)
    with pytest.raises(UserError) as error:
        draw("loss", [FLAT], ChartSize(40, 20), coloured=False)
    assert error.value.hint.startswith("pip install 'gptctl[ui]';")


def job(folder: Path, name: str, continues: str, *lines: dict[str, Any]) -> Any:
    """What a record has; `lines` are those of metrics.jsonl."""
    output = folder / name
    output.mkdir()
    (output / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return SimpleNamespace(id=name, continues=continues, output_dir=str(output), log_dir=str(output / "logs"), run_folder=output, world=1)  # fmt: skip


def lines(*steps: int, **fields: Any) -> list[dict[str, Any]]:
    return [{"step": step, "loss": 1.0 * step, "step_time": 1.0, **fields} for step in steps]


def test_a_run_over_three_jobs_is_one_curve(tmp_path: Path) -> None:
    """The second job resumed after step 20 and the third after 40: 30 of the first, 50 of the second are void."""
    first = job(tmp_path, "a", "", *lines(10, 20, 30))
    second = job(tmp_path, "b", "a", *lines(30, 40, 50))
    third = job(tmp_path, "c", "b", *lines(45))
    jobs = {each.id: each for each in (first, second, third)}
    store: Any = SimpleNamespace(holds=jobs.__contains__, find=jobs.__getitem__)
    run = lineage(third, store)
    assert [each.id for each in run] == ["c", "b", "a"]
    assert [(row["job"], row["step"]) for row in whole_run(run)] == [("a", 10), ("a", 20), ("b", 30), ("b", 40), ("c", 45)]  # fmt: skip
    assert [row["step"] for row in whole_run(lineage(first, store))] == [10, 20, 30]


def test_a_job_that_has_logged_nothing_yet_changes_nothing(tmp_path: Path) -> None:
    first, second = job(tmp_path, "a", "", *lines(10, 20)), job(tmp_path, "b", "a")
    assert [row["step"] for row in whole_run([second, first])] == [10, 20]


def test_what_was_lost_before_a_resume_counts_no_more(tmp_path: Path) -> None:
    """Steps 6 to 9 were recorded, but the run resumed from 5 and now records every tenth step; sums by hand."""
    resumed = {"resumed_from": 5, "attempt": 1}
    one = job(tmp_path, "a", "", *lines(4, 5, 6, 7, 8, 9, 10, attempt=0), resumed)
    assert [row["step"] for row in whole_run([one])] == [4, 5]
    two = job(tmp_path, "b", "", *lines(4, 5, 6, 7, attempt=0), resumed, *lines(10, 20, attempt=1))
    assert [row["step"] for row in whole_run([two])] == [4, 5, 10, 20]
    assert [row["step"] for row in each_attempt(job_rows(two, FileFilter(all_attempts=True)))] == [4, 5, 6, 7, 10, 20]
    assert [row["step"] for row in file_rows(Path(two.output_dir, "metrics.jsonl"))] == [4, 5, 10, 20]


def test_attempts_can_be_asked_for(tmp_path: Path) -> None:
    record = job(tmp_path, "a", "", *lines(10, 20, attempt=0), *lines(20, 30, attempt=1))
    assert [row["step"] for row in job_rows(record, FileFilter(attempt=0))] == [10, 20]
    both = each_attempt(job_rows(record, FileFilter(all_attempts=True)))
    assert [(row["attempt"], row["step"]) for row in both] == [(0, 10), (0, 20), (1, 20), (1, 30)]


def test_a_script_is_read_from_its_log_lines(tmp_path: Path) -> None:
    """Without metrics.jsonl; of two attempts, the second repeats step 2."""
    record = job(tmp_path, "a", "")
    for attempt, steps in enumerate(((1, 2, 3), (2,))):
        folder = tmp_path / f"a/logs/attempt-{attempt}"
        folder.mkdir(parents=True)
        texts = [str(TrainLine(step, 0, 0, 3.0 + attempt, 0.1, 1.0, 1.0, 8, 8, 1e-4)) for step in steps]
        (folder / "workerlog.0").write_text("\n".join([*texts, evaluation_line("valid", 2, 0, 0, 2.5, 1.0), ""]))
    rows = whole_run([record])
    assert [(row["step"], row["loss"], row.get("valid_loss")) for row in rows] == [(1, 3.0, None), (2, 4.0, 2.5)]


def test_a_file_is_a_log_or_a_metrics_file(tmp_path: Path) -> None:
    record = job(tmp_path, "a", "", *lines(10, 20), *lines(20, 30))
    assert [row["step"] for row in file_rows(Path(record.output_dir, "metrics.jsonl"))] == [10, 20, 30]
    log = tmp_path / "x.log"
    log.write_text(f"noise\n{TrainLine(7, 0, 0, 3.0, 0.1, 1.0, 1.0, 8, 8, 1e-4)}\n")
    assert [row["step"] for row in file_rows(log)] == [7]
