"""Where jobs run. A backend is an object that owns everything that differs between cluster kinds.

`docs/adding-a-backend.md` shows how to write one: a class in a folder here, and one line in
`spec/cluster_kinds.py`.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from importlib import import_module
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from gptctl.deadline import Deadline
from gptctl.engine.cause import Cause
from gptctl.engine.contract import LAUNCH_SCRIPT
from gptctl.engine.job_result import LOST, PENDING, UNKNOWN, Result
from gptctl.engine.processes import is_alive, is_here
from gptctl.engine.run_folder import RunFolder
from gptctl.jobs.store import JobRecord
from gptctl.reporting import Fetched, FetchOptions, Say, ShowProgress, Waiting
from gptctl.spec.cluster_kinds import KINDS
from trainer.errors import OUT_OF_REACH, WRONG_USAGE, Finding, UserError
from trainer.named_tuple import NamedTuple

if TYPE_CHECKING:
    from gptctl.engine.launch_plan import LaunchPlan
    from gptctl.planning.build import JobIdentity, PlanDefaults, Site
    from gptctl.spec.check import Checked
    from trainer.config import Override


class JobState(NamedTuple):
    """The state of a job, as far as it is known."""

    state: str  # see `engine/run_folder.py`
    reason: str = ""  # for people: never compared
    failure: Cause | None = None  # the first failure of a job that failed, if it is known

    def __str__(self) -> str:
        return f"{self.state}: {self.reason}" if self.reason else self.state

    def as_json(self) -> dict[str, Any]:
        return {**self._asdict(), "failure": self.failure.as_json() if self.failure else None}


def recorded_state(result: Result) -> JobState:
    """The state of a job that has recorded its result."""
    return JobState(result.state, result.reason, result.failure)


def cause_in_folder(record: JobRecord, folder: RunFolder) -> Cause | None:
    """Find the first failure of the latest attempt, if its supervisor could not record it."""
    attempt = folder.attempts() - 1
    codes = folder.exit_codes(attempt, range(record.nodes))
    first = next((node for node, code in codes.items() if code), None)
    if first is None:
        return None
    from gptctl.engine.first_failure import cause_on_nodes

    return cause_on_nodes(folder, attempt, record.log_dir, codes, first)


class Backend(Protocol):
    """One kind of cluster. The methods that have a body here fit most kinds."""

    # Rendered for every job, in the order in which they run.
    scripts: ClassVar[tuple[str, ...]] = (LAUNCH_SCRIPT,)

    nodes_are_here: ClassVar[bool] = False  # ports of every node are ports of this machine

    def __init__(self, say: Say, limit: Deadline | None = None) -> None:
        """`limit`: when the command has to end, whatever other machines do."""
        ...

    # Before a job is submitted

    def plan_defaults(self, checked: Checked, site: Site, identity: JobIdentity) -> PlanDefaults:
        """Return what this kind uses where the user has set nothing."""
        ...

    def plan(
        self,
        checked: Checked,
        site: Site,
        identity: JobIdentity | None = None,
        overrides: Sequence[Override] = (),
    ) -> LaunchPlan:
        # Imported here: configs take half of a start, and verbs such as `list` read none.
        from gptctl.planning.build import IN_PLACE, build_plan

        identity = identity or IN_PLACE
        defaults = self.plan_defaults(checked, site, identity)
        return build_plan(checked, site, identity, overrides, defaults)

    def preflight(self, checked: Checked, plan: LaunchPlan) -> Iterable[Finding]:
        """Check on this machine what matters only for jobs of this kind."""
        return ()

    def expected_start(self, checked: Checked, site: Site) -> tuple[list[Finding], str]:
        """Ask the scheduler, without submitting, if it accepts the job and when it would start."""
        return [], ""

    def local_dir(self, plan: LaunchPlan) -> str:
        """Return the job's folder on this machine: the original, or a copy from other machines."""
        return plan.remote_dir

    def watched_folder(self, record: JobRecord, checked: Checked) -> str | None:
        """Return where a new job sees the folder of another one, to wait for its end.

        None: it cannot see it. Only for clusters without a queue of their own.
        """
        return None

    # The life of a job

    def start(self, plan: LaunchPlan, record: JobRecord) -> dict[str, Any]:
        """Start the job, whose folder is complete; return its handle."""
        ...

    def abandon(self, record: JobRecord) -> bool:
        """Make sure that a half-submitted job never starts; return False if it has started."""
        ...

    def asked_together(self, records: Sequence[JobRecord]) -> list[list[JobRecord]]:
        """Group jobs whose states are prefetched together; groups are asked at the same time."""
        return [[record] for record in records]

    def prefetch_states(self, records: Sequence[JobRecord]) -> None:
        """Prepare for `state` of these jobs: a scheduler should be asked once for all."""

    def state(self, record: JobRecord) -> JobState:
        """Return the state of a job that has recorded no result."""
        ...

    def waiting(self, record: JobRecord, state: JobState) -> Waiting:
        """Explain why a job in this PENDING state has not started."""
        return Waiting(state.reason)

    def is_over(self, record: JobRecord) -> bool:
        """Whether all machines confirmed that nothing of this ended job is left."""
        return True

    def may_answer_later(self, record: JobRecord) -> bool:
        """Whether an UNKNOWN state can become known by waiting."""
        return bool(record.handle)

    def before_cancel(self, record: JobRecord) -> None:
        """Prepare to stop a job: its state is asked for next, and nothing may delay that."""

    def cancel(self, record: JobRecord, now: bool) -> None:
        """Stop every process of the job; return when none is left."""
        ...

    def node_command(
        self, record: JobRecord, node: int, words: Sequence[str], has_terminal: bool
    ) -> list[str]:
        """Return the command that runs a module of the job's engine on a node, from this machine.

        `words` are its name and its arguments after the run folder. Nothing may stay on the node
        when the command ends here.
        """
        message = f"commands cannot be run on the nodes of a {record.kind} cluster"
        raise UserError(message, "", WRONG_USAGE)

    # Its files

    def following(self, record: JobRecord) -> AbstractContextManager[None]:
        """Keep the job's folder on this machine up to date while its logs are followed."""
        return nullcontext()

    def await_hosts(self, record: JobRecord) -> None:
        """Give hosts that are unreachable the time for one more try, while a job is followed."""

    def want_logs(self, record: JobRecord, max_size: int | None) -> None:
        """Prepare to show logs: copy all of them, or so many bytes from each node, if given."""

    def catch_up(self, record: JobRecord) -> list[str]:
        """Copy new logs to this machine; return messages about what is missing, and why."""
        return []

    def checkpoints(self, record: JobRecord) -> tuple[str, list[str]]:
        """Return the trainer's output folder, as the next job there sees it, and its entries."""
        folder = record.output_dir
        try:
            return folder, os.listdir(folder) if os.path.isdir(folder) else []
        except OSError as error:
            message = f"cannot read {folder}: {error.strerror}"
            raise UserError(message, "check its permissions", OUT_OF_REACH) from None

    def remove(self, record: JobRecord) -> None:
        """Remove the job's folder on other machines; the one on this machine is removed next."""

    def is_elsewhere(self, record: JobRecord) -> bool:
        """Whether the job's files are on other machines, so that `fetch` copies them."""
        return False

    def fetch(self, record: JobRecord, options: FetchOptions, show: ShowProgress) -> Fetched:
        """Copy what the job wrote on its hosts to this machine."""
        message = f"the files of {record.id} are already visible from this machine"
        raise UserError(message, f"see {record.local_dir}", WRONG_USAGE)

    # Arrays: many jobs that are alike, submitted as one

    def is_array(self, plans: Sequence[LaunchPlan], numbers: Sequence[int]) -> bool:
        """Whether these jobs can be submitted with `start_array`, as tasks of these numbers."""
        return False

    def array_folder(self, plan: LaunchPlan, name: str) -> str:
        """Return the folder of an array of this name."""
        raise NotImplementedError

    def start_array(
        self, plans: Sequence[LaunchPlan], records: Sequence[JobRecord], limit: int | None
    ) -> list[dict[str, Any]]:
        """Start jobs as one array, at most `limit` at once; return their handles, as `start`."""
        raise NotImplementedError


def half_submitted(record: JobRecord) -> JobState:
    """The state of a job that its backend has not accepted yet."""
    if not is_here(record.submitter):
        host = record.submitter.get("host")
        return JobState(UNKNOWN, f"it was being submitted on {host}; run gptctl on that machine")
    if is_alive(record.submitter):
        return JobState(PENDING, "being submitted")
    return JobState(LOST, "gptctl was killed before it started the job")


class Backends:
    """The backends of one command, each created when it is first needed.

    They hold open connections and answers of a scheduler, which must not outlive the command.
    """

    def __init__(self, say: Say, limit: Deadline | None = None) -> None:
        self._say, self._limit = say, limit
        self._created: dict[str, Backend] = {}
        self._creating = threading.Lock()  # threads ask, each for one of several jobs

    def of(self, kind: str) -> Backend:
        if not self.knows(kind):
            hint = f"a newer gptctl may have created this job; this one knows {', '.join(KINDS)}"
            raise UserError(f"unknown kind of cluster: {kind}", hint, OUT_OF_REACH)
        with self._creating:
            if kind not in self._created:
                # Imported when needed: a command for one kind must not load the others.
                module, _, name = KINDS[kind].backend.partition(":")
                self._created[kind] = getattr(import_module(module), name)(self._say, self._limit)
            return self._created[kind]

    def knows(self, kind: str) -> bool:
        return kind in KINDS
