"""What a running job does besides training steps: it starts, restarts, saves or evaluates.

From the newest events of the engine and of the trainer. Jobs of older versions and scripts have no
such events: of them nothing is said.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gptctl.engine.events import ATTEMPT, FAILURE, REQUEUE, SIGNAL, STARTED
from gptctl.engine.file_reading import is_time, is_whole
from gptctl.engine.rank_runs import rank_runs
from gptctl.jobs.recorded_files import Fields, newest_events
from gptctl.jobs.store import JobRecord
from gptctl.jobs.timeline import MOST_ATTEMPTS, RANKS_UP
from gptctl.logs.local_files import LocalLogFiles
from gptctl.logs.metric_rows import HIGHEST_STEP
from gptctl.text import count
from trainer.event_names import (
    COMMITTED,
    EVALUATING,
    FAILED,
    FINISHED,
    FIRST_STEP,
    GROUP,
    SAVING,
    STOP,
)

Facts = dict[str, Any]
_OF_ENGINE = (STARTED, ATTEMPT, FAILURE, REQUEUE, SIGNAL)
_OF_TRAINER = (GROUP, FIRST_STEP, SAVING, EVALUATING, STOP, FINISHED, FAILED)


def phase_of(record: JobRecord, now: float, logged: float | None) -> Facts | None:
    """Return the phase of a running job as JSON, or None while it trains.

    `logged`: when its newest step was recorded, if it has recorded any.
    """
    if not record.output_dir:
        return None  # a script: nothing tells when its start is over
    own, trainers = newest_events(record)
    found = _newest(record, own, trainers)
    moment = found.get("time")
    # A step that was recorded later: the training continues.
    if not is_time(moment) or (logged is not None and moment < logged):
        return None
    attempt, ranks, step = (found.get(name) for name in ("attempt", "ranks", "step"))
    number = attempt if is_whole(attempt, 0, MOST_ATTEMPTS) else None
    before = number - 1 if number else None
    failed = [each.get("attempt") for each in own if each.get("event") == FAILURE]
    return {
        "name": found["event"],
        "attempt": number,
        "after_failure": before is not None and before in failed,
        "seconds": max(0.0, round(now - moment, 3)),  # clocks of hosts may differ
        "ranks": ranks if is_whole(ranks, 1, 1 << 26) else None,
        "world_size": record.world,
        "step": step if is_whole(step, 0, HIGHEST_STEP) else None,
    }


def _newest(record: JobRecord, own: Sequence[Fields], trainers: Sequence[Fields]) -> Fields:
    """The event that tells the phase; empty if none does."""
    latest = own[-1] if own else {}
    if latest.get("event") not in _OF_ENGINE:
        return {}  # no engine has recorded anything, or the job has ended
    attempt = latest.get("attempt")
    if latest["event"] != ATTEMPT or not is_whole(attempt, 0, MOST_ATTEMPTS):
        return latest
    # Checkpoints are committed in the background, whatever the training does meanwhile.
    mine = [each for each in trainers if each.get("attempt") == attempt]
    mine = [each for each in mine if each.get("event") != COMMITTED]
    if not mine:
        return _ranks_up(record, attempt) or latest
    return mine[-1] if mine[-1].get("event") in _OF_TRAINER else {}


def _ranks_up(record: JobRecord, attempt: int) -> Fields | None:
    files = LocalLogFiles(Path(record.log_dir), record.run_folder)
    starts = [run.started for run in rank_runs(files.records(attempt)) if is_time(run.started)]
    if not starts:
        return None
    return {"event": RANKS_UP, "attempt": attempt, "time": max(starts), "ranks": len(starts)}


_TEXTS = {
    STARTED: "starting: nodes allocated {ago}",
    ATTEMPT: "starting: attempt {attempt} began {ago}",
    RANKS_UP: "starting: {ranks} up {ago}",
    GROUP: "starting: process group formed {ago}",
    FIRST_STEP: "training: the first step began {ago}; none is logged yet",
    SAVING: "saving a checkpoint{at}, for {age}",
    EVALUATING: "evaluating{at}, for {age}",
    FINISHED: "finishing: the last step was {ago}",
    STOP: "stopping: requested {ago}",
    SIGNAL: "stopping: requested {ago}",
    FAILED: "failing: a rank failed {ago}",
    FAILURE: "attempt {attempt} failed {ago}",
    REQUEUE: "waiting for nodes: requeued {ago}",
}


def phase_text(phase: Facts | None, age: str) -> str:
    """The phase for people; `age` is its age as text."""
    if phase is None:
        return ""
    ranks, world, step = phase["ranks"], phase["world_size"], phase["step"]
    text = _TEXTS[phase["name"]].format(
        ago=f"{age} ago",
        age=age,
        attempt=phase["attempt"],
        ranks=count(world, "rank") if ranks in (None, world) else f"{ranks} of {world} ranks",
        at="" if step is None else f" at step {step:,}",
    )
    if not phase["after_failure"] or not text.startswith("starting: "):
        return text
    return f"restarting after a failure (attempt {phase['attempt']}): {text[len('starting: ') :]}"
