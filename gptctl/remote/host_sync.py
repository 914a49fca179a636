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

from gptctl.deadline import Deadline
from gptctl.engine.atomic_files import replacing
from gptctl.engine.contract import (
    ALIVE,
    ATTEMPT_NAME,
    EVENTS,
    LAST_STEP,
    NO_SUCH_JOB,
    NOTIFICATIONS,
    OUTCOME,
    RESULT,
    STILL_RUNNING,
    UNRECOVERABLE_FILE,
)
from gptctl.engine.deliveries import is_of_engine
from gptctl.engine.file_reading import parse_json, size_of
from gptctl.engine.job_result import Result, parse_result
from gptctl.engine.launch_plan import LaunchPlan
from gptctl.jobs.store import JobRecord
from gptctl.remote.answers import is_answer
from gptctl.remote.connection import NETWORK_ERRORS, CommandResult
from gptctl.remote.copy_files import Part, continue_copy, is_up_to_date
from gptctl.remote.file_owners import BATCH_LOG, FIRST, FileOwners, saver_by_name
from gptctl.remote.host_error import NOT_ASKED, HostError
from gptctl.remote.limits import MAX_ATTEMPTS, MAX_LOGS, room_in, shares
from gptctl.remote.link import HostLink, LinkConnection
from gptctl.remote.scripts import remote_command
from gptctl.remote.sftp import OutOfTime, SftpReader
from gptctl.text import enough_for, size_text, some_of
from trainer.checkpoint_names import ENVIRONMENT, EVALUATION

REMOVE_TIMEOUT = 600.0  # seconds: a folder may hold many checkpoints
MAX_WHOLE = 1 << 20  # bytes of a file that is copied whole
MAX_ANSWER = 1 << 20  # bytes of the answer to a command; the state of a job has a few hundred
SLOW = "only a part of its new logs was copied in time"
MAX_NAMED = 5  # files that one message names
MAX_PROBLEM = 200  # characters of a host's error message
_ATTEMPT = re.compile(ATTEMPT_NAME)
# Names come from other machines: only these are accepted, and none can leave the folder.
GROWS = re.compile(
    r"workerlog\.\d{1,7}|node\.\d{1,7}\.log|ranks\.\d{1,7}\.jsonl|batch\.log"
    r"|(metrics|metrics\.repeated|events|rank_times)\.jsonl",
    re.ASCII,
)
_WHOLE = re.compile(
    rf"endpoint\.json|hosts|{UNRECOVERABLE_FILE}|{OUTCOME}|node\.\d{{1,7}}\.(exit|pid)"
    rf"|status\.json|{LAST_STEP}|{re.escape(ALIVE)}|{re.escape(ENVIRONMENT)}|{EVALUATION.pattern}",
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
        owners: FileOwners | None = None,
    ) -> None:
        """`owners`: None if this host has the files of all nodes."""
        self.record, self.plan, self.node, self.route = record, plan, node, link.route
        self._link, self._has_agent, self._owners = link, has_agent, owners
        self.unreachable_reason = NOT_ASKED  # why it is unreachable
        self.status: dict[str, Any] | None = None  # its last answer; None: its folder is missing
        self.has_result = False
        self.max_size = MAX_LOGS  # bytes of logs that may be here
        self.incomplete = ""  # why not all of its logs are here
        self.is_cut = False  # there was no time to copy all of them

    @property
    def has_all_files(self) -> bool:
        return self._owners is None

    @property
    def time_left(self) -> float:
        return self._link.time_left

    @contextmanager
    def connected(self) -> Iterator[LinkConnection]:
        try:
            with self._link.connected() as connection:
                yield connection
            self.unreachable_reason = ""
        except HostError as error:
            self.unreachable_reason = error.detail
            raise

    def ask(self, *command: str, timeout: float | None = None) -> dict[str, Any] | None:
        """Run a command of `host_commands`; return None if nothing of the job is on the host.

        `timeout`: for work that takes longer than an answer.
        """
        with self.connected() as connection:
            # The token makes sure that the folder belongs to this job, not to one of the same id.
            words = (self.plan.remote_dir, self.record.token, *command)
            done = connection.run(remote_command("ask_host.sh", *words), timeout=timeout)
            if done.code == NO_SUCH_JOB:
                return None
            return self._answer(command[0], done)

    def _answer(self, command: str, done: CommandResult) -> dict[str, Any]:
        if len(done.out) > MAX_ANSWER:
            raise HostError(self.route.name, f"its answer has more than {MAX_ANSWER:,} bytes")
        answer = parse_json(done.out)
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

    def has_ended(self) -> bool:
        """Whether the host has answered that nothing of the job is running there."""
        if self.unreachable_reason:
            return False
        return not self.status or not (self.status["agents"] or self.status["processes"])

    @property
    def has_job(self) -> bool:
        """Whether its folder of that name belongs to the job, by the last answer of its agent."""
        return not self._has_agent or self.status is not None

    @property
    def has_silent_files(self) -> bool:
        return self._link.has_silent_files

    @contextmanager
    def files(self, deadline: Deadline | None = None) -> Iterator[SftpReader]:
        """Use the files of the host: only one thread at a time may, and may append to a copy."""
        try:
            with self._link.files(deadline) as files:
                yield files
        except HostError as error:
            # Any other problem with files does not make the host unreachable.
            if error.is_lost:
                self.unreachable_reason = error.detail
            raise

    def list_names(self, folder: str) -> list[str]:
        with self.files() as files, self._readable(folder):
            return [entry.name for entry in files.listed(folder)]

    def copy_new(self, deadline: Deadline | None = None) -> None:
        """Copy everything that the host has written since the last call, within the limits.

        At the deadline it stops: what is here by then is complete up to its size.
        """
        self.is_cut = False
        try:
            with self.files(deadline) as files:
                self._copy_all(files)
        except OutOfTime:
            self.is_cut = True
            self.incomplete = f"{SLOW}: gptctl logs {self.record.id} copies the rest"
        except HostError as error:
            if error.is_lost:
                raise
            # What the host says of the job stays valid.
            self.incomplete = error.detail

    def _copy_all(self, files: SftpReader) -> None:
        try:
            parts = self._limited(list(self._parts(files)))
            denied = [part.remote for part in parts if not self._copy(files, part)]
            if denied:
                self.incomplete = f"no permission to read {some_of(denied, MAX_NAMED)}"
        except OSError as error:
            if not error.errno or error.errno in NETWORK_ERRORS:
                raise
            # A file here, for example on a full disk.
            self.incomplete = f"{error.filename or self.record.run_folder}: {error.strerror}"

    def _copy(self, files: SftpReader, part: Part) -> bool:
        """Copy what is new of a file; return False if the host denies it."""
        # It may have been removed since it was listed.
        with suppress(FileNotFoundError):
            try:
                if self._grows(part.local):
                    _append(files, part)
                else:
                    _replace(files, part)
            except PermissionError as error:
                # With a file name it is one of this machine.
                if error.filename:
                    raise
                return False
        return True

    def _limited(self, parts: list[Part]) -> list[Part]:
        """Cut the files that are too large for `max_size`, or for the disk here."""
        here = [size_of(part.local) for part in parts]
        room = room_in(self.record.run_folder) + sum(here)
        most = min(self.max_size, room)
        self.incomplete = ""
        if sum(part.size for part in parts) > most:
            self.incomplete = self._too_large(parts, room)
        sizes = shares([part.size for part in parts], most)
        # What is here already stays, even if it was copied with a higher limit.
        kept = [max(size, min(own, part.size)) for size, own, part in zip(sizes, here, parts)]
        return [part._replace(size=size) for part, size in zip(parts, kept)]

    def _too_large(self, parts: list[Part], room: int) -> str:
        total, largest = sum(part.size for part in parts), max(parts, key=lambda part: part.size)
        what = f"its logs have {size_text(total)} ({largest.remote}: {size_text(largest.size)})"
        if room < self.max_size:
            folder = self.record.run_folder
            return f"{what}, and the disk of {folder} has room for {size_text(room)} of them"
        allowed = f"only {size_text(self.max_size)} of them are copied"
        command = f"gptctl logs {self.record.id} --max-size {enough_for(total)}"
        return f"{what}; {allowed}. To copy more: {command}"

    def _grows(self, file: Path) -> bool:
        # Slurm's log is moved to the folder of the next attempt, and then there may be a new one.
        return bool(GROWS.fullmatch(file.name)) and file != self._batch_log

    @property
    def _batch_log(self) -> Path:
        return Path(self.record.log_dir, BATCH_LOG)

    def _parts(self, files: SftpReader) -> Iterator[Part]:
        for remote, local, name in (
            (self.plan.remote_dir, self.record.local_dir, ""),
            (self.plan.log_dir, self.record.log_dir, "logs/"),
        ):
            for entry in files.listed(remote):
                if _ATTEMPT.fullmatch(entry.name) and self._has_attempt(entry.name):
                    places = f"{remote}/{entry.name}", Path(local, entry.name)
                    yield from self._parts_of(files, *places, f"{name}{entry.name}/")
                self.has_result |= entry.name == RESULT
                is_story = entry.name in (EVENTS, ALIVE) and remote == self.plan.remote_dir
                if is_story and stat.S_ISREG(entry.mode) and self.owns(entry.name):
                    copy = Path(local, entry.name)
                    yield Part(f"{remote}/{entry.name}", copy, entry.size, entry.changed)
                is_told = entry.name == NOTIFICATIONS and remote == self.plan.remote_dir
                if is_told and stat.S_ISDIR(entry.mode) and self.plan.notify:
                    yield from self._deliveries(files)
                if entry.name == BATCH_LOG and stat.S_ISREG(entry.mode) and self.owns(BATCH_LOG):
                    changed = (entry.size, entry.changed)
                    yield Part(f"{remote}/{BATCH_LOG}", self._batch_log, *changed)
        # With c10d, torchrun itself numbers the nodes: rank 0 may be on any host.
        has_first_rank = self.node == FIRST or self.plan.form == "c10d"
        if self.plan.output_dir and has_first_rank:
            places = self.plan.output_dir, Path(self.record.output_dir)
            yield from self._parts_of(files, *places, "output/")

    def _deliveries(self, files: SftpReader) -> Iterator[Part]:
        """What the engine did to notify people: then those who watch the job need not."""
        for entry in files.listed(f"{self.plan.remote_dir}/{NOTIFICATIONS}"):
            path = f"{NOTIFICATIONS}/{entry.name}"
            # Not those of watchers: theirs are here.
            is_wanted = is_of_engine(entry.name) and stat.S_ISREG(entry.mode)
            if is_wanted and self.owns(path):
                copy = Path(self.record.local_dir, path)
                yield Part(f"{self.plan.remote_dir}/{path}", copy, entry.size, entry.changed)

    def _has_attempt(self, name: str) -> bool:
        """Whether this attempt of the job exists. Only the first host can begin one."""
        folder = self.record.run_folder / name
        if self.node == FIRST and int(name.rpartition("-")[2]) < MAX_ATTEMPTS:
            folder.mkdir(exist_ok=True)
        return folder.is_dir()

    def _parts_of(self, files: SftpReader, remote: str, local: Path, name: str) -> Iterator[Part]:
        for entry in files.listed(remote):
            # No symbolic links: they could point to any file of the host.
            is_file = is_synced(entry.name) and stat.S_ISREG(entry.mode)
            if is_file and self.owns(f"{name}{entry.name}"):
                yield Part(f"{remote}/{entry.name}", local / entry.name, entry.size, entry.changed)

    def owns(self, path: str) -> bool:
        """Whether this file of the job belongs to this host; the path is that of the copy here."""
        if self._owners is None:
            return True
        # Ranks of any host may write this one, and its agent reports it to the first host.
        if self.node != FIRST and os.path.basename(path) == UNRECOVERABLE_FILE:
            return False
        attempts = filter(_ATTEMPT.fullmatch, path.split("/")[:2])
        if not all(map(self._has_attempt, attempts)):
            return False
        return self._owners.may_take(self.node, self.route.name, path, self._is_forged(path))

    def has_rank_of(self, name: str) -> bool:
        """Whether a rank of this host saves the file of this name in a checkpoint."""
        return saver_by_name(name, self.plan) == self.node

    def _is_forged(self, path: str) -> bool:
        """Whether a file that belongs to another host can be here only if somebody put it here."""
        # Users may have chosen folders on a disk that the hosts share.
        folder = self.plan.log_dir if path.startswith("logs/") else self.plan.remote_dir
        is_of_job = not path.startswith(("output/", "work/", "profiler_log/"))
        return is_of_job and f"{folder}/".startswith(f"{self.plan.remote_dir}/")

    def copy_result(self, deadline: Deadline | None = None) -> None:
        """Copy the result of the job, which only the first host has."""
        with self.files(deadline) as files:
            remote, local = f"{self.plan.remote_dir}/{RESULT}", self.record.run_folder / RESULT
            with self._readable(remote):
                found = files.stat(remote)
                part = Part(remote, local, found.size, found.changed)
                _replace(files, part)

    def read_result(self, deadline: Deadline | None = None) -> Result | None:
        """Read the result of the job on the first host, without copying it."""
        with self.files(deadline) as files:
            try:
                with files.open(f"{self.plan.remote_dir}/{RESULT}") as source:
                    return parse_result(parse_json(source.read(MAX_WHOLE)))
            except FileNotFoundError:
                return None
            except PermissionError:
                raise HostError(self.route.name, f"no permission to read {RESULT}") from None

    @contextmanager
    def _readable(self, path: str) -> Iterator[None]:
        """A host may list a file and then say that there is none, or keep it from us."""
        try:
            yield
        except (FileNotFoundError, PermissionError) as error:
            raise HostError(self.route.name, f"cannot read {path}: {error.strerror}") from None

    def keep_trying(self) -> None:
        """Ask a silent host again and again, until this command ends."""
        self._link.keeps_trying = True

    def wait_for_next_try(self) -> None:
        self._link.wait_for_next_try()


def is_synced(name: str) -> bool:
    return bool(GROWS.fullmatch(name) or _WHOLE.fullmatch(name))


def _append(files: SftpReader, part: Part) -> None:
    """Continue the copy from its end, or copy the file again if it was replaced on the host."""
    part.local.parent.mkdir(parents=True, exist_ok=True)
    if continue_copy(files, part):
        return
    # The trainer rewrites its records when it resumes. Until the new copy is complete, the old one
    # is shown; if there is no time for all of it, the next command continues it.
    again = part._replace(local=part.local.with_name(f"{part.local.name}.again"))
    if not continue_copy(files, again):
        again.local.unlink()  # of yet another file
        continue_copy(files, again)
    os.replace(again.local, part.local)


def _replace(files: SftpReader, part: Part) -> None:
    """Copy the whole file, unless the copy is up to date."""
    if is_up_to_date(part):
        return
    part.local.parent.mkdir(parents=True, exist_ok=True)
    with files.open(part.remote) as source:
        data = source.read(MAX_WHOLE)
    with replacing(part.local) as copy:
        copy.write(data)
    os.utime(part.local, (part.changed, part.changed))
