"""The profiler records the steps it is told to. Oracles: the chrome trace format (tests/chrome_traces.py), the same run
without a profile, and the names of operators that torch documents."""

from __future__ import annotations

import json
import os
import re
import resource
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from gptctl.traces.rank_profile import read_profile
from tests.chrome_traces import assert_is_chrome_trace
from tests.conftest import ROOT
from tests.ranks import Ranks, run, start, tiny
from trainer.__main__ import main

ON = ("Profiler.enable=True",)


def traces(folder: Path) -> dict[str, dict[str, Any]]:
    """The traces below a folder by their path; all of them are valid."""
    files = sorted(folder.rglob("rank_[0-9]*.json*"))
    return {str(file.relative_to(folder)): assert_is_chrome_trace(file.read_text()) for file in files}


def steps_in(trace: dict[str, Any]) -> list[int]:
    found = [re.fullmatch(r"ProfilerStep#(\d+)", event["name"]) for event in trace["traceEvents"] if event["ph"] == "X"]
    return sorted(int(step[1]) for step in found if step)


def count(trace: dict[str, Any], name: str) -> int:
    return sum(event["ph"] == "X" and event["name"] == name for event in trace["traceEvents"])


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Steps 3, 4 and 5 of eight, on two ranks, in a folder with a name that is hard to quote."""
    folder = tmp_path_factory.mktemp('t"w\\o')
    ended = run(folder, *tiny(max_steps=8), *ON, "Profiler.scheduler=[3, 6]", world=2)
    assert ended.ok, ended.text
    return ended


def test_every_rank_writes_a_chrome_trace_of_the_steps(two: Any) -> None:
    """The operators in it are those of three updates: two micro-batches of two layers on each rank, one all-reduce each
    for the gradients and the summary of a step."""
    found = traces(two.folder / "output")
    names = [f"profiler_log/attempt-0/rank_{rank}.steps_3-5.json" for rank in range(2)]
    assert list(found) == names
    for rank, name in enumerate(names):
        trace = found[name]
        assert steps_in(trace) == [3, 4, 5]
        assert trace["gptctl"] == {
            "rank": rank,
            "world": 2,
            "steps": [3, 5],
            "dp": 2,
            "sharding": 1,
            "pp": 1,
            "mp": 1,
        }
        assert count(trace, "aten::_scaled_dot_product_flash_attention_for_cpu") == 3 * 2
        assert count(trace, "aten::_fused_adamw_") >= 3
        assert count(trace, "shared:all_reduce") == 3
        assert count(trace, "gloo:all_reduce") >= 3
    assert not list((two.folder / "output").rglob("*.part*"))


def test_the_first_rank_logs_a_table_of_operators(two: Any) -> None:
    assert "Profiler: recording steps 3 to 5." in two.out[0]
    assert "Profiler: operators of steps 3 to 5, rank 0, the 20 longest" in two.out[0]
    assert re.search(r"^ +aten::addmm +\d+\.\d+% ", two.out[0], re.MULTILINE)
    assert "by input shapes" not in two.out[0]
    assert "gptctl trace output/profiler_log/attempt-0" in two.out[0]
    assert "Profiler" not in two.out[1].split("Training: 8 steps")[-1]
    assert "USDT" not in two.text  # what Kineto says by itself


def test_the_summary_of_a_real_trace_is_consistent(two: Any) -> None:
    """Steps are those of the log; shares add up to 1; ranks that share two cores wait for each other."""
    for rank in range(2):
        profile = read_profile(two.folder / f"output/profiler_log/attempt-0/rank_{rank}.steps_3-5.json", rank)
        assert list(profile.steps) == [3, 4, 5]
        assert sum(profile.shares().values()) == pytest.approx(1)
        assert all(share > 0 for share in profile.shares().values())
        assert profile.all_communication >= profile.parts["communication"] - 1e-9
        assert profile.invalid == 0
        assert sum(profile.steps.values()) == pytest.approx(profile.seconds, rel=0.05)


def test_attention_takes_as_long_as_in_the_table_of_torch(tmp_path: Path) -> None:
    """Oracle: the totals of the operators in torch's own table, forward and backward."""
    keys = (*ON, "Profiler.scheduler=[1, 3]", "Profiler.detailed=True", "Engine.check_accuracy=True")
    ended = run(tmp_path, *tiny(max_steps=2), *keys)
    assert ended.ok, ended.text
    unit = {"us": 1e-6, "ms": 1e-3, "s": 1.0}
    table = ended.out[0].partition("all by their own time")[2].partition("all by cpu_time_total")[0]

    def total(name: str) -> float:
        # Name, self %, self, total %, total, …
        row = next(line.split() for line in table.splitlines() if line.split()[:1] == [name])
        number, suffix = re.fullmatch(r"([\d.]+)(us|ms|s)", row[4]).groups()
        return float(number) * unit[suffix]

    names = ("aten::scaled_dot_product_attention", "aten::_scaled_dot_product_flash_attention_for_cpu_ba...")
    profile = read_profile(tmp_path / "output/profiler_log/attempt-0/rank_0.steps_1-2.json", 0)
    assert profile.parts["attention"] == pytest.approx(sum(map(total, names)), rel=0.01)


def test_a_profile_changes_no_result(two: Any, tmp_path: Path) -> None:
    """Neither losses and gradients, nor what the log says about the time to read data and write the profile."""
    without = run(tmp_path, *tiny(max_steps=8), world=2)
    assert two.metrics() == without.metrics()
    assert two.metrics("grad_norm") == without.metrics("grad_norm")
    assert max(two.metrics("reader_time")) < 1
    assert not (tmp_path / "output/profiler_log").exists()


def test_without_a_profile_nothing_of_it_is_loaded(tmp_path: Path) -> None:
    """In a process of its own: neither our module, nor what torch's profiler loads when it starts."""
    program = f"""
import sys
from trainer.__main__ import main
code = main({tiny(max_steps=2)!r})
import torch
print("LOADED", [name for name in sys.modules if name in ("trainer.profiler", "trainer.trace_files")])
print("ACTIVE", torch.autograd._profiler_enabled(), "CODE", code)
"""
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, env={"PYTHONPATH": str(ROOT)}, capture_output=True, text=True
    )
    assert "LOADED []\nACTIVE False CODE 0" in done.stdout, done.stdout[-500:] + done.stderr


def test_detailed_logs_every_table(tmp_path: Path) -> None:
    ended = run(tmp_path, *tiny(max_steps=2), *ON, "Profiler.detailed=True", "Profiler.scheduler=[1, 3]")
    assert ended.ok, ended.text
    for name in (
        "the 20 longest",
        "all by their own time",
        "all by cpu_time_total",
        "all by self_cpu_memory_usage",
        "all by input shapes",
    ):
        assert f"rank 0, {name}" in ended.out[0]
    (trace,) = traces(tmp_path / "output").values()
    assert any("Input Dims" in event.get("args", {}) for event in trace["traceEvents"])


def test_a_run_that_ends_in_the_range_writes_what_it_has(tmp_path: Path) -> None:
    ended = run(tmp_path, *tiny(max_steps=3), *ON, "Profiler.scheduler=[2, 50]")
    assert ended.ok, ended.text
    assert "T029 Profiler.scheduler" in ended.text
    (name,) = (found := traces(tmp_path / "output"))
    assert name == "profiler_log/attempt-0/rank_0.steps_2-3.json"
    assert steps_in(found[name]) == [2, 3]


def test_a_stop_in_the_range_writes_and_the_next_run_records_the_rest(tmp_path: Path) -> None:
    """Steps count over all attempts: together both traces have every step of the range once."""
    last = 100_000
    keys = (*ON, f"Profiler.scheduler=[2, {last}]", "Profiler.profiler_log=mine/traces")
    ranks = start(tmp_path, *tiny(max_steps=last, ckpt_dir="auto"), *keys, world=2)
    ranks.wait_for("global step 3,")
    ranks.kill(signal.SIGTERM, rank=1)
    stopped = ranks.wait()
    assert stopped.ok, stopped.text
    at = stopped.status()["step"]
    # First what matters: whoever asked to stop may not wait for the profile.
    assert stopped.out[0].index("Stopped on request at") < stopped.out[0].index("Profiler: the traces of all ranks")
    assert stopped.status()["state"] == "stopped"
    folder = tmp_path / "output/mine/traces/attempt-0"
    assert sorted(file.name for file in folder.iterdir()) == [f"rank_{rank}.steps_2-{at}.json" for rank in range(2)]

    keys = (*ON, f"Profiler.scheduler=[2, {at + 3}]", "Profiler.profiler_log=mine/traces")
    rest = run(tmp_path, *tiny(max_steps=at + 5, ckpt_dir="auto"), *keys, world=2)
    assert rest.ok, rest.text
    found = traces(folder)
    assert len(found) == 4
    steps = [steps_in(found[f"rank_0.steps_{first}-{end}.json"]) for first, end in ((2, at), (at + 1, at + 2))]
    assert [*steps[0], *steps[1]] == list(range(2, at + 3))


def test_a_range_that_is_over_records_nothing_and_says_so(tmp_path: Path) -> None:
    run(tmp_path, *tiny(max_steps=5))
    ended = run(tmp_path, *tiny(max_steps=7, ckpt_dir="auto"), *ON)
    assert ended.ok, ended.text
    assert "nothing to record: Profiler.scheduler is [1, 5], and this run trains steps 6 to 7." in ended.out[0]
    assert not (tmp_path / "output/profiler_log").exists()


def test_a_folder_that_cannot_be_used_is_a_warning(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    ended = run(tmp_path, *tiny(max_steps=6), *ON, f"Profiler.profiler_log={tmp_path}/file/x", world=2)
    assert ended.ok, ended.text
    assert all("cannot record a profile: " in out and "Not a directory" in out for out in ended.out)
    assert ended.status()["state"] == "finished"


def broken_on_one_rank(arguments: Sequence[str]) -> int:
    import trainer.profiler

    def fail(*needed: object) -> None:
        raise RuntimeError("another profiler is running")

    if os.environ["RANK"] == "1":
        trainer.profiler.start_profile = fail
    return main(arguments)


def test_a_rank_that_cannot_record_holds_up_nobody(tmp_path: Path) -> None:
    """The training goes on, and the other rank writes its trace. A mock: torch's profiler fails on all ranks alike."""
    ended = Ranks([*tiny(max_steps=6), *ON], 2, tmp_path, {}, broken_on_one_rank).wait()
    assert ended.ok, ended.text
    assert "rank 1: cannot record a profile: another profiler is running" in ended.out[1]
    assert list(traces(tmp_path / "output")) == ["profiler_log/attempt-0/rank_0.steps_1-4.json"]


def limited(arguments: Sequence[str]) -> int:
    """Files of at most 30 KB, which is what a full disk does to a trace, and not to the rest."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (30_000, 30_000))
    return main(arguments)


def test_a_full_disk_is_a_warning_and_leaves_no_half_of_a_trace(tmp_path: Path) -> None:
    arguments = [*tiny(max_steps=6), *ON, "Engine.check_accuracy=True"]
    ended = Ranks(arguments, 2, tmp_path, {}, limited).wait()
    assert ended.ok, ended.text
    for rank, out in enumerate(ended.out):
        name = f"output/profiler_log/attempt-0/rank_{rank}.steps_1-4.json"
        assert f"cannot write the profile: {name}: not written completely; is the disk full?" in out
    assert "rank 0, the 20 longest" in ended.out[0]
    assert list((tmp_path / "output/profiler_log/attempt-0").iterdir()) == []
    assert ended.metrics("step") == [1, 2, 3, 4, 5, 6]


FAILING = """
import sys
import trainer.train
from trainer.__main__ import main
from trainer.errors import UserError

def fail(t, outcome):
    if outcome.step == 3:
        raise UserError("no progress", "try again")

trainer.train.take_note = fail
sys.exit(main(sys.argv[1:]))
"""


def test_an_error_in_the_range_is_the_error_that_is_shown(tmp_path: Path) -> None:
    """The run fails as it would without a profile: no trace, and nothing about the profiler. In a process of its own,
    which ends as Python does: torch crashes there if its profiler is still running."""
    words = [*tiny(max_steps=300), *ON, "Profiler.scheduler=[1, 300]"]
    done = subprocess.run(
        [sys.executable, "-c", FAILING, *words],
        cwd=tmp_path,
        env={"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stderr) == (93, "error: no progress\nhint: try again\n")
    assert not list((tmp_path / "output/profiler_log").rglob("*.json*"))


def test_a_job_and_its_attempt_have_a_folder_of_their_own(tmp_path: Path) -> None:
    environ = {"GPTCTL_JOB": "gpt-3f9a2c", "GPTCTL_ATTEMPT": "2"}
    ended = run(tmp_path, *tiny(max_steps=2), *ON, "Profiler.scheduler=[1, 2]", **environ)
    assert ended.ok, ended.text
    assert list(traces(tmp_path / "output")) == ["profiler_log/gpt-3f9a2c/attempt-2/rank_0.steps_1-1.json"]
    assert "gptctl trace gpt-3f9a2c;" in ended.out[0]


@pytest.mark.long
@pytest.mark.parametrize("layout", [{"mp_degree": 2}, {"pp_degree": 2}, {"sharding.sharding_degree": 2}])
def test_every_layout_can_be_recorded(tmp_path: Path, layout: dict[str, int]) -> None:
    keys = [f"Distributed.{name}={degree}" for name, degree in layout.items()]
    ended = run(tmp_path, *tiny(max_steps=3), *keys, *ON, "Profiler.scheduler=[2, 4]", world=2)
    assert ended.ok, ended.text
    found = traces(tmp_path / "output")
    assert [steps_in(trace) for trace in found.values()] == [[2, 3], [2, 3]]
    for file in (tmp_path / "output").rglob("rank_*.json"):
        assert read_profile(file, 0).all_communication > 0


def test_json_style_logs_tables_as_records(tmp_path: Path) -> None:
    keys = ("Engine.log_style=json", "Profiler.scheduler=[1, 2]")
    ended = run(tmp_path, *tiny(max_steps=1), *ON, *keys)
    assert ended.ok, ended.text
    records = [json.loads(line) for line in ended.out[0].splitlines()]
    assert any("operators of steps 1 to 1" in str(record) for record in records)
