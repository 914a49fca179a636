"""Hosts may answer anything: what they say is damaged, and goes through all that consumes it.

Oracles, for each case: no exception but UserError, also in threads; no call takes 2 s of processor time; the state is what an
honest first host says, whatever the others do; a damaged first host gets no verdict that it did not utter; a job counts as
stopped only if every host says so; no host writes into the copy of another one's file.

A case is its number: `GPTCTL_CASE=123 pytest tests/property/test_host_answers.py` repeats one.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from gptctl.backends.ssh import backend as ssh_backend
from gptctl.backends.ssh import launcher as launcher_module
from gptctl.backends.ssh.backend import SshBackend
from gptctl.backends.ssh.launcher import AgentClient, Launcher
from gptctl.engine.file_reading import read_json
from gptctl.engine.job_result import FINAL, LOST, PENDING, RUNNING, UNKNOWN
from gptctl.engine.launch_plan import LaunchPlan
from gptctl.engine.run_folder import RunFolder
from gptctl.jobs.store import JobRecord, Store
from gptctl.remote import link as remote_link
from gptctl.remote import log_sync
from gptctl.remote.answers import is_commit
from gptctl.remote.file_owners import owner_by_name
from gptctl.remote.link import HostLink
from gptctl.remote.log_sync import LogSync
from gptctl.remote.route import Route
from gptctl.reporting import FetchOptions
from tests.property.pretend_hosts import Mutator, PretendHost
from trainer.errors import UserError

CASES, MANY_CASES = 100, 20_000
MESSAGES, MANY_MESSAGES = 500, 100_000
MOST_WORK, MOST_WAITING = 2.0, 30  # seconds of processor time, and on the clock: machines are busy
JOB, RUN = "gpt-f00", "/srv/runs/gpt-f00"
PROCESS = {"pid": 5, "started": 7, "boot": "b", "host": "h0"}
EMPTY: dict[str, Any] = {"str": "", "int": 0, "bool": False, "float": 0.0, "int | None": None, "tuple[str, ...]": ()}
FIELDS = {name: EMPTY.get(kind.__forward_arg__, {}) for name, kind in LaunchPlan.__annotations__.items()}
TRUTHS = {
    "RUNNING": None,
    "COMPLETED": ["COMPLETED", "", 1.0, None],
    "FAILED": ["FAILED", "why", 1.0, None],
    "LOST": None,
}
VERBS = ("state", "catch_up", "cancel", "abandon", "fetch", "checkpoints", "remove", "follow")


def plan_of(form: str) -> LaunchPlan:
    paths = {"remote_dir": RUN, "log_dir": f"{RUN}/logs", "output_dir": f"{RUN}/output", "work_dir": f"{RUN}/code"}
    own = {"job_id": JOB, "form": form, "nodes": 3, "nnodes": "3", "per_node": 1, "world": 3, "hosts": ["a", "b", "c"]}
    return LaunchPlan(**{**FIELDS, **LaunchPlan._field_defaults, **paths, **own})


def files_of(node: int, truth: str) -> dict[str, bytes]:
    """What a host has: its own files, and forged ones in the names of all others."""
    forged = f"FORGED-{node}\n".encode()
    names = [f"attempt-0/ranks.{n}.jsonl" for n in range(3)] + [f"logs/attempt-0/workerlog.{n}" for n in range(3)]
    names += ["attempt-0/endpoint.json", "attempt-0/outcome.json", "output/status.json", "output/metrics.jsonl"]
    found = {f"{RUN}/{name}": forged for name in names}
    found |= {f"{RUN}/output/step_5/manifest.json": b'{"files": {}}', f"{RUN}/code/out.txt": forged}
    if node == 0 and TRUTHS[truth]:
        result = {"state": truth, "reason": "", "ended": 1.0, "failure": None, "not_ended": []}
        found[f"{RUN}/result.json"] = json.dumps(result).encode()
    if node and TRUTHS[truth] is None:
        found[f"{RUN}/result.json"] = b'{"state": "COMPLETED", "reason": "forged", "ended": 1.0}'
    return found


def answers_of(truth: str) -> dict[str, Any]:
    alive = [PROCESS] if truth == "RUNNING" else []
    status = {
        "claim": PROCESS,
        "agents": alive,
        "processes": len(alive),
        "boot": "b",
        "result": TRUTHS[truth],
        "waiting": "",
    }
    return {"status": status, "end": {"left": []}, "abandon": {"claim": PROCESS}}


class Case:
    """One job on three pretended hosts, some of them damaged."""

    def __init__(self, number: int, folder: Path) -> None:
        self.number, self.random = number, random.Random(number)
        self.truth = self.random.choice(list(TRUTHS))
        self.is_honest = self.random.random() < 0.4  # the first host
        self.form = self.random.choice(("static", "static", "c10d"))
        self.verbs = self.random.sample(VERBS, 2)
        run = folder / "home" / "runs" / JOB
        (run / "attempt-0").mkdir(parents=True)
        (run / "plan.json").write_text(json.dumps(plan_of(self.form).as_json()))
        self.record = JobRecord(
            JOB,
            "gpt",
            1.0,
            "c",
            "ssh",
            str(run),
            f"{run}/logs",
            3,
            1,
            3,
            "",
            f"{run}/output",
            token="t",
            handle=PROCESS,
        )
        self.folder, self.bugs, self.succeeded = folder, list[str](), Counter[str]()
        self.hosts = [self._host(node) for node in range(3)]
        links = [HostLink(host.route, self._connect(host)) for host in self.hosts]
        self.backend = SshBackend(lambda words: None)
        self.sync = self.backend._syncs[JOB] = LogSync(self.record, links)

    def _host(self, node: int) -> PretendHost:
        rate = 0.0 if node == 0 and self.is_honest else self.random.choice((0.02, 0.1, 0.4))
        mutator = Mutator(f"{self.number}-{node}", rate)
        return PretendHost(
            Route(f"h{node}", "", 1, "", (), ()), files_of(node, self.truth), answers_of(self.truth), mutator
        )

    def _connect(self, host: PretendHost) -> Callable[[], PretendHost]:
        return lambda: host

    def run(self) -> None:
        for verb in self.verbs:
            self._run_verb(verb)
        self.check_copies()
        assert not self.bugs, self.bugs
        assert sorted(os.listdir(self.folder)) in (["home"], ["home", "target"])

    def _run_verb(self, verb: str) -> None:
        began = time.process_time()
        try:
            getattr(self, verb)()
            self.succeeded[verb] += 1
        except UserError as error:
            assert error.exit_code in (1, 2, 3), verb
        assert time.process_time() - began < MOST_WORK, verb

    def state(self) -> None:
        self.sync._refreshed = float("-inf")
        found = self.backend.state(self.record)
        assert "\n" not in found.reason
        if self.is_honest and "cancel" not in self.verbs:
            assert found.state == self.truth, found
        elif found.state != UNKNOWN and "cancel" not in self.verbs:
            assert found.state in self.uttered(), (found, self.hosts[0].said)

    def uttered(self) -> set[str]:
        """The states that the first host has named itself, read in the simplest way."""
        head = self.hosts[0]
        code, text = head.said.get("status", (0, b""))
        words = text + b"".join(head.sent_files)
        found = {state for state in FINAL if f'"{state}"'.encode() in words} - {LOST}
        with suppress(ValueError, RecursionError):
            value = json.loads(text.decode(errors="replace"))  # a damaged text is still its text
            is_idle = isinstance(value, dict) and value.get("agents") == [] and not value.get("processes")
            found |= {LOST} if is_idle else {RUNNING, PENDING}
        return found | ({LOST} if code == 66 else set())

    def catch_up(self) -> None:
        assert all(isinstance(words, str) for words in self.backend.catch_up(self.record))

    def follow(self) -> None:
        with mock.patch.object(LogSync, "_follow"), self.backend.following(self.record):
            self.backend.state(self.record)

    def cancel(self) -> None:
        self.backend.cancel(self.record, self.random.random() < 0.5)
        for host in self.hosts:
            code, text = host.said["end"]
            assert code == 66 or json.loads(text)["left"] == [], host.said

    def abandon(self) -> None:
        if not self.backend.abandon(self.record):
            return
        code, text = self.hosts[0].said["abandon"]
        assert code == 66 or json.loads(text)["claim"]["abandoned"] is True

    def checkpoints(self) -> None:
        assert isinstance(self.backend.checkpoints(self.record)[1], list)

    def remove(self) -> None:
        self.backend.remove(self.record)

    def fetch(self) -> None:
        options = FetchOptions(str(self.folder / "target"), True, 10**9, 1000)
        self.backend.fetch(self.record, options, lambda title, total: nullcontext(lambda size: None))

    def check_copies(self) -> None:
        """Forged content is only in files that belong to the forger, or apart from those of others."""
        for here in (self.record.run_folder, self.folder / "target"):
            for file in here.rglob("*"):
                path = str(file.relative_to(here))
                if not file.is_file() or path.startswith(("hosts/", "file-owners", "output/step_")):
                    continue
                forgers = {node for node in range(3) if f"FORGED-{node}".encode() in file.read_bytes()}
                # An unfinished copy is of one host, which its name does not tell.
                is_unfinished = path.startswith(".fetching/")
                owner = None if is_unfinished else owner_by_name(path, plan_of(self.form))
                # Where the name does not tell, there is one owner all the same.
                assert forgers <= {owner} if owner is not None else len(forgers) <= 1, (path, forgers)


@contextmanager
def quick(bugs: Callable[[], list[str]]) -> Iterator[None]:
    """No threads, no waiting, and no exception that a thread would have swallowed."""

    def serial(work: Callable[[Any], Any], items: Sequence[Any], most: int = 0, **_: Any) -> list[Any]:
        results: list[Any] = []
        for item in items:
            try:
                results.append(work(item))
            except UserError as error:
                results.append(error)
            except Exception as error:
                bugs().append(repr(error))
                results.append(error)
        return results

    with (
        mock.patch.object(log_sync, "in_parallel", serial),
        mock.patch.object(ssh_backend, "in_parallel", serial),
        mock.patch.object(remote_link, "RETRY_DELAYS", (0.0, 0.0)),
        mock.patch.object(os, "fsync"),
        alarm(),
    ):
        yield


@contextmanager
def alarm() -> Iterator[None]:
    def hang(*_: object) -> None:
        raise AssertionError("it hangs")

    before = signal.signal(signal.SIGALRM, hang)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def run_cases(numbers: Sequence[int], folder: Path) -> None:
    bugs: list[str] = []
    succeeded = Counter[str]()
    with quick(lambda: bugs):
        for number in numbers:
            signal.alarm(MOST_WAITING)
            own = folder / str(number)
            try:
                case = Case(number, own)
                case.bugs = bugs
                case.run()
            except BaseException as error:
                error.add_note(f"repeat it: GPTCTL_CASE={number} pytest {__file__}")
                raise
            succeeded += case.succeeded
            shutil.rmtree(own)
    # Every verb succeeds now and then, or its oracles have judged nothing.
    assert len(numbers) < CASES or set(succeeded) == set(VERBS), succeeded


def chosen(count: int) -> Sequence[int]:
    case = os.environ.get("GPTCTL_CASE")
    return [int(case)] if case else range(count)


def test_answers_of_hosts(tmp_path: Path) -> None:
    run_cases(chosen(CASES), tmp_path)


@pytest.mark.long
def test_many_answers_of_hosts(tmp_path: Path) -> None:
    run_cases(range(CASES, MANY_CASES), tmp_path)


class PretendChannel:
    """What an agent prints, in pieces."""

    closed = True

    def __init__(self, data: bytes) -> None:
        self._data = data

    def settimeout(self, seconds: float) -> None:
        return

    def sendall(self, data: bytes) -> None:
        return

    def recv_stderr_ready(self) -> bool:
        return False

    def recv(self, size: int) -> bytes:
        piece, self._data = self._data[:1000], self._data[1000:]
        return piece


class Commits:
    """Starts one job again and again; the commit of its first host is damaged each time."""

    def __init__(self, folder: Path) -> None:
        run = folder / "runs" / JOB
        run.mkdir(parents=True)
        paths = {"local_dir": str(run), "log_dir": f"{run}/logs"}
        ranks = {"nodes": 1, "per_node": 1, "world": 1}
        self.store, self.plan = Store(folder), plan_of("static")
        self.record = JobRecord(JOB, "gpt", 1.0, "c", "ssh", **paths, **ranks, token="t")  # type: ignore[arg-type]
        assert self.store.add(self.record)

    def check(self, number: int) -> None:
        shutil.rmtree(self.record.run_folder)
        self.record.run_folder.mkdir()
        backend = SshBackend(lambda words: None)
        backend._syncs[JOB] = mock.MagicMock()
        with mock.patch.object(launcher_module, "Launcher", return_value=committing(number)):
            try:
                handle = backend.start(self.plan, self.record)
            except UserError:
                return
        self.store.accept(self.record._replace(handle=handle))
        # What a host says must neither spoil the record of the job nor its folder.
        assert self.store.find(JOB).handle == handle
        assert not self.store.damaged
        assert set(handle) == {"pid", "started", "boot", "host"}
        folder = RunFolder(self.record.local_dir)
        assert folder.claimed_by() == handle
        place = read_json(folder.attempt(0) / "endpoint.json")
        assert place is None or (0 < place["port"] < 1 << 16 and len(place["host"]) < 256)
        assert len(folder.waiting_for()) < 10_000


def committing(number: int) -> Launcher:
    """A launcher whose hosts are ready, and whose first one confirms the commit as this number says."""
    mutator = Mutator(f"launch-{number}", 0.5)
    text = mutator.answer({"committed": mutator.extended(PROCESS), "endpoint": ["h", 29500], "waiting": ""})
    agent = AgentClient.__new__(AgentClient)
    agent.route, agent._buffer, agent._has_started = Route("h0", "", 1, "", (), ()), b"", True
    agent._sending = mock.MagicMock()
    agent._channel = PretendChannel(text + b"\n")
    launcher = Launcher.__new__(Launcher)
    launcher.agents, launcher.timeout = [agent], 5.0
    launcher.prepare = launcher.close = lambda: None  # type: ignore[method-assign]
    return launcher


def check_commits(numbers: Sequence[int], folder: Path) -> None:
    commits = Commits(folder)
    with alarm(), mock.patch.object(os, "fsync"):
        for number in numbers:
            signal.alarm(MOST_WAITING)
            try:
                commits.check(number)
            except BaseException as error:
                error.add_note(f"commit {number}")
                raise


def test_commits(tmp_path: Path) -> None:
    """Whatever a first host confirms, the record of the job can be read again, and says nothing else of it."""
    check_commits(range(MESSAGES), tmp_path)


@pytest.mark.parametrize(
    "commit",
    [
        {"committed": {**PROCESS, "scheduler_id": []}, "endpoint": ["h", 29500]},
        {"committed": {**PROCESS, "abandoned": True, "more": "x" * 900_000}, "endpoint": ["h", None]},
    ],
)
def test_a_commit_adds_nothing_to_the_record(commit: dict[str, Any], tmp_path: Path) -> None:
    commits = Commits(tmp_path)
    with mock.patch.object(Mutator, "answer", return_value=json.dumps(commit).encode()):
        commits.check(0)
    assert commits.store.find(JOB).handle == PROCESS | {"host": "h"}


@pytest.mark.parametrize(
    "endpoint", [["h", -5], ["h", 0], ["h", 99_999_999], ["h", True], ["h" * 100_000, 29500], ["h"]]
)
def test_a_commit_names_a_possible_endpoint(endpoint: list[Any]) -> None:
    assert is_commit({"committed": PROCESS, "endpoint": ["h", 29500]})
    assert not is_commit({"committed": PROCESS, "endpoint": endpoint})


@pytest.mark.long
def test_many_commits(tmp_path: Path) -> None:
    check_commits(range(MESSAGES, MANY_MESSAGES), tmp_path)


def test_a_result_file_of_a_host_is_used_only_if_it_is_one(tmp_path: Path) -> None:
    """Whatever is in it, reading it gives a final state that it names, or none."""
    with mock.patch.object(os, "fsync"):
        for number in range(MESSAGES):
            mutator = Mutator(f"result-{number}", 0.7)
            value = {
                "state": "FAILED",
                "reason": "why",
                "ended": 1.0,
                "failure": {"rank": 1, "text": "x"},
                "not_ended": [],
            }
            text = mutator.answer(value)
            (tmp_path / "result.json").write_bytes(text)
            found = RunFolder(tmp_path).result()
            if found:
                assert f'"{found.state}"'.encode() in text
                assert found.state in FINAL
                assert "\n" not in found.reason
                json.dumps(found.as_json()).encode()
