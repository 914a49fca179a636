"""What the files of a job tell: its news so far, and how far its training is.

Files are read as far as they have grown: a story may be asked every second. They may be copies, and
they may be damaged.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gptctl.engine.addresses import FIRST_STEP
from gptctl.engine.contract import EVENTS
from gptctl.engine.events import STARTED
from gptctl.engine.file_reading import (
    is_time,
    is_whole,
    json_lines,
    read_bytes,
    read_json,
    read_tail,
)
from gptctl.engine.launch_plan import LaunchPlan
from gptctl.engine.notifications import MOST_ATTEMPTS, JobFacts, News, elapsed, news_in
from gptctl.engine.run_folder import RunFolder, newest_checkpoint

MOST_EVENTS = 8 << 20  # bytes of new events that are read at once
METRICS = "metrics.jsonl"  # of the trainer, in its output folder
METRICS_TAIL = 16 << 10  # bytes: some fifty steps
FIRST_STEP_EVENTS = ("first step", "first_step")  # as the trainer calls it
RANK_EVENTS = 4096  # bytes: the first of them


class GrowingFile:
    """A file of JSON lines that others append to."""

    def __init__(self, path: Path) -> None:
        self._path, self._offset = path, 0

    def new(self) -> list[dict[str, Any]]:
        data = read_tail(self._path, MOST_EVENTS, self._offset)
        # The last line may still be written.
        complete, end, _ = data.rpartition(b"\n")
        self._offset += len(complete) + len(end)
        return list(json_lines(complete))


class JobStory:
    def __init__(self, folder: Path, plan: LaunchPlan, output_dir: str) -> None:
        """`folder` and `output_dir`: as this machine sees them."""
        self.folder, self.plan, self.output_dir = RunFolder(folder), plan, output_dir
        self._own = GrowingFile(folder / EVENTS)
        self._trainers = GrowingFile(Path(output_dir, EVENTS)) if output_dir else None
        self._events: list[dict[str, Any]] = []
        self._first_steps: dict[int, News] = {}  # by attempt

    def news(self) -> list[News]:
        """Everything that people may be told, oldest first."""
        self._events += self._own.new()
        found = news_in(self._events)
        began = next((event for event in self._events if event.get("event") == STARTED), None)
        if began:
            self._find_first_steps(began)
        told = sorted([*found, *self._first_steps.values()], key=lambda news: news.time)
        return [news for news in told if news.number < MOST_ATTEMPTS]

    def _find_first_steps(self, began: Mapping[str, Any]) -> None:
        if not self._trainers:
            self._find_ranks(began)
            return
        for event in self._trainers.new():
            # Several jobs of a chain write to the same file.
            is_ours = event.get("job") == self.plan.job_id
            if event.get("event") in FIRST_STEP_EVENTS and is_ours:
                self._note(event.get("attempt"), event, began)

    def _find_ranks(self, began: Mapping[str, Any]) -> None:
        """For programs whose steps are not known: that their ranks have started."""
        attempt = self.folder.attempts() - 1
        if attempt < 0 or attempt in self._first_steps:
            return
        for node in range(min(self.plan.nodes, 2)):
            file = self.folder.attempt(attempt) / f"ranks.{node}.jsonl"
            first = next(json_lines(read_bytes(file, RANK_EVENTS)), {})
            self._note(attempt, first, began)

    def _note(self, attempt: object, event: Mapping[str, Any], began: Mapping[str, Any]) -> None:
        moment = event.get("time")
        if is_whole(attempt, 0, 1 << 20) and is_time(moment):
            news = News(FIRST_STEP, attempt, moment, seconds=elapsed(began, event))
            self._first_steps.setdefault(attempt, news)

    def facts(self) -> JobFacts:
        """What messages say about the job, as it is now."""
        plan = self.plan
        last: Mapping[str, Any] = {}
        loss = None  # of the last step that has one: the last record may be an evaluation
        for row in json_lines(read_tail(Path(self.output_dir or "/", METRICS), METRICS_TAIL)):
            # The jobs of a chain share the file.
            is_ours = row.get("job") in (None, plan.job_id)
            if is_ours and is_whole(row.get("step"), 0, 1 << 53):
                last, loss = row, row.get("loss", loss)
        total = last.get("max_steps")
        saved = newest_checkpoint(self.output_dir) if self.output_dir else -1
        return JobFacts(
            plan.job_id,
            plan.cluster,
            plan.nodes,
            plan.per_node,
            bool(plan.output_dir),
            last.get("step"),
            total if is_whole(total, 1, 1 << 53) else self._configured_steps(),
            loss if isinstance(loss, float) else None,
            saved if saved >= 0 else None,
        )

    def _configured_steps(self) -> int | None:
        values: Any = read_json(self.folder.path / "config.json") or {}
        for name in ("resolved", "Engine"):
            values = values.get(name) if isinstance(values, dict) else None
        # In epochs only the trainer knows the number of steps.
        if not isinstance(values, dict) or values.get("run_mode") == "epoch":
            return None
        steps = values.get("max_steps")
        return steps if is_whole(steps, 1, 1 << 53) and self.plan.output_dir else None
