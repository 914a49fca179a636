"""Hosts whose SFTP server is mute, slow or of another job. Oracles: the clock, what was asked of them, and what is here then.

Below the connection nothing is real.
"""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from gptctl.backends import Backends
from gptctl.backends.ssh.backend import SshBackend, _prepare
from gptctl.cli.jobs import cancel_records
from gptctl.cli.session import Session
from gptctl.deadline import Deadline
from gptctl.engine.contract import NO_SUCH_JOB
from gptctl.engine.job_result import CANCELLED, RUNNING, UNKNOWN
from gptctl.engine.processes import this_process
from gptctl.engine.run_folder import RunFolder
from gptctl.jobs.state import may_run
from gptctl.jobs.store import JobRecord
from gptctl.remote.connection import CommandResult
from gptctl.remote.host_error import HostError, silent_host
from gptctl.remote.link import HostLink
from gptctl.remote.log_sync import LogSync
from gptctl.remote.route import Route
from gptctl.remote.sftp import SftpReader
from tests.property.pretend_hosts import Mutator, PretendHost, PretendSftp
from tests.property.test_host_answers import JOB, PROCESS, answers_of, files_of, plan_of
from trainer.errors import UserError

PATIENCE = 1.0


class MuteFiles(PretendHost):
    """Answers commands, and its SFTP server says nothing."""

    asked: list[str]

    def run(self, command: Sequence[str], stdin: bytes = b"", timeout: float | None = None) -> CommandResult:
        self.asked.append(next(word for word in command if word in self.answers))
        return super().run(command)

    def files(self, deadline: Deadline) -> SftpReader:
        self.asked.append("files")
        raise TimeoutError


class SlowFiles(MuteFiles):
    """Every reply of its SFTP server takes a while."""

    def files(self, deadline: Deadline) -> SftpReader:
        return PretendHost.files(self, deadline)

    def close_files(self) -> None:
        self.asked.append("closed")
        super().close_files()


class SlowSftp(PretendSftp):
    delay = 0.1

    def recv(self, size: int) -> bytes:
        time.sleep(self.delay)
        return super().recv(size)


class OfAnotherJob(MuteFiles):
    """It was reset, and has a folder of this name with another token."""

    def run(self, command: Sequence[str], stdin: bytes = b"", timeout: float | None = None) -> CommandResult:
        return CommandResult(NO_SUCH_JOB, b"", "")

    def files(self, deadline: Deadline) -> SftpReader:
        return PretendHost.files(self, deadline)


class Job:
    """A running job on three hosts, one of which is of another class."""

    def __init__(self, folder: Path, kind: type[MuteFiles], node: int) -> None:
        run = folder / "runs" / JOB
        (run / "attempt-0").mkdir(parents=True)
        (run / "plan.json").write_text(json.dumps(plan_of("static").as_json()))
        paths: Any = {"local_dir": str(run), "log_dir": f"{run}/logs", "output_dir": f"{run}/output"}
        ranks: Any = {"nodes": 3, "per_node": 1, "world": 3}
        self.record = JobRecord(JOB, "gpt", 1.0, "c", "ssh", **paths, **ranks, token="t", handle=PROCESS)
        self.hosts = [self._host(kind if number == node else SlowFiles, number) for number in range(3)]
        self.backends = Backends(lambda words: None)
        backend: Any = self.backends.of("ssh")
        self.backend: SshBackend = backend
        links = [HostLink(host.route, lambda host=host: host) for host in self.hosts]  # type: ignore[misc]
        self.backend._syncs[JOB] = self.sync = LogSync(self.record, links)
        self.logs = run / "logs" / "attempt-0"

    def _host(self, kind: type[MuteFiles], node: int) -> MuteFiles:
        route = Route(f"h{node}", "", 1, "", (), (), patience=PATIENCE)
        host = kind(route, files_of(node, "RUNNING"), answers_of("RUNNING"), Mutator("", 0.0))
        host.asked = []
        return host


@pytest.fixture(autouse=True)
def own_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GPTCTL_HOME", str(tmp_path / "home"))


@pytest.mark.parametrize("node", [0, 1])
def test_the_state_is_known_although_files_are_not(node: int, tmp_path: Path) -> None:
    """What the first host said is used; what is missing is named, and the SFTP server is waited for once."""
    job = Job(tmp_path, MuteFiles, node)
    for _ in range(3):
        job.sync.refresh(0.0)
    assert job.backend.state(job.record).state == RUNNING
    assert job.hosts[node].asked.count("files") == 1
    (words,) = job.backend.catch_up(job.record)[:1]
    assert words == f"h{node}: its SFTP server did not answer in 1 s"
    other = 1 - node
    assert (job.logs / f"workerlog.{other}").exists()
    assert not (job.logs / f"workerlog.{node}").exists()


def test_cancel_stops_a_job_before_it_copies_anything(tmp_path: Path) -> None:
    job = Job(tmp_path, MuteFiles, 0)
    assert may_run(job.record, job.backends)
    job.backend.cancel(job.record, now=True)
    for host in job.hosts:
        assert host.asked[:2] == ["status", "end"], host.route.name
    assert "files" in job.hosts[0].asked
    found = RunFolder(job.record.local_dir).result()
    assert found
    assert found.state == CANCELLED


class Undoing(SlowFiles):
    """Has no agents left when it answers `end`; the gptctl that was submitting the job has undone that."""

    folder: Path

    def run(self, command: Sequence[str], stdin: bytes = b"", timeout: float | None = None) -> CommandResult:
        if "end" in command:
            shutil.rmtree(self.folder, ignore_errors=True)
        return super().run(command)


def test_cancel_of_a_job_that_is_being_submitted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Nothing is left, and that is what it says: not that the job is lost."""
    job = Job(tmp_path, Undoing, 0)
    job.hosts[0].folder = job.record.run_folder  # type: ignore[attr-defined]
    record = job.record._replace(handle={}, submitter=this_process())
    session = Session()
    session.__dict__["backends"] = job.backends
    assert cancel_records(session, [record], now=True, as_json=True) == 0
    assert json.loads(capsys.readouterr().out) == [{"job": JOB, "state": CANCELLED}]


@pytest.mark.parametrize("problem", [None, HostError("h1", "lost the connection", is_lost=True)])
def test_submit_blames_the_cancel_and_not_the_network(problem: HostError | None, tmp_path: Path) -> None:
    """Also if the hosts did not have the job yet when `cancel` asked them."""
    folder = RunFolder(tmp_path)
    launcher = mock.Mock()
    launcher.prepare.side_effect = problem or (lambda: folder.cancel(True))
    if problem:
        with pytest.raises(HostError):
            _prepare(launcher, folder)
        folder.cancel(True)
    with pytest.raises(UserError, match="was cancelled while it was being started; nothing runs"):
        _prepare(launcher, folder)
    launcher.roll_back.assert_called()


@pytest.mark.parametrize("is_quiet", [False, True])
def test_a_host_that_answers_no_keepalive_is_silent_as_a_whole(is_quiet: bool, tmp_path: Path) -> None:
    job = Job(tmp_path, MuteFiles, 0)
    job.hosts[0].is_quiet = is_quiet
    with pytest.raises(HostError) as caught, job.sync.hosts[0].files():
        pass
    assert (caught.value.is_lost, caught.value.is_silent) == (is_quiet, is_quiet)


def test_slow_replies_do_not_add_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Listing and copying end together, a second try is not worth it, and `logs` gets everything."""
    monkeypatch.setattr("tests.property.pretend_hosts.PretendSftp", SlowSftp)
    job = Job(tmp_path, SlowFiles, 0)
    began = time.monotonic()
    for _ in range(3):
        job.sync.refresh(0.0)
    assert time.monotonic() - began < 6 * PATIENCE
    assert job.backend.state(job.record).state == RUNNING
    assert "only a part of its new logs was copied in time" in job.sync.hosts[0].incomplete
    assert job.hosts[0].asked.count("closed") == 1
    monkeypatch.setattr(SlowSftp, "delay", 0.0)
    job.sync.want_all()
    job.sync.refresh()
    assert not job.sync.hosts[0].incomplete
    assert (job.logs / "workerlog.0").read_text() == "FORGED-0\n"


def test_an_answer_of_megabytes_is_not_parsed(tmp_path: Path) -> None:
    job = Job(tmp_path, MuteFiles, 0)
    job.hosts[0].answers["status"] |= {"agents": [[]] * 300_000}
    with pytest.raises(HostError, match="its answer has more than 1,048,576 bytes"):
        job.sync.hosts[0].ask("status")
    assert job.backend.state(job.record).state == UNKNOWN


def test_a_host_that_was_not_asked_is_not_called_unreachable(tmp_path: Path) -> None:
    """`list` has 3 s: on a busy machine little may be left when the turn of a host comes."""
    job = Job(tmp_path, SlowFiles, 0)
    for host in job.sync.hosts:
        host._link._limit = Deadline(0.3)
    found = job.backend.state(job.record)
    assert found.state == UNKNOWN
    for node in range(3):
        assert f"h{node}: gptctl had no time left to ask it" in found.reason
    assert "unreachable" not in found.reason
    assert silent_host("h0", 0.22).detail == "gptctl had no time left to ask it"
    assert silent_host("h0", 2.2).detail == "no answer in 2.2 s"


def test_logs_of_another_job_are_not_shown(tmp_path: Path) -> None:
    """A folder of the same name, with another token: the agent's script there says that there is no such job."""
    job = Job(tmp_path, OfAnotherJob, 1)
    job.backend.catch_up(job.record)
    assert (job.logs / "workerlog.0").exists()
    assert not (job.logs / "workerlog.1").exists()
