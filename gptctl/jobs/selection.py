"""Choose among many jobs: filters, from the cheapest to the dearest, and orders of the rows.

What one filter excludes is not read for the next one. If nothing is left, the filter that excluded
the last job names what comes nearest.
"""

from __future__ import annotations

import math
import os
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from gptctl.engine.job_result import FINAL, PENDING, RUNNING, UNKNOWN
from gptctl.jobs.labels import Labels, LabelStore, Tag
from gptctl.jobs.last_state import last_state
from gptctl.jobs.store import JobRecord, Store
from gptctl.text import clock_time, count, some_of
from trainer.errors import WRONG_USAGE, UserError, closest, one_of

if TYPE_CHECKING:
    from gptctl.backends import JobState

STATES = (RUNNING, PENDING, UNKNOWN, *FINAL)
CLOCK_ERROR = 86_400.0  # seconds: a file server may have another time than this machine
MOST_NAMED = 8  # values that a message lists

T = TypeVar("T")


class Filters(NamedTuple):
    """What is asked of a job; an empty filter asks for nothing."""

    tags: tuple[Tag, ...] = ()  # all of them
    clusters: tuple[str, ...] = ()  # one of them
    since: float | None = None  # submitted then or later
    states: tuple[str, ...] = ()  # one of them

    def words(self) -> list[str]:
        """The options that set them."""
        since = [f"--since {clock_time(self.since)!r}"] if self.since is not None else []
        return [
            *(f"--tag {tag}" for tag in self.tags),
            *(f"--cluster {cluster}" for cluster in self.clusters),
            *since,
            *(f"--state {state}" for state in self.states),
        ]


class Selected(NamedTuple):
    """The jobs that pass the filters, oldest first; if there are none, what comes nearest."""

    records: list[JobRecord]
    nearest: str = ""


def parse_states(texts: Iterable[str]) -> tuple[str, ...]:
    """Read states in any case, also several in one text: `failed,timeout`."""
    words = [word.strip() for text in texts for word in text.split(",")]
    for word in words:
        if word.upper() not in STATES:
            near = closest(word, STATES)
            hint = f"did you mean {near[0]}?" if near else f"use {one_of(STATES)}"
            raise UserError(f"unknown state: {word[:40] or '(empty)'}", hint, WRONG_USAGE)
    return tuple(dict.fromkeys(word.upper() for word in words))


def select(store: Store, filters: Filters, with_removed: bool = False) -> Selected:
    """Find the jobs that pass all filters but that of the state: see `in_states`."""
    ids = store.ids() if with_removed else store.present_ids()
    if filters.since is not None:
        # The newest one tells what comes nearest.
        ids = [each for each in ids if _may_be_newer(store, each, filters.since)] or ids[-1:]
    if filters.tags:
        labels = LabelStore(store.folder.parent)
        tagged = labels.ids()
        # Without a file of labels a job has no tags, and its record need not be read.
        read = store.records_of([job_id for job_id in ids if job_id in tagged])
        found = _tagged([(record, labels.of(record)) for record in read], filters.tags)
    else:
        found = Selected(store.records_of(ids))
    if found.records and filters.clusters:
        found = _on_clusters(found.records, filters.clusters)
    if found.records and filters.since is not None:
        found = _submitted_since(found.records, filters.since)
    return found


def _may_be_newer(store: Store, job_id: str, since: float) -> bool:
    """Whether a job may have been submitted since then: its record is written at that time."""
    try:
        return os.stat(store.folder / f"{job_id}.json").st_mtime > since - CLOCK_ERROR
    except OSError:  # whoever reads it says what is wrong
        return True


def _tagged(jobs: Sequence[tuple[JobRecord, Labels]], tags: Sequence[Tag]) -> Selected:
    for tag in tags:
        left = [(record, labels) for record, labels in jobs if labels.has(tag)]
        if not left:
            known = Counter(str(Tag(*each)) for _, own in jobs for each in own.tags.items())
            return Selected([], _nearest(str(tag), known, "tags"))
        jobs = left
    return Selected([record for record, _ in jobs])


def _on_clusters(records: Sequence[JobRecord], clusters: Sequence[str]) -> Selected:
    left = [record for record in records if record.cluster in clusters]
    known = Counter(record.cluster for record in records)
    return Selected(left, "" if left else _nearest(clusters[0], known, "clusters"))


def _nearest(wanted: str, known: Counter[str], noun: str) -> str:
    """What comes nearest among the values that are in use."""
    if not known:
        return f"none has {noun}"
    if near := closest(wanted, known):
        return f"the nearest of their {noun} is {near[0]} ({count(known[near[0]], 'job')})"
    names = [name for name, _ in known.most_common()]
    return f"their {noun} are {some_of(names, MOST_NAMED)}"


def _submitted_since(records: Sequence[JobRecord], since: float) -> Selected:
    left = [record for record in records if record.created >= since]
    newest = max(records, key=lambda record: record.created)
    nearest = f"the newest is {newest.id}, submitted {clock_time(newest.created)}"
    return Selected(left, "" if left else nearest)


def in_states(
    records: Sequence[JobRecord], known: Mapping[str, JobState], states: Sequence[str]
) -> Selected:
    """Find the jobs in one of these states."""
    shown = {record.id: _shown_state(record, known[record.id]) for record in records}
    left = [record for record in records if {known[record.id].state, shown[record.id]} & {*states}]
    numbers = Counter(shown.values()).most_common()
    nearest = f"their states are {', '.join(f'{number:,} {state}' for state, number in numbers)}"
    return Selected(left, "" if left else nearest)


def _shown_state(record: JobRecord, state: JobState) -> str:
    # While nobody tells the state of a job, `list` shows the last known one.
    last = last_state(record) if state.state == UNKNOWN else None
    return last.state if last else state.state


def _number_of(row: Mapping[str, Any], name: str) -> float | None:
    value = (row["progress"] or {}).get(name)
    # The log of a script can have a loss of NaN, which has no place in an order.
    return None if value is None or math.isnan(value) else value


class Order(NamedTuple):
    """In which order rows are shown."""

    key: str  # one of SORTS
    is_descending: bool = False

    def sorted(self, items: Sequence[T], value_of: Callable[[T], Any]) -> list[T]:
        """Sort items by a value; those whose value is unknown (None) come last either way."""
        # Equal ones stay in the order of their submission.
        known = [item for item in items if value_of(item) is not None]
        unknown = [item for item in items if value_of(item) is None]
        return [*sorted(known, key=value_of, reverse=self.is_descending), *unknown]


# How a key is read from a row of `list`; `size` and what needs only the record are known earlier.
ROW_VALUES: dict[str, Callable[[Mapping[str, Any]], Any]] = {
    "state": lambda row: STATES.index(row["last_state"] or row["state"]),
    "loss": lambda row: _number_of(row, "loss"),
    "tokens/s": lambda row: _number_of(row, "tokens_per_second"),
    "duration": lambda row: row["duration"],
}
RECORD_VALUES: dict[str, Callable[[JobRecord], Any]] = {
    "created": lambda record: record.created,
    "name": lambda record: record.id,
}
SORTS = ("created", "state", "loss", "tokens/s", "duration", "size", "name")


def parse_order(text: str) -> Order:
    """Read `loss`, or `-loss` for descending; raise UserError for anything else."""
    key = text.removeprefix("-").lower()
    if key not in SORTS:
        near = closest(key, SORTS)
        hint = f"did you mean {near[0]}?" if near else f"use {one_of(SORTS)}"
        message = f"cannot sort by {key[:40] or '(empty)'}"
        raise UserError(message, f"{hint}; -KEY sorts in descending order", WRONG_USAGE)
    return Order(key, text.startswith("-"))
