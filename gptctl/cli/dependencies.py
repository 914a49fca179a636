"""What a job waits for before it starts: `--after JOB[:ok|any|fail]` and `--queue`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from trainer.errors import ANSWER_IS_NO, WRONG_USAGE, UserError
from trainer.named_tuple import NamedTuple

if TYPE_CHECKING:
    from gptctl.cli.session import Session
    from gptctl.engine.launch_plan import StartConditions
    from gptctl.jobs.store import JobRecord
    from gptctl.spec.check import Checked

# The type of Slurm's --dependency for each condition.
SLURM_TYPES = {"ok": "afterok", "any": "afterany", "fail": "afternotok"}


class Dependency(NamedTuple):
    """A job that must end before another one starts, and how."""

    typed: str
    record: JobRecord
    when: str  # ok | any | fail


def unmet(after: Sequence[str], session: Session) -> list[Dependency]:
    """Read `--after`: the jobs that have not ended yet; raise UserError if one can never do."""
    if not after:
        return []
    from gptctl.engine.admission import is_met
    from gptctl.jobs.state import is_final

    found = []
    for text in after:
        job, colon, when = text.rpartition(":")
        job, when = (job, when) if colon else (text, "ok")
        if when not in SLURM_TYPES:
            message = f"--after {text}: unknown condition {when}"
            raise UserError(message, f"use {job}:ok, {job}:any or {job}:fail", WRONG_USAGE)
        record = _named(text, job, session)
        state = session.state_of(record)
        # Slurm forgets jobs a while after their end, and rejects a dependency on them.
        if not is_final(state):
            found.append(Dependency(text, record, when))
        elif not is_met(when, state.state):
            met = " or ".join(f"{job}:{each}" for each in SLURM_TYPES if is_met(each, state.state))
            hint = f"use --after {met}, run it again (gptctl rerun {record.id}), or omit --after"
            raise UserError(f"--after {text}: that job is {state}", hint, ANSWER_IS_NO)
    return found


def _named(text: str, job: str, session: Session) -> JobRecord:
    try:
        return session.store.find(job)
    except UserError as error:
        message = f"--after {text}: {error.message}"
        raise UserError(message, error.hint, error.exit_code) from None


def with_dependencies(
    sbatch_options: tuple[str, ...], dependencies: Sequence[Dependency]
) -> tuple[str, ...]:
    """Add the options of sbatch that start a job after these jobs have ended."""
    # sbatch keeps only one --dependency: join the user's own with those of --after.
    # Both forms end up in one comma-separated list, which means: after all of them.
    prefix = "dependency="
    asked = [option.partition("=")[2] for option in sbatch_options if option.startswith(prefix)]
    others = tuple(option for option in sbatch_options if not option.startswith(prefix))
    wanted = [text for text in (*asked, *slurm_dependencies(dependencies)) if text]
    if not wanted:
        return others
    # If it can never start, Slurm cancels it. Without the option it would pend forever.
    return (*others, f"{prefix}{','.join(wanted)}", "kill-on-invalid-dep=yes")


def slurm_dependencies(dependencies: Sequence[Dependency]) -> list[str]:
    """The parts of Slurm's --dependency for these jobs, such as `afterok:17:18`."""
    ids: dict[str, list[str]] = {}
    for dependency in dependencies:
        if scheduler_id := dependency.record.handle.get("scheduler_id"):
            ids.setdefault(SLURM_TYPES[dependency.when], []).append(str(scheduler_id))
    return [":".join([kind, *jobs]) for kind, jobs in ids.items()]


def refuse_foreign(session: Session, after: Sequence[str], checked: Checked) -> None:
    """Refuse a job that waits in Slurm's queue for a job that Slurm does not know."""
    login = checked.cluster.login.host if checked.cluster.login else ""
    for typed, record, _ in unmet(after, session) if checked.cluster.traits.has_queue else ():
        # Another login host may be another cluster, where the same id is another job.
        if "scheduler_id" not in record.handle or record.login != login:
            raise UserError(*cannot_wait(typed, record, checked), WRONG_USAGE)


def cannot_wait(typed: str, record: JobRecord, checked: Checked) -> tuple[str, str]:
    here = checked.cluster.name
    message = f"--after {typed}: it runs on {record.cluster}; a job on {here} cannot wait for it"
    return message, f"wait for it first: gptctl wait {record.id}"


def start_conditions(
    session: Session, checked: Checked, after: Sequence[str], queue: bool
) -> StartConditions:
    """What the job's own supervisor waits for. A scheduler waits itself: see `check_job`."""
    from gptctl.cli import ui
    from gptctl.engine.launch_plan import StartConditions

    if checked.cluster.traits.has_queue:
        if queue:
            ui.say(f"note: --queue has no effect on {checked.cluster.name}: it has its own queue")
        return StartConditions()
    backend = session.backends.of(checked.cluster.kind)
    watched = []
    for typed, record, when in unmet(after, session):
        run_dir = backend.watched_folder(record, checked)
        if run_dir is None:
            raise UserError(*cannot_wait(typed, record, checked), WRONG_USAGE)
        watched.append({"job": record.id, "when": when, "run_dir": run_dir})
    return StartConditions(queue=queue, after=tuple(watched))
