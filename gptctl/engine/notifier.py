"""Tell people what happens to a job, while it runs: threads that read its story and send messages.

The engine has a notifier on the node, and so has every gptctl that watches the job: it helps if the
node has no way out, or if the engine was killed. `deliveries.py` decides who of them sends. Nothing
here can delay the job or make it fail.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from gptctl.engine.address_reading import UnusableAddress, read_address, shown_address
from gptctl.engine.addresses import END
from gptctl.engine.deliveries import (
    DELIVERED,
    ENGINE,
    FAILED,
    FIRST_OF_COPY,
    GAVE_UP,
    MOST_TRIES,
    WATCHER,
    Delivery,
    Try,
    has_given_up,
    is_settled,
    next_try,
)
from gptctl.engine.job_story import JobStory
from gptctl.engine.launch_plan import LaunchPlan
from gptctl.engine.log import say
from gptctl.engine.notifications import News, ended_as, message_about
from gptctl.engine.processes import is_alive
from gptctl.engine.webhook import SendOutcome, send

POLL = 1.0  # seconds between two looks at the story
BUSY_POLL = 0.1  # while the last messages are sent
TOO_OLD = 3600.0  # seconds after which nobody needs to be told any more
FIRST_LOOK = 5.0  # seconds in which a notifier finds what happened before it began
# Seconds that a watcher gives the engine to be the sender. Where it sees only copies of the
# engine's records, it must be sure that the engine has stopped.
PATIENCE, PATIENCE_WITH_COPY = 3.0, 90.0
END_PATIENCE = 5.0  # seconds for which a watcher waits to see the end of a job
MOST_TRIES_AT_END = 3  # of a watcher: a person waits for its end


class View(NamedTuple):
    """A job as a sender sees it: where its files are here, and in which role it sends."""

    folder: Path
    output_dir: str
    role: str = ENGINE
    is_copy: bool = False  # the folder is a copy of that on the job's hosts


class Notifier:
    """Sends the news of a job to its targets: a slow one must not delay the others."""

    def __init__(
        self,
        plan: LaunchPlan,
        view: View,
        environment: Mapping[str, str],
        say: Callable[[str], None] = say,
    ) -> None:
        self._is_closing, self._say = threading.Event(), say
        self._senders = [
            _Sender(plan, view, number, target, environment, say)
            for number, target in enumerate(plan.notify)
        ]
        self._threads = [
            # A daemon: the process must be able to exit whatever it waits for.
            threading.Thread(target=sender.run, args=(self._is_closing,), daemon=True)
            for sender in self._senders
        ]

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def has_open_news(self) -> bool:
        """Whether anything is left to be told, as far as it is known here."""
        return any(sender.has_open_news() for sender in self._senders)

    def end_as(self, state: str, reason: str) -> None:
        """Tell the end of a job whose engine was killed before it could."""
        for sender in self._senders:
            sender.end = state, reason, time.time()

    def close(self, limit: float) -> bool:
        """Send what is left, for at most so many seconds; return whether nothing is."""
        deadline = time.monotonic() + limit
        self._is_closing.set()
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        is_done = not any(thread.is_alive() for thread in self._threads)
        for sender in self._senders:
            # The job has ended: nothing may change its exit code any more.
            try:
                sender.leave()
            except Exception as error:
                self._say(f"notifications: {type(error).__name__}: {error}")
        return is_done


class _Sender:
    """Sends the news to one target."""

    def __init__(
        self,
        plan: LaunchPlan,
        view: View,
        number: int,
        target: Mapping[str, Any],
        environment: Mapping[str, str],
        say: Callable[[str], None],
    ) -> None:
        self._plan, self._view, self._number, self._target = plan, view, number, target
        self._environment, self._say = environment, say
        self._story = JobStory(view.folder, plan, view.output_dir)
        self._settled: set[str] = set()  # names of news
        self._seen: dict[str, float] = {}  # when news were seen first, on the steady clock
        self._deliveries: dict[str, Delivery] = {}  # by name of the news
        self._began, self._closed = time.monotonic(), 0.0
        self.end: tuple[str, str, float] | None = None  # see `Notifier.end_as`

    def run(self, is_closing: threading.Event) -> None:
        # Signals are for the thread that runs the job.
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        try:
            while True:
                # Before looking: what was written before the end is then seen in this round.
                is_last = is_closing.is_set()
                num_left = self._round(is_last)
                if is_last and not num_left and not self._awaits_end():
                    return
                if is_last:
                    time.sleep(BUSY_POLL)
                else:
                    is_closing.wait(BUSY_POLL * 5 if num_left else POLL)
        except Exception as error:  # whatever it is, it must not disturb the job
            self._say(f"notifications stopped: {type(error).__name__}: {error}")

    def leave(self) -> None:
        """Leave what could not be sent in time to those who watch the job."""
        if self._view.role != ENGINE:
            return
        for news in self._news(JobStory(*self._places)):
            delivery = self._delivery(news)
            tries = delivery.tries()
            if not is_settled(tries, ENGINE):
                delivery.leave(tries, "the job has ended")

    def has_open_news(self) -> bool:
        return any(
            not is_settled(self._delivery(news).tries(), self._view.role)
            for news in self._open_news()
        )

    @property
    def _places(self) -> tuple[Path, LaunchPlan, str]:
        return self._view.folder, self._plan, self._view.output_dir

    def _awaits_end(self) -> bool:
        """Whether a watcher does not see the end yet of a job that has ended.

        The engine records it after the result, and a copy of the record arrives later.
        """
        self._closed = self._closed or time.monotonic()
        if self._view.role == ENGINE or self.end or self._has_engine_here():
            return False
        is_seen = any(news.event == END for news in self._story.news())
        return not is_seen and time.monotonic() - self._closed < END_PATIENCE

    def _round(self, is_closing: bool) -> int:
        """Try to send what is due; return how much is left."""
        open_news = self._open_news()
        for news in open_news:
            if self._advance(news, is_closing):
                self._settled.add(news.name)
        return sum(news.name not in self._settled for news in open_news)

    def _open_news(self) -> list[News]:
        found = [news for news in self._news(self._story) if news.name not in self._settled]
        is_ours = self._view.role == ENGINE or not self._has_engine_here()
        return found if is_ours else []

    def _news(self, story: JobStory) -> list[News]:
        found, now = story.news(), time.time()
        if self.end:
            own = ended_as(found, *self.end)
            if not any(news.event == END and news.number == own.number for news in found):
                found.append(own)
        wanted = self._target.get("on") or ()
        return [news for news in found if news.is_told(wanted) and self._is_recent(news, now)]

    def _is_recent(self, news: News, now: float) -> bool:
        seen = self._seen.setdefault(news.name, time.monotonic())
        # What happens while this runs is new, whatever the clock says. For the rest it must do.
        return seen - self._began > FIRST_LOOK or now - news.time < TOO_OLD

    def _has_engine_here(self) -> bool:
        """Whether the engine runs on this machine: what it cannot reach, nobody here can."""
        claim = self._story.folder.claimed_by()
        return bool(claim) and is_alive(claim or {})

    def _advance(self, news: News, is_closing: bool) -> bool:
        """Send news if it is our turn; return whether nothing is left to do."""
        delivery, role = self._delivery(news), self._view.role
        tries = delivery.tries()
        most = MOST_TRIES_AT_END if is_closing and role == WATCHER else MOST_TRIES
        if is_settled(tries, role, most):
            return True
        number = next_try(tries, role)
        if number is None or not self._may_begin(news, tries):
            return False
        number = max(number, FIRST_OF_COPY) if self._view.is_copy else number
        try:
            if not delivery.begin(number):
                return False
        except OSError:
            # The disk is full: once is better than never, and a watcher is not alone.
            return role == WATCHER or self._send(news) is not None
        outcome = self._send(news)
        num_own = 1 + sum(each.role == role for each in tries)
        state = DELIVERED if outcome.is_delivered else FAILED
        if state == FAILED and (outcome.is_final or num_own >= most):
            state = GAVE_UP
            self._say(f"{news.event}: cannot notify {self._name()}: {outcome.text}")
        delivery.record(number, state, outcome.text)
        return state != FAILED

    def _may_begin(self, news: News, tries: list[Try]) -> bool:
        """Whether a watcher may send: first it is the engine's turn."""
        if self._view.role == ENGINE or has_given_up(tries, ENGINE):
            return True
        # The engine tried, and failed: in a shared folder the next try is anybody's.
        if tries and not self._view.is_copy:
            return True
        patience = PATIENCE_WITH_COPY if self._view.is_copy and not self.end else PATIENCE
        return time.monotonic() - self._seen[news.name] >= patience

    def _send(self, news: News) -> SendOutcome:
        try:
            address = read_address(self._target, self._environment)
        except UnusableAddress as problem:
            return SendOutcome(False, str(problem), True)
        host = os.uname().nodename
        return send(address, message_about(news, self._story.facts(), host))

    def _delivery(self, news: News) -> Delivery:
        # The same one each time: it remembers how long a try has taken.
        if news.name not in self._deliveries:
            made = Delivery(self._view.folder, news.name, self._number, self._view.role)
            self._deliveries[news.name] = made
        return self._deliveries[news.name]

    def _name(self) -> str:
        try:
            address = read_address(self._target, self._environment)
        except UnusableAddress:
            return f"target {self._number + 1}"
        return shown_address(address.kind, address.url)
