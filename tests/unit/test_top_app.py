"""`gptctl top` in textual, with its keys, and in the terminal without textual. Oracles: made-up snapshots, and the
pictures of `top_view`."""

from __future__ import annotations

import asyncio
import re
import threading
import time
from collections.abc import Awaitable, Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any, cast

import pytest
from textual.pilot import Pilot
from textual.widgets import Static

from gptctl.cli.top_app import TopApp
from gptctl.cli.top_keys import ViewState
from gptctl.jobs import top_collector
from gptctl.jobs.top_collector import TopCollector, Wanted
from gptctl.jobs.top_snapshot import TopSnapshot
from tests.job_records import add_job
from tests.top_jobs import NOW, detail, pending, screen, summary
from trainer.errors import UserError

JOBS = (summary("gpt-a"), summary("gpt-b"), pending("gpt-c", "[bold]Priority[/]"))


class MadeUp:
    """In the place of a collector: what it was asked for, and jobs that nobody ran."""

    def __init__(self) -> None:
        self.wanted, self.cancelled, self.notes = list[Wanted](), list[str](), list[str]()
        self.blocks = threading.Event()
        self.blocks.set()
        self.tick = 0

    def ask(self) -> None:
        self.blocks.wait(20)

    def note(self, text: str) -> None:
        self.notes.append(text)

    def record_of(self, job: str) -> None:
        return None

    def following(self, record: object) -> Any:
        return nullcontext()

    def cancel(self, job: str) -> str:
        self.cancelled.append(job)
        return f"{job} is cancelled"

    def snapshot(self, wanted: Wanted) -> TopSnapshot:
        self.wanted.append(wanted)
        self.tick += 1
        chosen = next((job for job in JOBS if job.job == wanted.job), None)
        full = detail(chosen, [1.0] * 16) if chosen else None
        return TopSnapshot(NOW + self.tick, False, JOBS, full, tuple(self.notes))


def run_app(
    check: Callable[[TopApp, Pilot[None], MadeUp], Awaitable[None]],
    view: ViewState = ViewState(),  # noqa: B008 (frozen)
    size: tuple[int, int] = (80, 24),
) -> None:
    async def run() -> None:
        made_up = MadeUp()
        app = TopApp(cast(TopCollector, made_up), view, 0.1)
        async with app.run_test(size=size) as pilot:
            await until(pilot, lambda: app.snapshot is not None)
            await check(app, pilot, made_up)
            app.close()

    asyncio.run(run())


async def until(pilot: Pilot[None], is_true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 10
    while not is_true():
        assert time.monotonic() < deadline
        await pilot.pause(0.02)


def text_of(app: TopApp) -> list[str]:
    lines = [strip.text for strip in app.query_one("#screen", Static).render_lines(app.screen.region)]
    return [line.rstrip() for line in lines]


@pytest.mark.parametrize("size", [(80, 24), (160, 50), (30, 8)])
def test_the_picture_is_that_of_the_view(size: tuple[int, int]) -> None:
    async def check(app: TopApp, pilot: Pilot[None], made_up: MadeUp) -> None:
        await pilot.press("down", "down", "f")
        assert app.snapshot
        await pilot.pause()
        assert text_of(app) == screen(app.snapshot, app.view, *size)
        assert not app.view.follows

    run_app(check, size=size)


def test_a_job_is_opened_and_a_rank_chosen() -> None:
    async def check(app: TopApp, pilot: Pilot[None], made_up: MadeUp) -> None:
        await pilot.press("down", "enter")
        await until(pilot, lambda: "log of rank 0" in "\n".join(text_of(app)))
        assert made_up.wanted[-1] == Wanted("gpt-b", 0)
        await pilot.press("right", "right")
        await until(pilot, lambda: made_up.wanted[-1] == Wanted("gpt-b", 2))
        await pilot.press("1", "2")
        await until(pilot, lambda: made_up.wanted[-1] == Wanted("gpt-b", 12))
        await pilot.press("escape")
        await until(pilot, lambda: made_up.wanted[-1] == Wanted())
        assert app.view.selected == "gpt-b"

    run_app(check)


def test_filter_and_help() -> None:
    async def check(app: TopApp, pilot: Pilot[None], made_up: MadeUp) -> None:
        await pilot.press("slash", *"pend", "enter")
        assert [line.split()[0] for line in text_of(app)[2:4] if line] == ["gpt-c"]
        await pilot.press("question_mark")
        assert "show and hide this help" in "\n".join(text_of(app))

    run_app(check)


def test_cancel_asks_and_tells() -> None:
    async def check(app: TopApp, pilot: Pilot[None], made_up: MadeUp) -> None:
        await pilot.press("c", "n")
        await pilot.press("down", "c")
        assert text_of(app)[-1].startswith("cancel gpt-b?")
        assert made_up.cancelled == []
        await pilot.press("y")
        await until(pilot, lambda: text_of(app)[-1] == "gpt-b is cancelled")
        assert made_up.cancelled == ["gpt-b"]

    run_app(check)


def test_what_is_read_stays_while_stopped() -> None:
    async def check(app: TopApp, pilot: Pilot[None], made_up: MadeUp) -> None:
        await until(pilot, lambda: app.snapshot is not None and app.snapshot.detail is not None)
        await pilot.press("up")
        assert app.snapshot
        before, tick = app.snapshot.time, made_up.tick
        await until(pilot, lambda: made_up.tick > tick + 2)
        assert app.snapshot.time == before
        await pilot.press("f")
        await until(pilot, lambda: app.snapshot is not None and app.snapshot.time > before)

    run_app(check, ViewState(opened="gpt-a", is_single=True))


def test_the_log_is_scrolled_only_as_far_as_it_has_lines() -> None:
    async def check(app: TopApp, pilot: Pilot[None], made_up: MadeUp) -> None:
        await until(pilot, lambda: "log of rank 0" in "\n".join(text_of(app)))
        await pilot.press(*["pageup"] * 9)
        above = int(re.findall(r"log of rank 0, (\d+) lines further up", "\n".join(text_of(app)))[0])
        assert "line 0" in text_of(app)
        assert above == app.view.scroll < 60
        await pilot.press("down")
        assert app.view.scroll == above - 1, "the first key counts"

    run_app(check, ViewState(opened="gpt-a", is_single=True))


def test_why_a_log_is_not_updated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(record: object) -> None:
        raise UserError("gpu7 is not reachable")

    async def check(app: TopApp, pilot: Pilot[None], made_up: MadeUp) -> None:
        await until(pilot, lambda: "gpu7 is not reachable" in text_of(app)[-1])
        await pilot.pause(0.6)
        assert len(made_up.notes) == 1, "not again and again"

    record = add_job(tmp_path, "gpt-a", "RUNNING")
    monkeypatch.setattr(MadeUp, "record_of", lambda made_up, job: record if job else None)
    monkeypatch.setattr(MadeUp, "following", lambda made_up, record: fails(record))
    run_app(check, ViewState(opened="gpt-a", is_single=True))


def test_keys_answer_while_a_scheduler_does_not() -> None:
    async def run() -> None:
        made_up = MadeUp()
        made_up.blocks.clear()
        app = TopApp(cast(TopCollector, made_up), ViewState(), 0.1)
        async with app.run_test(size=(80, 24)) as pilot:
            await pilot.pause(0.1)
            assert text_of(app)[0] == "asking for the states of jobs …"
            began = time.monotonic()
            await pilot.press("down", "q")
            assert time.monotonic() - began < 2
        made_up.blocks.set()

    asyncio.run(run())


def test_a_bug_in_a_thread_ends_the_picture(monkeypatch: pytest.MonkeyPatch) -> None:
    """It must neither be lost nor leave a screen that never changes."""

    async def run() -> None:
        made_up = MadeUp()
        monkeypatch.setattr(made_up, "snapshot", lambda wanted: 1 / 0)
        app = TopApp(cast(TopCollector, made_up), ViewState(), 0.1)
        async with app.run_test(size=(80, 24)) as pilot:
            await until(pilot, lambda: app.return_code is not None or not app.is_running)
        assert isinstance(app.feed.problem, ZeroDivisionError)

    asyncio.run(run())


def test_the_picture_in_the_docs_loads_nothing() -> None:
    """`docs/img/top.svg` must not make a browser ask another machine."""
    text = (Path(__file__).resolve().parents[2] / "docs" / "img" / "top.svg").read_text("utf-8")
    assert len(text) < 200_000
    assert set(re.findall(r"https?://[^\"'\s)]+", text)) <= {"http://www.w3.org/2000/svg"}
    assert "@font-face" not in text


def test_schedulers_are_asked_at_most_ten_times_a_minute() -> None:
    assert 60 / top_collector.ASK_EVERY <= 10
