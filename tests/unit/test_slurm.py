"""What Slurm's clients say, read without a cluster: ends that the lab cannot make, such as a job out of memory."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from gptctl.backends import JobState
from gptctl.backends.slurm import client as slurm
from gptctl.backends.slurm import queue as slurm_queue
from gptctl.backends.slurm import submission
from gptctl.backends.slurm.backend import SlurmBackend
from gptctl.backends.slurm.client import ClientResult, SlurmClient, SlurmError
from gptctl.cli.dependencies import refuse_foreign
from gptctl.doctor.slurm_checks import pyxis_row
from gptctl.engine.job_result import PENDING
from gptctl.engine.processes import clean_environment, this_process
from gptctl.engine.run_folder import RunFolder
from gptctl.jobs.store import JobRecord
from gptctl.spec.cluster import load_profile
from trainer.errors import UserError

SEEN = slurm_queue.QueuedJob("7", "PENDING", "Priority", "N/A", "", 0, 0, "", "")


@pytest.fixture
def backend() -> SlurmBackend:
    found = SlurmBackend(print)
    found.queue._asked = time.monotonic()
    return found


@pytest.fixture
def record(tmp_path: Path) -> JobRecord:
    handle = {"scheduler_id": "7", "host": "login"}
    return JobRecord("gpt-1", "gpt", 0.0, "lab", "slurm", str(tmp_path), str(tmp_path / "logs"), 2, 2, 4, handle=handle)


@pytest.mark.parametrize(
    ("facts", "state"),
    [
        ({}, "PENDING: Priority"),
        ({"start": "2026-01-01T10:00:00"}, "PENDING: Priority, expected to start 2026-01-01 10:00:00"),
        ({"reason": "None", "start": "2026-01-01T10:00:00"}, "PENDING: expected to start 2026-01-01 10:00:00"),
        ({"restarts": 2, "reason": "BeginTime"}, "PENDING: requeued 2 times; BeginTime"),
        (
            {"reason": "BadConstraints", "start": "2026-01-01T10:00:00"},
            "PENDING: BadConstraints: it will never start; cancel it, and request what the cluster has",
        ),
        ({"state": "REQUEUE_HOLD", "reason": "job_requeued_in_held_state"}, "PENDING: job_requeued_in_held_state"),
        ({"state": "RUNNING"}, "RUNNING: starting"),
        ({"state": "RUNNING", "restarts": 1}, "RUNNING: starting, requeued once"),
        ({"state": "SUSPENDED"}, "RUNNING: suspended"),
        (
            {"state": "OUT_OF_MEMORY", "nodes": "n1"},
            "OUT_OF_MEMORY: killed by the out-of-memory killer; Slurm reports OUT_OF_MEMORY, on n1",
        ),
        ({"state": "TIMEOUT", "nodes": "n1"}, "TIMEOUT: Slurm reports TIMEOUT, on n1"),
        ({"state": "PREEMPTED"}, "PREEMPTED: Slurm reports PREEMPTED"),
        ({"state": "BOOT_FAIL"}, "NODE_FAIL: Slurm reports BOOT_FAIL"),
        ({"state": "FAILED", "exit_code": 3 << 8}, "FAILED: Slurm reports FAILED, exit code 3"),
        ({"state": "FAILED", "exit_code": 9}, "FAILED: Slurm reports FAILED, signal 9"),
        ({"state": "CANCELLED"}, "CANCELLED: with scancel"),
        (
            {"state": "CANCELLED", "reason": "DependencyNeverSatisfied"},
            "CANCELLED: a job that it waited for did not end as required",
        ),
        ({"state": "COMPLETED"}, "COMPLETED: reported by Slurm; the job could not record its own result"),
        ({"state": "NEW_IN_25"}, "UNKNOWN: Slurm reports NEW_IN_25"),
    ],
)
def test_states(backend: SlurmBackend, record: JobRecord, facts: dict[str, object], state: str) -> None:
    backend.queue.jobs = {"7": SEEN._replace(work_dir=record.local_dir, **facts)}
    assert str(backend.state(record)) == state


def test_a_handle_without_a_job_is_damaged_and_not_half_submitted(backend: SlurmBackend, record: JobRecord) -> None:
    """One flipped bit in the name of its key: the job was submitted, by a gptctl that may still be running."""
    damaged = record._replace(handle={"scheduler_ie": "17", "host": "h"}, submitter=this_process())
    assert backend.state(damaged).state == "UNKNOWN"
    assert backend.state(damaged._replace(handle={})).state == "PENDING"


def test_a_controller_that_does_not_answer_is_waited_for_once(
    backend: SlurmBackend, record: JobRecord, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A login host may take a minute for each command: sacct would not change the answer."""
    asked: list[str] = []

    def silent(command: Sequence[str], stdin: str) -> ClientResult:
        asked.append(command[0])
        raise SlurmError("no answer", is_doubtful=True)

    monkeypatch.setattr(backend.direct, "queue", slurm_queue.Queue(SlurmClient(silent)))
    backend.prefetch_states([record])
    assert backend.state(record).state == "UNKNOWN"
    assert asked == ["squeue"]


def test_the_number_of_another_job_is_not_ours(
    backend: SlurmBackend, record: JobRecord, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend.queue.jobs = {"7": SEEN._replace(state="COMPLETED", work_dir="/another")}
    monkeypatch.setattr(slurm_queue, "query_sacct", lambda client, jobs: {})
    assert backend.state(record).state == "LOST"


def test_an_end_that_slurm_told_is_known_when_it_has_forgotten_the_job(
    backend: SlurmBackend, record: JobRecord
) -> None:
    """But what may still be requeued is asked for again."""
    for state in ("NODE_FAIL", "PREEMPTED", "TIMEOUT"):
        backend.queue.jobs = {"7": SEEN._replace(state=state, work_dir=record.local_dir)}
        backend.state(record)
        result = RunFolder(record.local_dir).result()
        assert (result and result.state) == ("TIMEOUT" if state == "TIMEOUT" else None)


def test_a_script_that_could_not_be_started(backend: SlurmBackend, record: JobRecord) -> None:
    backend.queue.jobs = {"7": SEEN._replace(state="FAILED", exit_code=53, nodes="n1", work_dir=record.local_dir)}
    check = f"check that the nodes see {record.local_dir}: gptctl doctor --cluster lab"
    assert backend.state(record).reason == f"Slurm could not start the job script on n1: {check}"


def test_a_job_of_another_folder_in_the_accounting_is_not_ours(
    backend: SlurmBackend, record: JobRecord, monkeypatch: pytest.MonkeyPatch
) -> None:
    known = slurm_queue.AccountingRecord("COMPLETED", 0, 0, "n1", "/another")
    monkeypatch.setattr(slurm_queue, "query_sacct", lambda client, jobs: {"7": known})
    assert backend.state(record).state == "LOST"
    assert backend.state(record._replace(local_dir="/another")).state == "COMPLETED"


def test_the_accounting_may_be_late(backend: SlurmBackend, record: JobRecord, monkeypatch: pytest.MonkeyPatch) -> None:
    """A job that it does not know yet is not lost, and one that it calls running is asked for again."""
    answers = [{}, {"7": "RUNNING"}, {"7": "COMPLETED"}]
    records = [
        {job: slurm_queue.AccountingRecord(state, 0, 0, "", record.local_dir) for job, state in said.items()}
        for said in answers
    ]
    monkeypatch.setattr(slurm_queue, "query_sacct", lambda client, jobs: records.pop(0))
    fresh, states = record._replace(created=time.time()), []
    for _ in answers:
        backend.queue._queried = dict.fromkeys(backend.queue._queried, float("-inf"))  # some seconds later
        states.append(backend.state(fresh).state)
    assert states == ["UNKNOWN", "RUNNING", "COMPLETED"]
    assert backend.state(fresh).state == "COMPLETED"  # and is not asked for again


@pytest.mark.parametrize(
    ("queue", "has_run", "is_undone", "cancelled"),
    [
        ([("7", "JobHeldUser")], False, True, ["7"]),
        ([("7", "Priority"), ("8", "JobHeldUser")], False, False, ["8"]),
        ([("8", "JobHeldUser")], True, False, ["8"]),  # ours ran, and Slurm has forgotten it
        ([("8", "JobHeldUser")], False, True, ["8"]),  # ours was lost before it was released
        ([], True, False, []),
        ([], False, True, []),
    ],
)
def test_what_is_taken_back(
    backend: SlurmBackend,
    record: JobRecord,
    monkeypatch: pytest.MonkeyPatch,
    queue: list[tuple[str, str]],
    has_run: bool,
    is_undone: bool,
    cancelled: list[str],
) -> None:
    folder = RunFolder(record.local_dir)
    folder.try_claim(dict(record.handle))
    if has_run:
        folder.attempt(0).mkdir()
    jobs = [SEEN._replace(id=job, reason=reason, work_dir=record.local_dir) for job, reason in queue]
    monkeypatch.setattr(submission, "find_submitted", lambda client, token, run_dir: jobs)
    ended: list[str] = []
    monkeypatch.setattr(slurm.SlurmClient, "run", lambda self, *command: ended.extend(command[1:]) or "")
    assert backend.abandon(record) is is_undone
    assert ended == cancelled


def test_slurms_last_words_are_the_reason(backend: SlurmBackend, record: JobRecord) -> None:
    log = Path(record.log_dir) / "attempt-0" / "batch.log"
    log.parent.mkdir(parents=True)
    RunFolder(record.local_dir).attempt(0).mkdir()
    log.write_text("srun: error: Node failure on n2\nslurmstepd: error: *** JOB 7 ON n1 CANCELLED AT x DUE TO y ***\n")
    backend.queue.jobs = {"7": SEEN._replace(state="NODE_FAIL", work_dir=record.local_dir)}
    words = "(Node failure on n2; *** JOB 7 ON n1 CANCELLED AT x DUE TO y ***)"
    assert backend.state(record).reason == f"Slurm reports NODE_FAIL {words}"
    RunFolder(record.local_dir).attempt(1).mkdir()
    assert "(attempt 0: Node failure on n2;" in backend.state(record).reason


@pytest.mark.parametrize(
    ("said", "is_doubtful"),
    [
        ("sbatch: error: Batch job submission failed: Socket timed out on send/recv operation", True),
        ("sbatch: error: Batch job submission failed: Unable to contact slurm controller (connect failure)", True),
        ("Zero Bytes were transmitted or received", True),
        ("slurm_suspend error: Unexpected message received", True),
        (
            "sbatch: error: Batch job submission failed: Invalid account or account/partition combination specified",
            False,
        ),
        ("sbatch: error: invalid partition specified: nowhere", False),
        ("sbatch: error: Invalid argument: sockets-per-node=x", False),
        ("sbatch: error: invalid partition specified: munge", False),
        ("sbatch: error: QOSMaxSubmitJobPerUserLimit", False),
        ("sbatch: error: DNS SRV lookup failed\nsbatch: fatal: Could not establish a configuration source", False),
    ],
)
def test_what_is_in_doubt(said: str, is_doubtful: bool) -> None:
    assert slurm.failure(slurm.error_text(said)).is_doubtful is is_doubtful


def test_words_without_the_name_of_their_client() -> None:
    said = (
        "sbatch: error: invalid partition specified: x\nsbatch: error: Batch job submission failed: Invalid partition\n"
    )
    assert slurm.error_text(said) == "invalid partition specified: x; Batch job submission failed: Invalid partition"


def test_a_damaged_line_of_squeue_is_left_out() -> None:
    assert slurm_queue._parse_job(["1", "RUNNING"]) is None


def test_the_environment_of_another_job_does_not_come_along(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("SLURM_JOB_ID", "SBATCH_PARTITION", "PMI_RANK", "PMIX_RANK", "SQUEUE_FORMAT", "RANK", "BASH_ENV"):
        monkeypatch.setenv(name, "x")
    monkeypatch.setenv("SLURM_CONF", "/etc/slurm.conf")
    kept = {name for name in clean_environment() if name in os.environ}
    assert "SLURM_CONF" in kept
    assert not kept & {"SLURM_JOB_ID", "SBATCH_PARTITION", "PMI_RANK", "PMIX_RANK", "SQUEUE_FORMAT", "RANK", "BASH_ENV"}


@pytest.mark.parametrize(
    ("options", "state", "words"),
    [
        ("", "wrong", "srun has no --container-image, --container-mounts, --container-workdir"),
        ("--container-image= --container-mounts=", "wrong", "srun has no --container-workdir"),
        ("--container-image= --container-mounts= --container-workdir=", "notice", "no --container-env"),
        ("--container-image= --container-mounts= --container-workdir= --container-env=", "ok", "has the options"),
    ],
)
def test_doctor_looks_for_pyxis_in_the_help_of_srun(options: str, state: str, words: str) -> None:
    """The options are those that pyxis's README lists under `srun --help`."""
    row = pyxis_row(f"Usage: srun [OPTIONS(0)]\n  {options}\n")
    assert (row.state, words in row.found) == (state, True), row


@pytest.mark.parametrize(("login", "is_refused"), [("hpc", False), ("other", True), ("", True)])
def test_a_job_waits_only_for_jobs_of_its_own_cluster(
    record: JobRecord, tmp_path: Path, login: str, is_refused: bool
) -> None:
    """Oracle: Slurm, where the id 7 of another cluster is another job."""
    (tmp_path / "hpc.yaml").write_text("kind: slurm\nrun_root: /runs\nlogin: hpc\n")
    job = record._replace(login=login)
    session: Any = SimpleNamespace(store=SimpleNamespace(find=lambda _: job), state_of=lambda _: JobState(PENDING))
    checked: Any = SimpleNamespace(cluster=load_profile(str(tmp_path / "hpc.yaml")).cluster)
    expected = pytest.raises(UserError, match="cannot wait for it") if is_refused else nullcontext()
    with expected:
        refuse_foreign(session, ["gpt-1"], checked)
