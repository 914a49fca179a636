"""The messages about a job: which events are told, and in what words. Pure: events in, text out.

Texts are plain and bounded, without control characters: reasons come from foreign programs.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from gptctl.engine import events as log
from gptctl.engine.addresses import END, FAILURE, FIRST_STEP, START
from gptctl.engine.error_text import one_line
from gptctl.engine.file_reading import is_time, is_whole
from gptctl.engine.job_result import COMPLETED, FAILED, FINAL

# Of a job that fails again and again, nobody wants a thousand messages.
MOST_ATTEMPTS = 20
LONGEST_REASON = 300  # characters
LONGEST_TEXT = 1800  # bytes: WeCom takes 2,048
STOPPING = "STOPPING"  # the scheduler stops the job, and has not said yet how it ends


class News(NamedTuple):
    """Something that happened to a job, and that people are told."""

    event: str  # one of addresses.TOLD
    number: int  # of the attempt; of a start or an end: how often the job had started before
    time: float
    state: str = ""
    reason: str = ""
    seconds: float | None = None  # since the job started

    @property
    def name(self) -> str:
        return f"{self.event}.{self.number}"

    def is_told(self, wanted: Iterable[str]) -> bool:
        """Whether somebody wants to hear this who chose these events."""
        # A job that ends badly is a failure, too; one message tells both.
        is_bad_end = self.event == END and self.state != COMPLETED
        return self.event in wanted or (is_bad_end and FAILURE in wanted)


class JobFacts(NamedTuple):
    """What messages say about a job besides its events. What is not known is None or empty."""

    job: str
    cluster: str = ""
    nodes: int = 1
    per_node: int = 1
    is_trainer: bool = False
    step: int | None = None
    total: int | None = None
    loss: float | None = None
    checkpoint: int | None = None  # the step of the newest one


class Message(NamedTuple):
    """A message: the same one has the same id, whoever sends it, and however often."""

    id: str
    title: str
    text: str  # begins with the title
    facts: Mapping[str, Any]

    def as_json(self) -> dict[str, Any]:
        return {"id": self.id, **self.facts, "title": self.title, "text": self.text}


def news_in(events: Iterable[Mapping[str, Any]]) -> list[News]:
    """Choose what is told among the events that the engine recorded, oldest first."""
    story = _Story()
    return [news for event in events for news in story.told_by(event)]


class _Story:
    """What is needed of earlier events to understand the next one."""

    def __init__(self) -> None:
        self.runs = 0
        self.began: Mapping[str, Any] = {}  # the event of the first start
        self.failure: tuple[int, str] | None = None  # the attempt, and why it failed
        self.was_requeued = False

    def told_by(self, event: Mapping[str, Any]) -> Iterator[News]:
        moment, attempt, reason = event.get("time"), event.get("attempt"), event.get("reason")
        if not is_time(moment) or not is_whole(attempt, -1, 1 << 20):
            return
        why = one_line(reason, LONGEST_REASON) if isinstance(reason, str) else ""
        match event.get("event"):
            case log.STARTED:
                self.runs, self.began = self.runs + 1, self.began or event
                self.failure, self.was_requeued = None, False
                yield News(START, self.runs - 1, moment)
            case log.FAILURE:
                self.failure = attempt, why
            case log.ATTEMPT if self.failure:
                yield self._failed(event, "RESTARTED")
            case log.REQUEUE:
                self.failure = self.failure or (attempt, why)
                self.was_requeued = True
                yield self._failed(event, "REQUEUED")
            case log.END:
                yield from self._ended(event, why)

    def _failed(self, event: Mapping[str, Any], state: str) -> News:
        assert self.failure
        (attempt, why), self.failure = self.failure, None
        return News(FAILURE, attempt, event["time"], state, why, elapsed(self.began, event))

    def _ended(self, event: Mapping[str, Any], why: str) -> Iterator[News]:
        state = event.get("state")
        # Without a state, the scheduler is ending the job; after a requeue, it starts again.
        if state in FINAL or (state is None and not self.was_requeued):
            known = str(state) if state in FINAL else STOPPING
            number = max(0, self.runs - 1)
            yield News(END, number, event["time"], known, why, elapsed(self.began, event))


def elapsed(first: Mapping[str, Any], last: Mapping[str, Any]) -> float | None:
    """The seconds between two events; by the steady clock, if both have that of one machine."""

    def between(name: str) -> float | None:
        begin, end = first.get(name), last.get(name)
        return end - begin if is_time(begin) and is_time(end) else None

    steady = between("clock") if first.get("host") == last.get("host") else None
    # It starts again with the machine.
    if steady is not None and steady >= 0:
        return steady
    passed = between("time")
    return None if passed is None else max(0.0, passed)


def ended_as(found: list[News], state: str, reason: str, now: float) -> News:
    """The end of a job whose engine recorded none, as whoever watches it knows it."""
    starts = [news for news in found if news.event == START]
    seconds = max(0.0, now - starts[0].time) if starts else None
    why = one_line(reason, LONGEST_REASON)
    return News(END, max(0, len(starts) - 1), now, one_line(state, 20), why, seconds)


def message_about(news: News, job: JobFacts, host: str = "") -> Message:
    """Put news into words."""
    title = f"gptctl: {job.job} {_what(news, job)}"
    after = f" after {duration(news.seconds)}" if news.event == END and news.seconds else ""
    name = f"{job.job}.{news.name}"
    has_progress = news.event != START and job.step is not None
    lines = [
        f"{title}{after}",
        f"reason: {news.reason}" if news.reason else "",
        _place(job) if news.event == START else "",
        _progress(news, job) if has_progress else "",
        *(f"next: {command}" for command in _next_commands(news, job)),
        f"id: {name}",
    ]
    facts = {
        "event": news.event,
        "job": job.job,
        "state": news.state or None,
        "reason": news.reason or None,
        "number": news.number,
        "step": job.step if has_progress else None,
        "total_steps": job.total,
        "loss": job.loss if has_progress else None,
        "seconds": news.seconds,
        "time": news.time,
        "cluster": job.cluster,
        "host": host,
    }
    text = "\n".join(filter(None, lines))
    return Message(name, title, cut(text, LONGEST_TEXT), facts)


def trial_message(host: str, moment: float) -> Message:
    title = "gptctl: this is a test"
    name = f"test.{int(moment)}"
    text = f"{title}\nsent from {host}\nid: {name}"
    return Message(name, title, text, {"event": "test", "time": moment, "host": host})


def _what(news: News, job: JobFacts) -> str:
    match news.event, news.state:
        case ("start", _):
            return "has started" if not news.number else "has started again"
        case ("first_step", _) if job.is_trainer and news.number:
            return f"trains again (attempt {news.number})"
        case ("first_step", _):
            return "has completed its first step" if job.is_trainer else "runs: its ranks are up"
        case ("failure", "REQUEUED"):
            return f"is requeued after attempt {news.number}"
        case ("failure", _):
            return f"failed in attempt {news.number}, and starts again"
        case (_, "STOPPING"):
            return "is being stopped by the scheduler"
    return news.state


def _place(job: JobFacts) -> str:
    nodes = f"{job.nodes} node{'s' if job.nodes != 1 else ''} × {job.per_node}"
    return f"on cluster {job.cluster}: {nodes}" if job.cluster else nodes


def _progress(news: News, job: JobFacts) -> str:
    total = f" of {job.total:,}" if job.total else ""
    loss = f", loss {job.loss:.4f}" if job.loss is not None else ""
    saved = ""
    # Where a restart or `gptctl resume` continues.
    if job.checkpoint is not None and news.event in (FAILURE, END) and news.state != COMPLETED:
        saved = f"; newest checkpoint: step {job.checkpoint:,}"
    return f"step {job.step:,}{total}{loss}{saved}"


def _next_commands(news: News, job: JobFacts) -> list[str]:
    if news.event in (START, FIRST_STEP):
        return [f"gptctl logs {job.job} --follow"]
    if news.event == FAILURE:
        return [f"gptctl logs {job.job} --failed"]
    resume = [f"gptctl resume {job.job}"] if job.checkpoint is not None else []
    if news.state == COMPLETED:
        return [f"gptctl logs {job.job} --metrics" if job.is_trainer else f"gptctl logs {job.job}"]
    if news.state == FAILED:
        return [f"gptctl logs {job.job} --failed", *resume]
    return [f"gptctl status {job.job}", *resume]


def duration(seconds: float) -> str:
    """`12 s`, `3 min 20 s`, `2 h 03 min` or `1 d 4 h`."""
    minutes, second = divmod(int(seconds), 60)
    hours, minute = divmod(minutes, 60)
    if hours >= 24:
        return f"{hours // 24:,} d {hours % 24} h"
    if hours:
        return f"{hours} h {minute:02} min"
    return f"{minute} min {second:02} s" if minute else f"{second} s"


def cut(text: str, longest: int) -> str:
    """Cut a text to so many bytes, at the end of a character."""
    data = text.encode("utf-8", "replace")
    return text if len(data) <= longest else f"{data[: longest - 3].decode('utf-8', 'ignore')}…"
