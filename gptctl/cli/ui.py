"""The only module that prints: rich on a terminal, plain text when piped, JSON when asked.

Data goes to stdout, messages to stderr.
"""

from __future__ import annotations

import json
import os
import re
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from typing import TYPE_CHECKING, Any

from gptctl.cli.table_layout import Column, as_columns, broken_name, fitted, wrapped
from gptctl.text import CONTROL, clean
from trainer.errors import Finding, UserError

if TYPE_CHECKING:
    from gptctl.cli.chart import ChartSize
    from gptctl.cli.styled_lines import StyledLine
    from gptctl.reporting import Progress
    from gptctl.spec.check import Checked

    Picture = Callable[[int, int], Sequence[StyledLine]]  # of so many columns and lines

WIDEST_CHART, HIGHEST_CHART = 160, 40
PAIR_MARGINS = 7  # characters around and between the two columns of `print_pairs`
SAY_EVERY = 5.0  # seconds between two progress messages in a log
_COLOURS = {"error": "bold red", "warning": "yellow", "notice": "cyan", "hint": "green"}

# Of a job, and of a row of `doctor`.
_STATE_COLOURS = {"COMPLETED": "green", "RUNNING": "cyan", "PENDING": "yellow", "ok": "green"}
_STATE_COLOURS |= dict.fromkeys(("CANCELLED", "STOPPED"), "magenta")
_STATE_COLOURS |= dict.fromkeys(("LOST", "UNKNOWN", "PREEMPTED", "warning"), "yellow")
_STATE_COLOURS |= dict.fromkeys(("FAILED", "TIMEOUT", "OUT_OF_MEMORY", "NODE_FAIL"), "red")
_STATE_COLOURS |= {"wrong": "red", "notice": "cyan"}


def print_json(value: Any) -> None:
    text = json.dumps(value, indent=2, ensure_ascii=False)
    # Escape control characters that JSON allows: they could still act on a terminal.
    print(
        CONTROL.sub(
            lambda found: "".join(f"\\u{ord(character):04x}" for character in found[0]), text
        )
    )


def print_text(text: str) -> None:
    print(clean(text))


def print_coloured(lines: Iterable[str], colours: Mapping[str, str]) -> None:
    """Print lines; on a terminal each in the colour of its first character."""
    if not sys.stdout.isatty():
        for line in lines:
            print_text(line)
        return
    from rich.text import Text

    console = _console()
    for line in map(clean, lines):
        # soft_wrap: let the terminal wrap, so that a copied line has no line break.
        console.print(Text(line, colours.get(line[:1], "")), soft_wrap=True)


@contextmanager
def progress(title: str, total: int) -> Iterator[Progress]:
    """Show the progress of a transfer: a bar on a terminal, otherwise a line every few seconds."""
    # rich is imported where it is used: it costs more time than most commands take.
    if sys.stderr.isatty():
        from rich.console import Console
        from rich.progress import BarColumn, DownloadColumn, TextColumn, TransferSpeedColumn
        from rich.progress import Progress as Bar

        columns = (TextColumn(clean(title)), BarColumn(), DownloadColumn(), TransferSpeedColumn())
        with Bar(*columns, console=Console(stderr=True)) as bar:
            task = bar.add_task("", total=total)
            yield lambda size: bar.advance(task, size)
        return
    came, said = 0, time.monotonic()

    def note(size: int) -> None:
        nonlocal came, said
        came += size
        if time.monotonic() - said > SAY_EVERY:
            said = time.monotonic()
            say(f"{title}: {came:,} of {total:,} bytes")

    yield note


@contextmanager
def status_line() -> Iterator[Callable[[str], None]]:
    """Show how far something is: in place on a terminal, otherwise a line every few seconds."""
    is_in_place = sys.stderr.isatty() and has_colours()
    told = time.monotonic()

    def show(text: str) -> None:
        nonlocal told
        if time.monotonic() - told < (0.1 if is_in_place else SAY_EVERY):
            return
        told = time.monotonic()
        if is_in_place:
            cut = clean(text)[: terminal_width(sys.stderr) - 1]
            print(f"\r{cut}\x1b[K", end="", file=sys.stderr, flush=True)
        else:
            say(text)

    try:
        yield show
    finally:
        if is_in_place:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)


class TerminalScreen:
    """Stdout as a terminal: boxes, and one line at the bottom that is updated in place."""

    def __init__(self) -> None:
        self._drawn = ""
        # A dumb terminal cannot move the cursor: it gets no line that is updated in place.
        self.is_in_place = os.environ.get("TERM", "dumb") not in ("", "dumb", "unknown")
        self.has_colours = has_colours()

    @property
    def width(self) -> int:
        """The columns that a line may use."""
        # One less than the window has: some terminals scroll when a line is full.
        return terminal_width() - 1

    def draw(self, text: str) -> None:
        if self.is_in_place and text != self._drawn:
            self._drawn = text
            shown = clean(text)
            if self.has_colours:
                shown = re.sub("━+", "\x1b[32m\\g<0>\x1b[0m", shown)
            # The cursor stays in the first column. If the window gets narrower, the line wraps, and
            # clearing from the cursor to the end of the screen still removes all of it.
            self._write(f"\r{shown}\x1b[J\r")

    def erase(self) -> None:
        if self._drawn:
            self._drawn = ""
            self._write("\r\x1b[J")

    def box(self, title: str, text: str) -> None:
        self.erase()
        print_box(title, text)

    def _write(self, text: str) -> None:
        # Log lines are written to the same buffer: using it directly keeps the order.
        sys.stdout.buffer.write(text.encode())
        sys.stdout.buffer.flush()


@contextmanager
def live_lines() -> Iterator[Callable[[Picture], None]]:
    """Fill the window with lines that change; it looks as before at the end. For terminals only."""
    from rich.console import Group
    from rich.live import Live
    from rich.text import Text

    from gptctl.cli.styled_lines import STYLES

    console = _console()
    with Live(console=console, screen=True, auto_refresh=False) as live:

        def draw(picture: Picture) -> None:
            console.width, lines = terminal_width(), os.get_terminal_size(sys.stdout.fileno()).lines
            # One line less: a full last line scrolls some terminals.
            rows = [
                Text.assemble(*((part.text, STYLES[part.style]) for part in row), no_wrap=True)
                for row in picture(console.width, lines - 1)
            ]
            live.update(Group(*rows), refresh=True)

        yield draw


def has_colours() -> bool:
    """Whether the terminal has colours, and the user wants them."""
    is_plain = os.environ.get("TERM", "dumb") in ("", "dumb", "unknown")
    return not is_plain and not os.environ.get("NO_COLOR")


def chart_size() -> ChartSize:
    """Return the size of a chart: the window, but for the prompt; a page if there is no window."""
    from gptctl.cli.chart import ChartSize

    lines = _assumed_size().lines
    with suppress(OSError, ValueError):
        lines = os.get_terminal_size(sys.stdout.fileno()).lines or lines
    return ChartSize(min(terminal_width(), WIDEST_CHART), min(lines - 2, HIGHEST_CHART))


def terminal_width(stream: Any = None) -> int:
    """Return the current width of the window."""
    # COLUMNS may be outdated after the window was resized: ask the terminal first.
    with suppress(OSError, ValueError):
        if columns := os.get_terminal_size((stream or sys.stdout).fileno()).columns:
            return columns
    return _assumed_size().columns


def _assumed_size() -> os.terminal_size:
    # Imported here: shutil loads two libraries for compression, which few commands need.
    from shutil import get_terminal_size

    return get_terminal_size()


def print_box(title: str, body: str | Sequence[tuple[str, str]], colour: str = "cyan") -> None:
    """Print a text, or a table of names and texts, in a frame. For terminals only."""
    from rich.panel import Panel
    from rich.table import Table
    from rich.text import Text

    content: Any = Text(clean(body)) if isinstance(body, str) else Table.grid(padding=(0, 2, 0, 0))
    if not isinstance(body, str):
        content.add_column(style="cyan", no_wrap=True)
        content.add_column(overflow="fold")
        for name, text in body:
            content.add_row(name, Text(clean(text)))
    frame = Panel(
        content, title=Text(clean(title)), title_align="left", border_style=colour, expand=False
    )
    _console().print(frame)


def print_exactly(text: str) -> None:
    """Print a script byte for byte, so that it can be saved; to a terminal without controls."""
    # The file may have been damaged since it was written.
    sys.stdout.write(clean(text) if sys.stdout.isatty() else text)


def say(text: str) -> None:
    """Print a message to stderr, so that stdout has only data."""
    # A terminal or log that shows both streams gets them in the order of writing.
    sys.stdout.flush()
    # A message that cannot be printed does not change the result.
    with suppress(OSError):
        print(clean(text), file=sys.stderr)


def print_findings(findings: Iterable[Finding], to_stderr: bool = False) -> None:
    stream = sys.stderr if to_stderr else sys.stdout
    # Messages that cannot be printed do not change the result; the answer itself must be.
    with suppress(OSError) if to_stderr else nullcontext():
        for finding in findings:
            _print_marked(str(finding), stream)
            if finding.hint:
                _print_marked(f"hint: {finding.hint}", stream)


def note_machine_findings(checked: Checked, shown: Iterable[Finding] = ()) -> None:
    """Say what a valid config would lack on this machine, unless that is shown anyway.

    Not part of the answer.
    """
    from gptctl.spec.machine_rules import (
        check_apprise_here,
        check_cache_here,
        check_gpus_here,
        check_trackers_here,
    )

    if checked.is_valid:
        checks = (check_gpus_here, check_cache_here, check_apprise_here, check_trackers_here)
        found = [finding for check in checks for finding in check(checked)]
        known = {finding.code for finding in shown}
        print_findings([each for each in found if each.code not in known], to_stderr=True)


def print_error(error: UserError) -> None:
    print_findings(error.findings, to_stderr=True)
    _print_marked(f"error: {error.message}", sys.stderr)
    if error.hint:
        _print_marked(f"hint: {error.hint}", sys.stderr)


def _print_marked(line: str, stream: Any) -> None:
    """Print a line; on a terminal its first word (error:, hint:, …) is coloured."""
    line = clean(line)
    if not stream.isatty():
        print(line, file=stream)
        return
    from rich.console import Console
    from rich.text import Text

    word, _, rest = line.partition(":")
    marked = Text.assemble((f"{word}:", _COLOURS.get(word, "")), rest)
    # soft_wrap: let the terminal wrap, so that a copied path or command has no line break.
    Console(file=stream, highlight=False).print(marked, soft_wrap=True)


def say_wrapped(text: str) -> None:
    """Like `say`, but a terminal gets lines that fit, with list items indented."""
    say(wrapped(text, terminal_width(sys.stderr)) if sys.stderr.isatty() else text)


def print_pairs(title: str, pairs: Sequence[tuple[str, str]]) -> None:
    """Print a short report: one name and one text per line."""
    width = max((len(name) for name, _ in pairs), default=0)
    if not sys.stdout.isatty():
        print(clean(title))
        for name, text in pairs:
            print(f"  {name:<{width}}  {clean(text)}")
        return
    from rich import box
    from rich.table import Table
    from rich.text import Text

    table = Table(
        title=Text(clean(title), style="bold"),
        title_justify="left",
        show_header=False,
        box=box.SIMPLE,
    )
    table.add_column(style="cyan", no_wrap=True)
    table.add_column(overflow="fold")  # not cut: a path can be copied
    room = terminal_width() - width - PAIR_MARGINS
    for name, text in pairs:
        table.add_row(name, _styled(name, wrapped(clean(text), room)))
    _console().print(table)


def _console() -> Any:
    from rich.console import Console

    # rich would prefer COLUMNS to the real width, and colours numbers.
    sys.stdout.flush()
    return Console(width=terminal_width(), highlight=False)


def _styled(name: str, text: str) -> Any:
    """Colour the state in a cell; `name` is that of its column or row."""
    from rich.text import Text

    styled = Text(text)
    if name == "state":
        word = text.partition(":")[0]
        styled.stylize(_STATE_COLOURS.get(word, ""), 0, len(word))
    return styled


def print_state(job: str, state: str) -> None:
    """Print `gpt-3f9a2c: FAILED: …`; the state is coloured on a terminal."""
    if not sys.stdout.isatty():
        print_text(f"{job}: {state}")
        return
    from rich.text import Text

    line = Text.assemble(clean(job), ": ", _styled("state", clean(state)))
    # soft_wrap: let the terminal wrap, so that a copied path has no line break.
    _console().print(line, soft_wrap=True)


def print_table(
    title: str,
    columns: Sequence[str | Column],
    rows: Iterable[Sequence[Any]],
    by_first: bool = False,
) -> None:
    """Print a table; `by_first` draws a line where the first column changes."""
    cells = [[clean(str(cell)) for cell in row] for row in rows]
    described = as_columns(columns)
    if not sys.stdout.isatty():
        _print_plain_table(title, [column.name for column in described], cells)
        return
    widths = fitted(described, cells, terminal_width())
    if widths is None:
        _print_blocks(title, described, cells)
    else:
        _print_rich_table(title, described, cells, widths, by_first)


def _print_plain_table(title: str, names: Sequence[str], cells: Sequence[Sequence[str]]) -> None:
    """Print columns for pipes and tests: no frames, no colours, no wrapping."""
    # A cell of several lines would break the columns.
    rows = [names, *([cell.replace("\n", "; ") for cell in row] for row in cells)]
    widths = [max(map(len, column)) for column in zip(*rows)]
    lines = ("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)
    print(clean(title), *lines, sep="\n")


def _print_rich_table(
    title: str,
    columns: Sequence[Column],
    cells: Sequence[Sequence[str]],
    widths: dict[int, int],
    by_first: bool,
) -> None:
    from rich import box
    from rich.table import Table
    from rich.text import Text

    table = Table(
        title=Text(clean(title), style="bold"),
        title_justify="left",
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
    )
    # The first column starts at the left edge, like the title.
    table.pad_edge = False
    for index, width in widths.items():
        column = columns[index]
        table.add_column(
            broken_name(column.name, width),
            width=width,
            style=column.colour,
            overflow="ellipsis" if column.fit == "cut" else "fold",
            no_wrap=column.fit != "wrap",
        )
    for before, row in zip([None, *cells], cells):
        if by_first and before and before[0] != row[0]:
            table.add_section()
        table.add_row(*(_styled(columns[index].name, row[index]) for index in widths))
    _console().print(table)


def _print_blocks(title: str, columns: Sequence[Column], cells: Sequence[Sequence[str]]) -> None:
    """Print each row of a table that is too wide as a block of its own."""
    from rich.table import Table
    from rich.text import Text

    console = _console()
    console.print(Text(clean(title), style="bold"))
    for row in cells:
        console.print()
        console.print(Text(f"{columns[0].name} {row[0]}", style="cyan"), overflow="fold")
        block = Table.grid(padding=(0, 2, 0, 0))
        block.add_column(no_wrap=True)
        block.add_column(overflow="fold")
        for column, cell in list(zip(columns, row))[1:]:
            if cell:
                text = _styled(column.name, cell)
                text.stylize_before(column.colour)
                if column.fit == "cut":
                    text.no_wrap, text.overflow = True, "ellipsis"
                block.add_row(f"  {column.name}", text)
        console.print(block)
