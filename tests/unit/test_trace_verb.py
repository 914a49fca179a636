"""`gptctl trace` on traces with known times. Oracles: sums on paper (tests/chrome_traces.py), and the documented layout of files."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from gptctl.engine.launch_plan import LaunchPlan
from gptctl.jobs.job_traces import trace_place
from gptctl.remote.file_owners import FileOwners, owner_by_name
from gptctl.traces.rank_profile import read_profile
from tests.chrome_traces import ON_CPU, assert_is_chrome_trace, event, step, write
from tests.unit.test_jobs import record

FOLDER = "profiler_log/attempt-0"


@pytest.fixture
def four(tmp_path: Path) -> Path:
    """Four ranks of two steps of 1 ms: the own work of rank 2 takes 900 µs per step, that of the others 600."""
    for rank in range(4):
        own = 900 if rank == 2 else 600
        events = [
            item
            for number in (1, 2)
            for item in (
                step(number, 1000 * number, 1000),
                event("aten::mm", 1000 * number, own),
                event("gloo:all_reduce", 1000 * number + own, 1000 - own, "user_annotation", tid=2),
            )
        ]
        write(tmp_path / FOLDER / f"rank_{rank}.steps_1-2.json", events)
    return tmp_path


def test_the_table_names_shares_the_slow_rank_and_the_files(gptctl, four: Path) -> None:
    done = gptctl("trace", "profiler_log", cwd=four)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        "steps 1 to 2, 4 ranks",
        "rank  step     longest  own time  matrix products  attention  other operators  communication  host gaps",
        "0     1.00 ms  1.00 ms  0.60 ms   60.0 %           0.0 %      0.0 %            40.0 %         0.0 %",
        "1     1.00 ms  1.00 ms  0.60 ms   60.0 %           0.0 %      0.0 %            40.0 %         0.0 %",
        "2     1.00 ms  1.00 ms  0.90 ms   90.0 %           0.0 %      0.0 %            10.0 %         0.0 %",
        "3     1.00 ms  1.00 ms  0.60 ms   60.0 %           0.0 %      0.0 %            40.0 %         0.0 %",
        "mean  1.00 ms  1.00 ms  0.68 ms   67.5 %           0.0 %      0.0 %            32.5 %         0.0 %",
        "rank 2 is slow: its own work takes 50.0 % longer than usual",
        "open in ui.perfetto.dev: rank_0.steps_1-2.json, rank_1.steps_1-2.json, rank_2.steps_1-2.json, "
        f"rank_3.steps_1-2.json, in {FOLDER}",
    ]
    assert done.stderr == ""


def test_json_has_all_numbers(gptctl, four: Path) -> None:
    done = gptctl("trace", "profiler_log", "--rank", "2", "--rank", "0", "--json", cwd=four)
    facts = json.loads(done.stdout)
    assert [each["rank"] for each in facts["ranks"]] == [0, 2]
    assert facts["steps"] == [1, 2]
    assert facts["shares"]["matrix_products"] == pytest.approx(0.75)
    assert facts["slowest"][0] == {
        "rank": 2,
        "own_time": pytest.approx(9e-4),
        "above_median": pytest.approx(0.2),
    }
    assert facts["ranks"][1]["steps"] == [{"step": 1, "seconds": 1e-3}, {"step": 2, "seconds": 1e-3}]
    assert facts["problems"] == []


def test_one_file_has_all_ranks(gptctl, four: Path) -> None:
    done = gptctl("trace", "profiler_log", "--output", "all.json", cwd=four)
    assert "all ranks in one timeline, for ui.perfetto.dev: all.json" in done.stdout
    trace = assert_is_chrome_trace((four / "all.json").read_text())
    assert len(trace["traceEvents"]) == 4 * 7
    # It is a trace like any other, with any name.
    assert "one trace, 1 rank" in gptctl("trace", "all.json", cwd=four).stdout


def test_too_many_processes_to_merge(gptctl, four: Path) -> None:
    """Each trace alone can be read; a message, not a bug."""
    one = event("aten::mm", 1000, 1)
    write(four / FOLDER / "rank_1.steps_1-2.json", [step(1, 1000, 1000), *({**one, "pid": n} for n in range(100_010))])
    done = gptctl("trace", "profiler_log", "--output", "all.json", cwd=four)
    assert (done.returncode, done.stderr.count("Traceback")) == (2, 0)
    assert "error: cannot merge the traces: more than 100,000 processes" in done.stderr
    assert not (four / "all.json").exists()


def test_a_damaged_trace_is_named_and_the_others_are_shown(gptctl, four: Path) -> None:
    file = four / FOLDER / "rank_1.steps_1-2.json"
    file.write_bytes(file.read_bytes()[:500])
    (four / FOLDER / "rank_3.steps_1-2.json").chmod(0)
    done = gptctl("trace", "profiler_log", "--output", "all.json", cwd=four)
    assert done.returncode == 0
    assert f"warning: {FOLDER}/rank_1.steps_1-2.json is damaged: not complete: it ends in the middle" in done.stderr
    assert "steps 1 to 2, " in done.stdout
    assert_is_chrome_trace((four / "all.json").read_text())
    assert [row[0] for row in done.stdout.splitlines()[2:4]] == ["0", "2"]
    only = gptctl("trace", "profiler_log", "--rank", "1", cwd=four)
    assert only.returncode == 1
    assert "error: no trace can be read" in only.stderr


def test_ranks_without_a_trace_are_named(gptctl, tmp_path: Path) -> None:
    for rank in (0, 3):
        write(tmp_path / FOLDER / f"rank_{rank}.steps_3-4.json", ON_CPU, gptctl={"world": 4})
    assert "warning: no trace of rank 1, 2: see its log\n" in gptctl("trace", "profiler_log").stderr
    assert gptctl("trace", "profiler_log", "--rank", "3").stderr == ""
    for world in (10**30, -1, True, "4", None, []):
        file = write(tmp_path / "t.json", ON_CPU, gptctl={"world": world})
        assert read_profile(file, 3).world == 0


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (("no/where",), 2, "error: no/where does not exist"),
        (("empty",), 2, "error: there are no traces"),
        (("gpt-1",), 2, "error: there are no jobs yet"),
        (
            ("profiler_log", "--rank", "7"),
            1,
            f"error: no trace of rank 7 in {FOLDER}\nhint: ranks with traces: 0, 1, 2, 3",
        ),
        (("profiler_log", "--attempt", "3"), 1, "error: attempt 3 has no traces\nhint: attempts with traces: 0"),
        (("profiler_log", "--output", "no/where.json"), 2, "error: cannot write no/where.json: No such file"),
        (("profiler_log", "--output", f"{FOLDER}/rank_0.steps_1-2.json"), 2, "is one of the traces"),
    ],
)
def test_mistakes(gptctl, four: Path, words: tuple[str, ...], code: int, message: str) -> None:
    (four / "empty").mkdir()
    before = (four / FOLDER / "rank_0.steps_1-2.json").read_bytes()
    done = gptctl("trace", *words, cwd=four)
    assert (done.returncode, message in done.stderr) == (code, True), done.stderr
    assert (four / FOLDER / "rank_0.steps_1-2.json").read_bytes() == before


def test_control_characters_in_a_trace_do_not_reach_the_terminal(gptctl, tmp_path: Path) -> None:
    write(tmp_path / "t\x1b[31m.json", [*ON_CPU, event("\x1b]0;x\x07aten::mm", 0, 1)], host_name="\x1b[2J")
    done = gptctl("trace", "t\x1b[31m.json")
    assert done.returncode == 0
    assert "\x1b" not in done.stdout + done.stderr


def test_the_last_attempt_and_its_last_steps_are_shown(gptctl, tmp_path: Path) -> None:
    for attempt, steps in ((0, "3-4"), (1, "3-4"), (10, "1-2"), (10, "3-4")):
        write(tmp_path / f"p/attempt-{attempt}/rank_0.steps_{steps}.json", ON_CPU)
    done = gptctl("trace", "./p")
    assert (
        "there are also older traces: p/attempt-0 steps 3-4, p/attempt-1 steps 3-4, p/attempt-10 steps 1-2"
        in done.stderr
    )
    assert "rank_0.steps_3-4.json, in p/attempt-10\n" in done.stdout
    assert "rank_0.steps_3-4.json, in p/attempt-1\n" in gptctl("trace", "./p", "--attempt", "1").stdout


PLAN = SimpleNamespace(form="static", per_node=2, world=4, nodes=2)


@pytest.mark.parametrize(
    ("path", "node"),
    [
        ("output/profiler_log/gpt-1/attempt-0/rank_3.steps_1-4.json", 1),
        ("output/mine/gpt-1/attempt-0/rank_0.steps_1-4.memory.pickle", 0),
        ("profiler_log/gpt-1/attempt-0/rank_2.steps_1-4.json", 1),
        ("output/profiler_log/gpt-1/attempt-0/rank_3.steps_1-4.json.part", 0),
        ("output/step_5/rank_3.steps_1-4.json", 1),
    ],
)
def test_a_trace_belongs_to_the_host_of_its_rank(path: str, node: int) -> None:
    plan: LaunchPlan = PLAN  # type: ignore[assignment]
    assert owner_by_name(path, plan) == node


def test_with_c10d_a_host_gets_the_traces_of_as_many_ranks_as_it_has(tmp_path: Path) -> None:
    """torchrun numbers the nodes there, so the first host that offers a trace owns it; a hostile one must not own all."""
    plan: LaunchPlan = SimpleNamespace(form="c10d", per_node=2, world=4, nodes=2)  # type: ignore[assignment]
    owners = FileOwners(tmp_path, plan)
    names = [f"output/profiler_log/gpt-1/attempt-0/rank_{rank}.steps_1-4.json" for rank in range(4)]
    assert [owners.may_take(1, "evil", name, False) for name in names] == [True, True, False, False]
    assert [owners.may_take(0, "good", name, False) for name in names] == [False, False, True, True]


@pytest.mark.parametrize(
    ("log", "remote", "local"),
    [
        ("profiler_log", "/there/output/profiler_log/gpt-1", "{here}/output/profiler_log/gpt-1"),
        ("a/b", "/there/output/a/b/gpt-1", "{here}/output/a/b/gpt-1"),
        ("/shared/x", "/shared/x/gpt-1", "{here}/profiler_log/gpt-1"),
        ("../x", "/there/x/gpt-1", "{here}/profiler_log/gpt-1"),
    ],
)
def test_where_traces_of_other_machines_are_copied_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, log: str, remote: str, local: str
) -> None:
    """Always into the job's folder on this machine, whatever the job's own folder is called there."""
    from gptctl.jobs import job_traces

    monkeypatch.setattr(job_traces, "read_plan", lambda folder: SimpleNamespace(output_dir="/there/output"))
    monkeypatch.setattr(job_traces, "frozen_value", lambda record, key: log)
    place = trace_place(record("gpt-1", local_dir=str(tmp_path), output_dir=str(tmp_path / "output")))
    assert place == (remote, local.format(here=tmp_path))
