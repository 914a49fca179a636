"""What `gptctl top` shows: a snapshot and the size of a window in, lines out. Pure."""

from __future__ import annotations

from gptctl.cli.top_job_view import job_lines
from gptctl.cli.top_jobs_view import jobs_lines, totals
from gptctl.cli.top_keys import HELP, Looking, settled, visible
from gptctl.cli.top_lines import Styled, StyledLine, cells, line_of, page
from gptctl.jobs.top_snapshot import TopSnapshot
from gptctl.text import clock_time

LEAST_HEIGHT = 3
KEYS = "up/down choose  Enter open  / filter  f pause  c cancel  ? help  q quit"
NO_KEYS = "Ctrl-C ends; for keys: pip install 'gptctl[ui]'"
JOB_KEYS = "Esc back  left/right rank  up/down scroll  f pause  c cancel  ? help  q quit"


def top_lines(
    snapshot: TopSnapshot | None, look: Looking, width: int, height: int
) -> list[StyledLine]:
    """The screen: exactly `height` lines, each `width` columns wide."""
    if snapshot is None:
        return page([line_of("asking for the states of jobs …")], width, height)
    body_height = max(1, height - 2)
    body = page(body_lines(snapshot, look, width, body_height), width, body_height)
    return page([title(snapshot, look, width), *body, footer(snapshot, look)], width, height)


def body_lines(snapshot: TopSnapshot, look: Looking, width: int, height: int) -> list[StyledLine]:
    if look.shows_help:
        names = max(len(keys) for keys, _ in HELP)
        return [line_of(Styled(f"  {keys:<{names}}  ", "title"), text) for keys, text in HELP]
    if look.opened is None:
        look = settled(look, snapshot)
        jobs = visible(snapshot, look.filter)
        if not jobs and snapshot.jobs:
            return [line_of(Styled("no job contains this text", "dim"))]
        return jobs_lines(jobs, look.selected, width, height)
    if snapshot.detail is None or snapshot.detail.summary.job != look.opened:
        return [line_of(Styled(f"{look.opened}: {_missing(snapshot)}", "dim"))]
    return job_lines(snapshot.detail, look.scroll, width, height)


def _missing(snapshot: TopSnapshot) -> str:
    return "not submitted yet" if snapshot.is_past and not snapshot.jobs else "reading …"


def title(snapshot: TopSnapshot, look: Looking, width: int) -> StyledLine:
    day, clock = clock_time(snapshot.time).split()
    when = f"as at {day} {clock}" if snapshot.is_past else clock
    when = when if look.follows or snapshot.is_past else f"paused at {clock}, f follows"
    # A narrow window has the name of the verb on its own command line.
    about = totals(visible(snapshot, look.filter)) if look.opened is None else look.opened
    left = line_of(Styled("gptctl top", "title"), "  ", Styled(about, "title" * bool(look.opened)))
    space = width - sum(cells(part.text) for part in left) - cells(when)
    return (*left, Styled(" " * max(2, space)), Styled(when, "" if look.follows else "warn"))


def footer(snapshot: TopSnapshot, look: Looking) -> StyledLine:
    if look.asks_about:
        question = f"stop {look.asks_about}? The trainer saves first.  y: stop it  n: keep it"
        return (Styled(question, "warn"),)
    if look.is_typing:
        return line_of(Styled(f"/{look.filter}", "title"), Styled("▏  Enter keeps  Esc clears"))
    if snapshot.notes:
        return (Styled(snapshot.notes[-1], "warn"),)
    if not look.has_keys:
        return (Styled(NO_KEYS, "dim"),)
    keys = JOB_KEYS if look.opened else KEYS
    keys = keys.removeprefix("Esc back  ") if look.is_single else keys
    keys = keys.replace("c cancel  ", "") if snapshot.is_past else keys
    kept = f"filter: {look.filter}  " if look.filter and not look.opened else ""
    return line_of(Styled(kept, "notice"), Styled(keys, "dim"))
