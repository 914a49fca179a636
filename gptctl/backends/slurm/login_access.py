"""gptctl runs on a machine without Slurm: everything goes through a login host, by ssh.

The job's folder is on the cluster; the one on this machine is a copy, like that of an ssh job.
A request whose reply was lost is repeated, so each of them may arrive twice: the scripts of
templates/remote make sure that it takes effect once.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from typing import Any

from gptctl.backends.slurm.client import (
    SUBMIT_TIMEOUT,
    ClientResult,
    SlurmClient,
    SlurmError,
    error_text,
    failure,
)
from gptctl.backends.slurm.options import submitted_comment
from gptctl.backends.slurm.queue import Queue
from gptctl.deadline import Deadline
from gptctl.engine.atomic_files import private_files
from gptctl.engine.contract import BATCH_SCRIPT, NO_SUCH_JOB
from gptctl.engine.file_reading import parse_json
from gptctl.engine.job_result import Result
from gptctl.engine.launch_plan import LaunchPlan
from gptctl.engine.run_folder import ABANDONED, UNSENT, RunFolder, is_scheduler_id
from gptctl.jobs.store import JobRecord
from gptctl.remote.archive import MIN_SPEED, pack, secrets_of
from gptctl.remote.connection import CommandResult
from gptctl.remote.host_error import USABLE, HostError
from gptctl.remote.log_sync import LogSync, catch_up
from gptctl.remote.login import login_link, login_route
from gptctl.remote.scripts import (
    START_MARKER,
    after_login,
    login_command,
    login_output,
    login_script,
    remote_command,
)
from gptctl.remote.ssh_program import ssh_words
from gptctl.reporting import Fetched, FetchOptions, Say, ShowProgress
from gptctl.spec.cluster import Cluster
from trainer.errors import Finding, UserError

MAX_AGE = 1.0  # seconds for which the copy of a job's folder counts as up to date
NOT_FOUND = 127  # the exit code of bash if a command does not exist
TRY_LATER = 75  # submit_job.sh: an earlier request may still reach sbatch


def check_login(cluster: Cluster) -> Iterator[Finding]:
    """Check that profile and ssh config lead to the login host, without connecting to it."""
    try:
        login_route(cluster)
    except HostError as error:
        yield USABLE.found("login", error.host, error.detail, error.hint)
    except UserError as error:
        yield USABLE.found("login", None, error.message, error.hint)


class LoginAccess:
    """See `Access`. All jobs of this login host share one connection."""

    def __init__(self, cluster: Cluster, say: Say, limit: Deadline | None = None) -> None:
        self._link, self._say = login_link(cluster, limit), say
        self.host = self._link.route.name
        self.client = SlurmClient(self._execute)
        self.queue = Queue(self.client)
        self._syncs: dict[str, LogSync] = {}  # by job id
        self._requests = 0

    # Commands

    @contextmanager
    def _host_errors(self) -> Iterator[None]:
        """Report what happens to the connection as the backend expects it of Slurm."""
        try:
            yield
        except HostError as error:
            said = f"login host {self.host}: {error.detail}"
            # If the connection was lost, the request may have arrived.
            hint = error.hint or f"check that you can log in: ssh {self.host}"
            raise SlurmError(
                said, error.is_lost, hint=hint, is_answer=False, is_silent=error.is_silent
            ) from None

    def run(
        self, command: Sequence[str], stdin: bytes = b"", timeout: float | None = None
    ) -> CommandResult:
        with self._host_errors(), self._link.connected() as connection:
            done = connection.run(command, stdin, timeout)
            # There is no exit code if the connection was lost, or the command was killed.
            if done.code < 0:
                raise HostError(self.host, "lost the connection", is_lost=True)
            return done

    def _execute(self, command: Sequence[str], stdin: str) -> ClientResult:
        words = login_command(*command, marker=START_MARKER)
        return self._login_result(command[0], self.run(words, stdin.encode()))

    def _login_result(self, program: str, done: CommandResult) -> ClientResult:
        output = login_output(done.out)
        # Without its output, squeue would seem to say that the job does not exist.
        if output is None:
            hint = "~/.bash_profile and ~/.profile there must not exit, nor exec another shell"
            said = f"login host {self.host}: its login shell exited before it ran {program}"
            raise SlurmError(said, is_doubtful=False, hint=hint, is_answer=False)
        if done.code == NOT_FOUND:
            hint = f"check that it is in PATH: ssh {self.host} bash -lc 'command -v {program}'"
            said = f"{program} is not installed on login host {self.host}"
            raise SlurmError(said, is_doubtful=False, is_missing=True, hint=hint)
        return ClientResult(done.code, output.decode(errors="replace"), after_login(done.err))

    def _script(self, name: str, record: JobRecord, *words: str) -> CommandResult:
        return self.run(remote_command(name, record.remote_dir, record.token, *words))

    def _checked(self, done: CommandResult) -> CommandResult:
        if done.code:
            said = done.err.partition("\n")[0] or f"exit code {done.code}"
            hint = "check run_root in the cluster profile, and the free space there"
            said = f"login host {self.host}: {said}"
            raise SlurmError(said, is_doubtful=False, hint=hint, is_answer=False)
        return done

    def connect(self, record: JobRecord) -> None:
        self._say(f"connecting to {self.host} …")
        try:
            # In a login shell, as Slurm's commands later.
            self._execute(["true"], "")
        except SlurmError:
            with private_files():
                RunFolder(record.local_dir).try_claim(UNSENT)
            raise
        self._say("sending the job …")

    def was_sent(self, record: JobRecord) -> bool:
        return RunFolder(record.local_dir).claimed_by() != UNSENT

    def check(self) -> str:
        """Connect, and return who is connected to what."""
        self.run(["true"])
        route = self._link.route
        return f"{route.user}@{route.host}:{route.port}"

    # Submitting

    def send_folder(self, plan: LaunchPlan, record: JobRecord) -> None:
        archive = pack(record.run_folder)
        limit = SUBMIT_TIMEOUT + len(archive) / MIN_SPEED
        sizes = (str(len(archive)), f"{limit:.0f}")
        words = (plan.remote_dir, record.token, *sizes, plan.log_dir, *plan.inputs)
        done = self._checked(self.run(remote_command("place_job.sh", *words), archive, limit))
        for path in done.out.decode(errors="replace").splitlines():
            # Nodes may see file systems that the login host does not.
            self._say(f"warning: {path} does not exist on {self.host}")

    def sbatch(self, plan: LaunchPlan, record: JobRecord) -> str:
        self._requests += 1
        comment = submitted_comment(plan, record.token)
        words = (record.remote_dir, record.token, str(self._requests), comment, BATCH_SCRIPT)
        # Over stdin: other users of the host can read the arguments of every process.
        secrets = "".join(f"{name}={value}\0" for name, value in secrets_of(plan).items())
        command = login_script("submit_job.sh", *words)
        done = self.run(command, secrets.encode(), SUBMIT_TIMEOUT)
        result = self._login_result("sbatch", done)
        if result.code == TRY_LATER:
            said = f"another request is still running on {self.host}"
            raise SlurmError(said, is_doubtful=True)
        if result.code:
            said = error_text(result.err) or f"sbatch exited with code {result.code}"
            # It may have sent its request before.
            is_killed = result.code > 128
            said = f"sbatch was killed on {self.host}" if is_killed else said
            raise failure(said, is_killed)
        job = result.out.strip().partition(";")[0]
        if not is_scheduler_id(job):
            said = f"unexpected reply of sbatch on {self.host}: {result.out.strip()[:80]!r}"
            raise SlurmError(said, is_doubtful=True)
        return job

    def claim(self, record: JobRecord, claim: Mapping[str, Any]) -> dict[str, Any]:
        done = self._script("claim_job.sh", record, json.dumps(claim))
        # Without its folder the job cannot start.
        found = ABANDONED if done.code == NO_SUCH_JOB else self._claim_in(done)
        # Nothing else must overwrite it here: state and logs are read from this folder.
        folder = RunFolder(record.local_dir)
        with private_files(), suppress(FileNotFoundError):
            folder.try_claim(found)
        return folder.claimed_by() or found

    def _claim_in(self, done: CommandResult) -> dict[str, Any]:
        found = parse_json(self._checked(done).out)
        if found is None:
            raise SlurmError(f"login host {self.host}: the claim is damaged", is_doubtful=False)
        return found

    def remove_folder(self, record: JobRecord) -> None:
        self._checked(self._script("withdraw_job.sh", record))

    def forbid_attempts(self, record: JobRecord, now: bool) -> None:
        self._checked(self._script("cancel_job.sh", record, "now" if now else "gently"))
        with private_files():
            RunFolder(record.local_dir).cancel(now)

    # Files

    def sync_of(self, record: JobRecord) -> LogSync:
        if record.id not in self._syncs:
            self._syncs[record.id] = LogSync(record, [self._link], has_agents=False)
        return self._syncs[record.id]

    def update(self, record: JobRecord) -> None:
        self.sync_of(record).refresh(MAX_AGE)

    def final_result(self, record: JobRecord) -> Result | None:
        with self._host_errors():
            return self.sync_of(record).final_result()

    def following(self, record: JobRecord) -> AbstractContextManager[None]:
        return self.sync_of(record).keep_updated()

    def catch_up(self, record: JobRecord) -> list[str]:
        return catch_up(record, self.sync_of)

    def checkpoints(self, record: JobRecord) -> tuple[str, list[str]]:
        return self.sync_of(record).checkpoints()

    def remove(self, record: JobRecord) -> None:
        """Remove the folder of a job that has ended."""
        with self._host_errors():
            self.sync_of(record).hosts[0].remove_folder()

    def fetch(self, record: JobRecord, options: FetchOptions, show: ShowProgress) -> Fetched:
        from gptctl.remote.fetch import fetch

        return fetch(record, self.sync_of(record), options, self._say, show)

    def command(self, words: Sequence[str], has_terminal: bool) -> list[str]:
        # A terminal ends what runs in it when the connection is lost.
        script = words if has_terminal else remote_command("while_connected.sh", *words)
        return ssh_words(self._link.route, login_command(*script), has_terminal)
