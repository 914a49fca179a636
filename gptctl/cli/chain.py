"""`submit --chain N`: jobs that are submitted together, each of which continues the one before.

All of them train in the output folder of the first one. A job whose turn comes after the training
is complete ends at once: see `engine/chain.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gptctl.cli import INTERRUPTED
from gptctl.cli.overrides import check_job
from gptctl.cli.session import Session
from trainer.errors import WRONG_USAGE, UserError

if TYPE_CHECKING:
    from gptctl.jobs.labels import Labels
    from gptctl.jobs.resume import ResumePoint
    from gptctl.jobs.store import JobRecord
    from gptctl.jobs.submit import Prepared
    from gptctl.planning.user_templates import UserTemplate
    from gptctl.spec.check import Checked
    from trainer.config import Override


class Chain:
    """Submits the jobs of a chain one by one, in their order."""

    def __init__(
        self,
        session: Session,
        length: int,
        queue: bool,
        templates: Callable[[Path | None], Sequence[UserTemplate]],
        arguments: Mapping[str, Any],
        resumes: ResumePoint | None,
        labels: Labels,
    ) -> None:
        self._session, self.length, self._queue = session, length, queue
        self._templates, self._arguments = templates, dict(arguments)
        self._resumes, self._labels = resumes, labels
        self.first = self._prepare_first()
        self.records: list[JobRecord] = []

    def _prepare_first(self) -> Prepared:
        checked, overrides = check_job(self._session, **self._arguments)
        if checked.launch.entrypoint != "trainer":
            message = f"--chain: gptctl cannot resume {checked.launch.entrypoint}"
            hint = "only the bundled trainer resumes by itself; use --after JOB:any for a script"
            raise UserError(message, hint, WRONG_USAGE)
        # A job that requeues itself at its time limit would never leave its place to the next one.
        if checked.cluster.traits.has_queue and checked.launch.slurm.requeue is None:
            self._arguments["requeue"] = False
            checked, overrides = check_job(self._session, **self._arguments)
        return self._prepared(checked, overrides)

    def _prepare_next(self) -> Prepared:
        """Prepare the job that continues the last one that was submitted."""
        from trainer.config import Override

        before, output = self.records[-1], self.first.plan.output_dir
        shared = Override("Engine.save_load.output_dir", output, "--chain", verbatim=True)
        arguments = {**self._arguments, "after": (f"{before.id}:any",)}
        arguments["more"] = [*arguments["more"], shared]
        checked, overrides = check_job(self._session, **arguments)
        prepared = self._prepared(checked, overrides, before)
        return prepared._replace(continues=before.id)

    def _prepared(
        self, checked: Checked, overrides: Sequence[Override], before: JobRecord | None = None
    ) -> Prepared:
        from gptctl.cli.dependencies import start_conditions
        from gptctl.engine.run_folder import read_plan
        from gptctl.jobs.submit import prepare, this_site

        after = (f"{before.id}:any",) if before else self._arguments["after"]
        conditions = start_conditions(self._session, checked, after, self._queue)
        if before:
            plan = read_plan(before.run_folder)
            conditions = conditions._replace(
                continues=plan.remote_dir,
                chain=tuple(self.ids),
                first_job=plan.first_job or before.id,
            )
        return prepare(
            checked,
            self._session.store,
            self._session.backends,
            this_site(),
            overrides,
            self._templates(checked.path),
            # The ids of a chain differ in their last number only.
            base=self.first.base_id if before else "",
            conditions=conditions,
            # The others find the checkpoints of the first one when they start.
            resumes=None if before else self._resumes,
        )._replace(labels=self._labels)

    def submit(self) -> bool:
        """Submit all jobs; return False if the user interrupted it."""
        from gptctl.cli import ui
        from gptctl.engine.run_folder import read_plan
        from gptctl.jobs import job_status
        from gptctl.jobs.submit import submit

        while len(self.records) < self.length:
            prepared = self._prepare_next() if self.records else self.first
            sent = submit(prepared, self._session.store, self._session.backends)
            self.records.append(sent.record)
            if sent.problem:
                ui.say(job_status.start_problem(sent.record, sent.problem))
            # Another gptctl may have taken the id of the first job: then it got the next one.
            if len(self.records) == 1:
                self.first = self.first._replace(plan=read_plan(sent.record.run_folder))
            if sent.was_interrupted:
                return False
        return True

    def so_far(self) -> str:
        return f"{len(self.records)} of {self.length} jobs were submitted: {' '.join(self.ids)}"

    @property
    def ids(self) -> list[str]:
        return [record.id for record in self.records]


def partial_failure(chain: Chain, error: BaseException) -> UserError:
    """The error of one submission, with what became of the others."""
    message = error.message if isinstance(error, UserError) else "interrupted"
    findings = error.findings if isinstance(error, UserError) else ()
    code = error.exit_code if isinstance(error, UserError) else INTERRUPTED
    hint = f"keep them, or cancel them: gptctl cancel {' '.join(chain.ids)}"
    return UserError(f"{message}; {chain.so_far()}", hint, code, findings)


def follow_chain(
    chain: Chain, session: Session, as_json: bool, follow: bool, wait_for_it: bool
) -> int:
    """The exit code is that of the last job: 0 if the training is complete."""
    from gptctl.cli.follow import follow_job
    from gptctl.cli.jobs import wait_for
    from gptctl.logs.files import FileFilter
    from gptctl.logs.stream import LineFilter

    code = 0
    for record in chain.records if follow else ():
        style = "json" if as_json else "text"
        code = follow_job(session, record, FileFilter(all_attempts=True), LineFilter(), style)
        if code == INTERRUPTED:
            return code
    if wait_for_it and not follow:
        return wait_for(session, chain.records[-1], None, quiet=as_json)
    return code
