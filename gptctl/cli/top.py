"""The verb `top`: watch jobs live, or as they were at a past moment."""

from __future__ import annotations

import signal
import sys
import time
from typing import TYPE_CHECKING

import click

from gptctl.cli.options import NumberRange, as_json_option, examples, job_argument
from gptctl.cli.session import Session
from trainer.errors import WRONG_USAGE, UserError

if TYPE_CHECKING:
    from gptctl.cli.top_app import TopApp
    from gptctl.cli.top_keys import ViewState
    from gptctl.jobs.top_collector import TopCollector
    from gptctl.jobs.top_snapshot import TopSnapshot

INTERVAL = 2.0  # seconds between two pictures
PLAIN_SIZE = (120, 60)  # columns and lines of a snapshot in a pipe


@click.command(
    epilog=examples(
        "gptctl top",
        "gptctl top gpt-3f9a2c --at 02:30",
        "gptctl top --json",
    )
)
@job_argument(required=False)
@click.option(
    "--at",
    metavar="TIME",
    help="Show the jobs as they were: 2h (ago), 07:30, or 2026-11-18T07:30.",
)
@click.option(
    "--interval",
    type=NumberRange(min=0.5, max=3600),
    default=INTERVAL,
    show_default=True,
    metavar="SECONDS",
    help="Seconds between two reads of the files. Schedulers are asked at most every 6 seconds.",
)
@as_json_option
@click.pass_obj
def top(session: Session, job: str | None, at: str | None, interval: float, as_json: bool) -> int:
    """Watch jobs in full screen: progress, curves, slow ranks, events and logs.

    Without JOB: the 30 newest jobs; Enter opens one. Keys need `pip install 'gptctl[ui]'`; `?`
    shows them. In a pipe, or with --json, one snapshot is printed.
    """
    from gptctl.cli import ui
    from gptctl.cli.top_keys import ViewState
    from gptctl.engine.atomic_files import private_files

    record = session.find(job, announce=False) if job else None
    moment = moment_of(at) if at is not None else None
    collector = collector_of(session, record.id if record else None, moment)
    view = ViewState(opened=record.id if record else None, is_single=record is not None)
    # Around all threads: the umask belongs to the process, not to a thread.
    with private_files():
        if as_json or not sys.stdout.isatty() or not ui.TerminalScreen().is_in_place:
            print_once(collector, view, as_json)
        elif sys.stdin.isatty() and (app := app_of_textual()):
            return run_app(app(collector, view, interval))
        else:
            try:
                run_without_keys(collector, view, interval)
            except EndedBySignal as ended:
                return 128 + int(ended.args[0])
    return 0


def moment_of(text: str) -> float:
    from gptctl.logs.lines import parse_since

    now = time.time()
    moment = parse_since(text.strip().removesuffix(" ago"), now, option="--at")
    if moment > now:
        hint = "use a past time, such as 2h, 07:30 or 2026-11-18T07:30"
        raise UserError(f"--at {text[:60]!r} is in the future", hint, WRONG_USAGE)
    return moment


def collector_of(session: Session, job: str | None, at: float | None) -> TopCollector:
    from gptctl.backends import Backends
    from gptctl.jobs.top_collector import TopCollector

    said: list[TopCollector] = []
    # What a backend says would be written over the picture: the collector keeps it.
    backends = Backends(lambda text: said[0].note(text))
    store = session.store
    collector = TopCollector(store, backends, store.find(job) if job else None, at)
    said.append(collector)
    return collector


def first_snapshot(collector: TopCollector, view: ViewState) -> TopSnapshot:
    from gptctl.jobs.top_collector import Wanted

    collector.ask()
    if collector.is_past:
        # No later snapshot corrects this one: whoever has not answered gets more time.
        collector.ask()
    return collector.snapshot(Wanted(view.opened, view.rank if view.opened else None))


def print_once(collector: TopCollector, view: ViewState, as_json: bool) -> None:
    from gptctl.cli import ui
    from gptctl.cli.styled_lines import plain_text
    from gptctl.cli.top_view import body_lines, title

    collector.catch_up()
    snapshot = first_snapshot(collector, view)
    if as_json:
        ui.print_json(snapshot.as_json())
        return
    width, height = PLAIN_SIZE
    lines = [title(snapshot, view, width), *body_lines(snapshot, view, width, height)]
    for line in lines:
        ui.print_text(plain_text(line).rstrip())
    for note in snapshot.notes:
        ui.say(f"note: {note}")


def app_of_textual() -> type[TopApp] | None:
    """Return the program with keys; None if textual is missing, too old, or damaged."""
    try:
        from gptctl.cli.top_app import TopApp
    except Exception:  # whatever a damaged package raises: there is another picture
        return None
    return TopApp


def run_app(app: TopApp) -> int:
    app.run()
    app.feed.stop()
    if app.feed.problem:
        raise app.feed.problem
    return app.return_code or 0


class EndedBySignal(Exception):
    """Raised wherever the program is, so that it leaves the picture as it would for Ctrl-C."""


def _end_by_signal(number: int, frame: object) -> None:
    raise EndedBySignal(number)


def run_without_keys(collector: TopCollector, view: ViewState, interval: float) -> None:
    """Without textual: the same picture, without keys."""
    from gptctl.cli import ui
    from gptctl.cli.top_feed import TopFeed
    from gptctl.cli.top_view import top_lines
    from gptctl.jobs.top_collector import Wanted

    view, newest = view._replace(has_keys=False), list["TopSnapshot"]()
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _end_by_signal)
    feed = TopFeed(collector, interval, newest.append, lambda: None)
    feed.want(Wanted(view.opened, view.rank if view.opened else None))
    feed.start()
    with ui.live_lines() as draw:
        while not feed.problem:
            del newest[:-1]
            draw(lambda width, height: top_lines(next(iter(newest), None), view, width, height))
            time.sleep(min(0.5, interval))
    raise feed.problem
