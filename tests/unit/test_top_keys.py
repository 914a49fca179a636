"""The keys of `gptctl top`. Oracle: what its help says of them."""

from __future__ import annotations

from gptctl.cli.top_keys import Looking, pressed, settled
from gptctl.jobs.top_snapshot import TopSnapshot
from tests.top_jobs import detail, pending, snapshot, summary

JOBS = snapshot(summary("gpt-a"), summary("gpt-b"), pending("gpt-c"))


def after(look: Looking, *keys: str, shown: TopSnapshot = JOBS) -> Looking:
    for key in keys:
        look = pressed(look, key, key if len(key) == 1 else None, shown)
    return look


def test_the_selection_moves_and_stays_inside() -> None:
    assert settled(Looking(), JOBS).selected == "gpt-a"
    assert after(Looking(), "down").selected == "gpt-b"
    assert after(Looking(), "pagedown", "up").selected == "gpt-b"
    assert after(Looking(), "pagedown", "pageup").selected == "gpt-a"
    # A selected job that is not there any more.
    assert after(Looking(selected="gpt-gone"), "f").selected == "gpt-a"
    assert after(Looking(), "down", "enter", "c", shown=snapshot()) == Looking()


def test_a_job_is_opened_and_closed() -> None:
    opened = after(Looking(), "down", "enter")
    assert opened.opened == "gpt-b"
    assert after(opened, "escape") == Looking(selected="gpt-b")
    single = Looking(opened="gpt-b", is_single=True)
    assert after(single, "escape") == single


def test_the_filter_is_typed() -> None:
    typed = after(Looking(), "/", "P", "e", "n", "q")
    assert (typed.is_typing, typed.filter, typed.selected) == (True, "Penq", None)
    kept = after(typed, "backspace", "enter")
    assert (kept.is_typing, kept.filter, kept.selected) == (False, "Pen", "gpt-c")
    assert after(kept, "escape").filter == ""
    assert after(typed, "escape").filter == ""
    assert len(after(Looking(), "/", *"x" * 100).filter) == 40


def test_cancel_asks() -> None:
    asked = after(Looking(), "down", "c")
    assert (asked.asks_about, asked.stops) == ("gpt-b", None)
    for other in ("n", "escape", "enter", "q", "c"):
        answered = after(asked, other)
        assert (answered.asks_about, answered.stops, answered.quits) == (None, None, False)
    assert after(asked, "y").stops == "gpt-b"
    assert after(asked, "y", "up").stops is None, "once"
    assert after(Looking(), "c", shown=snapshot(summary(), is_past=True)).asks_about is None


def test_a_rank_is_chosen() -> None:
    look = Looking(opened="gpt-a")
    assert after(look, "right", "right").rank == 2
    assert after(look, "left").rank == 15
    assert after(look, "1", "2").rank == 12
    assert after(look, "1", "9").rank == 9, "there is no rank 19"
    assert after(look, "1", "right", "2").rank == 2
    alone = snapshot(summary("gpt-a", world=1))
    assert after(look, "7", "right", shown=alone).rank == 0


def test_scrolling_stops_what_moves() -> None:
    shown = snapshot(summary("gpt-a"), detail=detail(summary("gpt-a")))
    look = after(Looking(opened="gpt-a"), "up", "up", shown=shown)
    assert (look.scroll, look.follows) == (2, False)
    assert after(look, "down", "down", "down", shown=shown) == Looking(opened="gpt-a")
    assert after(look, "f", shown=shown) == Looking(opened="gpt-a")
    assert after(look, *["pageup"] * 20, shown=shown).scroll == 60


def test_help_and_quit() -> None:
    assert after(Looking(), "?").shows_help
    assert not after(Looking(), "?", "x").shows_help
    assert after(Looking(), "?", "q").quits
    assert after(Looking(), "q").quits
    assert after(Looking(is_typing=True), "ctrl+c").quits
