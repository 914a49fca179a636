"""The steps of a job as they are logged, for whoever looks at it for hours.

Old steps are thinned out as in `row_sample`: any number of steps takes the same memory.
"""

from __future__ import annotations

from pathlib import Path

from gptctl.engine.file_reading import json_lines
from gptctl.engine.run_folder import RunFolder
from gptctl.jobs.appended_file import AppendedFile
from gptctl.jobs.store import JobRecord
from gptctl.jobs.timeline import NEEDED
from gptctl.jobs.training_progress import step_logs
from gptctl.logs.lines import readable
from gptctl.logs.metric_rows import BEFORE_ALL, Row, parse_lines, row_of_line, rows_in, run_rows
from gptctl.logs.row_sample import RowSample
from trainer.checkpoint_names import METRICS, REPEATED_METRICS

# What the ledger and the views use; a row of the file has twice as much.
NAMES = (*NEEDED, "valid_loss", "max_steps", "ips_total", "memory", "gpu_memory")
VALUES_PER_ROW = 20  # on average at most; the bundled trainer writes fifteen of NAMES
NEWEST = 100  # rows that are never thinned: recent steps are looked at more closely


class LiveRows:
    """Reads what is new in the files of one job."""

    def __init__(self, record: JobRecord, most_bytes: int, most_rows: int) -> None:
        """`most_bytes` are read at once, about `most_rows` are kept of each file."""
        self._record, self._most, self._most_rows = record, most_bytes, most_rows
        self._files: dict[Path, StepFile] = {}
        self._run: list[Row] = []
        self.source: Path | None = None  # the file with the rows of `run`
        self.version = 0  # changes with the rows

    @property
    def rows(self) -> list[Row]:
        """Every step, also those that were trained again."""
        return [row for file in self._files.values() for row in file.sample.rows()]

    @property
    def run(self) -> list[Row]:
        """One row per step: what was trained again replaces what was lost."""
        return self._run

    def refresh(self) -> None:
        paths = self._paths()
        # The logs of an earlier attempt of a script are not needed any more.
        self._files = {path: self._files.get(path) or self._opened(path) for path in paths}
        # Every file is read, also after one that has something new.
        has_news = [file.read() for file in self._files.values()]
        if any(has_news):
            self.version += 1
            # Those in METRICS, or in the first log that has any.
            having = paths[-1:] if self._record.output_dir else paths
            having = [path for path in having if self._files[path].has_rows]
            self.source = having[0] if having else None
            self._run = run_rows(self._files[having[0]].sample.rows()) if having else []

    def _paths(self) -> list[Path]:
        if self._record.output_dir:
            return [Path(self._record.output_dir, name) for name in (REPEATED_METRICS, METRICS)]
        return step_logs(self._record)

    def _opened(self, path: Path) -> StepFile:
        return StepFile(self._record, path, self._most, self._most_rows)


class StepFile:
    """One file, and the rows that were read of it so far."""

    def __init__(self, record: JobRecord, path: Path, most_bytes: int, most_rows: int) -> None:
        self._record, self._most_rows = record, most_rows
        self._file = AppendedFile(path, most_bytes)
        self._start_again()

    def _start_again(self) -> None:
        self.sample = RowSample(self._most_rows, VALUES_PER_ROW * self._most_rows, NEWEST)
        self.has_rows = False
        # Files of older versions do not number attempts: each row's follows from the one before.
        self._before = BEFORE_ALL

    def read(self) -> bool:
        """Add the rows that are new; return whether any changed."""
        data, is_new_file = self._file.new_lines()
        had_rows = self.has_rows
        if is_new_file:
            self._start_again()
        parsed = self._parsed(data) if data else []
        for row in parsed:
            self.sample.add(row)
        if parsed:
            self.has_rows, self._before = True, (parsed[-1]["attempt"], parsed[-1]["step"])
        return bool(parsed) or (is_new_file and had_rows)

    def _parsed(self, data: bytes) -> list[Row]:
        record = self._record
        if record.output_dir:
            return list(rows_in(json_lines(data), record.id, record.world, NAMES, self._before))
        attempt = RunFolder(record.local_dir).attempts() - 1
        return [
            row_of_line(line, attempt) for line in parse_lines(map(readable, data.split(b"\n")))
        ]
