"""Runs for tests of reports, without anything that ran; every text in them can be chosen."""

from __future__ import annotations

import math
from html.parser import HTMLParser
from typing import Any

from gptctl.jobs.attempt_failures import FailureText
from gptctl.jobs.costs import JobTimes
from gptctl.jobs.ledger import AttemptCosts, Ledger, Segment
from gptctl.jobs.rank_map import rank_map
from gptctl.jobs.rank_times import RankTimes
from gptctl.jobs.run_facts import SECTIONS, Facts, Value
from gptctl.jobs.run_report import RunReport
from gptctl.jobs.timeline import Allocation, Event, Timeline
from gptctl.pages.run_page import Assets
from gptctl.spec.resources import folder

METRICS = "loss lr grad_norm ips_total step_time compute_time wait_time reader_time memory mfu".split()


def assets() -> Assets:
    where = folder("templates") / "report"
    return Assets((where / "report.css").read_text(), (where / "report.js").read_text())


def rows_of(steps: int, job: str = "job", spike: int = 0) -> list[dict[str, Any]]:
    return [
        {
            "job": job, "attempt": 0, "step": step, "tokens": 4096 * step, "time": 1e9 + 2.0 * step,
            **{name: (100.0 if step == spike else 1.0 + number + math.sin(step * (number + 1))) for number, name in enumerate(METRICS)},
            **({"valid_loss": 3.0 + 1 / step} if step % 100 == 0 else {}),
        }
        for step in range(1, steps + 1)
    ]  # fmt: skip


def ledger_of_parts(job: str, parts: list[tuple[str, float]], cause: str = "") -> Ledger:
    """One attempt of 4 GPUs that did these things, for so many seconds, one after the other."""
    at, segments = 1000.0, []
    for account, seconds in parts:
        segments.append(Segment(at, at + seconds, {account: seconds}))
        at += seconds
    return Ledger(job, 30.0, [AttemptCosts(0, 1000.0, at, 4, cause, 7, segments)])


def run_report(text: str = "job", steps: int = 50, ranks: int = 4, events: int = 3, world: int = 4) -> RunReport:
    """A run in which every text that somebody else may have written is `text`."""
    parts = [("starting", 10.0), ("compute", 60.0), ("checkpoint", 2.0), ("compute", 20.0), ("idle", 8.0)]
    times = [
        RankTimes(0, step, 1e9 + step, [100.0 + (step * rank) % 7 for rank in range(ranks)])
        for step in range(1, steps + 1)
    ]
    happened = [
        Event("failure" if n % 2 else text, 1000.0 + n % 100, 0, {text: text, "reason": text}) for n in range(events)
    ]
    timeline = Timeline(text, 970.0, happened, [Allocation(1000.0, 1100.0, 4, 0)], [], {})
    facts: Facts = {
        name: {text: {text: Value(text, text, text), "seed": Value(1, "config.yaml:3", "1")}} for name in SECTIONS
    }
    status = {
        "state": text, "reason": text, "last_state": None, "age": None, "note": text, "tags": {text: text}, "created": 970.0,
        "ended": 1100.0, "nodes": 1, "gpus_per_node": world, "world_size": world, "cluster": text, "hosts": [text, text],
        "run_dir": text, "duration": 100.0,
        "progress": {"step": steps, "total": steps, "percent": 100, "loss": 1.0, "tokens_per_second": 5.0, "seconds_left": None},
    }  # fmt: skip
    failure = FailureText(text, 0, text, text, text, text, {text: [text, text]})
    ledger = ledger_of_parts(text, parts, cause=text)
    return RunReport(
        text,
        status,
        (text, text),
        rows_of(steps, text),
        [JobTimes(timeline, ledger)],
        rank_map(times),
        [failure],
        facts,
        [text],
    )


class Elements(HTMLParser):
    """What a browser would make of a page: elements with their attributes, and the texts between them."""

    def __init__(self, html: str) -> None:
        super().__init__(convert_charrefs=True)
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[str] = []
        self.others: list[str] = []
        self.feed(html)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.texts.append(data)

    def handle_comment(self, data: str) -> None:
        self.others.append(data)

    def handle_pi(self, data: str) -> None:
        self.others.append(data)

    def unknown_decl(self, data: str) -> None:
        self.others.append(data)

    def of(self, tag: str, kind: str = "") -> list[dict[str, str | None]]:
        return [
            each for name, each in self.found if name == tag and (not kind or kind in str(each.get("class")).split())
        ]
