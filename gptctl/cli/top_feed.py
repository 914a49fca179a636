"""Keeps the snapshot of `gptctl top` up to date beside the keys.

What may block, schedulers and hosts, runs in threads of its own. The process does not wait for them
when it exits.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from gptctl.jobs.top_collector import ASK_EVERY, TopCollector, Wanted
from gptctl.jobs.top_snapshot import TopSnapshot
from trainer.errors import UserError

FOLLOW_AGAIN = 20.0  # seconds after which a log that could not be followed is tried again


class TopFeed:
    def __init__(
        self,
        collector: TopCollector,
        interval: float,
        show: Callable[[TopSnapshot], None],
        end: Callable[[], None],
    ) -> None:
        """`show` and `end` are called by other threads; `end` if one of them has failed."""
        self._end = end
        self._collector, self._interval, self._show = collector, interval, show
        self._wanted = Wanted()
        self._wake, self._ended = threading.Event(), threading.Event()
        self._asked = threading.Event()
        self.problem: Exception | None = None  # a bug of ours, which the verb must raise

    def start(self) -> None:
        for work in (self._ask, self._read, self._follow):
            threading.Thread(target=self._guarded, args=(work,), daemon=True).start()

    def stop(self) -> None:
        self._ended.set()
        self._wake.set()

    def want(self, wanted: Wanted) -> None:
        """Show this soon: a key must not wait for the next interval."""
        if wanted != self._wanted:
            self._wanted = wanted
            self._wake.set()

    def cancel(self, job: str) -> None:
        self._collector.note(f"cancelling {job} …")
        self._wake.set()
        threading.Thread(target=self._cancel, args=(job,), daemon=True).start()

    def _cancel(self, job: str) -> None:
        self._collector.note(self._collector.cancel(job))
        self._wake.set()

    def _guarded(self, work: Callable[[], None]) -> None:
        try:
            work()
        except Exception as error:  # shown by the main thread, when the screen is its own again
            self.problem = error
            self.stop()
            self._end()

    def _ask(self) -> None:
        while not self._ended.is_set():
            began = time.monotonic()
            try:
                self._collector.ask()
            except UserError as error:
                self._collector.note(error.message)
            self._asked.set()
            self._wake.set()
            self._ended.wait(max(0.0, began + ASK_EVERY - time.monotonic()))

    def _read(self) -> None:
        self._asked.wait()
        while not self._ended.is_set():
            self._wake.clear()
            self._show(self._collector.snapshot(self._wanted))
            self._wake.wait(self._interval)

    def _follow(self) -> None:
        """Copy new lines of the job that is shown, if it is on other machines."""
        while not self._ended.is_set():
            record = self._collector.record_of(self._wanted.job or "")
            if record is None:
                self._ended.wait(0.2)
                continue
            try:
                with self._collector.following(record):
                    self._stay_at(record.id)
            except UserError as error:
                self._collector.note(f"the log of {record.id} is not updated: {error.message}")
                self._wake.set()
                self._stay_at(record.id, FOLLOW_AGAIN)
            self._ended.wait(0.2)

    def _stay_at(self, job: str, seconds: float = float("inf")) -> None:
        """Wait until another job is shown, at most for so long."""
        until = time.monotonic() + seconds
        while self._wanted.job == job and time.monotonic() < until:
            if self._ended.wait(0.2):
                return
