"""Keeps a job waiting until it may start: for other jobs, then for its place on each machine.

Machines are taken one after another, in the same order by all jobs: two jobs can never wait for
each other.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Protocol

from gptctl.engine.file_reading import DamagedFile
from gptctl.engine.job_result import CANCELLED, COMPLETED, LOST, Result
from gptctl.engine.launch_plan import LaunchPlan
from gptctl.engine.log import os_error_text, say
from gptctl.engine.processes import is_alive, is_here, processes_of
from gptctl.engine.run_folder import RunFolder, read_plan

POLL = 0.1  # seconds between two checks


class Place(Protocol):
    """The place of a job on one machine. `machine_queue.py` describes it for this machine."""

    machine: str  # names the machine: the order in which all jobs take their places

    def poll(self) -> str:
        """Take a place in the queue; return what the job waits for there, or an empty text."""
        ...

    def keep_alive(self) -> None:
        """Called while the job waits; raise NeverStarts if the machine is lost."""
        ...

    def release(self) -> None: ...


class NeverStarts(Exception):
    """The job can never start: this is how it ends."""

    def __init__(self, result: Result) -> None:
        super().__init__(result.reason)
        self.result = result


class Admission:
    def __init__(self, plan: LaunchPlan, places: Sequence[Place]) -> None:
        self._plan, self._folder = plan, RunFolder(plan.remote_dir)
        self._places = sorted(places, key=lambda place: place.machine)

    def wait(self, check: Callable[[], None], on_wait: Callable[[], None]) -> None:
        """Return when the job may start; `check` is called meanwhile, and may raise.

        Call `on_wait` once if the job must wait. Raise NeverStarts if it can never start.
        """
        shown = ""
        for reason in self._reasons():
            if reason != shown:
                say(f"PENDING: {reason}")
                self._note(reason)
            if not shown:
                on_wait()
            shown = reason
            for place in self._places:
                place.keep_alive()
            check()
            time.sleep(POLL)
        if shown:
            self._folder.set_waiting("")

    def _note(self, reason: str) -> None:
        # A full disk must not end the job: this note is for people.
        try:
            self._folder.set_waiting(reason)
        except OSError as error:
            say(f"cannot note what the job waits for: {os_error_text(error)}")

    def _reasons(self) -> Iterator[str]:
        """Yield what the job waits for, until it may start."""
        # Jobs that wait for another one take no place: others may run meanwhile.
        for dependency in self._plan.after or ():
            while reason := waits_for(dependency):
                yield reason
        for place in self._places:
            while reason := place.poll():
                yield reason

    def release(self) -> None:
        for place in self._places:
            place.release()


def waits_for(dependency: Mapping[str, str]) -> str:
    """What is awaited of another job; empty if it has ended as it should."""
    job, when = dependency["job"], dependency["when"]
    state = _ended_as(RunFolder(dependency["run_dir"]))
    if not state:
        return f"waits for {job} to {_VERBS[when]}"
    if not is_met(when, state):
        reason = f"{job} is {state}, and this job starts only if it {_CONDITIONS[when]}"
        raise NeverStarts(Result(CANCELLED, reason))
    return ""


_VERBS = {"ok": "complete", "any": "end", "fail": "fail"}
_CONDITIONS = {"ok": "completes", "any": "ends", "fail": "fails"}


def is_met(when: str, state: str) -> bool:
    """Whether a job that ended in this state allows the job after it to start."""
    return when == "any" or (state == COMPLETED) == (when == "ok")


def _ended_as(folder: RunFolder) -> str:
    """The final state of a job on this machine; empty while it runs or waits."""
    if result := folder.result():
        return result.state
    claim = folder.claimed_by()
    if not folder.path.is_dir() or (claim or {}).get("abandoned"):
        return LOST
    # The processes of another machine cannot be seen from here: only its result counts.
    if not claim or not is_here(claim) or is_alive(claim) or processes_of(str(folder.path)):
        return ""
    # It may have written the result just before it exited.
    result = folder.result()
    return result.state if result else _without_supervisor(folder)


def _without_supervisor(folder: RunFolder) -> str:
    """How a job ended whose supervisor was killed: ranks run on, and record their exit codes."""
    try:
        plan = read_plan(folder.path)
    except DamagedFile:
        return LOST
    attempt = folder.attempts() - 1
    codes = folder.exit_codes(attempt, range(plan.nodes))
    if len(codes) < plan.nodes:
        return CANCELLED if folder.is_cancelled() else LOST
    return folder.attempt_result(attempt, codes, plan.nnodes, plan.output_dir, since=0.0).state
