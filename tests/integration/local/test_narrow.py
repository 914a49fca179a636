"""Tables, reports and charts on real terminals (ptys) of 40, 80 and 120 columns. Oracles: the records that were written,
the width of the window, and the model of a terminal in `tests/terminal.py`."""

from __future__ import annotations

import json
import re
import time
from pathlib import Path
from typing import Any

import pytest

from gptctl.engine.processes import this_process
from gptctl.jobs.store import JobRecord, Store
from tests.conftest import ROOT
from tests.terminal import GPTCTL, Run

WIDTHS = (40, 80, 120)
REASON = "rank 3 (node 1): RuntimeError: the file /data/corpus/part-0001_ids.npy is shorter than its index says"
COLOURS = {"COMPLETED": "32", "FAILED": "31", "RUNNING": "36", "CANCELLED": "35"}
CREATED = 1_790_000_000.0
CLOCK = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(CREATED))


class Desk:
    """A folder with records of jobs that nobody runs, and terminals in it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "home").mkdir()
        for name, state in (("ok", "COMPLETED"), ("bad", "FAILED"), ("gone", "CANCELLED"), ("now", "RUNNING")):
            self.add(f"char-gpt-{name}", state)

    def add(self, name: str, state: str) -> None:
        run = self.folder / "runs" / name
        (run / "attempt-0").mkdir(parents=True)
        started = time.time() - 100
        (run / "attempt-0/ranks.0.jsonl").write_text(json.dumps({"event": "start", "rank": 0, "time": started}))
        result = {"state": state, "reason": REASON if state == "FAILED" else "", "ended": started + 3661}
        if state == "RUNNING":
            (run / "claim.json").write_text(json.dumps(this_process()))
        else:
            (run / "result.json").write_text(json.dumps(result))
        lines = [self.line(step, started) for step in range(10, 410, 10)]
        (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        record = JobRecord(name, "char-gpt", CREATED, "local", "local", str(run), str(run / "logs"), 2, 4, 8, output_dir=str(run), token=name, handle={"x": 1})  # fmt: skip
        store = Store(self.folder / "store")
        assert store.add(record)
        store.accept(record)

    @staticmethod
    def line(step: int, started: float) -> dict[str, Any]:
        return {"step": step, "max_steps": 1000, "loss": 9 - step / 100, "lr": 1e-4, "tokens_per_second": 123456.0, "step_time": 360.0, "time": started}  # fmt: skip

    def show(self, columns: int, *arguments: str, **env: str) -> Run:
        env = {"GPTCTL_HOME": str(self.folder / "store"), **env}
        run = Run(GPTCTL, *arguments, cwd=self.folder, columns=columns, **env)
        assert run.finish() == 0, run.text
        lines = run.screen()
        # The terminal never had to wrap a line: a wrapped one is full, and continues on the next.
        assert max(map(len, lines)) <= columns
        return run


@pytest.fixture(scope="module")
def desk(tmp_path_factory: pytest.TempPathFactory) -> Desk:
    return Desk(tmp_path_factory.mktemp("narrow"))


@pytest.mark.parametrize("columns", WIDTHS)
def test_the_list_of_jobs(desk: Desk, columns: int) -> None:
    run = desk.show(columns, "list")
    rows = [line.split() for line in run.screen() if line.startswith(" char-gpt")]
    assert [row[1:3] for row in rows] == [["COMPLETED", "40%"], ["FAILED", "40%"], ["CANCELLED", "40%"], ["RUNNING", "40%"]]  # fmt: skip
    for state, colour in COLOURS.items():
        assert f"\x1b[{colour}m{state}" in run.text
    text = "\n".join(run.screen())
    # 600 steps of 360 s, of which 100 s have passed: 2 d 11:58.
    assert ("2 d 11:58" in text) == (columns > 40)
    assert (REASON[:31] in text) == (columns > 40)
    # A time is whole or not shown.
    assert text.count(CLOCK[:10]) == text.count(CLOCK)


def test_the_end_of_a_job_is_coloured(desk: Desk) -> None:
    run = desk.show(40, "wait", "char-gpt-ok")
    assert run.text == "char-gpt-ok: \x1b[32mCOMPLETED\x1b[0m\r\n"


def test_colours_can_be_switched_off(desk: Desk) -> None:
    assert not re.search(r"\x1b\[(3[1-6])m", desk.show(80, "list", NO_COLOR="1").text)


@pytest.mark.parametrize("columns", WIDTHS)
def test_the_status_of_a_job(desk: Desk, columns: int) -> None:
    text = "\n".join(desk.show(columns, "status", "char-gpt-now").screen())
    assert CLOCK in text
    assert "400 of 1,000 (40%)" in text
    assert "123,456 tokens/s" in text
    assert "2 d 11:58" in text


@pytest.mark.parametrize("columns", WIDTHS)
def test_a_chart(desk: Desk, columns: int) -> None:
    lines = desk.show(columns, "plot", "char-gpt-ok", "char-gpt-now").screen()
    assert lines[0].strip() == "loss"
    assert sum("┤" in line for line in lines) > 3
    assert "char-gpt-now" in lines[-2]


@pytest.mark.parametrize("columns", WIDTHS)
def test_metrics(desk: Desk, columns: int) -> None:
    lines = desk.show(columns, "logs", "char-gpt-ok", "--metrics", "--tail", "2").screen()
    assert lines[0] == "2 steps"
    assert [line.split()[:2] for line in lines if re.match(r" \d", line)] == [["390", "5.100000000"], ["400", "5.000000000"]]  # fmt: skip


@pytest.mark.parametrize("columns", WIDTHS)
def test_the_groups_of_a_layout(desk: Desk, columns: int) -> None:
    """Oracle: in dp2-mp2-pp2, rank 6 is in the groups 6,7 (mp), 4,6 (pp) and 2,6 (dp)."""
    lines = desk.show(columns, "topo", str(ROOT / "templates/configs/dp2-mp2-pp2.yaml")).screen()
    row = next(line.split() for line in lines if re.match(r" 0 +6 ", line))
    assert [cell for cell in row if "," in cell] == ["6,7", "4,6", "2,6"]


@pytest.mark.parametrize("columns", WIDTHS)
def test_a_profile_is_shown_without_python(desk: Desk, columns: int) -> None:
    text = "\n".join(desk.show(columns, "clusters", "show", "slurm-example").screen())
    assert "NCCL_SOCKET_IFNAME: bond0" in text
    assert "line 31" in text
    assert not re.search(r"None|True|False|\(\)|\{|'", text)


def test_the_notes_of_validate_are_indented(desk: Desk) -> None:
    lines = desk.show(40, "validate", str(ROOT / "templates/configs/char-gpt.yaml")).screen()
    notes = lines[lines.index("memory is an estimate:") + 1 :]
    assert all(re.match(r"  · \S|    \S|$", line) for line in notes), notes
