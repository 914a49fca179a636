"""The ledgers of jobs: of this moment, or as they were kept when a run folder was removed."""

from __future__ import annotations

import json
import os
import pwd
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from gptctl.engine.atomic_files import private_files, replacing
from gptctl.engine.file_reading import is_time, is_whole, read_json
from gptctl.engine.job_result import FINAL
from gptctl.jobs.ledger import (
    ACCOUNTS,
    UNKNOWN,
    AttemptCosts,
    Ledger,
    Segment,
    goodput_of,
    ledger_of,
)
from gptctl.jobs.resume import lineage
from gptctl.jobs.store import COSTS, JobRecord, Store
from gptctl.jobs.timeline import Timeline, timeline_of
from gptctl.logs.metric_rows import is_number
from gptctl.spec.resources import home
from trainer.event_names import FIRST_STEP

MOST_GPUS = 1 << 26


class JobTimes(NamedTuple):
    """What happened in a job, and what its time went into."""

    timeline: Timeline | None  # None: its folder was removed
    ledger: Ledger


class EarlierSteps:
    """How far the jobs came that others continue. Each is read once, however many continue it."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._last: dict[str, int] = {}  # steps by job

    def before(self, record: JobRecord, timeline: Timeline) -> int:
        """The last step of the jobs that this one continues; 0 if it starts at step 0."""
        self._note(timeline)
        first = next((event for event in timeline.events if event.name == FIRST_STEP), None)
        if first is None or not first.facts.get("resumed"):
            return 0
        earlier = lineage(record, self._store)[1:]
        for each in earlier:
            if each.id not in self._last:
                self._note(timeline_of(each, is_over=True))
        return max((self._last[each.id] for each in earlier), default=0)

    def _note(self, timeline: Timeline) -> None:
        steps = [0, *(row["step"] for row in timeline.rows)]
        steps += [last.step for last in timeline.last_steps.values()]
        self._last[timeline.job] = max(steps)


def ledger_of_job(record: JobRecord, state: str, earlier: EarlierSteps, now: float) -> Ledger:
    """Account for a job, from its folder or from what was kept of it."""
    return times_of_job(record, state, earlier, now).ledger


def times_of_job(record: JobRecord, state: str, earlier: EarlierSteps, now: float) -> JobTimes:
    if not record.run_folder.is_dir():
        return JobTimes(None, kept_ledger(record) or Ledger(record.id, 0.0, []))
    timeline = timeline_of(record, is_over=state in FINAL)
    return JobTimes(timeline, ledger_of(timeline, now, earlier.before(record, timeline)))


def keep_ledger(record: JobRecord, state: str, store: Store, now: float) -> None:
    """Keep the sums of a job whose folder is about to be removed."""
    attempts = [
        _as_kept(each) for each in ledger_of_job(record, state, EarlierSteps(store), now).attempts
    ]
    facts = {"token": record.token, "attempts": attempts}
    with suppress(OSError), private_files(), replacing(_file(record)) as stream:
        stream.write(json.dumps(facts).encode() + b"\n")


def _as_kept(costs: AttemptCosts) -> dict[str, Any]:
    names = ("attempt", "began", "ended", "gpus", "cause", "repeated_steps", "seconds")
    return {name: getattr(costs, name) for name in names}


def kept_ledger(record: JobRecord) -> Ledger | None:
    found = read_json(_file(record)) or {}
    attempts = found.get("attempts")
    if found.get("token") != record.token or not isinstance(attempts, list):
        return None
    return Ledger(record.id, 0.0, [each for each in map(_kept_attempt, attempts) if each])


def _kept_attempt(found: Any) -> AttemptCosts | None:
    match found:
        case {
            "attempt": number, "began": began, "ended": ended, "gpus": gpus,
            "cause": str(cause), "repeated_steps": steps, "seconds": dict(seconds),
        } if is_time(began) and is_time(ended) and is_whole(gpus, 0, MOST_GPUS):  # fmt: skip
            parts = {name: seconds[name] for name in ACCOUNTS if is_number(seconds.get(name))}
            whole = is_whole(number, 0, 1 << 31) and is_whole(steps, 0, 1 << 62)
            segment = Segment(began, ended, parts)
            return (
                AttemptCosts(number, began, ended, gpus, cause, steps, [segment]) if whole else None
            )
    return None


def _file(record: JobRecord) -> Path:
    return home() / "jobs" / f"{record.id}{COSTS}"


def since(ledger: Ledger, moment: float) -> Ledger:
    """The part of a ledger after a moment."""
    attempts = [
        each._replace(
            began=max(each.began, moment),
            segments=[part for segment in each.segments for part in _after(segment, moment)],
        )
        for each in ledger.attempts
        if each.ended > moment
    ]
    return ledger._replace(attempts=attempts)


def _after(segment: Segment, moment: float) -> Iterable[Segment]:
    length = segment.ended - segment.began
    kept = segment.ended - max(segment.began, moment)
    if kept > 0 and length > 0:
        seconds = {name: part * kept / length for name, part in segment.seconds.items()}
        yield Segment(segment.ended - kept, segment.ended, seconds)


def cost_row(ledger: Ledger) -> dict[str, Any]:
    """The sums of a job in GPU seconds, as JSON."""
    gpu_seconds = {name: round(part, 3) for name, part in ledger.gpu_seconds.items()}
    return {
        "allocation": round(ledger.allocation, 3),
        "goodput": _rounded(ledger.goodput),
        "accounts": gpu_seconds,
        "queued": round(ledger.queued, 3),
        "repeated_steps": sum(each.repeated_steps for each in ledger.attempts),
    }


def attempt_rows(ledger: Ledger) -> list[dict[str, Any]]:
    return [
        {
            "attempt": each.attempt,
            "began": each.began,
            "ended": each.ended,
            "gpus": each.gpus,
            "cause": each.cause or None,
            "repeated_steps": each.repeated_steps,
            "accounts": {name: round(part, 3) for name, part in each.gpu_seconds.items()},
        }
        for each in ledger.attempts
    ]


def summed(rows: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """The sums of several rows of `cost_row`."""
    rows = list(rows)
    accounts = {name: round(sum(row["accounts"][name] for row in rows), 3) for name in ACCOUNTS}
    allocation = round(sum(row["allocation"] for row in rows), 3)
    return {
        "jobs": len({row["job"] for row in rows}),
        "allocation": allocation,
        "goodput": _rounded(_common_goodput(rows)),
        "accounts": accounts,
        "queued": round(sum(row["queued"] for row in rows), 3),
        "repeated_steps": sum(row["repeated_steps"] for row in rows),
    }


def _common_goodput(rows: Iterable[Mapping[str, Any]]) -> float | None:
    """Of the jobs whose steps are known: the time of scripts counts neither way."""
    known = [row for row in rows if not row["accounts"][UNKNOWN]]
    accounts = {name: sum(row["accounts"][name] for row in known) for name in ACCOUNTS}
    return goodput_of(accounts, sum(row["allocation"] for row in known))


def _rounded(share: float | None) -> float | None:
    return None if share is None else round(share, 4)


def user_of(record: JobRecord | None = None) -> str:
    """Who submitted a job: the owner of its folder, else of the job store."""
    for path in (*([record.local_dir] if record else []), str(home())):
        try:
            number = os.stat(path).st_uid
        except OSError:
            continue
        try:
            return pwd.getpwuid(number).pw_name
        except KeyError:
            return f"user {number}"
    return "?"
