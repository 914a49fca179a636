"""What the keys of `gptctl top` do: from what a person looks at now to what comes next. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from gptctl.jobs.top_snapshot import JobSummary, TopSnapshot

PAGE = 10  # rows or lines
LONGEST_FILTER = 40  # characters
HELP = (
    ("up, down", "choose a job; in a job: scroll its log"),
    ("Enter, Esc", "open the chosen job; back to all jobs"),
    ("left, right", "choose the rank whose log is shown; or type its number"),
    ("f", "pause and follow: while paused, nothing moves"),
    ("/", "show only jobs that contain a text: id, state, cluster or reason"),
    ("c", "stop a job, after asking; the trainer saves a checkpoint first"),
    ("?", "show and hide this help"),
    ("q", "quit; jobs keep running"),
)


class Looking(NamedTuple):
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
    asks_about: str | None = None  # the job that `c` would stop
    stops: str | None = None  # the job that is to be stopped now
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


def settled(look: Looking, snapshot: TopSnapshot) -> Looking:
    """With a selection that is on the screen."""
    jobs = [job.job for job in visible(snapshot, look.filter)]
    if look.opened or look.selected in jobs:
        return look
    return look._replace(selected=jobs[0] if jobs else None)


def pressed(look: Looking, key: str, character: str | None, snapshot: TopSnapshot) -> Looking:
    """What a person looks at after a key, by textual's names of keys."""
    look = settled(look._replace(stops=None), snapshot)
    if key == "ctrl+c":
        return look._replace(quits=True)
    if look.asks_about:
        is_yes = character in ("y", "Y")
        return look._replace(stops=look.asks_about if is_yes else None, asks_about=None)
    if look.is_typing:
        return settled(_typed(look, key, character), snapshot)
    if look.shows_help:
        return look._replace(shows_help=False, quits=character == "q")
    if character and character.isascii() and character.isdigit() and look.opened:
        return _rank_typed(look, character, snapshot)
    look = look._replace(digits="")
    if character in ("q", "f", "/", "c", "?"):
        return _command(look, character, snapshot.is_past)
    return _moved(look, key, snapshot)


def _command(look: Looking, character: str, is_past: bool) -> Looking:
    job = look.opened or look.selected
    match character:
        case "q":
            return look._replace(quits=True)
        case "f":
            return look._replace(follows=not look.follows, scroll=0)
        case "/" if not look.opened:
            return look._replace(is_typing=True)
        case "c" if job and not is_past:
            return look._replace(asks_about=job)
        case "?":
            return look._replace(shows_help=True)
    return look


def _typed(look: Looking, key: str, character: str | None) -> Looking:
    if key in ("enter", "escape"):
        kept = look.filter if key == "enter" else ""
        return look._replace(is_typing=False, filter=kept)
    if key == "backspace":
        return look._replace(filter=look.filter[:-1])
    if character and character.isprintable() and len(look.filter) < LONGEST_FILTER:
        return look._replace(filter=look.filter + character)
    return look


def _rank_typed(look: Looking, digit: str, snapshot: TopSnapshot) -> Looking:
    """`1` and then `2`: rank 12; a number that no rank has begins again."""
    world = _world(look, snapshot)
    digits = look.digits + digit if int(look.digits + digit) < world else digit
    rank = int(digits)
    return look._replace(digits=digits, rank=rank if rank < world else look.rank, scroll=0)


def _world(look: Looking, snapshot: TopSnapshot) -> int:
    return next((job.world for job in snapshot.jobs if job.job == look.opened), 1)


def _moved(look: Looking, key: str, snapshot: TopSnapshot) -> Looking:
    by = {"up": -1, "down": 1, "pageup": -PAGE, "pagedown": PAGE}.get(key)
    if look.opened is None:
        jobs = [job.job for job in visible(snapshot, look.filter)]
        return _moved_in_list(look, key, by, jobs)
    if key == "escape":
        back = look._replace(opened=None, selected=look.opened, scroll=0)
        return look if look.is_single else back
    if key in ("left", "right"):
        rank = (look.rank + (1 if key == "right" else -1)) % _world(look, snapshot)
        return look._replace(rank=rank, scroll=0)
    if by is None:
        return look
    lines = len(snapshot.detail.log.lines) if snapshot.detail and snapshot.detail.log else 0
    scroll = min(max(0, look.scroll - by), lines)
    # Lines that arrive must not move the ones that are being read.
    return look._replace(scroll=scroll, follows=scroll == 0)


def _moved_in_list(look: Looking, key: str, by: int | None, jobs: Sequence[str]) -> Looking:
    if key == "enter" and look.selected:
        return look._replace(opened=look.selected, rank=0, scroll=0)
    if key == "escape":
        return look._replace(filter="")
    if by is None or look.selected is None:
        return look
    place = min(max(0, jobs.index(look.selected) + by), len(jobs) - 1)
    return look._replace(selected=jobs[place])
