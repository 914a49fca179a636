"""The steps of a job as they are logged, for whoever looks at it for hours.

Old steps are thinned out: any number of steps takes the same memory.
"""

from __future__ import annotations

from pathlib import Path

from gptctl.engine.run_folder import RunFolder
from gptctl.jobs.appended_file import AppendedFile
from gptctl.jobs.store import JobRecord
from gptctl.logs.lines import readable
from gptctl.logs.metric_rows import Row, parse_lines, parse_metrics, row_of_line, run_rows
from trainer.checkpoint_names import METRICS, REPEATED_METRICS
from trainer.logline import RESUMED_FROM

# What views and the ledger use; a row of the file has twice as much.
NAMES = frozenset(
    "job attempt step time clock loss valid_loss max_steps speed step_time reader_time wait_time "
    "ips_total memory gpu_memory".split()
) | {RESUMED_FROM}


class LiveRows:
    """Reads what is new in the files of one job."""

    def __init__(self, record: JobRecord, most_bytes: int, most_rows: int) -> None:
        """`most_bytes` are read at once, `most_rows` are kept of each file."""
        self._record, self._most, self._most_rows = record, most_bytes, most_rows
        self._files: dict[Path, AppendedFile] = {}
        self._found: dict[Path, list[Row]] = {}
        self._run: list[Row] = []
        self.version = 0  # changes with the rows

    @property
    def rows(self) -> list[Row]:
        """Every step, also those that were trained again."""
        return [row for rows in self._found.values() for row in rows]

    @property
    def run(self) -> list[Row]:
        """One row per step: what was trained again replaces what was lost."""
        return self._run

    def refresh(self) -> None:
        paths = self._paths()
        # The logs of an earlier attempt of a script are not needed any more.
        self._files = {path: self._files.get(path) or self._opened(path) for path in paths}
        self._found = {path: self._found.get(path, []) for path in paths}
        # Every file is read, also after one that has something new.
        has_news = [self._read(file) for file in self._files.values()]
        if any(has_news):
            self.version += 1
            # Those in METRICS, or in the first log that has any.
            chosen = [rows for rows in self._found.values() if rows]
            shown = self._found[paths[-1]] if self._record.output_dir else [*chosen, []][0]
            self._run = run_rows(shown)

    def _opened(self, path: Path) -> AppendedFile:
        return AppendedFile(path, self._most)

    def _paths(self) -> list[Path]:
        if self._record.output_dir:
            return [Path(self._record.output_dir, name) for name in (REPEATED_METRICS, METRICS)]
        attempt = RunFolder(self._record.local_dir).attempts() - 1
        folder = Path(self._record.log_dir, f"attempt-{attempt}")
        # Most scripts log on the first rank, some on the last.
        ranks = dict.fromkeys((0, self._record.world - 1))
        return [folder / f"workerlog.{rank}" for rank in ranks] if attempt >= 0 else []

    def _read(self, file: AppendedFile) -> bool:
        data, is_new_file = file.new_lines()
        had = bool(self._found[file.path])
        if is_new_file:
            self._found[file.path] = []
        rows = self._found[file.path]
        parsed = self._parsed(data)
        rows += [{name: row[name] for name in row.keys() & NAMES} for row in parsed]
        while len(rows) > self._most_rows:
            # Every second one of the older half: recent steps are looked at more closely.
            half = len(rows) // 2
            rows[:half] = rows[:half:2]
        return bool(parsed) or (is_new_file and had)

    def _parsed(self, data: bytes) -> list[Row]:
        if not data:
            return []
        if self._record.output_dir:
            return parse_metrics(data, self._record.id, self._record.world)
        attempt = RunFolder(self._record.local_dir).attempts() - 1
        lines = parse_lines(map(readable, data.split(b"\n")))
        return [row_of_line(line, attempt) for line in lines]
