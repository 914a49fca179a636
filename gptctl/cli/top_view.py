"""What `gptctl top` shows: a snapshot and the size of a window in, lines out. Pure."""

from __future__ import annotations

from gptctl.cli.styled_lines import Styled, StyledLine, cells, line_of, page
from gptctl.cli.top_job_view import job_lines, most_scroll
from gptctl.cli.top_jobs_view import jobs_lines, totals
from gptctl.cli.top_keys import HELP, ViewState, can_cancel, visible, with_valid_selection
from gptctl.jobs.top_snapshot import TopSnapshot
from gptctl.text import clock_time

LEAST_HEIGHT = 3
KEYS = "up/down choose  Enter open  / filter  f pause  c cancel  ? help  q quit"
NO_KEYS = "Ctrl-C quits; for keys: pip install 'gptctl[ui]'"
JOB_KEYS = "Esc back  left/right rank  up/down scroll  f pause  c cancel  ? help  q quit"


def top_lines(
    snapshot: TopSnapshot | None, view: ViewState, width: int, height: int
) -> list[StyledLine]:
    """The screen: exactly `height` lines, each `width` columns wide."""
    if snapshot is None:
        return page([line_of("asking for the states of jobs …")], width, height)
    body_height = _body_height(height)
    body = page(body_lines(snapshot, view, width, body_height), width, body_height)
    return page([title(snapshot, view, width), *body, footer(snapshot, view, width)], width, height)


def with_valid_scroll(view: ViewState, snapshot: TopSnapshot, width: int, height: int) -> ViewState:
    """With a log that is scrolled no further than it has lines above the window."""
    if not view.scroll or snapshot.detail is None:
        return view
    most = most_scroll(snapshot.detail, width, _body_height(height))
    if view.scroll <= most:
        return view
    # Where there is nothing to scroll, nothing is paused.
    return view._replace(scroll=most, follows=most == 0)


def _body_height(height: int) -> int:
    return max(1, height - 2)


def body_lines(snapshot: TopSnapshot, view: ViewState, width: int, height: int) -> list[StyledLine]:
    if view.shows_help:
        names = max(len(keys) for keys, _ in HELP)
        return [line_of(Styled(f"  {keys:<{names}}  ", "title"), text) for keys, text in HELP]
    if view.opened is None:
        view = with_valid_selection(view, snapshot)
        jobs = visible(snapshot, view.filter)
        if not jobs and snapshot.jobs:
            return [line_of(Styled("no job matches the filter", "dim"))]
        return jobs_lines(jobs, view.selected, width, height)
    if snapshot.detail is None or snapshot.detail.summary.job != view.opened:
        return [line_of(Styled(f"{view.opened}: {_missing(snapshot)}", "dim"))]
    return job_lines(snapshot.detail, view.scroll, width, height)


def _missing(snapshot: TopSnapshot) -> str:
    return "not submitted yet" if snapshot.is_past and not snapshot.jobs else "reading …"


def title(snapshot: TopSnapshot, view: ViewState, width: int) -> StyledLine:
    day, clock = clock_time(snapshot.time).split()
    when = f"as of {day} {clock}" if snapshot.is_past else clock
    when = when if view.follows or snapshot.is_past else f"paused at {clock}; f: follow"
    # A narrow window has the name of the verb on its own command line.
    about = totals(visible(snapshot, view.filter)) if view.opened is None else view.opened
    left = line_of(
        Styled("gptctl top", "title"), "  ", Styled(about, "title" if view.opened else "")
    )
    space = width - sum(cells(part.text) for part in left) - cells(when)
    return (*left, Styled(" " * max(2, space)), Styled(when, "" if view.follows else "warn"))


def footer(snapshot: TopSnapshot, view: ViewState, width: int) -> StyledLine:
    if view.confirming:
        return (Styled(_question(view.confirming, width), "warn"),)
    if view.is_typing:
        return line_of(Styled(f"/{view.filter}", "title"), Styled("▏  Enter keeps  Esc clears"))
    if snapshot.notes:
        return (Styled(snapshot.notes[-1], "warn"),)
    if not view.has_keys:
        return (Styled(NO_KEYS, "dim"),)
    keys = JOB_KEYS if view.opened else KEYS
    keys = keys.removeprefix("Esc back  ") if view.is_single else keys
    chosen = view.opened or view.selected
    keys = keys if chosen and can_cancel(chosen, snapshot) else keys.replace("c cancel  ", "")
    kept = f"filter: {view.filter}  " if view.filter and not view.opened else ""
    return line_of(Styled(kept, "notice"), Styled(keys, "dim"))


def _question(job: str, width: int) -> str:
    """Whether to cancel a job. In a narrow window the keys matter most."""
    saves = (" The bundled trainer saves a checkpoint first.", " The bundled trainer saves first.")
    texts = [f"cancel {job}?{text}  y: cancel it  n: keep it" for text in (*saves, "")]
    return next((text for text in texts if cells(text) <= width), texts[-1])
