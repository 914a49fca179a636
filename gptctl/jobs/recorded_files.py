"""The one reader of metrics.jsonl and events.jsonl in the folders of jobs on this machine.

They can have any size, and anything in them: jobs run for days, hosts are not trusted, disks
fail. Files are read line by line, and rows are thinned beyond a limit.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from gptctl.engine.contract import EVENTS
from gptctl.engine.file_reading import CHUNK, json_lines, open_at_once, records_of
from gptctl.jobs.store import JobRecord
from gptctl.logs.metric_rows import Row, parse_metrics, rows_in, run_rows
from gptctl.logs.row_sample import sample_of
from gptctl.reporting import Say
from trainer.checkpoint_names import METRICS, REPEATED_METRICS

METRICS_BYTES = 1 << 30  # bytes, from the end of a file: about two million rows
EVENTS_BYTES = 16 << 20  # of all events: about a hundred thousand
NEWEST_EVENTS_BYTES = 256 << 10  # of the latest ones
EVALUATIONS_TAIL = 512 << 10  # some thousand rows, for one of them
METRICS_TAIL = 8 << 10  # about twenty rows
HEAD = 1 << 10  # the first line of a file
MOST_SEARCHED = 64 << 20  # of it
Fields = dict[str, Any]


def say_nothing(text: str) -> None:
    """For callers whose sums do not need every record."""


def recorded_rows(
    record: JobRecord,
    names: tuple[str, ...] | None = None,
    with_repeated: bool = False,
    say: Say = say_nothing,
) -> list[Row]:
    """Return the rows of a job in the order of writing; empty for a script.

    `names`: how the names of the numbers begin that are needed; None: all. `with_repeated`: also
    of the steps that were trained again later.
    """
    if not record.output_dir:
        return []
    files = (REPEATED_METRICS, METRICS) if with_repeated else (METRICS,)
    return [
        row
        for name in files
        for row in rows_of_file(Path(record.output_dir, name), record.id, record.world, names, say)
    ]


def rows_of_file(
    file: Path,
    job: str = "",
    world: int = 1,
    names: tuple[str, ...] | None = None,
    say: Say = say_nothing,
) -> list[Row]:
    """Return the rows of one file; `say` is told if there are too many of them."""
    sample = sample_of(rows_in(records_of(file, METRICS_BYTES, job=job), job, world, names))
    if sample.left_out:
        say(f"{job or file} has {sample.left_out}")
    return sample.rows()


def newest_rows(record: JobRecord) -> tuple[list[Row], float]:
    """Return the last rows of a job, and when their file was written; costs a short read."""
    file = Path(record.output_dir, METRICS)
    data, changed = tail_of(file, METRICS_TAIL)
    rows = run_rows(parse_metrics(data, record.id, record.world))
    if not rows and data:
        # The jobs of a chain share the file: later ones have written since.
        data = _tail_of_job(file, record.id)
        rows = run_rows(parse_metrics(data, record.id, record.world))
    return rows, changed


def newest_valid_loss(record: JobRecord) -> float | None:
    """Return the last validation loss, which may be a thousand steps before the last row."""
    if not record.output_dir:
        return None
    data, _ = tail_of(Path(record.output_dir, METRICS), EVALUATIONS_TAIL)
    # From the end: one line is parsed, however many there are.
    while (found := data.rfind(b'"valid_loss"')) >= 0:
        start, end = data.rfind(b"\n", 0, found) + 1, data.find(b"\n", found)
        rows = parse_metrics(data[start : end if end >= 0 else None], record.id, record.world)
        if rows and (loss := rows[0].get("valid_loss")) is not None:
            return float(loss)
        data = data[:start]
    return None


def tail_of(file: Path, size: int) -> tuple[bytes, float]:
    """Return the whole lines in the last bytes of a file, and when it was changed."""
    try:
        with open(file, "rb", opener=open_at_once) as stream:
            status = os.fstat(stream.fileno())
            data = os.pread(stream.fileno(), size, max(0, status.st_size - size))
    except OSError:
        return b"", 0.0
    # The first line is incomplete, unless this is the whole file.
    return data if status.st_size <= size else data.partition(b"\n")[2], status.st_mtime


def _tail_of_job(file: Path, job: str) -> bytes:
    """Return the last lines of a job in a file to which later jobs have written, too."""
    mark = f'"job": {json.dumps(job)}'.encode()
    try:
        with open(file, "rb", opener=open_at_once) as stream:
            start = stream.seek(0, os.SEEK_END)
            # Not further: a damaged file may be of any size.
            last = max(0, start - MOST_SEARCHED)
            while start > last:
                start = max(0, start - CHUNK)
                stream.seek(start)
                # A line may begin in this chunk and end in the one after it.
                chunk = stream.read(CHUNK + HEAD)
                if (found := chunk.rfind(mark)) >= 0:
                    end = start + found + len(mark)
                    first = max(0, end - METRICS_TAIL)
                    stream.seek(first)
                    data = stream.read(end - first + HEAD)
                    return data.partition(b"\n")[2] if first else data
    except OSError:
        pass
    return b""


def engine_events(record: JobRecord) -> Iterator[Fields]:
    """What the engine recorded of a job, oldest first."""
    return records_of(record.run_folder / EVENTS, EVENTS_BYTES)


def trainer_events(record: JobRecord) -> Iterator[Fields]:
    """What the trainer recorded, oldest first; without the events of other jobs in the folder."""
    if not record.output_dir:
        return iter(())
    events = records_of(Path(record.output_dir, EVENTS), EVENTS_BYTES, job=record.id)
    return (fields for fields in events if fields.get("job") in (None, record.id))


def newest_events(record: JobRecord) -> tuple[list[Fields], list[Fields]]:
    """Return the last events of the engine and of the trainer, at the cost of two short reads."""
    own, _ = tail_of(record.run_folder / EVENTS, NEWEST_EVENTS_BYTES)
    trainers = b""
    if record.output_dir:
        trainers, _ = tail_of(Path(record.output_dir, EVENTS), NEWEST_EVENTS_BYTES)
    mine = [each for each in json_lines(trainers) if each.get("job") in (None, record.id)]
    return list(json_lines(own)), mine
