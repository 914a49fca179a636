"""The attempts of a run on one line of time, coloured by what its GPUs did."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from typing import NamedTuple

from gptctl.engine.events import FAILURE
from gptctl.jobs.costs import JobTimes
from gptctl.jobs.ledger import ACCOUNTS, AttemptCosts
from gptctl.pages.markup import Markup, element
from gptctl.text import duration
from trainer.event_names import COMMITTED, EVALUATION, FIRST_STEP, STOP

WIDTH, HEIGHT, MARKS = 1000, 40, 12  # units of the picture, which the page stretches
WIDEST_GAP = 0.04  # of the line: a night in the queue must not hide the hour after it
ALMOST_ALL = 0.995  # of a column: the rest would be a line that nobody sees
# Events that are marked below the line, with the class of their mark; all others have the table.
MARKED = {
    FAILURE: "failure",
    COMMITTED: "checkpoint",
    EVALUATION: "evaluation",
    FIRST_STEP: "start",
    STOP: "stop",
}
SHORTEST = 1e-3  # seconds of an attempt that is drawn
MOST_MARKS = 300  # of one kind


class Stretch(NamedTuple):
    """A part of the line: an attempt, or the time between two."""

    began: float
    ended: float
    left: float
    right: float
    costs: AttemptCosts | None = None
    job: str = ""

    def x(self, moment: float) -> float:
        length = self.ended - self.began
        part = (moment - self.began) / length if length > 0 else 0.0
        return self.left + (self.right - self.left) * min(1.0, max(0.0, part))


def time_strip(jobs: Sequence[JobTimes]) -> Markup | None:
    line = stretches(jobs)
    if not line:
        return None
    attempts = [each for each in line if each.costs]
    areas: dict[str, list[str]] = {name: [] for name in ACCOUNTS}
    for each in attempts:
        for name, area in _areas(each):
            areas[name].append(area)
    return element(
        "svg",
        {
            "class": "strip",
            "viewBox": f"0 0 {WIDTH} {HEIGHT + MARKS}",
            "preserveAspectRatio": "none",
            "role": "img",
            "aria-label": "what the GPUs did over time",
        },
        *(
            element("path", {"class": f"account-{name}", "d": "".join(found)})
            for name, found in areas.items()
            if found
        ),
        *(_attempt_frame(each) for each in attempts),
        *(_gap(each) for each in line if not each.costs),
        *_marks(jobs, line),
    )


def stretches(jobs: Sequence[JobTimes]) -> list[Stretch]:
    """Lay out attempts by their length, with gaps that are cut short if they are long."""
    attempts = [
        (each, job.ledger.job)
        for job in jobs
        for each in job.ledger.attempts
        if each.ended - each.began > SHORTEST
    ]
    total = sum(each.ended - each.began for each, _ in attempts)
    found: list[tuple[float, float, float, AttemptCosts | None, str]] = []
    for number, (each, job) in enumerate(attempts):
        waited = each.began - attempts[number - 1][0].ended if number else 0.0
        if waited > 0:
            shown = min(waited, WIDEST_GAP * total)
            found.append((each.began - waited, each.began, shown, None, ""))
        found.append((each.began, each.ended, each.ended - each.began, each, job))
    scale, left, line = WIDTH / (sum(each[2] for each in found) or 1.0), 0.0, []
    for began, ended, length, costs, job in found:
        line.append(Stretch(began, ended, left, left + length * scale, costs, job))
        left += length * scale
    return line


def _areas(stretch: Stretch) -> Iterator[tuple[str, str]]:
    """The areas of an attempt by account, as pieces of SVG paths."""
    shares = list(_columns(stretch))
    at, width = stretch.left, (stretch.right - stretch.left) / len(shares)
    for column, group in groupby(shares):
        length = width * len(list(group))
        top = 0.0
        for name, share in column:
            high = share * HEIGHT
            yield name, f"M{at:.1f} {top:.1f}h{length:.1f}v{high:.1f}h{-length:.1f}z"
            top += high
        at += length


def _columns(stretch: Stretch) -> Iterator[tuple[tuple[str, float], ...]]:
    """The accounts of each column, with their shares of it."""
    assert stretch.costs
    number = max(1, round(stretch.right - stretch.left))
    width = (stretch.ended - stretch.began) / number
    sums: list[dict[str, float]] = [{} for _ in range(number)]
    for segment in stretch.costs.segments:
        length = segment.ended - segment.began
        first = max(0, int((segment.began - stretch.began) / width))
        last = min(number - 1, int((segment.ended - stretch.began) / width))
        for index in range(first, last + 1 if length > 0 else first):
            start = stretch.began + index * width
            part = min(segment.ended, start + width) - max(segment.began, start)
            for name, seconds in segment.seconds.items():
                share = seconds * max(0.0, part) / length / width
                sums[index][name] = sums[index].get(name, 0.0) + share
    yield from map(_column, sums)


def _column(shares: Mapping[str, float]) -> tuple[tuple[str, float], ...]:
    """Shares that fill a column, rounded: equal neighbours become one area."""
    total = sum(shares.values())
    if total <= 0:
        return ()
    largest = max(shares, key=shares.__getitem__)
    if shares[largest] > ALMOST_ALL * total:
        return ((largest, 1.0),)
    edges, above = [], 0.0
    for name in ACCOUNTS:
        if shares.get(name, 0.0) > 0:
            top = round(above / total, 2)
            above += shares[name]
            edges.append((name, round(round(above / total, 2) - top, 2)))
    return tuple(edges)


def _attempt_frame(stretch: Stretch) -> Markup:
    """Says on hover which attempt this is; its edge shows where the next one begins."""
    costs = stretch.costs
    assert costs
    ended = f"; ended: {costs.cause}" if costs.cause else ""
    text = f"{stretch.job} attempt {costs.attempt}: {duration(costs.ended - costs.began)}{ended}"
    area = {
        "class": "attempt",
        "x": f"{stretch.left:.1f}",
        "y": "0",
        "width": f"{max(0.1, stretch.right - stretch.left):.1f}",
        "height": str(HEIGHT),
    }
    return element("rect", area, element("title", None, text))


def _gap(stretch: Stretch) -> Markup:
    text = f"without nodes: {duration(stretch.ended - stretch.began)}"
    d = f"M{stretch.left:.1f} {HEIGHT / 2}H{stretch.right:.1f}"
    return element("path", {"class": "gap", "d": d}, element("title", None, text))


def _marks(jobs: Sequence[JobTimes], line: Sequence[Stretch]) -> Iterator[Markup]:
    for name, kind in MARKED.items():
        moments = [
            event.time
            for job in jobs
            if job.timeline
            for event in job.timeline.events
            if event.name == name
        ]
        places = sorted({f"{x:.1f}" for x in _places(moments[-MOST_MARKS:], line)})
        if places:
            d = "".join(f"M{x} {HEIGHT + 2}V{HEIGHT + MARKS}" for x in places)
            yield element("path", {"class": f"mark {kind}", "d": d}, element("title", None, name))


def _places(moments: Iterable[float], line: Sequence[Stretch]) -> Iterator[float]:
    for moment in moments:
        inside = (each for each in line if each.began <= moment <= each.ended)
        if stretch := next(inside, None):
            yield stretch.x(moment)
