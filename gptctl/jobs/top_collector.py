"""Gathers snapshots for `gptctl top`: states from backends, everything else from files.

States are asked for in one call for all jobs, and not more often than a scheduler can bear. They
may take long; files never wait for them.
"""

from __future__ import annotations

import threading
import time
from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple

from gptctl.backends import Backends, JobState
from gptctl.deadline import Deadline
from gptctl.engine.error_text import one_line
from gptctl.engine.job_result import UNKNOWN
from gptctl.jobs.costs import EarlierSteps
from gptctl.jobs.job_reading import JobReader, JobReading, attempt_at, rank_log
from gptctl.jobs.job_status import known_states
from gptctl.jobs.last_state import last_state
from gptctl.jobs.past_reading import past_reading
from gptctl.jobs.rank_times import RankTimes
from gptctl.jobs.state import is_final, may_run
from gptctl.jobs.store import JobRecord, Store
from gptctl.jobs.top_snapshot import JobSummary, TopSnapshot, detail_of, summary_of
from trainer.errors import UserError

ASK_EVERY = 6.0  # seconds between two questions to a scheduler: at most ten a minute
FIRST_WITHIN = 3.0  # seconds that the first picture waits for answers, as `list` does
ANSWER_WITHIN = 20.0  # seconds that hosts and schedulers have to answer
RECENT = 30  # jobs that are shown
MOST_NOTES = 3
NOTE_SECONDS = 15.0  # for which a note is shown


class Wanted(NamedTuple):
    """What the next snapshot should have besides all jobs."""

    job: str | None = None
    rank: int | None = None


class TopCollector:
    """Two threads use it: one calls `ask`, which may block, the other `snapshot`."""

    def __init__(
        self, store: Store, backends: Backends, only: JobRecord | None, at: float | None
    ) -> None:
        self._store, self._backends, self._only, self._at = store, backends, only, at
        self._earlier = EarlierSteps(store)
        self._records: list[JobRecord] = []
        self._states: dict[str, JobState] = {}
        self._readers: dict[tuple[str, bool], JobReader] = {}
        # Of jobs that do not change any more; their rows would take much memory.
        self._final: dict[str, tuple[JobState, JobSummary]] = {}
        self._past: tuple[object, TopSnapshot] | None = None
        self._past_ranks: dict[str, RankTimes | None] = {}
        self._notes: list[tuple[float, str]] = []  # when it came, and what it says
        self._lock = threading.Lock()

    def note(self, text: str) -> None:
        """Take what a backend says: it must not write to the screen itself."""
        with self._lock:
            self._notes = [*self._notes, (time.monotonic(), one_line(text, 200))][-MOST_NOTES:]

    def ask(self) -> None:
        """Ask for the states of all jobs that have not ended; of the past, until all are known."""
        if self.is_past and self._records and not self._has_unknown():
            return
        records = [self._only] if self._only else self._store.records(RECENT)
        left = [each for each in records if not self._is_settled(each)]
        # A host that is down must not keep the first picture waiting.
        limit = ANSWER_WITHIN if self._records else FIRST_WITHIN
        found = known_states(left, self._backends, Deadline(limit))
        # A new one: the other thread may be reading.
        self._states = {**self._states, **found}
        self._records = records

    @property
    def is_past(self) -> bool:
        return self._at is not None

    def _has_unknown(self) -> bool:
        return any(self._states[each.id].state == UNKNOWN for each in self._records)

    def _is_settled(self, record: JobRecord) -> bool:
        return record.id in self._states and is_final(self._states[record.id])

    def following(self, record: JobRecord) -> AbstractContextManager[None]:
        """Copy new log lines of a job from its hosts, as `logs --follow` does."""
        if self._at is not None or not self._backends.knows(record.kind):
            return nullcontext()
        return self._backends.of(record.kind).following(record)

    def catch_up(self) -> None:
        """Copy what the one job has written on other machines since it was looked at last."""
        if self._only and self._only.run_folder.is_dir() and self._backends.knows(self._only.kind):
            try:
                for text in self._backends.of(self._only.kind).catch_up(self._only):
                    self.note(text)
            except UserError as error:  # what was copied before is shown in any case
                self.note(error.message)

    def record_of(self, job: str) -> JobRecord | None:
        return next((each for each in self._records if each.id == job), None)

    def cancel(self, job: str) -> str:
        """Cancel a job; return what to tell the user. Takes as long as the job needs to save."""
        record = self.record_of(job)
        if record is None:
            return f"no job {job}"
        try:
            if not may_run(record, self._backends):
                return f"{job} has already ended"
            self._backends.of(record.kind).cancel(record, now=False)
        except UserError as error:
            return one_line(f"{job}: {error.message}", 200)
        return f"{job} is cancelled"

    def snapshot(self, wanted: Wanted) -> TopSnapshot:
        """What is known now. The past does not change: it is read again only for a new state."""
        key = wanted, self._states
        if self._at is None or self._past is None or self._past[0] != key:
            self._past = key, self._gathered(wanted)
        oldest = time.monotonic() - NOTE_SECONDS
        return self._past[1]._replace(notes=tuple(x for when, x in self._notes if when > oldest))

    def _gathered(self, wanted: Wanted) -> TopSnapshot:
        now = time.time() if self._at is None else self._at
        records = [each for each in self._records if each.id in self._states]
        records = [each for each in records if self._at is None or each.created <= now]
        chosen = next((each for each in records if each.id == wanted.job), None)
        detail = None
        if chosen:
            detail = detail_of(self._detailed(chosen, wanted.rank), now)
        shown = [
            # What was read of the chosen job is not read again.
            detail.summary if detail and record is chosen else self._summary(record, now)
            for record in records
        ]
        return TopSnapshot(now, self._at is not None, tuple(reversed(shown)), detail)

    def _summary(self, record: JobRecord, now: float) -> JobSummary:
        state = _shown_state(record, self._states[record.id])
        known = self._final.get(record.id)
        if known and known[0] == state:
            return known[1]
        reading = self._reader(record, is_detailed=False).read(state)
        found = summary_of(reading if self._at is None else past_reading(reading, self._at), now)
        if is_final(state) or self._at is not None:
            self._final[record.id] = state, found
            del self._readers[record.id, False]
        return found

    def _detailed(self, record: JobRecord, rank: int | None) -> JobReading:
        # Of one job at a time: the rows of each take some memory.
        for key in [key for key in self._readers if key[1] and key[0] != record.id]:
            del self._readers[key]
        reader = self._reader(record, is_detailed=True)
        state = _shown_state(record, self._states[record.id])
        if self._at is None:
            return reader.read(state, rank)
        reading = reader.read(state)
        log = None
        if rank is not None:
            log = rank_log(record, rank, attempt_at(reading.timeline, self._at), self._at)
        # Another rank of the same job needs the large file no second time.
        if record.id not in self._past_ranks:
            self._past_ranks[record.id] = reader.past_ranks(self._at)
        found = reading._replace(ranks=self._past_ranks[record.id], log=log)
        return past_reading(found, self._at)

    def _reader(self, record: JobRecord, is_detailed: bool) -> JobReader:
        key = record.id, is_detailed
        if key not in self._readers:
            self._readers[key] = JobReader(record, self._earlier, is_detailed)
        return self._readers[key]


def _shown_state(record: JobRecord, state: JobState) -> JobState:
    """While nobody tells the state, the last known one and why."""
    last = last_state(record) if state.state == UNKNOWN else None
    return JobState(last.state, f"last known; {state.reason}") if last else state
