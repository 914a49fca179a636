"""What a node may record about ranks. Oracle: how torchrun numbers ranks, and which node wrote each line."""

from __future__ import annotations

import gc
import json
import time
from pathlib import Path
from typing import Any

import pytest

from gptctl.engine import file_reading
from gptctl.engine.attempt_outcome import failed_attempt
from gptctl.engine.cause import Cause
from gptctl.engine.launch_plan import LaunchPlan
from gptctl.engine.node import NodeExit
from gptctl.engine.rank_owners import LARGEST_RECORDS, MOST_EVENTS, own_records, rank_events
from gptctl.engine.rank_runs import rank_runs
from gptctl.logs.failed import failure_in
from gptctl.logs.files import FileFilter, node_of_ranks
from gptctl.logs.local_files import LocalLogFiles
from gptctl.logs.tables import failure_report, list_rows
from tests.unit.test_supervisor import plan_in

STATIC = plan_in(Path("/x"), nodes=2, nnodes="2", per_node=2, world=4)
C10D = STATIC._replace(form="c10d")
ELASTIC = C10D._replace(nnodes="1:2")


def line(event: str, rank: object, node: object, time: float = 1.0, **more: Any) -> bytes:
    facts = {"event": event, "rank": rank, "node": node, "host": "h0", "pid": 7, "time": time, **more}
    return json.dumps({name: value for name, value in facts.items() if value is not None}).encode() + b"\n"


def killed(rank: object, node: object) -> bytes:
    """A rank that segfaults, before all others."""
    return line("start", rank, node) + line("end", rank, node, 2.0, signal=11)


def block(first: int, node: int | None, time: float = 1.0, **end: Any) -> bytes:
    """The two ranks of a node; without `end` they are running."""
    ends = [line("end", first + local, node, time + 1, **end) for local in (0, 1)] if end else []
    return b"".join([*(line("start", first + local, node, time) for local in (0, 1)), *ends])


def seen(plan: LaunchPlan | None, *files: bytes, outcome: bytes = b"") -> tuple[list[Any], list[str]]:
    """Rank, node and state of the latest process of each rank, and the files with forged lines."""
    named = {f"ranks.{node}.jsonl": data for node, data in enumerate(files)}
    records, forged = own_records({**named, "outcome.json": outcome}, plan)
    latest = {run.rank: (run.rank, run.node, run.how) for run in rank_runs(records)}
    return list(latest.values()), forged


RUNNING = [(0, 0, "running"), (1, 0, "running"), (2, 1, "running"), (3, 1, "running")]


@pytest.mark.parametrize("plan", [STATIC, C10D, ELASTIC])
@pytest.mark.parametrize(
    "forged",
    [
        killed(0, 0),  # of another node
        killed(4, 1),  # outside the world
        killed(-1, 1),
        killed(10**12, 1),
        killed(True, 1),
        killed("0", 1),
        killed(2, True),
        killed(2, "1"),
    ],
)
def test_a_line_about_another_node_or_no_rank_is_ignored(plan: LaunchPlan, forged: bytes) -> None:
    assert seen(plan, block(0, 0), block(2, 1) + forged) == (RUNNING, ["ranks.1.jsonl"])
    assert seen(plan, block(0, 0), forged + block(2, 1)) == (RUNNING, ["ranks.1.jsonl"])


@pytest.mark.parametrize("plan", [STATIC, C10D])
def test_a_node_cannot_claim_the_rank_of_another(plan: LaunchPlan) -> None:
    """As its own: with c10d the first node keeps it, and a node has no second group of ranks."""
    assert seen(plan, block(0, 0), block(2, 1) + killed(0, 1)) == (RUNNING, ["ranks.1.jsonl"])
    claimed, forged = seen(plan, block(0, 0), killed(0, 1))
    assert (claimed, forged) == (RUNNING[:2], ["ranks.1.jsonl"])


def test_with_c10d_nodes_may_have_any_group_of_ranks() -> None:
    swapped = [(0, 1, "running"), (1, 1, "running"), (2, 0, "running"), (3, 0, "running")]
    assert seen(C10D, block(2, 0), block(0, 1)) == (swapped, [])
    assert seen(STATIC, block(2, 0), block(0, 1)) == ([], ["ranks.0.jsonl", "ranks.1.jsonl"])


@pytest.mark.parametrize("plan", [STATIC, C10D, ELASTIC, None])
def test_records_without_a_node_are_those_of_their_file(plan: LaunchPlan | None) -> None:
    """So are those of restarts by torchrun, and damaged lines are no forgery."""
    again = block(2, None, signal=15) + b'{"event": "sta\n' + block(2, None, 9.0)
    assert seen(plan, block(0, None), again) == (RUNNING, [])


def test_the_order_of_nodes_is_that_of_their_numbers() -> None:
    plan = C10D._replace(nodes=11, nnodes="11", world=22)
    records = {"ranks.10.jsonl": killed(0, 10), "ranks.2.jsonl": block(0, 2)}
    assert own_records(records, plan)[1] == ["ranks.10.jsonl"]


def test_a_second_spelling_of_a_number_is_not_read() -> None:
    assert rank_runs({"ranks.01.jsonl": killed(2, 1), "ranks.1.jsonl": b""}) == []


@pytest.mark.parametrize(("plan", "rank", "reason"), [
    (STATIC, 0, "node 1 (b): x"), (STATIC, 4, "node 1 (b): x"), (STATIC, 2, "rank 2 (node 1): x"),
    (C10D, 0, "rank 0 (node 1): x"), (C10D, 4, "node 1 (b): x"),
])  # fmt: skip
def test_the_reason_of_a_job_names_no_rank_of_another_host(plan: LaunchPlan, rank: int, reason: str) -> None:
    """The agent of a host reports the first failure there."""
    result = failed_attempt([NodeExit(1, Cause("x", 1, rank))], ("a", "b"), plan)
    assert result is not None
    assert result.reason == reason


def test_an_elastic_job_numbers_its_nodes_again() -> None:
    """The node that is left gets the ranks of the one that failed; its earlier ones are dropped."""
    moved = [(0, 1, "running"), (1, 1, "running")]
    again = block(2, 1, signal=15) + block(0, 1, 9.0)
    assert seen(ELASTIC, block(0, 0, exit=1), again) == (moved, [])
    # The other way round, and with a new node that comes first.
    back = [(0, 0, "running"), (1, 0, "running")]
    assert seen(ELASTIC, block(2, 0, signal=15) + block(0, 0, 9.0), block(0, 1, exit=1)) == (back, [])
    swapped = [(0, 1, "running"), (1, 1, "running"), (2, 0, "running"), (3, 0, "running")]
    assert seen(ELASTIC, block(0, 0, signal=15) + block(2, 0, 9.0), block(0, 1, 9.0)) == (swapped, [])


def test_in_an_elastic_job_a_rank_that_runs_or_has_succeeded_cannot_be_claimed() -> None:
    again = block(2, 1) + block(0, 1, 9.0, signal=11)
    assert seen(ELASTIC, block(0, 0), again)[0] == RUNNING[:2]
    assert seen(ELASTIC, block(0, 0, exit=0), again)[0] == [(0, 0, "exit 0"), (1, 0, "exit 0")]
    # Its node was lost without an exit: the supervisor recorded that.
    outcome = json.dumps({"state": "FAILED", "exits": {"0": 255}}).encode()
    assert seen(ELASTIC, block(0, 0), again, outcome=outcome)[0] == [(0, 1, "SIGSEGV"), (1, 1, "SIGSEGV")]


def test_the_recorded_failure_comes_first_only_with_its_node() -> None:
    """With c10d, node 1 may say that it had rank 0: by the records, node 0 has it."""
    found = {"ranks.0.jsonl": killed(0, 0), "ranks.1.jsonl": line("end", 2, 1, 1.0, exit=5)}
    for node, first in ((0, 0), (1, 2)):
        outcome = json.dumps({"failure": {"cause": "x", "rank": 0, "node": node}}).encode()
        failure = failure_in({**found, "outcome.json": outcome})
        assert failure.first is not None
        assert failure.first.rank == first


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> LocalLogFiles:
    """A job whose second host reports that rank 0, of the first one, failed first."""
    monkeypatch.setattr(file_reading, "noticed", {})
    plan = plan_in(tmp_path, nodes=2, nnodes="2", per_node=2, world=4)
    (tmp_path / "plan.json").write_text(json.dumps(plan.as_json()))
    attempt, logs = tmp_path / "attempt-0", tmp_path / "logs" / "attempt-0"
    attempt.mkdir()
    logs.mkdir(parents=True)
    (attempt / "ranks.0.jsonl").write_bytes(block(0, 0))
    (attempt / "ranks.1.jsonl").write_bytes(killed(0, 0) + killed(7, 1) + block(2, 1, 5.0, exit=77))
    for rank in range(4):
        (logs / f"workerlog.{rank}").write_text("x\n")
    return LocalLogFiles(tmp_path / "logs", tmp_path)


def test_no_report_blames_the_rank_of_another_host(files: LocalLogFiles, tmp_path: Path) -> None:
    failure = failure_report(files).failure
    assert failure.first is not None
    assert (failure.first.rank, failure.first.node, failure.ranks_started) == (2, 1, 4)
    assert [row["ended"] for row in list_rows(files, FileFilter())] == ["running", "running", "exit 77", "exit 77"]
    assert node_of_ranks(files.records(0)) == {0: 0, 1: 0, 2: 1, 3: 1}
    assert list(file_reading.noticed) == [str(tmp_path / "attempt-0" / "ranks.1.jsonl")]


def test_a_file_without_end_is_read_in_part(request: pytest.FixtureRequest) -> None:
    """Megabytes of lines that say nothing, or of lines with large values, cost little more than a large real file."""
    real = line("start", 0, 0, padding="x" * 150) * MOST_EVENTS
    # What other tests keep in memory must not be searched for garbage meanwhile.
    gc.freeze()
    request.addfinalizer(gc.unfreeze)
    began = time.process_time()
    assert len(rank_events(real)) == MOST_EVENTS
    cost_of_real = time.process_time() - began
    began = time.process_time()
    assert len(rank_events(b'{"a":1}\n' * 500_000)) == MOST_EVENTS
    nested = b'{"rank": 0, "host": [' + b"[]," * 1000 + b'[]], "more": [' + b"[]," * 1000 + b"[]]}\n"
    events = rank_events(nested * 1500)
    assert events[0] == {"rank": 0}
    assert len(events) * len(nested) <= LARGEST_RECORDS
    assert rank_runs({"ranks.0.jsonl": nested * 1500, "ranks.1.jsonl": b"{}\n" * 1_000_000}) == []
    # Four files, 8 times the cost of one; without limits 30 times. Seconds differ between machines, ratios hardly.
    assert time.process_time() - began < 20 * cost_of_real
