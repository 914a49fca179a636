"""What the keys of `gptctl top` do: from what a person looks at now to what comes next. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from gptctl.engine.job_result import FINAL
from gptctl.jobs.top_snapshot import JobSummary, TopSnapshot

PAGE = 10  # rows or lines
LONGEST_FILTER = 40  # characters
HELP = (
    ("up, down", "choose a job; in a job: scroll its log"),
    ("Page Up, Page Down", "the same, 10 rows or lines at a time"),
    ("Enter, Esc", "open the chosen job; back to all jobs"),
    ("left, right", "choose the rank whose log is shown; or type its number"),
    ("f", "pause and follow: while paused, nothing moves"),
    ("/", "show only jobs with a text in id, state, cluster or reason"),
    ("c", "cancel a job, after confirmation"),
    ("?", "show and hide this help"),
    ("q", "quit; jobs keep running"),
)


class ViewState(NamedTuple):
    """What is on the screen, and what was asked for."""

    selected: str | None = None
    opened: str | None = None  # the job that is shown in full
    has_keys: bool = True
    is_single: bool = False  # a job was named on the command line: there is no list
    filter: str = ""
    is_typing: bool = False  # the filter
    rank: int = 0
    digits: str = ""  # of a rank that is being typed
    scroll: int = 0  # lines of the log up from its end
    follows: bool = True
    shows_help: bool = False
    confirming: str | None = None  # the job that `c` would cancel
    to_cancel: str | None = None  # the job that is to be cancelled now
    quits: bool = False


def visible(snapshot: TopSnapshot, filter_text: str) -> list[JobSummary]:
    words = filter_text.lower().split()
    return [
        job
        for job in snapshot.jobs
        if all(
            word in f"{job.job} {job.state} {job.cluster} {job.reason}".lower() for word in words
        )
    ]


def with_valid_selection(view: ViewState, snapshot: TopSnapshot) -> ViewState:
    """With a selection that is on the screen."""
    jobs = [job.job for job in visible(snapshot, view.filter)]
    if view.opened or view.selected in jobs:
        return view
    return view._replace(selected=jobs[0] if jobs else None)


def pressed(view: ViewState, key: str, character: str | None, snapshot: TopSnapshot) -> ViewState:
    """What a person looks at after a key, by textual's names of keys."""
    view = with_valid_selection(view._replace(to_cancel=None), snapshot)
    if key == "ctrl+c":
        return view._replace(quits=True)
    if view.confirming:
        is_yes = character in ("y", "Y")
        return view._replace(to_cancel=view.confirming if is_yes else None, confirming=None)
    if view.is_typing:
        return with_valid_selection(_typed(view, key, character), snapshot)
    if view.shows_help:
        return view._replace(shows_help=False, quits=character == "q")
    if character and character.isascii() and character.isdigit() and view.opened:
        return _rank_typed(view, character, snapshot)
    view = view._replace(digits="")
    if character in ("q", "f", "/", "c", "?"):
        return _command(view, character, snapshot)
    return _moved(view, key, snapshot)


def _command(view: ViewState, character: str, snapshot: TopSnapshot) -> ViewState:
    job = view.opened or view.selected
    match character:
        case "q":
            return view._replace(quits=True)
        case "f":
            return view._replace(follows=not view.follows, scroll=0)
        case "/" if not view.opened:
            return view._replace(is_typing=True)
        case "c" if job and can_cancel(job, snapshot):
            return view._replace(confirming=job)
        case "?":
            return view._replace(shows_help=True)
    return view


def can_cancel(job: str, snapshot: TopSnapshot) -> bool:
    found = _summary(job, snapshot)
    return not snapshot.is_past and found is not None and found.state not in FINAL


def _summary(job: str | None, snapshot: TopSnapshot) -> JobSummary | None:
    return next((each for each in snapshot.jobs if each.job == job), None)


def _typed(view: ViewState, key: str, character: str | None) -> ViewState:
    if key in ("enter", "escape"):
        kept = view.filter if key == "enter" else ""
        return view._replace(is_typing=False, filter=kept)
    if key == "backspace":
        return view._replace(filter=view.filter[:-1])
    if character and character.isprintable() and len(view.filter) < LONGEST_FILTER:
        return view._replace(filter=view.filter + character)
    return view


def _rank_typed(view: ViewState, digit: str, snapshot: TopSnapshot) -> ViewState:
    """`1` and then `2`: rank 12; a number that no rank has begins again."""
    world = _world(view, snapshot)
    digits = view.digits + digit if int(view.digits + digit) < world else digit
    rank = int(digits)
    return view._replace(digits=digits, rank=rank if rank < world else view.rank, scroll=0)


def _world(view: ViewState, snapshot: TopSnapshot) -> int:
    job = _summary(view.opened, snapshot)
    return job.world if job else 1


def _moved(view: ViewState, key: str, snapshot: TopSnapshot) -> ViewState:
    by = {"up": -1, "down": 1, "pageup": -PAGE, "pagedown": PAGE}.get(key)
    if view.opened is None:
        jobs = [job.job for job in visible(snapshot, view.filter)]
        if key == "enter" and (job := _summary(view.selected, snapshot)):
            # Of a job that failed, the log that shows it.
            return view._replace(opened=job.job, rank=job.failed_rank or 0, scroll=0)
        return _moved_in_list(view, key, by, jobs)
    if key == "escape":
        back = view._replace(opened=None, selected=view.opened, scroll=0)
        return view if view.is_single else back
    if key in ("left", "right"):
        rank = (view.rank + (1 if key == "right" else -1)) % _world(view, snapshot)
        return view._replace(rank=rank, scroll=0)
    if by is None:
        return view
    # How far it can go depends on the height of the window: see `with_valid_scroll`.
    lines = len(snapshot.detail.log.lines) if snapshot.detail and snapshot.detail.log else 0
    scroll = min(max(0, view.scroll - by), lines)
    # Lines that arrive must not move the ones that are being read.
    return view._replace(scroll=scroll, follows=scroll == 0)


def _moved_in_list(view: ViewState, key: str, by: int | None, jobs: Sequence[str]) -> ViewState:
    if key == "escape":
        return view._replace(filter="")
    if by is None or view.selected is None:
        return view
    place = min(max(0, jobs.index(view.selected) + by), len(jobs) - 1)
    return view._replace(selected=jobs[place])
