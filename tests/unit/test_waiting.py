"""Why a job waits. Oracles: the reasons in Slurm's own library, what Slurm's manual says of its formats, and the rules of
the machine's queue."""

from __future__ import annotations

import json
import re
import time
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from gptctl.backends import Backends, JobState
from gptctl.backends.slurm.backend import SlurmBackend
from gptctl.backends.slurm.client import SlurmClient, SlurmError
from gptctl.backends.slurm.pending_reasons import reason_text
from gptctl.backends.slurm.queue import SEPARATOR, QueuedJob
from gptctl.backends.slurm.waiting import (
    Partition,
    PendingJob,
    _seconds,
    changes,
    query_partitions,
    waiting_in,
)
from gptctl.engine.queue_rules import GpuUse, Ticket, decide
from gptctl.jobs.queue_words import in_words
from gptctl.jobs.store import JobRecord
from gptctl.jobs.why import explain
from gptctl.jobs.why_text import why_pairs
from gptctl.reporting import Waiting

LIBRARY = Path("/usr/lib/x86_64-linux-gnu/slurm-wlm/libslurmfull.so")
# Reasons that squeue of 22.05 prints, as its manual lists them, without the families of limits.
REASONS = """
None Resources Priority Dependency DependencyNeverSatisfied BeginTime JobHeldUser JobHeldAdmin JobHoldMaxRequeue
JobLaunchFailure JobArrayTaskLimit ReqNodeNotAvail NodeDown FrontEndDown BadConstraints Licenses Reservation
ReservationDeleted PartitionDown PartitionInactive PartitionNodeLimit PartitionTimeLimit PartitionConfig TimeLimit
DeadLine InactiveLimit InvalidAccount AccountNotAllowed AccountingPolicy InvalidQOS QOSNotAllowed QOSUsageThreshold
QOSJobLimit QOSResourceLimit QOSTimeLimit AssociationJobLimit AssociationResourceLimit AssociationTimeLimit
MaxMemPerLimit SystemFailure NonZeroExitCode OutOfMemory Prolog Cleaning FedJobLock SchedDefer BurstBufferResources
BurstBufferStageIn BurstBufferOperation PowerNotAvail PowerReserved
""".split()


@pytest.mark.parametrize("reason", REASONS)
def test_every_reason_has_words(reason: str) -> None:
    text = reason_text(reason)
    assert text is not None
    assert text.cause
    assert text.fix


def test_every_limit_of_the_installed_slurm_has_words() -> None:
    """Oracle: the strings in Slurm's own library."""
    if not LIBRARY.exists():
        pytest.skip("Slurm is not installed here")
    named = set(re.findall(rb"\0((?:Assoc|QOS|Max)(?:Grp|Max|Min)?[A-Z][A-Za-z]{2,40})(?=\0)", LIBRARY.read_bytes()))
    limits = {name.decode() for name in named}
    limits = {each for each in limits if re.match(r"(Assoc|QOS)(Grp|Max|Min)|Max\w+PerAccount", each)}
    assert len(limits) > 100
    assert {each for each in limits if reason_text(each) is None} == set()


@pytest.mark.parametrize(
    ("reason", "words"),
    [
        ("AssocGrpGRES", "all jobs of your account together"),
        ("QOSMaxGRESPerUser", "your jobs have as many or as much as its QOS allows: GPUs"),
        ("QOSMaxJobsPerUserLimit", "your jobs have as many or as much as its QOS allows: running jobs"),
        ("QOSMaxWallDurationPerJobLimit", "it requests more time than its QOS allows for one job"),
        ("AssocGrpCPUMinutesLimit", "the budget of your account (processors × time) is used up"),
        ("MaxNodePerAccount", "your jobs have as many or as much as your account allows: nodes"),
        ("QOSMinGRES", "it requests fewer GPUs"),
        ("QOSGrpNodeLimit", "all jobs of its QOS together"),
        ("ReqNodeNotAvail, UnavailableNodes:node[1-2]", "down, drained, reserved"),
        ("ReqNodeNotAvail,_UnavailableNodes:node1", "down, drained, reserved"),
        ("(Resources)", "are in use"),
    ],
)
def test_words_of_limits_and_details(reason: str, words: str) -> None:
    text = reason_text(reason)
    assert text is not None
    assert words in text.cause


@pytest.mark.parametrize("reason", ["", "NewIn25", "\x1b[2J", "Assoc", "QOSMax"])
def test_an_unknown_reason_has_none(reason: str) -> None:
    assert reason_text(reason) is None


@pytest.mark.parametrize(
    ("limit", "seconds"),
    [("2:00", 120), ("1:00:00", 3600), ("1-00:00:00", 86400), ("UNLIMITED", None), ("", None), ("9" * 30, None)],
)
def test_time_limits_of_squeue(limit: str, seconds: int | None) -> None:
    assert _seconds(limit) == seconds


NOON = datetime(2026, 3, 1, 12)
OWN = PendingJob("7", 100, frozenset(["gpu"]), 4, 7200, None, NOON)
GPU = Partition("gpu", True, 2, 1, 8)
BIG, IDLE = Partition("big", True, 9, 0, 16), Partition("idle", True, 12, 0, 16)


def rival(minutes: float | None) -> PendingJob:
    """A job with a higher priority that is expected to start so many minutes from now."""
    start = None if minutes is None else NOON + timedelta(minutes=minutes)
    return PendingJob("3", 900, frozenset(["gpu"]), 8, 3600, start, NOON)


@pytest.mark.parametrize(
    ("own", "known", "ahead", "expected"),
    [
        (OWN, [GPU], [], ["--nodes 2"]),
        (OWN, [GPU, BIG, IDLE], [], ["--nodes 2", "--partition idle"]),
        (OWN, [GPU, BIG._replace(is_up=False), IDLE._replace(idle=3)], [], ["--nodes 2"]),
        # Idle nodes that a job with a higher priority waits for: only until its start, with a minute to spare.
        (OWN, [GPU], [rival(31)], ["--nodes 2 --time 30"]),
        (OWN, [GPU], [rival(300), rival(31)], ["--nodes 2 --time 30"]),
        (OWN, [GPU], [rival(300)], ["--nodes 2"]),
        (OWN._replace(nodes=2), [GPU], [rival(31)], ["--time 30"]),
        (OWN._replace(nodes=2, limit=None), [GPU], [rival(31)], ["--time 30"]),
        (OWN._replace(nodes=2, limit=60), [GPU], [rival(31)], []),  # backfill starts it as it is
        (OWN, [GPU], [rival(1.5)], []),
        (OWN, [GPU], [rival(None)], []),  # not planned yet
        (OWN._replace(now=None), [GPU], [rival(31)], []),
        (OWN, [GPU._replace(idle=0)], [rival(31)], []),
        (OWN, [], [], []),
    ],
)  # fmt: skip
def test_changes_that_are_worth_a_question(
    own: PendingJob, known: list[Partition], ahead: list[PendingJob], expected: list[str]
) -> None:
    """Oracle: counted by hand."""
    assert [change.option for change in changes(own, known, ahead)] == expected


class Cluster:
    """A cluster whose commands print what a test gives: the answers that the lab cannot give on purpose."""

    def __init__(self, pending: list[list[str]], sinfo: str, starts: dict[str, str]) -> None:
        self.pending, self.sinfo, self.starts = pending, sinfo, starts
        self.asked: list[list[str]] = []

    def __call__(self, command: list[str], stdin: str) -> Any:
        from gptctl.backends.slurm.client import ClientResult

        self.asked.append(list(command))
        if command[0] == "squeue":
            return ClientResult(0, "".join(SEPARATOR.join([*row, "\n"]) for row in self.pending), "")
        if command[0] == "sinfo":
            return ClientResult(0, self.sinfo, "")
        assert command[:2] == ["sbatch", "--test-only"]
        assert stdin == "#!/bin/bash\n"
        start = self.starts.get(" ".join(command[2:]))
        if start is None:
            return ClientResult(1, "", "allocation failure: Requested node configuration is not available\n")
        return ClientResult(
            0, "", f"sbatch: Job 99 to start at {start} using 4 processors on nodes n1 in partition x\n"
        )


@pytest.fixture
def job(tmp_path: Path) -> JobRecord:
    (tmp_path / "job.sbatch").write_text("#!/bin/bash\n")
    handle = {"scheduler_id": "7", "host": "login"}
    return JobRecord("gpt-1", "gpt", 0.0, "lab", "slurm", str(tmp_path), str(tmp_path / "logs"), 4, 2, 8, handle=handle)


def ask(job: JobRecord, cluster: Any, **seen: Any) -> Waiting:
    backend = SlurmBackend(print)
    access = backend.direct
    access.client = SlurmClient(cluster)
    queued = QueuedJob("7", "PENDING", "Resources", "2026-03-02T08:00:00", "", 0, 0, job.local_dir, "")
    access.queue.jobs = {"7": queued._replace(**seen)}
    return waiting_in(access, job, JobState("PENDING", "Resources"))


CLOCK = ["2026-03-01T08:00:00", "3600"]  # submitted, and how long ago: it is 9 o'clock
PENDING = [
    ["7", "100", "gpu", "4", "2:00:00", "2026-03-02T08:00:00", *CLOCK],
    ["5", "100", "gpu", "1", "2:00:00", "N/A", *CLOCK],  # came before it
    ["9", "300", "gpu,big", "2", "2:00:00", "2026-03-01T10:01:00", *CLOCK],
    ["3", "0", "gpu", "1", "2:00:00", "N/A", *CLOCK],  # held
    ["8", "100", "gpu", "1", "2:00:00", "N/A", *CLOCK],
    ["10", "900", "cpu", "1", "2:00:00", "2026-03-01T09:00:01", *CLOCK],
    ["a torn line"],
]
SINFO = "gpu|up|5/2/1/8\ncpu|up|0/1/0/1\nbig|up|0/6/0/6\ngarbage\n"


def test_place_nodes_and_what_would_start_sooner(job: JobRecord) -> None:
    starts = {"--partition=big": "2026-03-01T09:00:00", "--nodes=2 --time=60": "2026-03-02T08:00:00"}
    cluster = Cluster(PENDING, SINFO, starts)
    waiting = ask(job, cluster)
    assert (waiting.priority, waiting.ahead, waiting.pending) == (100, 2, 5)
    assert (waiting.nodes_wanted, waiting.nodes_idle, waiting.nodes_unusable, waiting.nodes_total) == (4, 2, 1, 8)
    assert waiting.expected_start == "2026-03-02 08:00:00"
    gap = "2 nodes are idle until another job's start at 2026-03-01 10:01:00"
    expected = [("--nodes 2 --time 60", "", gap), ("--partition big", "2026-03-01 09:00:00", "")]
    assert [tuple(each) for each in waiting.sooner] == expected
    assert [command[0] for command in cluster.asked] == ["squeue", "sinfo", "sbatch", "sbatch"]
    assert not waiting.never_starts
    json.dumps(waiting.as_json())


def test_what_slurm_refuses_or_starts_no_sooner_is_left_out(job: JobRecord) -> None:
    waiting = ask(job, Cluster(PENDING, SINFO, {"--partition=big": "2026-03-02T08:00:00"}))
    assert waiting.sooner == ()


def test_a_job_that_is_held_needs_no_further_questions(job: JobRecord) -> None:
    cluster = Cluster(PENDING, SINFO, {})
    waiting = ask(job, cluster, reason="JobHeldUser", start="N/A")
    assert waiting.fix == "release it: scontrol release 7"
    assert waiting.sooner == ()
    assert [command[0] for command in cluster.asked] == ["squeue", "sinfo"]


def test_a_job_that_can_never_start(job: JobRecord) -> None:
    waiting = ask(job, Cluster(PENDING, SINFO, {}), reason="PartitionTimeLimit", start="N/A")
    assert waiting.never_starts
    assert "shorter --time" in waiting.fix


def test_a_task_of_an_array_is_found_in_its_line(job: JobRecord) -> None:
    rows = [["7_[2-9%3]", "50", "gpu", "1", "UNLIMITED", "N/A", "N/A", "0"]]
    backend, cluster = SlurmBackend(print), Cluster(rows, "gpu|up|0/0/0/4\n", {})
    backend.direct.client = SlurmClient(cluster)
    task = job._replace(handle={"scheduler_id": "7_3"})
    queued = QueuedJob("7_3", "PENDING", "JobArrayTaskLimit", "N/A", "", 0, 0, job.local_dir, "")
    backend.direct.queue.jobs = {"7_3": queued}
    waiting = waiting_in(backend.direct, task, JobState("PENDING"))
    assert (waiting.priority, waiting.ahead, waiting.pending) == (50, 0, 1)
    assert "ArrayTaskThrottle" in waiting.fix


def test_half_an_answer_if_slurm_stops_answering(job: JobRecord) -> None:
    """The reason in words needs no further command."""

    def silent(command: list[str], stdin: str) -> Any:
        raise SlurmError(f"{command[0]} got no answer in 30 s", is_doubtful=True, is_silent=True)

    waiting = ask(job, silent)
    assert waiting.cause == "the nodes, GPUs or memory that it needs are in use"
    assert waiting.not_asked == "squeue got no answer in 30 s"
    assert waiting.nodes_total is None


def test_partitions_with_nodes_of_several_kinds_have_one_row() -> None:
    client = SlurmClient(Cluster([], "gpu|up|1/2/0/3\ngpu|up|0/4/1/5\n", {}))
    assert query_partitions(client) == [Partition("gpu", True, 6, 1, 8)]


def test_the_text_of_a_pending_job(job: JobRecord, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("GPTCTL_HOME", str(tmp_path / "home"))
    starts = {"--partition=big": "2026-03-01T09:00:00", "--nodes=2 --time=60": "2026-03-02T08:00:00"}
    cluster = Cluster(PENDING, SINFO, starts)
    backend = SlurmBackend(print)
    backend.direct.client = SlurmClient(cluster)
    queued = QueuedJob("7", "PENDING", "Priority", "2026-03-02T08:00:00", "", 0, 0, job.local_dir, "")
    backend.queue.jobs, backend.queue._asked = {"7": queued}, time.monotonic()
    backends = Backends(print)
    monkeypatch.setattr(backends, "of", lambda kind: backend)
    facts = explain(job, backends)
    assert why_pairs(facts, 0.0) == [
        ("state", "PENDING: Priority, expected to start 2026-03-02 08:00:00"),
        ("waits", "jobs with a higher priority are waiting before it"),
        ("fix", "wait; with fewer nodes, a shorter --time or another partition it may start sooner"),
        ("nodes", "it needs 4; 2 of 8 in gpu are idle, 1 unusable"),
        ("priority", "100; 2 of 5 pending jobs come before it"),
        ("expected", "2026-03-02 08:00:00"),
        (
            "sooner",
            "--nodes 2 --time 60: could start now: 2 nodes are idle until another job's start at 2026-03-01 10:01:00",
        ),
        ("", "--partition big: would start 2026-03-01 09:00:00"),
        ("try", "gptctl cancel gpt-1"),
        ("", "gptctl rerun gpt-1 --nodes 2 --time 60"),
    ]
    assert facts["explained"]


# The queue of a machine


def reasons_of_the_queue() -> dict[str, str]:
    """What the rules of the queue say for jobs that wait for each kind of thing."""
    own = Ticket(3, "gpt-3", "/runs/gpt-3", waits=True)
    first = Ticket(1, "gpt-1", "/runs/gpt-1", is_running=True)
    gpus = GpuUse(("0", "1"), frozenset(["0", "1"]))
    group = first._replace(group="g")
    return {
        "jobs that came before it": decide(own, [first]).reason,
        "processes that gptctl did not start": decide(own._replace(gpus=2), [], gpus).reason,
        "as many runs of its sweep": decide(own._replace(group="g", limit=1, waits=False), [group]).reason,
        "it was submitted with --after": "waits for gpt-1 to complete",
        "the lock of this machine's queue": "waits for the lock of the queue",
        "cannot be read": "cannot read the queue: Stale file handle: /x",
        "gptctl is submitting it": "being submitted",
    }


@pytest.mark.parametrize(("words", "reason"), reasons_of_the_queue().items(), ids=list(reasons_of_the_queue()))
def test_what_a_machine_is_waited_for_has_words(words: str, reason: str) -> None:
    waiting = in_words(Waiting(reason))
    assert words in waiting.cause
    assert waiting.fix


def test_words_of_a_scheduler_are_kept() -> None:
    known = Waiting("waits for gpt-1 to end", "because", "do")
    assert in_words(known) == known
    assert in_words(Waiting("nobody knows")).cause == ""
