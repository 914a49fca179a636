"""What `gptctl top` shows: a snapshot and the size of a window in, lines out. Pure."""

from __future__ import annotations

from gptctl.cli.styled_lines import Styled, StyledLine, cells, line_of, page
from gptctl.cli.top_job_view import job_lines
from gptctl.cli.top_jobs_view import jobs_lines, totals
from gptctl.cli.top_keys import HELP, ViewState, visible, with_valid_selection
from gptctl.jobs.top_snapshot import TopSnapshot
from gptctl.text import clock_time

LEAST_HEIGHT = 3
KEYS = "up/down choose  Enter open  / filter  f pause  c cancel  ? help  q quit"
NO_KEYS = "Ctrl-C ends; for keys: pip install 'gptctl[ui]'"
JOB_KEYS = "Esc back  left/right rank  up/down scroll  f pause  c cancel  ? help  q quit"


def top_lines(
    snapshot: TopSnapshot | None, view: ViewState, width: int, height: int
) -> list[StyledLine]:
    """The screen: exactly `height` lines, each `width` columns wide."""
    if snapshot is None:
        return page([line_of("asking for the states of jobs …")], width, height)
    body_height = max(1, height - 2)
    body = page(body_lines(snapshot, view, width, body_height), width, body_height)
    return page([title(snapshot, view, width), *body, footer(snapshot, view)], width, height)


def body_lines(snapshot: TopSnapshot, view: ViewState, width: int, height: int) -> list[StyledLine]:
    if view.shows_help:
        names = max(len(keys) for keys, _ in HELP)
        return [line_of(Styled(f"  {keys:<{names}}  ", "title"), text) for keys, text in HELP]
    if view.opened is None:
        view = with_valid_selection(view, snapshot)
        jobs = visible(snapshot, view.filter)
        if not jobs and snapshot.jobs:
            return [line_of(Styled("no job contains this text", "dim"))]
        return jobs_lines(jobs, view.selected, width, height)
    if snapshot.detail is None or snapshot.detail.summary.job != view.opened:
        return [line_of(Styled(f"{view.opened}: {_missing(snapshot)}", "dim"))]
    return job_lines(snapshot.detail, view.scroll, width, height)


def _missing(snapshot: TopSnapshot) -> str:
    return "not submitted yet" if snapshot.is_past and not snapshot.jobs else "reading …"


def title(snapshot: TopSnapshot, view: ViewState, width: int) -> StyledLine:
    day, clock = clock_time(snapshot.time).split()
    when = f"as at {day} {clock}" if snapshot.is_past else clock
    when = when if view.follows or snapshot.is_past else f"paused at {clock}, f follows"
    # A narrow window has the name of the verb on its own command line.
    about = totals(visible(snapshot, view.filter)) if view.opened is None else view.opened
    left = line_of(Styled("gptctl top", "title"), "  ", Styled(about, "title" * bool(view.opened)))
    space = width - sum(cells(part.text) for part in left) - cells(when)
    return (*left, Styled(" " * max(2, space)), Styled(when, "" if view.follows else "warn"))


def footer(snapshot: TopSnapshot, view: ViewState) -> StyledLine:
    if view.confirming:
        question = f"stop {view.confirming}? The trainer saves first.  y: stop it  n: keep it"
        return (Styled(question, "warn"),)
    if view.is_typing:
        return line_of(Styled(f"/{view.filter}", "title"), Styled("▏  Enter keeps  Esc clears"))
    if snapshot.notes:
        return (Styled(snapshot.notes[-1], "warn"),)
    if not view.has_keys:
        return (Styled(NO_KEYS, "dim"),)
    keys = JOB_KEYS if view.opened else KEYS
    keys = keys.removeprefix("Esc back  ") if view.is_single else keys
    keys = keys.replace("c cancel  ", "") if snapshot.is_past else keys
    kept = f"filter: {view.filter}  " if view.filter and not view.opened else ""
    return line_of(Styled(kept, "notice"), Styled(keys, "dim"))
