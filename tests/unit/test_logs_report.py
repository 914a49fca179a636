"""Who failed, which files there are, how the training went. Oracles: records and logs written by hand, and their answers."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gptctl.backends import JobState
from gptctl.cli.logs import print_failure, print_list, print_metrics, show_failure
from gptctl.engine.job_result import FAILED, RUNNING
from gptctl.engine.rank_runs import node_exits, rank_runs
from gptctl.logs.failed import find_failure
from gptctl.logs.files import FileFilter
from gptctl.logs.local_files import LocalFile
from gptctl.logs.metric_rows import metric_rows
from gptctl.logs.tables import list_rows
from tests.unit.test_jobs import record
from tests.unit.test_logline import PUBLISHED
from tests.unit.test_logs import Job
from trainer.logline import TrainLine

T0 = 1_763_280_000.0


@pytest.fixture
def job(tmp_path: Path) -> Job:
    return Job(tmp_path)


def event(name: str, rank: int, time: float, **more: Any) -> str:
    common = {
        "event": name,
        "rank": rank,
        "local_rank": rank % 2,
        "node": rank // 2,
        "host": f"h{rank // 2}",
        "pid": 100 + rank,
    }
    return json.dumps({**common, "time": T0 + time, **more}) + "\n"


def end(rank: int, time: float, exit: int | None = None, signal: int | None = None) -> str:
    return event("end", rank, time, exit=exit, signal=signal, max_rss_mb=312)


def records(*lines: str, exits: dict[int, str] | None = None) -> dict[str, bytes]:
    found = {f"ranks.{node}.jsonl": b"" for node in range(2)}
    for line in lines:
        found[f"ranks.{json.loads(line)['node']}.jsonl"] += line.encode()
    return {**found, **{f"node.{node}.exit": text.encode() for node, text in (exits or {}).items()}}


STARTS = [event("start", rank, rank / 10) for rank in range(4)]


def order(*lines: str, exits: dict[int, str] | None = None) -> list[tuple[int, str]]:
    found = records(*lines, exits=exits)
    failure = find_failure(rank_runs(found), node_exits(found))
    return [(run.rank, run.how) for run in ([failure.first] if failure.first else []) + list(failure.cascade)]


@pytest.mark.parametrize(
    ("ends", "exits", "expected"),
    [
        ([end(1, 9, 1), end(0, 8, 2)], {}, [(0, "exit 2"), (1, "exit 1")]),
        # victims ended first, and are not named first
        ([end(0, 5, 3), end(1, 6, None, 15), end(3, 7, None, 9)], {}, [(3, "SIGKILL"), (0, "exit 3"), (1, "SIGTERM")]),
        # only victims: the earliest of them
        ([end(2, 7, None, 15), end(0, 6, 3)], {}, [(0, "exit 3"), (2, "SIGTERM")]),
        ([end(0, 5, 0), end(1, 6, None, 64), end(2, 5, 0)], {}, [(1, "SIGRTMAX")]),
        # no end, but the node's script has one: killed together with its watcher
        (
            [end(0, 5, 3), end(1, 5.1, 3)],
            {0: "3", 1: "137\n"},
            [(2, "killed, no exit recorded"), (0, "exit 3"), (1, "exit 3"), (3, "killed, no exit recorded")],
        ),
        ([end(rank, 5, 0) for rank in range(4)], {0: "0", 1: "0"}, []),
        ([], {}, []),
    ],
)
def test_who_failed_first(ends: list[str], exits: dict[int, str], expected: list[tuple[int, str]]) -> None:
    """Oracle: the order that a person would give."""
    assert order(*STARTS, *ends, exits=exits) == expected


def test_a_restart_by_torchrun_begins_a_new_round() -> None:
    """Oracle: the last round decides; what failed before it and ran well then is no failure."""
    first = [*STARTS[:2], end(0, 5, 1), end(1, 6, None, 15)]
    again = [event("start", 0, 10), event("start", 1, 10)]
    assert order(*first, *again, end(0, 20, 0), end(1, 20, 0)) == []
    assert order(*first, *again, end(1, 20, 7), end(0, 21, 3)) == [(1, "exit 7"), (0, "exit 3")]
    lost = [*STARTS[2:], end(2, 4, 1), end(3, 4, 1)]  # a node that did not come back is not why the last round failed
    assert order(*first, *lost, *again, end(1, 20, 7), end(0, 21, 3)) == [(1, "exit 7"), (0, "exit 3")]


GARBAGE = st.one_of(
    st.binary(max_size=40),
    st.fixed_dictionaries(
        {"event": st.sampled_from(["start", "end", 3])},
        optional={
            name: st.one_of(st.none(), st.integers(), st.floats(), st.text(max_size=3), st.booleans())
            for name in ("rank", "node", "host", "pid", "time", "exit", "signal", "max_rss_mb")
        },
    ).map(lambda value: json.dumps(value).encode()),
)


@settings(deadline=None)
@given(lines=st.lists(GARBAGE, max_size=12), code=st.binary(max_size=5))
def test_torn_records_never_crash(lines: list[bytes], code: bytes) -> None:
    """Oracle: no exception, and an answer that JSON can hold."""
    found = {"ranks.0.jsonl": b"\n".join(lines), "node.0.exit": code}
    json.dumps(find_failure(rank_runs(found), node_exits(found)).as_json(), allow_nan=False)


def write_records(job: Job, found: dict[str, bytes], attempt: int = 0) -> None:
    folder = job.run_dir / f"attempt-{attempt}"
    folder.mkdir(parents=True, exist_ok=True)
    for name, data in found.items():
        (folder / name).write_bytes(data)


def test_the_report_of_a_failure(job: Job, capsys: pytest.CaptureFixture[str]) -> None:
    """Oracle: the facts in the records and the last 30 lines of the log, clean."""
    write_records(job, records(*STARTS, end(0, 5, 3), end(3, 4.3, None, 9)) | {"ranks.9.jsonl": b'{"event": "en'})
    job.add("workerlog.3", "".join(f"line {number}\n" for number in range(50)) + "\x1b]0;x\x07the end")
    assert print_failure(job.files)
    text = capsys.readouterr().out
    assert "rank 3 failed first: SIGKILL" in text
    assert "host h1, node 1, pid 103" in text
    assert "after 4.0 s" in text
    assert "312 MB" in text
    assert "  line 21\n" in text
    assert "line 20\n" not in text
    assert "  the end\n" in text
    assert "rank 0 on h0 (node 0): exit 3, +0.7 s" in text
    assert "no exit recorded for 2 ranks (1, 2)" in text
    assert print_failure(job.files, as_json=True)
    answer = json.loads(capsys.readouterr().out)
    assert (answer["first"]["rank"], answer["cascade"][0]["rank"], len(answer["last_lines"])) == (3, 0, 30)


def test_ranks_that_were_killed_without_an_exit_are_named(job: Job, capsys: pytest.CaptureFixture[str]) -> None:
    """As `status` does, once the job is over: their agent was killed, and their watchers with it."""
    write_records(job, records(*STARTS[:3], end(0, 5, 0)))
    assert not print_failure(job.files)
    assert capsys.readouterr().out == "attempt 0: no rank has failed (3 started)\n"
    assert not print_failure(job.files, is_over=True)
    said = "attempt 0: no rank recorded a failure (3 started); 2 ranks (1, 2) killed, no exit recorded\n"
    assert capsys.readouterr().out == said
    print_failure(job.files, as_json=True, is_over=True)
    answer = json.loads(capsys.readouterr().out)
    assert [(run["rank"], run["was_killed"]) for run in answer["silent"]] == [(1, True), (2, True)]
    write_records(job, records(*STARTS, end(3, 5, 1)))
    assert print_failure(job.files, is_over=True)
    assert "no exit recorded for 3 ranks (0, 1, 2): killed\n" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("state", "is_copied", "is_killed"), [(FAILED, True, True), (FAILED, False, False), (RUNNING, True, False)]
)
def test_ranks_are_killed_only_if_the_job_is_over(
    job: Job, capsys: pytest.CaptureFixture[str], state: str, is_copied: bool, is_killed: bool
) -> None:
    """Until all records are copied, a rank without a last one may still be running."""
    write_records(job, records(*STARTS))
    if not is_copied:
        (job.run_dir / "not-copied").write_text("h1")
    session: Any = SimpleNamespace(state_of=lambda record: JobState(state))
    show_failure(session, record(local_dir=str(job.run_dir)), job.files, {"as_json": False, "attempt": None})
    assert ("4 ranks (0, 1, 2, 3) killed, no exit recorded" in capsys.readouterr().out) == is_killed


def test_no_rank_ever_started(job: Job, capsys: pytest.CaptureFixture[str]) -> None:
    """Oracle: the nodes' exit codes, and the log of the first node that failed; of the latest attempt."""
    write_records(job, {"node.0.exit": b"0\n"}, 0)
    write_records(job, {"node.0.exit": b"0\n", "node.1.exit": b"127\n"}, 1)
    job.add("node.1.log", "torchrun: command not found\n", 1)
    assert print_failure(job.files)
    text = capsys.readouterr().out
    assert "attempt 1: no rank ever started" in text
    assert "launch script of node 1: exit 127" in text
    assert "  torchrun: command not found\n" in text
    assert not print_failure(job.files, attempt=0)
    assert "attempt 0: nothing has failed" in capsys.readouterr().out


def test_an_earlier_attempt_that_failed_is_named(job: Job, capsys: pytest.CaptureFixture[str]) -> None:
    """Oracle: attempt 0 lost a rank, attempts 1 and 2 did not; who asks for one attempt gets that one only."""
    write_records(job, records(*STARTS, end(3, 4.3, None, 9)), 0)
    for attempt in (1, 2):
        write_records(job, records(*STARTS, *(end(rank, 5, 0) for rank in range(4))), attempt)
    assert not print_failure(job.files, job="j-1")
    assert capsys.readouterr().out.splitlines() == [
        "attempt 2: no rank has failed (4 started)",
        "attempt 0 failed: gptctl logs j-1 --failed --attempt 0",
    ]
    assert not print_failure(job.files, attempt=1, job="j-1")
    assert capsys.readouterr().out == "attempt 1: no rank has failed (4 started)\n"
    write_records(job, records(*STARTS, end(3, 4.3, None, 9)), 2)
    assert print_failure(job.files)
    assert "attempt 0" not in capsys.readouterr().out


def test_metrics_skip_what_cannot_be_a_step(job: Job) -> None:
    """Oracle: no exception; the line of a script has more digits than Python converts."""
    job.add("workerlog.0", train(1, 9.0).replace("step 1,", f"step {'9' * 5000},") + train(2, 8.0))
    assert [row["step"] for row in metric_rows(job.files, FileFilter())] == [2]


def test_the_list_of_files(job: Job, capsys: pytest.CaptureFixture[str]) -> None:
    """Oracle: what the records say of each file."""
    write_records(job, records(*STARTS, end(0, 5, 0), end(1, 5, None, 9), exits={0: "1"}))
    for rank in range(4):
        job.add(f"workerlog.{rank}", "x\n")
    job.add("node.0.log", "")
    rows = list_rows(job.files, FileFilter())
    assert [row["ended"] for row in rows] == ["exit 0", "SIGKILL", "running", "running", "exit 1"]
    assert list_rows(job.files, FileFilter(), job_is_over=True)[2]["ended"] == "no exit recorded"
    assert (rows[1]["rank"], rows[1]["node"], rows[1]["host"], rows[1]["size"]) == (1, 0, "h0", 2)
    print_list(job.files, FileFilter(node=0, per_node=2), as_json=True)
    assert [row["file"] for row in json.loads(capsys.readouterr().out)] == ["workerlog.0", "workerlog.1", "node.0.log"]
    print_list(job.files, FileFilter())
    assert capsys.readouterr().out.count("workerlog") == 4


def train(step: int, loss: float) -> str:
    return f"{TrainLine(step, 0, step, loss, 0.1, 0.5, 2.0, 400, 100, 1e-4)}\n"


def test_metrics_tell_each_step_once(job: Job, capsys: pytest.CaptureFixture[str]) -> None:
    """Oracle: rank 0 wins over rank 1, a step that was done again over its first time."""
    job.add("workerlog.0", train(1, 9.0) + train(2, 8.0) + "noise\n" + train(2, 7.5))
    job.add("workerlog.1", train(2, 1.0) + train(3, 7.0))
    assert [(row["step"], row["loss"]) for row in metric_rows(job.files, FileFilter())] == [
        (1, 9.0),
        (2, 7.5),
        (3, 7.0),
    ]
    print_metrics(metric_rows(job.files, FileFilter()))
    assert "3     7.000000000  100  400        2.00   1.00000e-04" in capsys.readouterr().out


def test_metrics_of_a_published_log(tmp_path: Path) -> None:
    """Oracle: the numbers in FleetX's lines, whose colour codes have lost their escape bytes."""
    path = tmp_path / "published.log"
    path.write_text("\n".join(PUBLISHED))
    rows = metric_rows(LocalFile(path), FileFilter())
    assert [(row["step"], row["loss"], row["lr"]) for row in rows] == [
        (1, 11.266701698, 5.55556e-09),
        (2, 11.620714188, 9.375e-09),
    ]
