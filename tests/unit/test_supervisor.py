"""Rules of the supervisor that depend on an exact moment or on a thousand nodes.

The nodes and the scheduler are stand-ins, since a real one cannot be stopped at such a moment. Oracles: what the scheduler
was asked for, which attempts were started, and result.json. The suites of the backends test the same rules on real ones.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from gptctl.engine.cause import Cause
from gptctl.engine.contract import ROLL_BACK_VARIABLE, STOP_SIGNALS
from gptctl.engine.error_text import KILLED_FOR_MEMORY
from gptctl.engine.launch_plan import LaunchPlan
from gptctl.engine.messages import MessageStream
from gptctl.engine.node import NodeExit
from gptctl.engine.remote_node import RemoteNode
from gptctl.engine.run_folder import RunFolder
from gptctl.engine.srun_node import SrunNode, Step, hosts_of_allocation
from gptctl.engine.supervisor import Supervisor
from gptctl.jobs import freeze
from gptctl.jobs.freeze import pack_engine
from tests.conftest import ROOT


def plan_in(folder: Path, **facts: object) -> LaunchPlan:
    lists = ("interfaces", "container", "program", "setup")
    empty = dict.fromkeys(LaunchPlan._fields, "") | LaunchPlan._field_defaults | dict.fromkeys(lists, ()) | {
        "env_origins": {}, "secrets": {},
        "form": "static", "nodes": 1, "nnodes": "1", "per_node": 1, "world": 1, "hosts": (), "max_restarts": 0, "env": {}, "sbatch": {},
        "master_addr": "127.0.0.1", "master_port": 29500, "is_one_machine": True,
        "remote_dir": str(folder), "log_dir": str(folder / "logs"),
    }  # fmt: skip
    return LaunchPlan(**{**empty, **facts})  # type: ignore[arg-type]


class QuickNode:
    """Exits with this code, and for this reason, as soon as it has started."""

    number = 0

    def __init__(self, code: int, cause: Cause | None = None, begin: Callable[[], None] = lambda: None) -> None:
        self._exit, self._begin, self.started = NodeExit(code, cause), begin, list[int]()

    def start(self, attempt: int, host: str, port: int) -> None:
        self.started.append(attempt)
        self._begin()

    def exited(self) -> NodeExit:
        return self._exit

    def has_ranks(self) -> bool:
        return True

    def can_stop_gracefully(self) -> bool:
        return True

    def request_stop(self) -> None: ...

    def begin_kill(self) -> None: ...

    def kill(self) -> None: ...

    def is_lost(self) -> bool:
        return False

    def output(self) -> str:
        return ""


@pytest.fixture(autouse=True)
def own_signals() -> Iterator[None]:
    before = {number: signal.getsignal(number) for number in (*STOP_SIGNALS, signal.SIGALRM)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


class Recorder:
    """A scheduler that notes what it is asked for."""

    def __init__(self, on_attempt: Callable[[int], None], accepts: bool = True, can_requeue: bool = True) -> None:
        self.can_requeue, self.requests = can_requeue, 0
        self._on_attempt, self._accepts = on_attempt, accepts

    def begin_attempt(self, number: int) -> None:
        self._on_attempt(number)

    def ending(self) -> str:
        return ""

    def requeue(self) -> bool:
        self.requests += 1
        if self._accepts:  # Slurm stops the job, as it does after a requeue
            signal.setitimer(signal.ITIMER_REAL, 0.1)
        return self._accepts


@pytest.mark.parametrize(
    ("accepts", "can_requeue", "requests", "state"),
    [(True, True, 1, None), (False, True, 1, "STOPPED"), (True, False, 0, "STOPPED")],
)
def test_a_stop_request_between_two_attempts(
    tmp_path: Path, accepts: bool, can_requeue: bool, requests: int, state: str | None
) -> None:
    """The second attempt is created, but nothing is started in it."""
    node, stopped_in = QuickNode(1), 1

    def request_stop(attempt: int) -> None:
        if attempt == stopped_in:
            os.kill(os.getpid(), signal.SIGUSR1)

    scheduler = Recorder(request_stop, accepts, can_requeue)
    supervisor = Supervisor(plan_in(tmp_path, max_restarts=3), [node], scheduler=scheduler)
    signal.signal(signal.SIGALRM, supervisor.on_signal)
    supervisor.run()
    assert (node.started, scheduler.requests) == ([0], requests)
    result = RunFolder(tmp_path).result()
    assert (result.state if result else None) == state


def test_folders_of_attempts_that_a_user_adds_do_not_add_attempts(tmp_path: Path) -> None:
    """A fourth failure is the last one, in whichever folders the attempts are."""
    node = QuickNode(1)
    scheduler = Recorder(lambda number: (tmp_path / f"attempt-{number + 2}").mkdir(exist_ok=True), can_requeue=False)
    Supervisor(plan_in(tmp_path, max_restarts=3), [node], scheduler=scheduler).run()
    assert node.started == [0, 3, 6, 9]


@pytest.mark.parametrize(
    ("text", "saves", "is_trainer", "started"),
    [
        (KILLED_FOR_MEMORY, False, True, [0]),
        (KILLED_FOR_MEMORY, True, True, [0, 1]),  # it came further than the last time
        (KILLED_FOR_MEMORY, False, False, [0, 1]),  # of a script of one's own, nobody knows what it saves
        ("killed by signal 9 (SIGKILL); possibly out of memory", False, True, [0, 1]),
    ],
)
def test_too_little_memory_is_not_tried_again(
    tmp_path: Path, text: str, saves: bool, is_trainer: bool, started: list[int]
) -> None:
    """Unless the attempt has saved a checkpoint, or somebody else may have killed the rank."""
    output = tmp_path / "output"
    output.mkdir()
    node = QuickNode(1, Cause(text, 0, 0), lambda: (output / f"step_{len(node.started)}").mkdir() if saves else None)
    plan = plan_in(tmp_path, max_restarts=1, output_dir=str(output) if is_trainer else "")
    Supervisor(plan, [node], scheduler=Recorder(lambda number: None, can_requeue=False)).run()
    assert node.started == started
    result = RunFolder(tmp_path).result()
    assert result is not None
    assert result.reason.endswith("would fail in the same way") == (started == [0])


@pytest.mark.parametrize(
    ("max_restarts", "has_exited", "reason"),
    [
        (
            3,
            False,
            "node 1 (b): its host is lost: it closed the connection; not restarted after the loss of node 1 (b)",
        ),
        (3, True, "node 1 (b): disk full; not restarted after the loss of node 1 (b)"),
        (0, False, "node 1 (b): its host is lost: it closed the connection"),
    ],
)
def test_a_job_is_not_restarted_without_a_lost_host(
    tmp_path: Path, max_restarts: int, has_exited: bool, reason: str
) -> None:
    """Its agent cannot join again, so every other attempt would fail at once. Oracle: the attempts that were started."""
    sockets = socket.socketpair()
    near, far = (MessageStream(side.fileno(), side.fileno(), side) for side in sockets)
    node, first = RemoteNode(1, near), QuickNode(0)
    if has_exited:
        far.send(start=1, exit=NodeExit(1, Cause("disk full", 1)))
    sockets[1].shutdown(socket.SHUT_WR)
    plan = plan_in(tmp_path, max_restarts=max_restarts, nodes=2, nnodes="2", hosts=("a", "b"))
    Supervisor(plan, [first, node]).run()
    assert first.started == [0]
    result = RunFolder(tmp_path).result()
    assert result is not None
    assert (result.state, result.reason) == ("FAILED", reason)


def test_a_late_answer_confirms_only_its_own_kill() -> None:
    """A host that answers the first request after the second one was sent has not killed what started between them."""
    sockets = socket.socketpair()
    near, far = (MessageStream(side.fileno(), side.fileno(), side) for side in sockets)
    node = RemoteNode(1, near)
    far.send(killed=1)
    assert node.kill()
    assert far.receive(10) == {"kill": 1}
    node.begin_kill()
    far.send(killed=1)
    far.send(killed=True)
    assert not node.kill()
    node.begin_kill()
    far.send(killed=3)
    assert node.kill()


def test_a_completed_job_stays_completed_if_its_result_cannot_be_written(tmp_path: Path) -> None:
    """A folder in place of result.json cannot be replaced by a file. A scheduler gets the exit code."""
    (tmp_path / "result.json").mkdir()
    scheduler = Recorder(lambda number: None)
    assert Supervisor(plan_in(tmp_path), [QuickNode(0)], scheduler=scheduler).run() == 0
    assert Supervisor(plan_in(tmp_path), [QuickNode(1)], scheduler=scheduler).run() == 1


@pytest.mark.parametrize(("number", "state"), [("USR1", "STOPPED"), ("TERM", "STOPPED"), ("INT", None), ("HUP", None)])
def test_signals_to_a_supervisor_of_this_machine(tmp_path: Path, number: str, state: str | None) -> None:
    """USR1 means the same on every backend. Signals of a terminal do not concern a detached job."""
    (tmp_path / "launch.sh").write_text(f"touch {tmp_path}/up; exec sleep 100\n")
    (tmp_path / "plan.json").write_text(json.dumps(plan_in(tmp_path).as_json()))
    pack_engine(tmp_path / "engine.pyz")
    command = [sys.executable, "-E", "-S", str(tmp_path / "engine.pyz"), "supervisor", str(tmp_path)]
    with subprocess.Popen(command) as engine:
        deadline = time.monotonic() + 30
        while not (tmp_path / "up").exists():
            assert time.monotonic() < deadline
            time.sleep(0.05)
        engine.send_signal(signal.Signals[f"SIG{number}"])
        if state is None:
            time.sleep(0.5)
            assert engine.poll() is None
            engine.terminate()
        engine.wait(60)
    result = RunFolder(tmp_path).result()
    assert result[:2] == ("STOPPED", f"the supervisor received SIG{number if state else 'TERM'}")


def test_a_full_disk_under_the_log_costs_no_result(tmp_path: Path) -> None:
    """/dev/full as the log of a real supervisor: the result is recorded all the same."""
    (tmp_path / "launch.sh").write_text("exit 3\n")
    (tmp_path / "plan.json").write_text(json.dumps(plan_in(tmp_path).as_json()))
    pack_engine(tmp_path / "engine.pyz")
    with open("/dev/full", "w") as full:
        command = [sys.executable, "-E", "-S", str(tmp_path / "engine.pyz"), "supervisor", str(tmp_path)]
        subprocess.run(command, stdout=full, stderr=full, timeout=60)
    assert RunFolder(tmp_path).result()[:2] == ("FAILED", "node 0: exit code 3")


@pytest.mark.parametrize(
    ("recorded", "state", "reason"),
    [
        ("", "FAILED", "node 1: no exit code recorded: srun exited with code 137"),
        ("echo 7 > attempt-0/node.1.exit", "FAILED", "node 1: exit code 7"),
        # Node 0 had the time to complain.
        (
            "echo 1 > attempt-0/node.0.exit; echo 'Error: told to stop' > logs/attempt-0/node.0.log",
            "FAILED",
            "node 1: no exit code recorded: srun exited with code 137",
        ),
        ("touch attempt-0/node.1.stop-requested", "STOPPED", "the scheduler asked the job to stop"),
    ],
)
def test_the_node_that_srun_killed_is_not_to_blame(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, recorded: str, state: str, reason: str
) -> None:
    """After one node was killed, srun asks the other to stop, and may kill it before it has recorded its exit code."""
    srun = tmp_path / "bin" / "srun"
    srun.parent.mkdir()
    srun.write_text(
        f"#!/bin/sh\ntouch attempt-0/node.0.stop-requested logs/attempt-0/node.1.log\n{recorded}\nexit 137\n"
    )
    srun.chmod(0o755)
    monkeypatch.setenv("PATH", f"{srun.parent}:{os.environ['PATH']}")
    plan = plan_in(tmp_path, nodes=2, nnodes="2")
    step = Step(plan, 2, os.environ)
    nodes = [SrunNode(number, step) for number in range(2)]
    Supervisor(plan, nodes, scheduler=Recorder(lambda number: None, can_requeue=False)).run()
    result = RunFolder(tmp_path).result()
    assert result
    assert (result.state, result.reason.partition(";")[0]) == (state, reason)


def test_a_thousand_nodes_are_judged_in_one_pass(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Eight times the nodes may take some eight times as long; looking at all nodes for each node would take 64 times."""
    srun = tmp_path / "bin" / "srun"
    srun.parent.mkdir()
    srun.write_text("#!/bin/sh\nexit 1\n")
    srun.chmod(0o755)
    monkeypatch.setenv("PATH", f"{srun.parent}:{os.environ['PATH']}")

    def seconds(nodes: int) -> float:
        folder = tmp_path / str(nodes)
        step = Step(plan_in(folder, nodes=nodes), nodes, os.environ)
        (folder / "attempt-0").mkdir(parents=True)
        step.start(0, "127.0.0.1", 29500)
        assert step._process
        step._process.wait()
        for node in range(nodes):
            (folder / f"attempt-0/node.{node}.exit").write_text("1\n")
            (folder / f"attempt-0/ranks.{node}.jsonl").write_text("{}\n")
            (folder / f"logs/attempt-0/node.{node}.log").write_text("failed\n")
        begin = time.process_time()
        exits = step.exits()
        assert exits is not None
        assert [end.code for end in exits.values()] == [1] * nodes
        return time.process_time() - begin

    assert min(seconds(1024), seconds(1025)) < 24 * seconds(128)


def test_sinfo_may_answer_in_any_encoding(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The reason why a node is down is an administrator's free text."""
    sinfo = tmp_path / "bin" / "sinfo"
    sinfo.parent.mkdir()
    sinfo.write_bytes(b"#!/bin/sh\nprintf 'node1 of the last attempt is down: d\\351fectueux\\n'\n")
    sinfo.chmod(0o755)
    (tmp_path / "attempt-0").mkdir()
    (tmp_path / "attempt-0/hosts").write_text("node1\n")
    # In a process of its own: it redirects its output to the attempt's log.
    program = (
        "import sys; sys.path.insert(0, sys.argv[1])\n"
        "from pathlib import Path; from gptctl.engine.srun_node import SlurmJob; from tests.unit.test_supervisor import plan_in\n"
        "SlurmJob(plan_in(Path(sys.argv[2])), '7', ['node2']).begin_attempt(1)\n"
    )
    monkeypatch.setenv("PATH", f"{sinfo.parent}:{os.environ['PATH']}")
    subprocess.run([sys.executable, "-c", program, str(ROOT), str(tmp_path)], check=True, timeout=60)
    log = (tmp_path / "logs/attempt-1/batch.log").read_text()
    assert "node1 of the last attempt is down: d\ufffdfectueux" in log


def test_a_command_that_the_jobs_signal_killed_is_asked_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`scancel` reaches each process of the job: a scontrol without an answer made a cancelled job FAILED."""
    scontrol = tmp_path / "scontrol"
    scontrol.write_text(f"#!/bin/sh\nrm {tmp_path}/first && kill -TERM $$\necho node1\n")
    scontrol.chmod(0o755)
    (tmp_path / "first").touch()
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setenv("SLURM_JOB_NODELIST", "node1")
    assert hosts_of_allocation() == ["node1"]


def test_the_engine_is_packed_whatever_the_dates_of_its_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some package managers date all files 1970; the zip format begins with 1980."""
    shutil.copytree(ROOT / "gptctl", tmp_path / "gptctl")
    for file in (tmp_path / "gptctl").rglob("*.py"):
        os.utime(file, (0, 0))
    monkeypatch.setattr(freeze, "__file__", str(tmp_path / "gptctl/jobs/freeze.py"))
    pack_engine(tmp_path / "engine.pyz")
    subprocess.run([sys.executable, str(tmp_path / "engine.pyz"), "contract"], check=True, timeout=60)


def test_a_guard_ends_well_after_its_agent_has_rolled_back(tmp_path: Path) -> None:
    """The agent has removed the folder with the engine: the guard still tells its fallback to do nothing."""
    run_dir, heard = tmp_path / "gpt-1", tmp_path / "heard"
    run_dir.mkdir()
    pack_engine(run_dir / "engine.pyz")
    (run_dir / "agent.sh").write_text(f'read -r word; echo "$word" > {heard}\n')
    # Without a plan the agent refuses the job.
    words = [sys.executable, "-E", "-S", str(run_dir / "engine.pyz"), "guard", str(run_dir), "0"]
    environment = {**os.environ, ROLL_BACK_VARIABLE: "1"}
    streams: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "text": True}
    done = subprocess.run(words, **streams, env=environment, timeout=60, cwd=tmp_path)
    assert done.returncode == 0
    assert "refused" in done.stdout
    assert not run_dir.exists()
    deadline = time.monotonic() + 10
    while not (heard.exists() and heard.read_text()) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert heard.read_text() == "finished\n"
