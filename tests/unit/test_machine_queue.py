"""The queue of a machine, with files and processes as accidents leave them. Oracles: the files, and what a job waits for."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path

import pytest

from gptctl.backends import local
from gptctl.engine import gpus, machine_queue
from gptctl.engine.admission import Admission, NeverStarts, waits_for
from gptctl.engine.machine_queue import MachinePlace, MachineQueue, queue_folder, wanted
from gptctl.engine.processes import this_process
from gptctl.engine.queue_rules import Ticket
from gptctl.engine.run_folder import RunFolder
from tests.unit.test_supervisor import plan_in

DEAD = {**this_process(), "started": 1}


@pytest.fixture
def queue(tmp_path, monkeypatch) -> MachineQueue:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    return MachineQueue(queue_folder())


def damaged(**facts: object) -> str:
    return json.dumps({**Ticket(8, "a", "/a")._asdict(), "process": this_process(), **facts})


@pytest.mark.parametrize(
    "facts", [{"number": "x"}, {"number": 1e999}, {"job": 5}, {"devices": None}, {"devices": [[1]]}, {"limit": "1"}]
)
def test_a_damaged_ticket_is_removed(queue, facts: dict[str, object]) -> None:
    """Its process lives, so only its fields tell; a good one stays."""
    (queue.folder / "000000008.ticket").write_text(damaged(**facts))
    assert queue.add(Ticket(0, "b", "/b")).number == 1
    assert sorted(os.listdir(queue.folder)) == ["000000001.ticket", "lock"]


def test_what_is_no_file_does_not_block(queue) -> None:
    """A FIFO would keep its reader, and the lock, forever."""
    os.mkfifo(queue.folder / "000000008.ticket")
    (queue.folder / "000000009.ticket").mkdir()
    assert [queue.add(Ticket(0, "b", "/b")).number, len(queue.tickets())] == [1, 1]
    (queue.folder / "lock").unlink()
    os.mkfifo(queue.folder / "lock")
    with pytest.raises(OSError, match="lock"):
        queue.add(Ticket(0, "c", "/c"))


def test_a_job_waits_while_a_ticket_cannot_be_read(queue, tmp_path) -> None:
    """The job of that ticket may be running. A link to itself stands for a file system that is away."""
    file = queue.folder / "000000008.ticket"
    file.symlink_to(file)
    place = MachinePlace(plan_in(tmp_path, job_id="b", queue=True, group_limit=0), [])
    assert place.poll().startswith(f"cannot read the queue: {file}: ")
    assert os.path.lexists(file)
    file.unlink()
    assert place.poll() == ""


def test_only_the_own_ticket_is_removed(queue) -> None:
    """After somebody deleted the first ticket, its number belongs to another job."""
    first = queue.add(Ticket(0, "a", "/a"))
    (queue.folder / "000000001.ticket").unlink()
    second = queue.add(Ticket(0, "b", "/b"))
    queue.remove(first)
    assert queue.tickets() == [second]


def test_all_jobs_use_one_queue(tmp_path, monkeypatch) -> None:
    """A relative XDG_STATE_HOME would be another folder for each job."""
    monkeypatch.setenv("XDG_STATE_HOME", "state")
    monkeypatch.setenv("HOME", str(tmp_path))
    found = set()
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        monkeypatch.chdir(tmp_path / name)
        found.add(queue_folder().absolute())
    assert found == {tmp_path / ".local/state/gptctl/queue" / machine_queue.machine_name()}


def test_gpus_have_one_name(tmp_path, monkeypatch) -> None:
    """CUDA ignores spaces, and takes the start of a UUID."""
    monkeypatch.setattr(gpus, "_gpus", lambda: [["0", "GPU-ab1", "1", "9"], ["1", "GPU-ac2", "1", "9"]])
    plan = plan_in(tmp_path, env={"CUDA_VISIBLE_DEVICES": "0, GPU-ac,GPU-a"})
    assert wanted(plan).devices == ("0", "GPU-ac", "GPU-a")
    assert gpus.numbered(wanted(plan).devices) == ("0", "1", "GPU-a")


def job_without_supervisor(folder: Path, *codes: int) -> dict[str, str]:
    """A job of two nodes whose supervisor was killed; the nodes recorded these exit codes."""
    attempt = folder / "attempt-0"
    attempt.mkdir()
    (folder / "claim.json").write_text(json.dumps(DEAD))
    (folder / "plan.json").write_text(json.dumps(plan_in(folder, nodes=2, nnodes="2").as_json()))
    for node, code in enumerate(codes):
        (attempt / f"node.{node}.exit").write_text(f"{code}\n")
    return {"job": "gpt-1", "when": "ok", "run_dir": str(folder)}


def test_ranks_that_complete_without_their_supervisor(tmp_path) -> None:
    """Oracle: `gptctl status` calls such a job COMPLETED."""
    assert waits_for(job_without_supervisor(tmp_path, 0, 0)) == ""


@pytest.mark.parametrize(("codes", "state"), [((0, 3), "FAILED"), ((0,), "LOST")])
def test_ranks_that_fail_without_their_supervisor(tmp_path, codes: tuple[int, ...], state: str) -> None:
    with pytest.raises(NeverStarts, match=f"gpt-1 is {state}"):
        waits_for(job_without_supervisor(tmp_path, *codes))


class Busy:
    """A place that is free at the second look."""

    machine, looks = "here", 0

    def poll(self) -> str:
        self.looks += 1
        return "waits for gpt-1" if self.looks == 1 else ""

    def keep_alive(self) -> None: ...

    def release(self) -> None: ...


def test_a_waiting_job_survives_a_full_disk(tmp_path, monkeypatch, capsys) -> None:
    def fail(folder: RunFolder, reason: str) -> None:
        if reason:
            raise OSError(errno.ENOSPC, "No space left on device", "waiting")

    monkeypatch.setattr(RunFolder, "set_waiting", fail)
    Admission(plan_in(tmp_path), [Busy()]).wait(lambda: None, lambda: None)
    assert "waiting: No space left on device" in capsys.readouterr().out


def test_a_supervisor_that_is_killed_before_it_begins_has_started_nothing(tmp_path) -> None:
    """Oracle: `abandon` answers whether the job may be undone; one that began may not."""
    from tests.unit.test_jobs import record

    backend, job = local.LocalBackend(lambda text: None), record(local_dir=str(tmp_path))
    (tmp_path / "claim.json").write_text(json.dumps(this_process()))
    assert not backend.abandon(job)
    (tmp_path / "claim.json").write_text(json.dumps(DEAD))
    assert backend.abandon(job)
    (tmp_path / "attempt-0").mkdir()
    assert not backend.abandon(job)


def test_gptctl_waits_longer_than_nvidia_smi_may_hang() -> None:
    """A supervisor asks it four times at most, and takes the lock of the queue twice."""
    assert local.START_TIMEOUT > 4 * gpus.TIMEOUT + 2 * machine_queue.LOCK_TIMEOUT
