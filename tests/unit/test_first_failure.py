"""Which failure of an attempt is the first, and what its log says. The oracle is the log that each test writes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from gptctl.backends import Backends
from gptctl.engine.attempt_outcome import exits_and_stopped, record_outcome
from gptctl.engine.cause import Cause, cause_from, cause_in_message, first_cause
from gptctl.engine.error_text import describe_exit, is_consequence, one_line
from gptctl.engine.first_failure import cause_on_nodes
from gptctl.engine.job_result import CANCELLED, FAILED, Result
from gptctl.engine.node import NodeExit
from gptctl.engine.rank_runs import rank_runs
from gptctl.engine.run_folder import RunFolder
from gptctl.jobs.hints import hint_of
from gptctl.jobs.history import facts_of
from gptctl.jobs.job_status import attempts_text, exit_text
from gptctl.jobs.state import state_of
from gptctl.logs.files import FileFilter
from gptctl.logs.local_files import LocalLogFiles
from gptctl.logs.stream import LineFilter, read_all
from tests.unit.test_jobs import record

TRACE = 'Traceback (most recent call last):\n  File "x.py", line 1, in <module>\n    f()\n'
UNRELATED = "".join(f"step {number}\n" for number in range(150))


@pytest.mark.parametrize(
    ("code", "killer", "log", "cause"),
    [
        (1, None, f"{TRACE}RuntimeError: boom\n", "RuntimeError: boom"),
        (1, None, "[rank3]: " + TRACE.replace("\n", "\n[rank3]: ") + "ValueError: x\n", "ValueError: x"),
        (1, None, f"{TRACE}KeyError: 'a'\n\nDuring handling …\n\n{TRACE}x.Odd\nlate line\n", "x.Odd"),
        (1, None, f"{TRACE}RuntimeError: Error(s) in x:\n\tMissing key\n", "RuntimeError: Error(s) in x: Missing key"),
        (1, None, '  File "x.py", line 3\n    f(\n     ^\nSyntaxError: never closed\n', "SyntaxError: never closed at x.py:3"),
        (1, None, f'{TRACE}  File "y.py", line 2\n    f(\nIndentationError: x\n', "IndentationError: x at y.py:2"),
        # Of a text of several lines, the first one says what is wrong.
        (1, None, f"{TRACE}ValueError: bad shape\n  got 3\nsee the manual\n", "ValueError: bad shape"),
        (1, None, f"{TRACE}RuntimeError: [/pytorch/gloo/tcp/pair.cc:547] Connection closed by peer\n", "RuntimeError: Connection closed by peer"),
        # Handled long ago, or by a program that exits with its own code.
        (1, None, f"{TRACE}RuntimeError: boom\n{UNRELATED}", "exit code 1; last line: step 149"),
        (7, None, f"{TRACE}RuntimeError: boom\nbye\n", "exit code 7; last line: bye"),
        (93, None, "rank 1: error: no data in x\nhint: check the path\n", "no data in x"),
        (2, None, "usage: x\nx.py: error: unrecognized arguments: -y\n", "x.py: error: unrecognized arguments: -y"),
        (1, None, "/usr/bin/python3: No module named torch\n", "/usr/bin/python3: No module named torch"),
        (5, None, "", "exit code 5"),
        (None, 9, "step 5\n", "killed by signal 9 (SIGKILL); possibly out of memory"),
        (None, 9, "error: rank 3 (pid 7) does not respond; the others wait\nhint: x\n", "rank 3 (pid 7) does not respond; the others wait"),
        (None, 6, "terminate called\n  what():  bad device\n", "killed by signal 6 (SIGABRT): bad device"),
        (None, 6, 'Fatal Python error: Aborted\n\nCurrent thread 0x1 (most recent call first):\n  File "m.py", line 4 in f\n', "killed by signal 6 (SIGABRT) at m.py:4"),
        (None, 11, 'Fatal Python error: x\n\nThread 1 (most recent call first):\n  File "m.py", line 4 in f\n', "killed by signal 11 (SIGSEGV) at m.py:4"),
        (None, 2, f"{TRACE}KeyboardInterrupt\n", "KeyboardInterrupt"),
        (None, 64, "", "killed by signal 64 (SIGRTMAX)"),
        (None, 77, "", "killed by signal 77 (signal 77)"),
    ],
)  # fmt: skip
def test_what_a_log_says(code, killer, log: str, cause: str) -> None:
    assert describe_exit(code, killer, log) == cause


def test_the_out_of_memory_killer_is_named_as_surely_as_it_is_known() -> None:
    assert describe_exit(None, 9, "", "cgroup") == "killed by the out-of-memory killer"
    assert describe_exit(None, 9, "", "machine").endswith("probably by the out-of-memory killer")
    assert "possibly out of memory" in describe_exit(None, 9, "", None)


def test_a_hostile_line_becomes_one_safe_line() -> None:
    text = one_line("a\x1b[2J\r\n\tb\u202ec\x00" + "d" * 10**6)
    assert text.startswith("a\\x1b[2J b\\u202ec\\x00dd")
    assert len(text) == 200
    assert text.isprintable()


class Attempt:
    """The records and logs of attempt 0, as ranks write them."""

    def __init__(self, folder: Path) -> None:
        self.folder = RunFolder(folder)
        self.logs = folder / "logs" / "attempt-0"
        self.logs.mkdir(parents=True)
        self.folder.begin_attempt()

    def rank(self, rank: int, node: int, log: str = "", **end: object) -> None:
        facts = {"rank": rank, "node": node, "host": f"h{node}", "pid": 1}
        events = [{"event": "start", "time": 100.0, **facts}]
        events += [{"event": "end", "exit": None, "signal": None, **facts, **end}] if end else []
        with open(self.folder.attempt(0) / f"ranks.{node}.jsonl", "a") as stream:
            stream.writelines(json.dumps(event) + "\n" for event in events)
        (self.logs / f"workerlog.{rank}").write_text(log)

    def cause(self, **codes: int) -> Cause | None:
        exits = {int(name[1:]): code for name, code in codes.items()}
        for node, code in exits.items():
            (self.folder.attempt(0) / f"node.{node}.exit").write_text(f"{code}\n")
        return cause_on_nodes(self.folder, 0, str(self.logs.parent), exits, min(exits))


LOST = f"{TRACE}RuntimeError: [gloo] Connection closed by peer [10.0.0.1]:5\n"


def test_ranks_that_lost_a_connection_or_were_stopped_are_not_the_cause(tmp_path: Path) -> None:
    """Also if their host's clock is behind, so that they seem to have failed before."""
    attempt = Attempt(tmp_path)
    attempt.rank(0, 0, LOST, exit=1, time=90.0)
    attempt.rank(1, 0, signal=15, time=80.0)
    attempt.rank(2, 1, "error: rank 3 failed at global step 4: ValueError: x\n", exit=93, time=85.0)
    attempt.rank(3, 1, f"{TRACE}ValueError: x\n", exit=1, time=101.0)
    cause = attempt.cause(n0=1, n1=1)
    assert cause is not None
    assert cause.reason() == "rank 3 (node 1): ValueError: x"
    assert cause.as_json()["host"] == "h1"


def test_if_all_lost_a_connection_the_earliest_is_named(tmp_path: Path) -> None:
    attempt = Attempt(tmp_path)
    attempt.rank(0, 0, LOST, exit=1, time=103.0)
    attempt.rank(1, 1, LOST, exit=1, time=102.0)
    cause = attempt.cause(n0=1, n1=1)
    assert cause is not None
    assert (cause.rank, cause.is_consequence) == (1, True)


def test_a_rank_that_exits_early_with_0_is_named_not_those_that_lost_it(tmp_path: Path) -> None:
    """Unless a rank failed for a reason of its own."""
    attempt = Attempt(tmp_path)
    attempt.rank(0, 0, LOST, exit=1, time=103.0)
    attempt.rank(1, 0, "bye\n", exit=0, time=102.0)
    attempt.rank(2, 0, signal=15, time=104.0)
    cause = attempt.cause(n0=1)
    assert cause is not None
    assert cause.reason() == "rank 1 (node 0): exited with code 0 while other ranks were running"
    attempt.rank(3, 0, f"{TRACE}ValueError: x\n", exit=1, time=105.0)
    cause = attempt.cause(n0=1)
    assert cause is not None
    assert cause.reason() == "rank 3 (node 0): ValueError: x"


def test_a_clock_that_is_set_back_does_not_change_the_order(tmp_path: Path) -> None:
    """The steady clock of the host tells: rank 0 failed first, before somebody set the time back by an hour."""
    attempt = Attempt(tmp_path)
    attempt.rank(0, 0, f"{TRACE}ValueError: first\n", exit=1, time=4000.0, clock=50.0)
    attempt.rank(1, 0, f"{TRACE}ValueError: second\n", exit=1, time=405.0, clock=55.0)
    cause = attempt.cause(n0=1)
    assert cause is not None
    assert (cause.rank, cause.time) == (0, 4000.0)
    ended = {run.rank: run.ended for run in rank_runs(attempt.folder.records(0, [0]))}
    assert ended == {0: 4000.0, 1: 4005.0}


def test_a_killed_torchrun_is_the_cause_not_the_ranks_that_die_with_it(tmp_path: Path) -> None:
    attempt = Attempt(tmp_path)
    attempt.rank(0, 0)
    attempt.rank(1, 1, LOST, exit=1, time=101.0)
    cause = attempt.cause(n0=137, n1=1)
    assert cause is not None
    assert cause.reason(["a", "b"]).startswith("node 0 (a): torchrun killed by signal 9 (SIGKILL)")


def test_a_rank_whose_watcher_was_killed_is_named(tmp_path: Path) -> None:
    attempt = Attempt(tmp_path)
    attempt.rank(0, 0)
    attempt.rank(1, 0, signal=15, time=101.0)
    cause = attempt.cause(n0=1)
    assert cause is not None
    assert (cause.rank, cause.node) == (0, 0)
    assert "together with its watcher" in cause.text


def test_a_node_that_failed_without_ranks_is_described_by_its_log(tmp_path: Path) -> None:
    attempt = Attempt(tmp_path)
    (attempt.logs / "node.1.log").write_text("module load x\nerror: setup failed: false\n")
    codes = {0: 0, 1: 78}
    cause = cause_on_nodes(attempt.folder, 0, str(attempt.logs.parent), codes, 1)
    assert cause is not None
    assert cause.reason(["a", "b"]) == "node 1 (b): setup failed: false"


def test_the_lost_host_comes_before_those_that_lost_it() -> None:
    victims = [Cause("Connection reset by peer", node, node, time=5.0, is_consequence=True) for node in (0, 2)]
    lost = Cause("its host is lost: no message", 1)
    assert first_cause([*victims, lost]) == lost
    assert first_cause([]) is None


@pytest.mark.parametrize("value", [None, 5, [], {"cause": "x"}, {"cause": 5, "node": 1}, {"node": 1}])
def test_what_is_no_cause_is_none(value: object) -> None:
    assert cause_from(value) is None
    assert cause_in_message(value) is None


def test_a_cause_of_a_hostile_host_is_bounded_and_typed() -> None:
    found = cause_from({"cause": "x\n\x1b" * 999, "node": 1, "rank": "3", "host": 7, "exit": True, "time": 1e300})
    assert found is not None
    assert len(found.text) <= 400
    assert found.text.isprintable()
    assert found[1:7] == (1, None, "", None, None, None)


def test_results_of_older_versions_are_read(tmp_path: Path) -> None:
    (tmp_path / "result.json").write_text('{"state": "FAILED", "reason": "node 1 exited with code 1", "ended": 5}')
    result = RunFolder(tmp_path).result()
    assert result == Result(FAILED, "node 1 exited with code 1", 5, None)


def test_an_attempt_that_was_stopped_before_its_first_step_is_not_without_progress(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    for _ in range(4):
        folder.record_start(folder.begin_attempt(), -1)
    assert folder.num_stalled(3, -1) == 4
    folder.record_clean_stop(1)
    folder.record_clean_stop(2)
    assert folder.num_stalled(3, -1) == 2


def test_cancelled_says_by_whom_and_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GPTCTL_HOME", str(tmp_path / "home"))
    job, folder = record(local_dir=str(tmp_path)), RunFolder(tmp_path)
    folder.finish(CANCELLED, "cancelled")  # as older versions recorded it
    assert str(state_of(job, Backends(print))) == "CANCELLED"
    folder.cancel(now=False)
    assert not folder.is_cancelled_now()
    assert str(state_of(job, Backends(print))).startswith("CANCELLED: by ")
    folder.cancel(now=True)  # a second one does not change who was first
    assert folder.is_cancelled_now()


def test_a_job_without_attempts_says_what_happened() -> None:
    assert attempts_text(2, "FAILED") == "2"
    assert attempts_text(0, "CANCELLED") == "none: it ended before the first attempt"
    assert attempts_text(0, "PENDING") == "none yet"


@pytest.mark.parametrize(
    ("first", "text"),
    [
        (Cause("its host is lost: no message", 1), "node 0: 1, node 1: 255, node 2: 137 (stopped by gptctl), node 3: 137 (stopped by gptctl)"),
        # It was stopped, too, but later: what it wrote before is the first failure.
        (Cause("x", 2, 4), "node 0: 1, node 1: 255, node 2: 137, node 3: 137 (stopped by gptctl)"),
        (None, "node 0: 1, node 1: 255, node 2: 137 (stopped by gptctl), node 3: 137 (stopped by gptctl)"),
    ],
)  # fmt: skip
def test_only_nodes_that_were_stopped_are_called_so(tmp_path: Path, first: Cause | None, text: str) -> None:
    """Node 0 recorded its exit, node 1 was lost, 2 was stopped by the supervisor and 3 by srun."""
    folder = RunFolder(tmp_path)
    folder.begin_attempt()
    (folder.attempt(0) / "node.0.exit").write_text("1\n")
    for node in (0, 3):
        (folder.attempt(0) / f"node.{node}.stop-requested").touch()
    exits = {0: NodeExit(1), 1: NodeExit(255), 2: NodeExit(137, was_stopped=True), 3: NodeExit(137)}
    record_outcome(folder, 0, Result(FAILED, "x", 0.0, first), exits)
    assert exit_text(facts_of(record(local_dir=str(tmp_path), nodes=4))) == text


@pytest.mark.parametrize(
    ("outcome", "stopped"),
    [
        ({"failure": {"cause": "x", "node": 1}}, [0]),  # of an older version
        ({"stopped": [0, 7, True, "1", [1]]}, [0]),
        ({"stopped": {"0": 1}}, []),
        ({"stopped": None}, []),
    ],
)
def test_stopped_nodes_in_strange_outcomes(tmp_path: Path, outcome: dict[str, object], stopped: list[int]) -> None:
    folder = RunFolder(tmp_path)
    folder.begin_attempt()
    (folder.attempt(0) / "outcome.json").write_text(json.dumps({"exits": {"0": 137, "1": 255}, **outcome}))
    assert exits_and_stopped(folder, 0) == ({0: 137, 1: 255}, stopped)


def test_hints_name_a_key_only_for_the_bundled_trainer() -> None:
    memory = Cause("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB", 0, 0)
    assert "Global.micro_batch_size" in hint_of(memory, is_trainer=True)
    assert "Global" not in hint_of(memory, is_trainer=False)
    assert "another disk" in hint_of(Cause("OSError: [Errno 28] No space left on device", 0, 0), True)
    assert hint_of(Cause("ValueError: x", 0, 0), True) == ""
    assert is_consequence("torch.distributed.DistNetworkError: x")


class Shown:
    def __init__(self) -> None:
        self.lines: list[bytes] = []

    def add_files(self, files) -> None: ...

    def line(self, line) -> None:
        self.lines.append(line.text)

    def flush(self) -> None: ...

    def say(self, text: str) -> None: ...


def test_errors_of_the_first_failure_come_first(tmp_path: Path) -> None:
    """Rank 0 has the lower number and the earlier timestamp, rank 1 failed first."""
    attempt = Attempt(tmp_path)
    attempt.rank(0, 0, f"2026-01-01 00:00:00 ERROR early\n{LOST}", exit=1, time=105.0)
    attempt.rank(1, 0, f"2026-01-01 00:00:09 ERROR late\n{TRACE}ValueError: x\n", exit=1, time=101.0)
    attempt.cause(n0=1)
    shown = Shown()
    files = LocalLogFiles(tmp_path / "logs", tmp_path)
    read_all(files, FileFilter(), LineFilter(errors=True), shown)
    assert shown.lines[0].endswith(b"late")
    assert shown.lines[4] == b"ValueError: x"
    assert shown.lines[5].endswith(b"early")
