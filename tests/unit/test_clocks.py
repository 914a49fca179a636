"""Verdicts do not depend on clocks that differ or that somebody sets. Oracles: the order that each test makes, and counts."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import time
from pathlib import Path

import pytest

from gptctl.backends.slurm.backend import _age
from gptctl.doctor.probe import _reduce_failure
from gptctl.engine.cause import Cause, cause_in_message, first_cause, on_clock_of_receiver, relative_to_now
from gptctl.engine.chain import chain_result
from gptctl.engine.job_result import COMPLETED
from gptctl.engine.rank_runs import rank_runs
from gptctl.engine.run_folder import RunFolder
from gptctl.jobs.store import Store
from gptctl.jobs.submission_order import ORDER
from tests.clocks import TestClock
from tests.unit.test_jobs import record
from tests.unit.test_supervisor import plan_in

ROOT = Path(__file__).parents[2]
HOUR = 3600.0

# Modules that read the wall clock or the times of files, and what for. Everything else must use `time.monotonic`.
SHOWN = "shown to people, or recorded for them"
READERS_OF_CLOCKS = {
    "gptctl/backends/slurm/backend.py": "the age of a job that another machine submitted",
    "gptctl/jobs/labels.py": "the name under which a damaged file is moved away",
    "gptctl/jobs/selection.py": "which records --since need not read, with a day to spare",
    "gptctl/jobs/listed_jobs.py": "whether a file is the one that a row was read from; one that changed just now is read again",
    "gptctl/jobs/last_state.py": "how old a state is that is shown; one in the future counts as old",
    "gptctl/backends/slurm/queue.py": SHOWN,
    "gptctl/cli/cost.py": "until when a running job has used its nodes",
    "gptctl/cli/report.py": "until when a running job has used its nodes",
    "gptctl/cli/top.py": SHOWN,
    "gptctl/jobs/job_reading.py": SHOWN,
    "gptctl/jobs/top_collector.py": SHOWN,
    "gptctl/cli/follow.py": SHOWN,
    "gptctl/cli/notify.py": SHOWN,
    "gptctl/engine/notifier.py": SHOWN,
    "gptctl/engine/webhook.py": "in the signature of a message, as its service demands",
    "gptctl/cli/prometheus.py": "until when a running job has used its nodes",
    "gptctl/engine/events.py": "recorded beside the steady clock, which decides",
    "gptctl/cli/why.py": SHOWN,
    "gptctl/cli/options.py": "what a user asks for with --since and --older",
    "gptctl/doctor/probe.py": "it compares clocks; and errors that nothing else puts in order",
    "gptctl/doctor/slurm_job.py": "it compares clocks",
    "gptctl/doctor/ssh_hosts.py": "it compares clocks",
    "gptctl/engine/machine_queue.py": "whether a folder changed (also asked every two seconds); queues of 30 days ago",
    "gptctl/engine/run_folder.py": "the clock of the file system that nodes share; the rest is shown",
    "gptctl/jobs/evaluations.py": "which of very many results are new",
    "gptctl/jobs/damage.py": "whether a damaged file is the one that was reported before",
    "gptctl/jobs/history.py": SHOWN,
    "gptctl/jobs/remove.py": SHOWN,
    "gptctl/jobs/job_status.py": SHOWN,
    "gptctl/jobs/store.py": "jobs of older versions; files that no living process is named after",
    "gptctl/jobs/sweeps.py": "sweeps of older versions",
    "gptctl/jobs/recorded_files.py": SHOWN,
    "gptctl/jobs/why.py": "how long a job has been silent, which is shown",
    "gptctl/logs/lines.py": "what a user asks for with --since",
    "gptctl/logs/local_files.py": "the same",
    "gptctl/logs/terminal_view.py": SHOWN,
    "gptctl/remote/copy_files.py": "whether a time is the same as that of the copy",
    "gptctl/remote/log_sync.py": SHOWN,
    "trainer/checkpoint/folder_lock.py": "whether a time changes, for half a minute by the steady clock",
    "trainer/corpus/sources.py": "whether a file is the one that an interrupted command had read",
    "trainer/corpus/token_files.py": "whether a time is the same as when a file was read",
    "trainer/events.py": "recorded beside the steady clock, which decides",
    "trainer/metrics.py": SHOWN,
    "trainer/records.py": "recorded beside the steady clock, which decides",
    "trainer/node_check.py": "it compares clocks",
    "trainer/rank_log.py": "recorded beside the steady clock, which decides",
    "trainer/tasks/evaluation.py": SHOWN,
    "trainer/tasks/http_server.py": "what OpenAI's API calls created",
    "trainer/trackers/processes.py": SHOWN,
    "trainer/trackers/tensorboard.py": "shown; the names of the files that are there decide on their order",
    "trainer/status.py": "shown; the job and the attempt decide",
}
WALL = {"time.time", "time.time_ns", "datetime.now", "datetime.utcnow", "datetime.today", "date.today"}
FILE_TIMES = {"st_mtime", "st_mtime_ns", "st_ctime", "st_ctime_ns", "getmtime", "getctime"}


def reads_a_clock(file: Path) -> bool:
    nodes = [node for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.Attribute)]
    named = {f"{node.value.id}.{node.attr}" for node in nodes if isinstance(node.value, ast.Name)}
    return bool(named & WALL or {node.attr for node in nodes} & FILE_TIMES)


def test_every_module_that_reads_a_clock_says_what_for() -> None:
    files = [file for part in ("gptctl", "trainer") for file in (ROOT / part).rglob("*.py")]
    assert {str(file.relative_to(ROOT)) for file in files if reads_a_clock(file)} == set(READERS_OF_CLOCKS)


def test_no_script_counts_seconds_by_the_clock() -> None:
    """SECONDS and EPOCHSECONDS of bash follow the clock."""
    scripts = [file for file in (ROOT / "templates").rglob("*.*") if file.suffix in (".sh", ".j2", ".sbatch")]
    lines = [line for file in scripts for line in file.read_text().splitlines() if not line.lstrip().startswith("#")]
    assert [line for line in lines if "SECONDS" in line and "_SECONDS" not in line] == []


def test_a_host_waits_for_a_shared_folder_although_its_clock_is_set(tmp_path: Path) -> None:
    """Forward by an hour: it must not give up. The folder appears after that."""
    clock, folder = TestClock(tmp_path), tmp_path / "job"
    script = ROOT / "templates" / "remote" / "join_job.sh"
    command = ["bash", str(script), str(folder), "-", "1", "20.0"]
    with subprocess.Popen(command, env={**os.environ, **clock.env}, stdout=subprocess.PIPE, text=True) as waiting:
        clock.set(3600)
        time.sleep(0.5)  # longer than it sleeps between two looks
        folder.mkdir()
        (folder / "part").write_text('echo "agent of node $2"\n')
        (folder / "part").rename(folder / "agent.sh")
        assert waiting.communicate(timeout=20)[0] == "agent of node 1\n"


def test_jobs_are_in_the_order_of_their_submission(tmp_path: Path) -> None:
    """Whatever their times say. Jobs of older versions, which are not in the list, keep their places."""
    store = Store(tmp_path)
    for number, created in enumerate((5000.0, 9000.0, 1000.0, 4000.0)):
        assert store.add(record(f"gpt-{number}")._replace(created=created))
        os.utime(store.folder / f"gpt-{number}.json", (created, created))
    ids = [f"gpt-{number}" for number in range(4)]
    assert store.ids() == ids
    assert [each.id for each in store.records()] == ids
    assert [each.id for each in store.records(last=2)] == ids[2:]
    assert store.latest("").id == "gpt-3"
    # A crash left a part of a line, and an older gptctl submitted two jobs.
    order = store.folder / ORDER
    order.write_text(order.read_text().replace("gpt-1\n", "").replace("gpt-2\n", "") + "gpt")
    assert store.ids() == ["gpt-2", "gpt-0", "gpt-3", "gpt-1"]
    order.unlink()
    assert store.ids() == ["gpt-2", "gpt-3", "gpt-0", "gpt-1"]
    os.mkfifo(order)
    assert store.add(record("gpt-4"))
    assert set(store.ids()) == {*ids, "gpt-4"}


def test_a_file_that_is_being_written_is_not_removed(tmp_path: Path) -> None:
    """Although it looks old after the clock was set: its process lives. That of another one does not."""
    store = Store(tmp_path)
    store.folder.mkdir()
    dead = subprocess.Popen(["true"])
    dead.wait()
    for pid in (os.getpid(), dead.pid):
        for name in (f".gpt-1.{pid}", f"gpt-1.json.part{pid}"):
            (store.folder / name).touch()
            os.utime(store.folder / name, (1000, 1000))
    store.remove_temporary_files()
    assert sorted(os.listdir(store.folder)) == [f".gpt-1.{os.getpid()}", f"gpt-1.json.part{os.getpid()}"]


@pytest.mark.parametrize("jump", [HOUR, -HOUR])
def test_the_age_of_a_job_is_counted_by_the_clock_of_the_machine(jump: float) -> None:
    job = record()._replace(created=time.time() + jump)
    assert 0 <= _age(job) < 1000
    foreign = job._replace(submitter={**job.submitter, "boot": "another"})
    assert _age(foreign) == pytest.approx(-jump, abs=5), "there is no better clock"


def test_a_chain_is_complete_if_one_of_its_own_jobs_is(tmp_path: Path) -> None:
    own = plan_in(tmp_path, output_dir=str(tmp_path), continues=str(tmp_path / "gpt-1"), chain=("gpt-1",))
    for job, time_, is_complete in (("gpt-1", 1.0, True), ("other", 1e10, False), (None, 1e10, False)):
        (tmp_path / "status.json").write_text(json.dumps({"state": "finished", "time": time_, "job": job}))
        result = chain_result(own)
        assert (result is not None and result.state == COMPLETED) == is_complete


def records_of(*ends: tuple[int, float, float]) -> dict[str, bytes]:
    """One rank on each of several hosts: its number, when it ended by the clock of its host, and by its steady clock."""
    found = {}
    for rank, ended, clock in ends:
        facts = {"rank": rank, "node": rank, "host": f"h{rank}", "pid": 1}
        start = {"event": "start", "time": ended - 60, "clock": clock - 60, **facts}
        end = {"event": "end", "time": ended, "clock": clock, "exit": 1, "signal": None, **facts}
        found[f"ranks.{rank}.jsonl"] = f"{json.dumps(start)}\n{json.dumps(end)}\n".encode()
    return found


def test_times_of_hosts_are_compared_by_the_clock_of_their_file_system() -> None:
    """The clock of the second host is ten minutes behind. Below a second the clocks of the hosts are good enough."""
    records = records_of((0, 5000.0, 10.0), (1, 4401.0, 900.0))
    assert [run.ended for run in rank_runs(records)] == [5000.0, 4401.0]
    changed = {"ranks.0.jsonl": 5000.004, "ranks.1.jsonl": 5001.0}
    runs = rank_runs(records, changed)
    assert [(run.started, run.ended) for run in runs] == [(4940.0, 5000.0), (4941.0, 5001.0)]
    one_host = {name: data.replace(b'"h1"', b'"h0"') for name, data in records.items()}
    assert [run.clock for run in rank_runs(one_host, {"ranks.1.jsonl": 1.0})] == [10.0, 900.0]


def test_an_agent_tells_how_long_ago_a_failure_was() -> None:
    """The steady clocks of two hosts have nothing in common. The second failed five seconds before the first."""
    here = Cause("here", 0, 0, time=100.0, clock=1000.0)
    there = Cause("there", 1, 1, time=90_000.0, clock=7.0)
    message = json.loads(json.dumps(relative_to_now(there, 13.0)))
    received = on_clock_of_receiver(cause_in_message(message), 1001.0)
    assert received.clock == 995.0
    assert first_cause([here, received]).text == "there"
    for hostile in ("x", True, 5.0, float("nan"), -1e300, [1]):
        message[Cause._fields.index("clock")] = hostile
        assert cause_in_message(message).clock is None


def test_the_doctor_names_the_rank_that_others_lost(tmp_path: Path) -> None:
    """Although the host of rank 0, which only lost the connection, has a clock that is ten minutes behind."""
    for rank, text, changed in ((0, "RuntimeError: Connection closed by peer", 400), (1, "ValueError: x", 1000)):
        (tmp_path / f"node.{rank}.rank.{rank}.failed").write_text(text)
        os.utime(tmp_path / f"node.{rank}.rank.{rank}.failed", (changed, changed))
    assert _reduce_failure(tmp_path) == "rank 1: ValueError: x"


def test_a_status_counts_by_its_name(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "gpt-1")
    (tmp_path / "status.json").write_text(json.dumps({"state": "stopped", "time": 1e10}))
    assert not folder.has_stopped_on_purpose(0, str(tmp_path)), "of a run without gptctl"
