"""One host of a job: copy its files to the job's folder on this machine, and query its processes.

Logs only grow, so each copy is continued from its end; other files are small and copied whole.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from gptctl.engine.atomic_files import replacing
from gptctl.engine.contract import (
    ATTEMPT_NAME,
    NO_SUCH_JOB,
    OUTCOME,
    RESULT,
    STILL_RUNNING,
    UNRECOVERABLE_FILE,
)
from gptctl.engine.launch_plan import LaunchPlan
from gptctl.engine.messages import parse_message
from gptctl.engine.run_folder import Result, parse_result
from gptctl.jobs.store import JobRecord
from gptctl.remote.answers import is_answer
from gptctl.remote.connection import CommandResult, Files
from gptctl.remote.copy_files import Part, copy_rest, is_up_to_date, resume
from gptctl.remote.host_error import HostError
from gptctl.remote.link import HostLink, LinkConnection
from gptctl.remote.scripts import remote_command

REMOVE_TIMEOUT = 600.0  # seconds: a folder may hold many checkpoints
MAX_WHOLE = 1 << 20  # bytes of a file that is copied whole
BATCH_LOG = "batch.log"
MAX_PROBLEM = 200  # characters of a host's error message
_ATTEMPT = re.compile(ATTEMPT_NAME)
# Names come from other machines: only these are accepted, and none can leave the folder.
GROWS = re.compile(
    r"workerlog\.\d{1,7}|node\.\d{1,7}\.log|ranks\.\d{1,7}\.jsonl|metrics\.jsonl|batch\.log",
    re.ASCII,
)
_WHOLE = re.compile(
    rf"endpoint\.json|hosts|{UNRECOVERABLE_FILE}|{OUTCOME}|node\.\d{{1,7}}\.(exit|pid)"
    r"|status\.json",
    re.ASCII,
)


class HostSync:
    """One host of a job: its files, and the state of its processes."""

    def __init__(
        self,
        record: JobRecord,
        plan: LaunchPlan,
        link: HostLink,
        node: int,
        has_agent: bool = True,
    ) -> None:
        self.record, self.plan, self.node, self.route = record, plan, node, link.route
        self._link, self._has_agent = link, has_agent
        self.unreachable_reason = "not contacted yet"  # why it is unreachable
        self.status: dict[str, Any] | None = None  # its last answer; None: its folder is missing
        self.has_result = False
        self._copying = link.copying

    @contextmanager
    def connected(self) -> Iterator[LinkConnection]:
        try:
            with self._link.connected() as connection:
                yield connection
            self.unreachable_reason = ""
        except HostError as error:
            self.unreachable_reason = error.detail
            raise

    def ask(self, *command: str, timeout: float = 60.0) -> dict[str, Any] | None:
        """Run a command of `host_commands`; return None if nothing of the job is on the host."""
        with self.connected() as connection:
            # The token makes sure that the folder belongs to this job, not to one of the same id.
            words = (self.plan.remote_dir, self.record.token, *command)
            done = connection.run(remote_command("ask_host.sh", *words), timeout=timeout)
            if done.code == NO_SUCH_JOB:
                return None
            return self._answer(command[0], done)

    def _answer(self, command: str, done: CommandResult) -> dict[str, Any]:
        answer = parse_message(done.out)
        if answer is not None and is_answer(command, answer):
            return answer
        if not done.code:
            raise HostError(self.route.name, f"invalid answer to `{command}`")
        problem = done.last_error
        raise HostError(self.route.name, f"its agent script failed: {problem[:MAX_PROBLEM]}")

    def remove_folder(self) -> None:
        """Remove the job's folder on this host, unless it is already missing."""
        with self.connected() as connection:
            words = (self.plan.remote_dir, self.record.token)
            done = connection.run(remote_command("remove_job.sh", *words), timeout=REMOVE_TIMEOUT)
        if done.code == STILL_RUNNING:
            raise HostError(self.route.name, "processes of the job are running there")
        if done.code not in (0, NO_SUCH_JOB):
            problem = done.last_error
            raise HostError(self.route.name, problem[:MAX_PROBLEM])

    def update_status(self) -> None:
        if self._has_agent:
            self.status = self.ask("status")
            return
        # A scheduler knows the state of its jobs: only check that the host can be reached.
        with self.connected():
            return

    def list_names(self, folder: str) -> list[str]:
        with self._copying, self.connected() as connection:
            return [entry.name for entry in connection.listed(folder)]

    def copy_new(self) -> None:
        """Copy everything that the host has written since the last call."""
        # Only one thread at a time may append to a copy.
        with self._copying, self.connected() as connection:
            for part in self._parts(connection):
                copy = _append if self._grows(part.local) else _replace
                # It may have been removed since it was listed.
                with suppress(FileNotFoundError):
                    copy(connection.files, part)

    def _grows(self, file: Path) -> bool:
        # Slurm's log is moved to the folder of the next attempt, and then there may be a new one.
        return bool(GROWS.fullmatch(file.name)) and file != self._batch_log

    @property
    def _batch_log(self) -> Path:
        return Path(self.record.log_dir, BATCH_LOG)

    def _parts(self, connection: LinkConnection) -> Iterator[Part]:
        for remote, local in (
            (self.plan.remote_dir, self.record.local_dir),
            (self.plan.log_dir, self.record.log_dir),
        ):
            for entry in connection.listed(remote):
                if _ATTEMPT.fullmatch(entry.name):
                    yield from _parts_of(
                        connection, f"{remote}/{entry.name}", Path(local, entry.name)
                    )
                self.has_result |= entry.name == RESULT
                if entry.name == BATCH_LOG and stat.S_ISREG(entry.mode):
                    changed = (entry.size, entry.changed)
                    yield Part(f"{remote}/{BATCH_LOG}", self._batch_log, *changed)
        # With c10d, torchrun itself numbers the nodes: rank 0 may be on any host.
        has_first_rank = self.node == 0 or self.plan.form == "c10d"
        if self.plan.output_dir and has_first_rank:
            yield from _parts_of(connection, self.plan.output_dir, Path(self.record.output_dir))

    def copy_result(self) -> None:
        """Copy the result of the job, which only the first host has."""
        with self._copying, self.connected() as connection:
            remote, local = f"{self.plan.remote_dir}/{RESULT}", self.record.run_folder / RESULT
            found = connection.files.stat(remote)
            part = Part(remote, local, found.st_size or 0, found.st_mtime or 0)
            _replace(connection.files, part)

    def read_result(self) -> Result | None:
        """Read the result of the job on the first host, without copying it."""
        with self._copying, self.connected() as connection:
            try:
                with connection.files.open(f"{self.plan.remote_dir}/{RESULT}", "rb") as source:
                    return parse_result(parse_message(source.read(MAX_WHOLE)))
            except FileNotFoundError:
                return None

    def wait_for_next_try(self) -> None:
        self._link.wait_for_next_try()


def _parts_of(connection: LinkConnection, remote: str, local: Path) -> Iterator[Part]:
    for entry in connection.listed(remote):
        # No symbolic links: they could point to any file of the host.
        if is_synced(entry.name) and stat.S_ISREG(entry.mode):
            yield Part(f"{remote}/{entry.name}", local / entry.name, entry.size, entry.changed)


def is_synced(name: str) -> bool:
    return bool(GROWS.fullmatch(name) or _WHOLE.fullmatch(name))


def _append(files: Files, part: Part) -> None:
    """Continue the copy from its end."""
    part.local.parent.mkdir(parents=True, exist_ok=True)
    with open(part.local, "ab") as copy:
        start = resume(copy, part.size)
        if start < part.size:
            with files.open(part.remote, "rb") as source:
                copy_rest(source, copy, start, part.size)


def _replace(files: Files, part: Part) -> None:
    """Copy the whole file, unless the copy is up to date."""
    if is_up_to_date(part):
        return
    part.local.parent.mkdir(parents=True, exist_ok=True)
    with files.open(part.remote, "rb") as source:
        data = source.read(MAX_WHOLE)
    with replacing(part.local) as copy:
        copy.write(data)
    os.utime(part.local, (part.changed, part.changed))
