"""The queue of one user on one machine: a folder with a ticket for each job that runs or waits.

Who may start is decided in `queue_rules.py`. A ticket counts as long as the process that wrote it
lives, or processes of its job do: whatever ends them also frees the place. After a restart of the
machine the folder has another name, so the queue is empty.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from gptctl.engine.atomic_files import replacing
from gptctl.engine.file_reading import DamagedFile, load_json, open_at_once, read_json
from gptctl.engine.gpus import gpu_use, numbered, visible_gpus
from gptctl.engine.launch_plan import LaunchPlan
from gptctl.engine.log import os_error_text
from gptctl.engine.node import Node
from gptctl.engine.processes import boot_id, is_alive, processes_of, this_process
from gptctl.engine.queue_rules import Decision, GpuUse, Ticket, decide
from gptctl.engine.state_home import state_home
from gptctl.engine.typed_fields import check_fields, typed

LOCK_TIMEOUT = 10.0  # seconds; the lock is held for milliseconds
RECHECK = 2.0  # seconds after which tickets are read again although the folder has not changed
OLD_QUEUE = 30 * 86400.0  # seconds without a change
CLOCK_STEP = 50_000_000  # nanoseconds; longer than the steps of a file system's clock
GPU_RECHECK = 10.0  # the same, if the job waits for GPUs that other programs use
VISIBLE_DEVICES = "CUDA_VISIBLE_DEVICES"
LARGEST_TICKET = 1 << 20  # bytes; a damaged one may be of any size


def machine_name() -> str:
    """A name that no other machine has, even if it shares home folders with this one."""
    return f"{os.uname().nodename}-{boot_id()}"


def queue_folder() -> Path:
    """The folder of this user's queue on this machine, created if it is missing."""
    # Not GPTCTL_HOME: jobs of all its values use the same machine.
    folder = state_home() / "gptctl" / "queue" / machine_name()
    if not folder.is_dir():
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        _remove_old_queues(folder)
    return folder


def _remove_old_queues(folder: Path) -> None:
    """Remove what this machine left before it was restarted."""
    # Only after a while: another machine of the same name may use the same home folder.
    for other in folder.parent.glob(f"{os.uname().nodename}-*"):
        with suppress(OSError):
            if time.time() - other.stat().st_mtime > OLD_QUEUE:
                for file in other.iterdir():
                    file.unlink()
                other.rmdir()


class UnreadableTicket(OSError):
    """A ticket exists, but the file system does not give its content."""


class MachineQueue:
    """Reads and writes the tickets in a queue folder. Every change is made under its lock."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @contextmanager
    def locked(self) -> Iterator[None]:
        # The kernel releases the lock of a process that is killed.
        with open(self.folder / "lock", "ab", opener=open_at_once) as file:
            deadline = time.monotonic() + LOCK_TIMEOUT
            while True:
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    if time.monotonic() > deadline:
                        raise TimeoutError from None
                    time.sleep(0.01)
                # Some network file systems have no locks.
                except OSError as error:
                    problem = f"cannot lock it: {error.strerror}"
                    raise OSError(error.errno, problem, str(self.folder)) from None
            yield

    def tickets(self) -> list[Ticket]:
        """All tickets whose job waits or runs, first come first; remove those of dead jobs."""
        found = []
        for file in sorted(self.folder.glob("*.ticket")):
            # A folder of such a name is not a ticket; a file may just have been removed.
            with suppress(FileNotFoundError, IsADirectoryError):
                if ticket := _valid_ticket(file):
                    found.append(ticket)
                else:
                    file.unlink()
        return sorted(found, key=lambda ticket: ticket.number)

    def add(self, ticket: Ticket) -> Ticket:
        """Add a ticket behind all others; return it with its number."""
        with self.locked():
            last = max((ticket.number for ticket in self.tickets()), default=0)
            ticket = ticket._replace(number=last + 1)
            self.write(ticket)
        return ticket

    def write(self, ticket: Ticket) -> None:
        values = {**ticket._asdict(), "process": this_process()}
        with replacing(self._file(ticket)) as stream:
            stream.write(json.dumps(values).encode())

    def remove(self, ticket: Ticket) -> None:
        # If somebody deleted the file, another job may have this number by now.
        if (read_json(self._file(ticket)) or {}).get("run_dir") == ticket.run_dir:
            self._file(ticket).unlink(missing_ok=True)

    def changed(self) -> int:
        """A number that changes whenever a ticket is added, replaced or removed; 0: just now."""
        # The clock of file systems is coarse: two changes in a moment may have the same time.
        changed = os.stat(self.folder).st_mtime_ns
        return changed if time.time_ns() - changed > CLOCK_STEP else 0

    def _file(self, ticket: Ticket) -> Path:
        return self.folder / f"{ticket.number:09}.ticket"


class MachinePlace:
    """The place of one job on this machine: it waits, runs, and is released."""

    def __init__(self, plan: LaunchPlan, nodes: Sequence[Node]) -> None:
        self.machine = machine_name()
        self._nodes = nodes  # of the job, on this machine
        self._ticket = wanted(plan)  # without a number until it is in the queue
        self._names_devices = bool(self._ticket.devices)
        self._queue: MachineQueue | None = None
        self._visible: tuple[str, ...] = ()
        self._reason, self._seen, self._due = "", 0, 0.0

    def poll(self) -> str:
        """Take a place if there is none yet; return what the job waits for, or an empty text."""
        if self._ticket.is_running:
            return ""
        try:
            self._queue = self._queue or self._enter()
            return self._check(self._queue)
        except OSError as error:
            # A job that need not wait starts nevertheless: other jobs just cannot see it.
            if self._ticket.waits or self._ticket.group:
                # The process that has the lock may be suspended: try again later.
                if isinstance(error, TimeoutError):
                    return "waits for the lock of the queue"
                # Its job may be running: never start beside it.
                if isinstance(error, UnreadableTicket):
                    return f"cannot read the queue: {os_error_text(error)}"
                raise
            self._ticket = self._ticket._replace(is_running=True)
            return ""

    def _enter(self) -> MachineQueue:
        # nvidia-smi takes a while: only for jobs that use GPUs.
        if self._ticket.gpus:
            self._visible = visible_gpus()
            self._ticket = self._ticket._replace(devices=numbered(self._ticket.devices))
        queue = MachineQueue(queue_folder())
        self._ticket = queue.add(self._ticket)
        return queue

    def _check(self, queue: MachineQueue) -> str:
        # Reading all tickets is slow with many jobs: only if the folder changed, or after a while,
        # since a killed process changes nothing.
        changed = queue.changed()
        if changed and changed == self._seen and time.monotonic() < self._due:
            return self._reason
        self._seen, self._due = changed, time.monotonic() + RECHECK
        # Other programs use GPUs, too. Ask for them only if no job is in the way: that takes long.
        asks_for_gpus = self._ticket.waits and bool(self._visible)
        decision = self._decide(queue, GpuUse(self._visible), starts=not asks_for_gpus)
        if decision.may_start and asks_for_gpus:
            decision = self._decide(queue, gpu_use(), starts=True)
            self._due = time.monotonic() + GPU_RECHECK
        self._reason = decision.reason
        return self._reason

    def _decide(self, queue: MachineQueue, gpus: GpuUse, starts: bool) -> Decision:
        with queue.locked():
            decision = decide(self._ticket, queue.tickets(), gpus)
            if decision.may_start and starts:
                self._start(queue, decision.devices)
        return decision

    def _start(self, queue: MachineQueue, devices: tuple[str, ...]) -> None:
        # A job that did not wait uses the first GPUs that it sees.
        used = devices or self._visible[: self._ticket.gpus]
        self._ticket = self._ticket._replace(is_running=True, devices=used)
        queue.write(self._ticket)
        # Those that a config or profile names are set by launch.sh.
        for node in self._nodes if devices and not self._names_devices else ():
            node.set_variable(VISIBLE_DEVICES, ",".join(devices))

    def keep_alive(self) -> None:
        return  # this machine is not lost while this process runs

    def release(self) -> None:
        """Give the place to others. A process that is killed does so, too."""
        if self._queue:
            with suppress(OSError):
                self._queue.remove(self._ticket)


def wanted(plan: LaunchPlan) -> Ticket:
    """The ticket that a job needs on each of its machines."""
    named = plan.env.get(VISIBLE_DEVICES, "")
    return Ticket(
        0,
        plan.job_id,
        plan.remote_dir,
        gpus=plan.per_node if plan.device == "gpu" else 0,
        devices=tuple(name for each in named.split(",") if (name := each.strip())),
        waits=bool(plan.queue),
        group=plan.group,
        limit=plan.group_limit or 0,
    )


def _valid_ticket(file: Path) -> Ticket | None:
    """The ticket, if its job still waits or runs; None if not, or if it is damaged."""
    try:
        values = load_json(file, LARGEST_TICKET)
        # All fields: one without them is of no version of gptctl.
        if missing := [name for name in (*Ticket._fields, "process") if name not in values]:
            raise DamagedFile(f"{missing[0]} is missing")
        check_fields(values, {"process": Mapping[str, Any]})
        ticket, process = typed(Ticket, values), values["process"]
    except (FileNotFoundError, IsADirectoryError):
        raise
    except DamagedFile:
        return None
    except OSError as error:
        if error.errno == errno.ENXIO:  # a FIFO, a socket or a device: gptctl writes none
            return None
        raise UnreadableTicket(error.errno, error.strerror, str(file)) from None
    # Ranks outlive a supervisor that is killed, and use the machine as before.
    is_valid = is_alive(process) or (ticket.is_running and bool(processes_of(ticket.run_dir)))
    return ticket if is_valid else None
