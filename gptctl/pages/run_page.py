"""The page of `gptctl report`: one file, complete in itself, which asks nobody for anything.

A policy in the page forbids every request, and every style and script but its own two, which it
names by their digests. So text that got through as markup could still neither run nor load.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from gptctl import __version__
from gptctl.engine.file_reading import is_time
from gptctl.jobs.attempt_failures import FailureText
from gptctl.jobs.cost_text import SHORT_NAMES, hours_text, share_text
from gptctl.jobs.ledger import ACCOUNTS, COMPUTE, Ledger
from gptctl.jobs.progress_text import list_cells, state_text
from gptctl.jobs.run_report import RunReport
from gptctl.jobs.timeline import Event
from gptctl.pages.config_tables import differences, everything
from gptctl.pages.curves import COLOURS, charts
from gptctl.pages.markup import Markup, element, joined
from gptctl.pages.page_parts import cut, folded, pairs, section, table
from gptctl.pages.rank_section import colour_scale, rank_section
from gptctl.pages.time_strip import time_strip
from gptctl.text import clock_time, count, duration, plain_value, some_of

GENERATOR = "gptctl report"
MOST_EVENTS = 500  # of a run, the newest ones
# Facts of events that every one of them has.
COMMON = ("event", "time", "clock", "attempt", "host", "job")
LONGEST_FACT = 200  # characters


class Assets(NamedTuple):
    style: str
    script: str


def page(runs: Sequence[RunReport], assets: Assets, now: float) -> str:
    title = " · ".join(run.job for run in runs)
    body = element(
        "body",
        None,
        _header(runs, now),
        element(
            "main",
            None,
            element("div", {"class": "cards"}, *(_card(*each) for each in enumerate(runs))),
            section("Curves", charts([run.rows for run in runs])),
            section("Time", *(_time(*each, len(runs)) for each in enumerate(runs))),
            section("Ranks", *_ranks(runs)),
            section("Failures", *_each(runs, _failures)),
            section("Events", *_each(runs, _events)),
            section("Config", differences(runs), *_each(runs, everything)),
        ),
        element("script", None, Markup(assets.script)),
    )
    head = element(
        "head",
        None,
        element("meta", {"charset": "utf-8"}),
        Markup(generator_tag()),
        element("meta", {"http-equiv": "Content-Security-Policy", "content": _policy(assets)}),
        element("meta", {"name": "viewport", "content": "width=device-width, initial-scale=1"}),
        element("meta", {"name": "color-scheme", "content": "light dark"}),
        element("title", None, title),
        element("style", None, Markup(assets.style)),
    )
    return f"<!DOCTYPE html>\n{element('html', {'lang': 'en'}, head, body).html}\n"


def generator_tag() -> str:
    """Says at the start of a file that it is such a page, and may be written over."""
    return element("meta", {"name": "generator", "content": GENERATOR}).html


def _policy(assets: Assets) -> str:
    style, script = (f"'sha256-{_digest(text)}'" for text in assets)
    return (
        f"default-src 'none'; style-src {style}; script-src {script}; img-src data:; "
        "base-uri 'none'; form-action 'none'"
    )


def _digest(text: str) -> str:
    return base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def _each(
    runs: Sequence[RunReport], make: Callable[[RunReport], Markup | None]
) -> Iterator[Markup]:
    """A part of each run, under its name if there are several."""
    for number, run in enumerate(runs):
        made = make(run)
        if made and made.html:
            yield joined(_name(number, run) if len(runs) > 1 else None, made)


def _ranks(runs: Sequence[RunReport]) -> Iterator[Markup]:
    maps = list(_each(runs, lambda run: rank_section(run.ranks)))
    yield from maps
    if maps:
        yield colour_scale()


def _name(number: int, run: RunReport) -> Markup:
    return element("h3", None, _chip(number), run.job)


def _chip(number: int) -> Markup:
    return element("span", {"class": f"chip run-{number % COLOURS}"})


def _header(runs: Sequence[RunReport], now: float) -> Markup:
    """The title, and the controls that the script needs: without it they stay hidden."""
    made = f"{GENERATOR} {__version__}, {clock_time(now)}"
    chips = [
        element("label", None, _box(number), _chip(number), run.job)
        for number, run in enumerate(runs)
    ]
    controls = element(
        "div",
        {"id": "controls", "hidden": True},
        element("span", {"id": "choose"}, *chips) if len(runs) > 1 else None,
        element("label", None, "x ", _choice("axis", ("step", "tokens", "time"))),
        element("label", None, "smooth ", _slider()),
        element("label", None, element("input", {"id": "log", "type": "checkbox"}), "log y"),
        element("button", {"id": "reset", "disabled": True}, "all steps"),
        element("button", {"id": "theme"}, "dark / light"),
    )
    name = runs[0].job if len(runs) == 1 else count(len(runs), "run")
    heading = element("div", None, element("h1", None, name), element("small", None, made))
    return element("header", None, heading, controls)


def _box(number: int) -> Markup:
    return element("input", {"type": "checkbox", "checked": True, "data-run": number})


def _choice(name: str, options: Sequence[str]) -> Markup:
    return element("select", {"id": name}, *(element("option", None, each) for each in options))


def _slider() -> Markup:
    return element(
        "input", {"id": "smooth", "type": "range", "min": 0, "max": 99, "value": 0, "step": 1}
    )


def _card(number: int, run: RunReport) -> Markup:
    """What one wants to know first: the state, how far it is, what it cost."""
    status = run.status
    badge = None
    if status:
        state = str(status["state"]).lower()
        badge = element("span", {"class": f"state {state}"}, state_text(dict(status)))
    return element(
        "article",
        None,
        element("h2", None, _chip(number), run.job, badge),
        element("dl", {"class": "tiles"}, *(_tile(*each) for each in _tiles(run))),
        pairs(_facts(run)) if status else None,
        *(element("p", {"class": "note"}, note) for note in run.notes),
    )


def _tile(name: str, text: str) -> Markup | None:
    inner = (element("dt", None, name), element("dd", None, text))
    return element("div", None, *inner) if text else None


def _tiles(run: RunReport) -> Iterator[tuple[str, str]]:
    if run.status:
        cells = list_cells(dict(run.status))
        yield "step", cells["step"]
        yield "done", "" if cells["done"] == "100%" else cells["done"]
    yield from _losses(run)
    if run.status:
        yield "tokens/s", cells["tokens/s"]
        # Of a run of several jobs, the time of all of them.
        yield "time", _total_time(run) or cells["time"]
        yield "left", cells["left"]
    allocation = sum(job.ledger.allocation for job in run.jobs)
    if allocation > 0:
        ledgers = [job.ledger for job in run.jobs]
        yield "GPU time", hours_text(allocation)
        known = [each for each in ledgers if each.goodput is not None]
        useful = sum(each.gpu_seconds[COMPUTE] for each in known)
        of = sum(each.allocation for each in known)
        yield "goodput", f"{useful / of:.0%}" if of > 0 else ""
        repeated = sum(each.repeated_steps for ledger in ledgers for each in ledger.attempts)
        yield "steps repeated", f"{repeated:,}" if repeated else ""


def _total_time(run: RunReport) -> str:
    spans = [each.ended - each.began for job in run.jobs for each in job.ledger.attempts]
    return duration(sum(spans)) if len(run.lineage) > 1 and spans else ""


def _losses(run: RunReport) -> Iterator[tuple[str, str]]:
    for name in ("loss", "valid_loss", "test_loss"):
        values = [row[name] for row in run.rows if row.get(name) is not None]
        yield name.replace("_", " "), f"{values[-1]:.4f}" if values else ""


def _facts(run: RunReport) -> Iterator[tuple[str, str]]:
    status = run.status or {}
    yield "reason", str(status["reason"] or "")
    yield "note", str(status.get("note") or "")
    yield "tags", " ".join(f"{k}={v}" if v else k for k, v in status.get("tags", {}).items())
    yield "submitted", clock_time(status["created"])
    ended = status.get("ended")
    yield "ended", clock_time(ended) if is_time(ended) and ended else ""
    gpus = f"{status['nodes']} × {status['gpus_per_node']} on {status['cluster']}"
    yield "GPUs", f"{status['world_size']}: {gpus}"
    yield "hosts", some_of(list(map(str, status.get("hosts") or ())), 8)
    yield "continues", " → ".join(run.lineage) if len(run.lineage) > 1 else ""
    yield "folder", str(status["run_dir"])


def _time(number: int, run: RunReport, several: int) -> Markup | None:
    """The attempts over time, and what they cost, as `gptctl cost` has it."""
    strip = time_strip(run.jobs)
    if strip is None:
        return None
    began = min(each.began for job in run.jobs for each in job.ledger.attempts)
    ended = max(each.ended for job in run.jobs for each in job.ledger.attempts)
    return joined(
        _name(number, run) if several > 1 else None,
        strip,
        element("div", {"class": "x-axis"}, *(_moment(each) for each in (began, ended))),
        _accounts_legend(run),
        _costs(run),
    )


def _moment(moment: float) -> Markup:
    return element("span", None, clock_time(moment))


def _used(run: RunReport) -> list[str]:
    found = [each.seconds for job in run.jobs for each in job.ledger.attempts]
    return [name for name in ACCOUNTS if any(each[name] > 0 for each in found)]


def _short(account: str) -> str:
    return SHORT_NAMES.get(account, account)


def _accounts_legend(run: RunReport) -> Markup:
    names = [
        element("span", None, element("span", {"class": f"chip account-{name}"}), _short(name))
        for name in _used(run)
    ]
    return element("p", {"class": "legend"}, *names)


def _costs(run: RunReport) -> Markup:
    accounts = _used(run)
    heads = ["attempt", "GPU time", "goodput", *map(_short, accounts), "cause"]
    rows = [row for job in run.jobs for row in _cost_rows(job.ledger, accounts, run)]
    return table(heads, rows, "costs")


def _cost_rows(ledger: Ledger, accounts: Sequence[str], run: RunReport) -> Iterator[list[str]]:
    job = f"{ledger.job} " if len(run.lineage) > 1 else ""
    for each in ledger.attempts:
        seconds, allocation = each.gpu_seconds, each.allocation
        yield [
            f"{job}{each.attempt}",
            hours_text(allocation),
            "" if each.goodput is None else f"{each.goodput:.0%}",
            *(share_text(seconds[name], allocation) for name in accounts),
            cut(each.cause),
        ]
    if ledger.queued >= 1:
        waited = f"{hours_text(ledger.queued)} in the queue: not billed"
        yield [f"{job}queued", "", "", *("" for _ in accounts), waited]


def _failures(run: RunReport) -> Markup:
    return joined(*(_failure(each, run) for each in run.failures))


def _failure(found: FailureText, run: RunReport) -> Markup:
    job = f"{found.job}: " if len(run.lineage) > 1 else ""
    last = [
        joined(
            element("p", {"class": "note"}, f"The last lines of {name}:"),
            element("pre", None, "\n".join(lines)),
        )
        for name, lines in found.last.items()
        if lines
    ]
    return element(
        "article",
        {"class": "failure"},
        element("h4", None, f"{job}{found.what}"),
        pairs([("likely cause", ". ".join(filter(None, [found.title, found.why])))]),
        pairs([("fix", found.fix)]),
        *last,
    )


def _events(run: RunReport) -> Markup | None:
    events = [
        (event, job.ledger.job) for job in run.jobs if job.timeline for event in job.timeline.events
    ]
    if not events:
        return None
    shown, is_long = events[-MOST_EVENTS:], len(run.lineage) > 1
    heads = ["time", *(["job"] if is_long else []), "attempt", "event", ""]
    rows = [_event_row(event, job if is_long else None) for event, job in shown]
    more = len(events) - len(shown)
    title = count(len(events), "event") + (f", the last {len(shown):,}" if more else "")
    return folded(title, table(heads, rows, "events"))


def _event_row(event: Event, job: str | None) -> list[str]:
    facts = ", ".join(
        f"{name} {plain_value(value)}"
        for name, value in event.facts.items()
        if name not in COMMON and value is not None and not isinstance(value, dict | list)
    )
    attempt = str(event.attempt) if event.attempt >= 0 else ""
    where = [] if job is None else [job]
    return [clock_time(event.time), *where, attempt, event.name, facts[:LONGEST_FACT]]
