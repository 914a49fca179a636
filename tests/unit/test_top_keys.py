"""The keys of `gptctl top`. Oracle: what its help says of them."""

from __future__ import annotations

from gptctl.cli.top_keys import ViewState, pressed, with_valid_selection
from gptctl.jobs.top_snapshot import TopSnapshot
from tests.top_jobs import NOW, detail, pending, snapshot, summary

JOBS = snapshot(summary("gpt-a"), summary("gpt-b"), pending("gpt-c"))


def after(view: ViewState, *keys: str, shown: TopSnapshot = JOBS) -> ViewState:
    for key in keys:
        view = pressed(view, key, key if len(key) == 1 else None, shown)
    return view


def test_the_selection_moves_and_stays_inside() -> None:
    assert with_valid_selection(ViewState(), JOBS).selected == "gpt-a"
    assert after(ViewState(), "down").selected == "gpt-b"
    assert after(ViewState(), "pagedown", "up").selected == "gpt-b"
    assert after(ViewState(), "pagedown", "pageup").selected == "gpt-a"
    # A selected job that is not there any more.
    assert after(ViewState(selected="gpt-gone"), "f").selected == "gpt-a"
    assert after(ViewState(), "down", "enter", "c", shown=snapshot()) == ViewState()


def test_a_job_is_opened_and_closed() -> None:
    opened = after(ViewState(), "down", "enter")
    assert opened.opened == "gpt-b"
    assert after(opened, "escape") == ViewState(selected="gpt-b")
    single = ViewState(opened="gpt-b", is_single=True)
    assert after(single, "escape") == single


def test_the_filter_is_typed() -> None:
    typed = after(ViewState(), "/", "P", "e", "n", "q")
    assert (typed.is_typing, typed.filter, typed.selected) == (True, "Penq", None)
    kept = after(typed, "backspace", "enter")
    assert (kept.is_typing, kept.filter, kept.selected) == (False, "Pen", "gpt-c")
    assert after(kept, "escape").filter == ""
    assert after(typed, "escape").filter == ""
    assert len(after(ViewState(), "/", *"x" * 100).filter) == 40


def test_cancel_asks() -> None:
    asked = after(ViewState(), "down", "c")
    assert (asked.confirming, asked.to_cancel) == ("gpt-b", None)
    for other in ("n", "escape", "enter", "q", "c"):
        answered = after(asked, other)
        assert (answered.confirming, answered.to_cancel, answered.quits) == (None, None, False)
    assert after(asked, "y").to_cancel == "gpt-b"
    assert after(asked, "y", "up").to_cancel is None, "once"
    assert after(ViewState(), "c", shown=snapshot(summary(), is_past=True)).confirming is None


def test_a_rank_is_chosen() -> None:
    view = ViewState(opened="gpt-a")
    assert after(view, "right", "right").rank == 2
    assert after(view, "left").rank == 15
    assert after(view, "1", "2").rank == 12
    assert after(view, "1", "9").rank == 9, "there is no rank 19"
    assert after(view, "1", "right", "2").rank == 2
    alone = snapshot(summary("gpt-a", world=1))
    assert after(view, "7", "right", shown=alone).rank == 0


def test_scrolling_stops_what_moves() -> None:
    shown = snapshot(summary("gpt-a"), detail=detail(summary("gpt-a")))
    view = after(ViewState(opened="gpt-a"), "up", "up", shown=shown)
    assert (view.scroll, view.follows) == (2, False)
    assert after(view, "down", "down", "down", shown=shown) == ViewState(opened="gpt-a")
    assert after(view, "f", shown=shown) == ViewState(opened="gpt-a")
    assert after(view, *["pageup"] * 20, shown=shown).scroll == 60


def test_help_and_quit() -> None:
    assert after(ViewState(), "?").shows_help
    assert not after(ViewState(), "?", "x").shows_help
    assert after(ViewState(), "?", "q").quits
    assert after(ViewState(), "q").quits
    assert after(ViewState(is_typing=True), "ctrl+c").quits


def test_only_what_runs_or_waits_can_be_cancelled() -> None:
    ended = TopSnapshot(NOW, False, (summary("gpt-1", "FAILED"), summary("gpt-2", "PENDING")))
    assert after(ViewState(selected="gpt-1"), "c", shown=ended).confirming is None
    assert after(ViewState(selected="gpt-2"), "c", shown=ended).confirming == "gpt-2"


def test_a_failed_job_opens_with_the_log_of_the_rank_that_failed() -> None:
    failed = TopSnapshot(NOW, False, (summary("gpt-1", "FAILED", failed_rank=3),))
    view = after(ViewState(selected="gpt-1"), "enter", shown=failed)
    assert (view.opened, view.rank) == ("gpt-1", 3)
