"""The likely cause of a failure. Oracles: the excerpt that each test writes into the logs of a job, and the code beside it."""

from __future__ import annotations

import json
import re
import time
from pathlib import Path
from re import _constants, _parser  # type: ignore[attr-defined]
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gptctl.backends import Backends
from gptctl.engine.first_failure import cause_on_nodes
from gptctl.engine.run_folder import RunFolder
from gptctl.jobs.failures import CATALOGUE, Evidence, LogText, likely_cause, lines_of, own_hint
from gptctl.jobs.store import JobRecord
from gptctl.jobs.why import explain
from gptctl.jobs.why_text import why_pairs
from tests.unit.failure_excerpts import EXCERPTS, HEALTHY, LIKE_CONSEQUENCES, STEPS, TRACE, Excerpt
from tests.unit.test_docs import parse
from tests.unit.test_first_failure import LOST, Attempt
from tests.unit.test_jobs import record


@pytest.fixture(autouse=True)
def _home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GPTCTL_HOME", str(tmp_path / "home"))


def failed_job(folder: Path, excerpt: Excerpt) -> JobRecord:
    """A job of two nodes whose rank 3, or node 1, failed as the excerpt says; rank 0 lost its connection then."""
    attempt = Attempt(folder)
    if excerpt.batch:
        (attempt.logs / "batch.log").write_text(excerpt.batch)
    cause = None
    if not excerpt.reason:
        if excerpt.signal != 15:  # torchrun stops ranks with it: any other failure would come first
            attempt.rank(0, 0, LOST, exit=1, time=101.5 if excerpt.code in LIKE_CONSEQUENCES else 100.5)
        if excerpt.node:
            (attempt.logs / "node.1.log").write_text(excerpt.node)
            codes = {1: excerpt.node_exit}
        else:
            end = {"exit": excerpt.exit, "signal": excerpt.signal, "oom": excerpt.oom, "time": 101.0}
            attempt.rank(3, 1, STEPS + excerpt.log, **end)
            codes = {0: 1, 1: 1}
        for node, code in codes.items():
            (attempt.folder.attempt(0) / f"node.{node}.exit").write_text(f"{code}\n")
        cause = cause_on_nodes(attempt.folder, 0, str(attempt.logs.parent), codes, 1)
        assert cause is not None
        assert (cause.rank, cause.node) == (None if excerpt.node else 3, 1)
    reason = cause.reason() if cause else excerpt.reason
    attempt.folder.finish(excerpt.state, reason, cause)
    where = {"local_dir": str(folder), "log_dir": str(attempt.logs.parent), "nodes": 2, "per_node": 2, "world": 4}
    return record("gpt-1", **where)


def why(folder: Path, excerpt: Excerpt) -> dict[str, Any]:
    return explain(failed_job(folder, excerpt), Backends(print))


@pytest.mark.parametrize("excerpt", EXCERPTS, ids=lambda excerpt: excerpt.code)
def test_each_kind_of_failure_is_recognised(tmp_path: Path, excerpt: Excerpt) -> None:
    """With a healthy start of the log, and a rank that seems to have failed before."""
    facts = why(tmp_path, excerpt)
    likely = facts["likely_cause"]
    assert likely, facts
    assert likely["code"] == excerpt.code, (likely["title"], likely["line"])
    assert facts["explained"]
    assert likely["fix"]
    assert all("{" not in command for command in facts["commands"])
    json.dumps(facts, allow_nan=False)
    names = [name for name, _ in why_pairs(facts, time.time())]
    assert {"state", "cause", "fix", "try"} <= set(names)


def test_every_signature_has_an_excerpt_and_another_code() -> None:
    codes = [each.code for each in CATALOGUE]
    assert len(set(codes)) == len(codes) >= 30
    assert {excerpt.code for excerpt in EXCERPTS} == set(codes)


@pytest.mark.parametrize("text", HEALTHY.values(), ids=list(HEALTHY))
def test_healthy_logs_match_nothing(text: str) -> None:
    assert likely_cause(Evidence("FAILED", "exit code 5", (LogText("rank 3", text),), 5)) is None
    # The oracle of the oracle: the same log, with a failure at its end.
    failed = LogText("rank 3", f"{text}{TRACE}OSError: [Errno 28] No space left on device\n")
    found = likely_cause(Evidence("FAILED", "exit code 5", (failed,), 5))
    assert found is not None
    assert found.signature.code == "K043"


def test_an_unknown_failure_has_no_cause(tmp_path: Path) -> None:
    facts = why(tmp_path, Excerpt("", f"{TRACE}ValueError: the moon is full\n"))
    assert (facts["explained"], facts["likely_cause"]) == (False, None)
    assert facts["failure"]["rank"] == 3
    assert facts["commands"] == ["gptctl logs gpt-1 --failed"]
    assert ("cause", "not one that gptctl knows: read the last lines of its log") in why_pairs(facts, 0.0)


# How one of several is chosen

TIMEOUT = "[rank3]:[E301 10:20:44.9 ProcessGroupNCCL.cpp:616] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=8)\n"


@pytest.mark.parametrize(
    ("said", "logs", "code"),
    [
        # What the failure says of itself, before older lines of its log, whatever their place in the catalogue.
        ("OSError: [Errno 28] No space left on device", ["CUDA out of memory, trying a smaller batch\n"], "K043"),
        # A specific line of the log, before a general text of the failure.
        ("NCCL error: unhandled system error", ["NCCL WARN Call to ibv_create_qp failed with error 12\n"], "K020"),
        ("NCCL error: unhandled system error", ["nothing\n"], "K033"),
        # The log of the rank, before that of its node.
        ("exit code 1", [f"{TRACE}OSError: Disk quota exceeded\n", "Host key verification failed.\n"], "K044"),
        ("exit code 1", [STEPS, "Host key verification failed.\n"], "K027"),
        # Of two in one log: the one that explains more.
        ("exit code 1", [f"Xid (PCI:0000:4e:00): 48, pid=1\n{TRACE}RuntimeError: CUDA error: an illegal memory access was encountered\n"], "K003"),
        # A specific one of the node, before a general one of the rank.
        ("exit code 1", [TIMEOUT, "slurmstepd: error: Detected 1 oom_kill event in StepId=7.0\n"], "K040"),
        ("exit code 1", [TIMEOUT, "nothing\n"], "K032"),
    ],
)  # fmt: skip
def test_the_most_specific_at_the_first_failure_is_chosen(said: str, logs: list[str], code: str) -> None:
    texts = tuple(LogText(f"log {number}", text) for number, text in enumerate(logs))
    found = likely_cause(Evidence("FAILED", said, texts, 1))
    assert found is not None
    assert found.signature.code == code


def test_what_was_handled_long_ago_does_not_count() -> None:
    log = LogText("rank 3", "OSError: [Errno 28] No space left on device\n" + STEPS * 10)
    assert likely_cause(Evidence("FAILED", "exit code 5", (log,), 5)) is None


def test_the_hint_of_the_program_itself_is_the_fix(tmp_path: Path) -> None:
    """Not the hint of another error above it."""
    log = "error: first\nhint: wrong one\nrank 3: error: no room\nhint: take a larger one\nbye\n"
    assert own_hint("no room", log) == "take a larger one"
    assert own_hint("something else", log) == ""
    facts = why(tmp_path, Excerpt("K081", "rank 3: error: odd data in x\nhint: prepare it again\n", 93))
    assert facts["likely_cause"]["fix"] == "prepare it again"


def test_a_killed_torchrun_is_named_by_both_verbs(tmp_path: Path) -> None:
    """The node failed, its ranks with it, and rank 0 seems to have failed before: `logs --failed` says the same as `why`."""
    from gptctl.logs.local_files import LocalLogFiles
    from gptctl.logs.tables import failure_report

    job = failed_job(tmp_path, Excerpt("", node="x\n", node_exit=137))
    facts = explain(job, Backends(print))
    assert (facts["failure"]["rank"], facts["failure"]["node"], facts["failure"]["signal"]) == (None, 1, 9)
    known = RunFolder(tmp_path).result()
    assert known is not None
    files = LocalLogFiles(Path(job.log_dir), job.run_folder)
    report = failure_report(files, state="FAILED", is_over=True, known=known.failure)
    assert next(report.lines()).startswith("attempt 0: node 1 failed first: torchrun killed by signal 9")
    assert list(report.last) == ["node.1.log"]
    assert [run.rank for run in report.failure.cascade] == [0]


def test_a_rank_that_left_early_is_first_in_both(tmp_path: Path) -> None:
    from gptctl.logs.local_files import LocalLogFiles
    from gptctl.logs.tables import failure_of

    attempt = Attempt(tmp_path)
    attempt.rank(0, 0, LOST, exit=1, time=103.0)
    attempt.rank(1, 0, "bye\n", exit=0, time=102.0)
    cause = attempt.cause(n0=1)
    assert cause is not None
    attempt.folder.finish("FAILED", cause.reason(), cause)
    job = record("gpt-1", local_dir=str(tmp_path), log_dir=str(tmp_path / "logs"))
    facts = explain(job, Backends(print))
    assert (facts["failure"]["rank"], facts["likely_cause"]["code"]) == (1, "K076")
    assert "gptctl logs gpt-1 --rank 1 --tail 20" in facts["commands"]
    _, failure = failure_of(LocalLogFiles(tmp_path / "logs", tmp_path), is_over=True, known=cause)
    assert failure.first is not None
    assert failure.first.rank == 1


def test_a_job_that_recovered_says_from_what(tmp_path: Path) -> None:
    attempt = Attempt(tmp_path)
    attempt.rank(0, 0, f"{TRACE}ValueError: x\n", exit=1, time=101.0)
    attempt.cause(n0=1)
    attempt.folder.begin_attempt()
    attempt.folder.finish("COMPLETED", "")
    job = record("gpt-1", local_dir=str(tmp_path), log_dir=str(tmp_path / "logs"))
    facts = explain(job, Backends(print))
    assert (facts["explained"], facts["failure"]) == (True, None)
    assert facts["recovered_from"]["attempt"] == 0
    assert ("result", "it completed: there is nothing to fix") in why_pairs(facts, 0.0)


# Bounds and hostile text


def unbounded(pattern: str) -> list[Any]:
    """The repetitions of a pattern without a limit, or inside another one that is not small."""
    found: list[Any] = []

    def visit(items: Any, depth: int) -> None:
        for kind, value in items:
            if kind in (_constants.MAX_REPEAT, _constants.MIN_REPEAT):
                _, most, inner = value
                found.extend([value] if most > 300 or (depth and most > 1) else [])
                visit(inner, depth + (most > 1))
            elif kind is _constants.SUBPATTERN:
                visit(value[-1], depth)
            elif kind is _constants.BRANCH:
                for each in value[1]:
                    visit(each, depth)

    visit(_parser.parse(pattern), 0)
    return found


@pytest.mark.parametrize("signature", CATALOGUE, ids=lambda each: each.code)
def test_patterns_are_bounded(signature: Any) -> None:
    """Oracle: Python's own parser of regular expressions."""
    for pattern in signature.patterns:
        assert unbounded(pattern) == [], pattern
        assert not re.search(pattern, ""), pattern


def test_hostile_lines_cost_little() -> None:
    """Megabytes without a line end, made of what the patterns begin with. Oracle: the processor's clock."""
    starts = ["NET/IB : completion ", "loss is ", "launch.sh: line 1: ", "out of memory ", "srun: error: ", "error: argument ", "DataLoader worker (pid ", "a" * 50, " ", "gloo connect ", "Fatal: [", "hint: "]  # fmt: skip
    lines = "\n".join((start * (1 << 20))[: 1 << 20] for start in starts)
    many = "\n".join(starts * 50_000)
    for text in (lines, many, "\x00" * (1 << 20), "\n" * (1 << 20)):
        began = time.process_time()
        logs = tuple(LogText(name, text) for name in ("rank 3", "node 1", "batch log"))
        likely_cause(Evidence("FAILED", text, logs, 1))
        assert time.process_time() - began < 2.0


@settings(deadline=None, max_examples=60)
@given(st.text(), st.text(), st.text())
def test_any_text_gives_an_answer_that_a_terminal_can_show(said: str, rank: str, node: str) -> None:
    logs = (LogText("rank 3", f"{rank}\nNo space left on device {node}\x1b[2J\u202e"), LogText("node 1", node))
    found = likely_cause(Evidence("FAILED", said, logs, 1))
    assert found is not None
    assert found.line.isprintable()
    assert all(len(line) <= 2000 for line in lines_of(rank))
    assert own_hint(said, f"{rank}\n{node}").isprintable()


def test_a_huge_log_is_read_from_its_end(tmp_path: Path) -> None:
    """A gigabyte with a hole: only the end is read."""
    job = failed_job(tmp_path, Excerpt("", f"{TRACE}ValueError: x\n"))
    log = tmp_path / "logs" / "attempt-0" / "workerlog.3"
    with log.open("r+b") as stream:
        stream.seek(1 << 30)
        stream.write(b"\nOSError: [Errno 28] No space left on device\n")
    began = time.process_time()
    assert explain(job, Backends(print))["likely_cause"]["code"] == "K043"
    assert time.process_time() - began < 2.0


def test_commands_exist() -> None:
    """Every command and option of the catalogue is known to click."""
    for signature in CATALOGUE:
        for command in signature.commands:
            words = re.sub(r"\{(\w+)\}", r"\1", command).split()
            assert words[0] == "gptctl", command
            parse(words[1:])


def test_the_text_of_the_catalogue_reads_alike() -> None:
    for each in CATALOGUE:
        assert each.cause.endswith("."), each.code
        assert "\n" not in each.fix, each.code
        assert not each.fix.endswith("."), each.code
        assert each.patterns or each.exits or each.signals or each.states, each.code
