"""`gptctl top` in full screen: draws lines, passes on keys. Only this module imports textual."""

from __future__ import annotations

import asyncio
import codecs
import importlib
import signal
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import ClassVar

from textual import events
from textual.app import App, ComposeResult
from textual.binding import BindingType
from textual.content import Content
from textual.widgets import Static

from gptctl.cli.styled_lines import STYLES, StyledLine
from gptctl.cli.top_feed import TopFeed
from gptctl.cli.top_keys import ViewState, pressed, with_valid_selection
from gptctl.cli.top_view import top_lines, with_valid_scroll
from gptctl.jobs.top_collector import TopCollector, Wanted
from gptctl.jobs.top_snapshot import TopSnapshot

# textual's names of the terminal's own colours.
DECODER = "getincrementaldecoder"  # the name by which textual's drivers call that of codecs
_COLOURS = ("green", "cyan", "yellow", "red", "magenta")
_STYLES = {
    name: " ".join(f"ansi_{word}" if word in _COLOURS else word for word in style.split())
    for name, style in STYLES.items()
}


def ignore_damaged_input() -> None:
    """Let one byte that is not UTF-8, as a Latin-1 terminal sends it, not end the program."""
    # textual has no setting for it; a driver without this name keeps its own way.
    for name in ("linux_driver", "linux_inline_driver"):
        with suppress(ImportError):
            module = importlib.import_module(f"textual.drivers.{name}")
            if hasattr(module, DECODER):
                setattr(module, DECODER, _lenient_decoder)


def _lenient_decoder(encoding: str) -> Callable[[], codecs.IncrementalDecoder]:
    return partial(codecs.getincrementaldecoder(encoding), errors="replace")


class TopApp(App[None]):
    CSS = "Screen { background: ansi_default; } Static { width: 100%; height: 100%; }"
    ENABLE_COMMAND_PALETTE = False
    # textual's own bindings (ctrl+q, ctrl+c) would answer before `on_key`.
    BINDINGS: ClassVar[list[BindingType]] = []
    INHERIT_BINDINGS = False

    def __init__(self, collector: TopCollector, view: ViewState, interval: float) -> None:
        super().__init__(ansi_color=True)
        ignore_damaged_input()
        self.view = view
        self.snapshot: TopSnapshot | None = None  # that is shown
        self._newest: TopSnapshot | None = None
        self.feed = TopFeed(collector, interval, self._take, self._end)

    def compose(self) -> ComposeResult:
        yield Static(id="screen")

    def on_mount(self) -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGHUP):
            loop.add_signal_handler(number, self.exit, None, 128 + number)
        self.theme = "ansi-dark"
        self._want()
        self.feed.start()

    def _take(self, snapshot: TopSnapshot) -> None:
        # Called by the thread that reads.
        if self.is_running:
            self.call_later(self._show, snapshot)

    def _end(self) -> None:
        if self.is_running:
            self.call_later(self.exit)

    def _show(self, snapshot: TopSnapshot) -> None:
        self._newest = snapshot
        # What somebody reads stays; notes come in any case.
        if self.view.follows or self.snapshot is None:
            self.snapshot = snapshot
        else:
            self.snapshot = self.snapshot._replace(notes=snapshot.notes)
        self.draw()

    def on_resize(self, event: events.Resize) -> None:
        self.draw()

    def on_key(self, event: events.Key) -> None:
        event.stop()
        if self.snapshot is None:
            if event.key in ("q", "ctrl+c"):
                self.close()
            return
        before = self.view
        self.view = pressed(before, event.key, event.character, self.snapshot)
        if self.view.quits:
            self.close()
            return
        if self.view.to_cancel:
            self.feed.cancel(self.view.to_cancel)
        self._follow_view(before)
        self.draw()

    def _follow_view(self, before: ViewState) -> None:
        """Show the newest again where another job or rank is looked at."""
        is_other = (before.opened, before.rank) != (self.view.opened, self.view.rank)
        if is_other or (self.view.follows and not before.follows):
            self.view = self.view._replace(follows=True)
            self.snapshot = self._newest or self.snapshot
        self._want()

    def _want(self) -> None:
        rank = self.view.rank if self.view.opened else None
        self.feed.want(Wanted(self.view.opened, rank))

    def draw(self) -> None:
        if self.snapshot:
            self.view = with_valid_selection(self.view, self.snapshot)
            self.view = with_valid_scroll(self.view, self.snapshot, *self.size)
        lines = top_lines(self.snapshot, self.view, *self.size)
        self.query_one("#screen", Static).update(content_of(lines))

    def close(self) -> None:
        self.feed.stop()
        self.exit()


def content_of(lines: list[StyledLine]) -> Content:
    # As pairs, never as markup: text of jobs may have brackets.
    parts: list[str | tuple[str, str]] = []
    for number, line in enumerate(lines):
        parts += ["\n"] if number else []
        parts += [(text, _STYLES[style]) if style else text for text, style in line]
    return Content.assemble(*parts)
