"""What each rank needed for a step, without waiting for others: the reader of rank_times.jsonl.

The slowest rank holds up all others, so these numbers show it. A job of a thousand ranks writes ten
kilobytes for every logged step: lines are read one by one, and nothing is kept.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from gptctl.engine.file_reading import is_time, is_whole, json_lines, read_tail, records_of
from gptctl.jobs.store import MOST_RANKS, JobRecord
from gptctl.logs.metric_rows import HIGHEST_STEP, MOST_USELESS
from trainer.checkpoint_names import RANK_TIMES

MOST_BYTES = 1 << 30  # of a file, from its end: a hundred thousand steps of a thousand ranks
NEWEST = 2 << 20  # bytes: one line of the largest jobs
LONGEST_TIME = 1e9  # milliseconds: ten days


class RankTimes(NamedTuple):
    """A logged step of one attempt."""

    attempt: int
    step: int
    time: float  # when it was recorded
    own_ms: list[float]  # by rank

    @property
    def median(self) -> float:
        return median(self.own_ms)


def rank_times(record: JobRecord) -> Iterator[RankTimes]:
    """Every recorded step of a job in the order of writing, also those that were trained again."""
    if record.output_dir:
        file = Path(record.output_dir, RANK_TIMES)
        yield from _parsed(records_of(file, MOST_BYTES, NEWEST, record.id), record.id)


def newest_rank_times(record: JobRecord) -> RankTimes | None:
    """The last recorded step, at the cost of one short read."""
    if not record.output_dir:
        return None
    data = read_tail(Path(record.output_dir, RANK_TIMES), NEWEST)
    # From the end: the lines before the last one are not needed.
    for line in reversed(data.split(b"\n")):
        for found in _parsed(json_lines(line), record.id):
            return found
    return None


def _parsed(lines: Iterable[dict[str, Any]], job: str) -> Iterator[RankTimes]:
    useless = 0
    for fields in lines:
        if "own_ms" not in fields and (useless := useless + 1) > MOST_USELESS:
            return
        match fields:
            case {"step": step, "own_ms": list(own), "time": moment}:
                attempt = fields.get("attempt", 0)
                # Jobs may share an output folder.
                is_own = fields.get("job") in (None, job)
                is_valid = is_whole(step, 0, HIGHEST_STEP) and is_whole(attempt, 0, 1 << 31)
                is_valid = is_valid and is_time(moment) and 0 < len(own) <= MOST_RANKS
                if is_own and is_valid and _are_milliseconds(own):
                    yield RankTimes(attempt, step, float(moment), own)


def _are_milliseconds(values: list[Any]) -> bool:
    # By types first, which C code counts: a run of a thousand ranks has ten million numbers.
    are_numbers = set(map(type, values)) <= {int, float}
    return are_numbers and min(values) >= 0 and max(values) < LONGEST_TIME
