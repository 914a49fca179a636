"""What `gptctl top` draws. Oracles: the size of the window, and the numbers of the made-up jobs."""

from __future__ import annotations

import pytest

from gptctl.cli import chart
from gptctl.cli.styled_lines import cut, padded, sparkline
from gptctl.cli.top_job_view import short_line
from gptctl.cli.top_jobs_view import totals
from gptctl.cli.top_keys import ViewState
from gptctl.cli.top_rank_grid import grid, grouped
from gptctl.cli.top_view import with_valid_scroll
from gptctl.jobs.job_reading import LogLine, RankLog
from gptctl.jobs.top_snapshot import MetricCurve, ShownEvent, TopSnapshot
from tests.top_jobs import NOW, detail, pending, screen, snapshot, summary
from trainer.errors import UserError

SIZES = [(80, 24), (160, 50), (120, 30), (60, 15), (40, 10), (20, 5), (10, 3)]
HOSTILE = "\x1b[2J\x1b]0;title\x07evil\r\nrows\t\u202etxt\u2066 [bold red]markup[/] 你好" * 20
OPEN = ViewState(opened="gpt-3f9a2c", is_single=True)


@pytest.mark.parametrize(("width", "height"), SIZES)
def test_all_jobs_fit_any_window(width: int, height: int) -> None:
    failed = summary("gpt-aaaaaa", "FAILED", reason="rank 3: CUDA out of memory", left=None)
    shown = snapshot(summary(), pending(), failed, summary("训练-123456", cluster="集群"))
    screen(shown, ViewState(), width, height)
    many = snapshot(*(summary(f"gpt-{number:06d}") for number in range(200)))
    lines = screen(many, ViewState(selected="gpt-000150"), width, height)
    if width >= 40:
        assert any("gpt-000150" in line for line in lines), "the selected row is scrolled to"


def test_a_row_has_the_numbers_of_its_job() -> None:
    lines = screen(snapshot(summary(), pending()), ViewState(selected="gpt-77b0d1"))
    assert lines[0].startswith("gptctl top  2 jobs: 1 running, 1 pending")
    assert lines[2].split() == ["gpt-3f9a2c", "RUNNING", "56%", "0:40", "1:30", "17,440", "61%", "2.7881", "█▅▂▁"]
    assert lines[3].split(maxsplit=2) == ["gpt-77b0d1", "PENDING", "Priority, expected to start 2026-11-18 21:20:00"]
    assert "gpt-77b0d1: Priority, expected to start 2026-11-18 21:20:00" in lines
    wide = screen(snapshot(summary()), ViewState(), 160, 50)
    assert all(text in wide[2] for text in ("560/1,000", "1:30", "61%"))


@pytest.mark.parametrize(("width", "height"), SIZES)
@pytest.mark.parametrize("ranks", [1, 2, 16, 1024, 8192])
def test_one_job_fits_any_window(width: int, height: int, ranks: int) -> None:
    shown = summary(world=ranks)
    screen(snapshot(shown, detail=detail(shown, [10.0] * ranks)), OPEN, width, height)


def test_one_job_shows_everything_at_80x24() -> None:
    shown = summary()
    text = "\n".join(screen(snapshot(shown, detail=detail(shown, [10.0] * 15 + [16.0])), OPEN))
    for part in (
        "RUNNING  56%  step 560/1,000  0:40 left  17,440 tokens/s  loss 2.7881", "memory peak 1.2 GB", "goodput 61%", "┤",
        "thousand tokens/s", "16 ranks  median 10.0 ms", "slow: rank 15 on gpu8 16.0 ms (1.60×)", "0 ···············#",
        "event 39", "log of rank 0", "line 59", "q quit",
    ):  # fmt: skip
        assert part in text


@pytest.mark.parametrize(("width", "height"), [(80, 24), (160, 50)])
def test_the_straggler_of_1024_ranks_is_named(width: int, height: int) -> None:
    own_ms = [10.0 + (rank % 7) / 100 for rank in range(1024)]
    own_ms[517] = 18.0
    shown = summary(world=1024, nodes=128)
    lines = screen(snapshot(shown, detail=detail(shown, own_ms)), OPEN, width, height)
    assert any("slow: rank 517 on node 64 18.0 ms (1.79×)" in line for line in lines)
    assert sum(line.count("#") for line in lines if line.lstrip()[:1].isdigit()) == 1, "one cell"
    if width == 80:
        assert any("1,024 ranks, 8 in a cell  median" in line for line in lines), "what does not fit is grouped"


def test_a_group_is_as_slow_as_its_slowest_rank() -> None:
    cells, group = grouped([1.0, 1.0, 1.0, 2.0, 1.0], 1.0, 3)
    assert (cells, group) == ([1.0, 2.0, 1.0], 2)
    assert grouped([0.0, 0.0], 0.0, 10) == ([1.0, 1.0], 1), "no rank measured anything"
    assert ["".join(part.text for part in line) for line in grid([1.0, 1.2, 1.3, 9.0], 1, 80)] == ["0 ·oO#"]


@pytest.mark.parametrize(("width", "height"), SIZES)
def test_hostile_text_cannot_control_the_terminal(width: int, height: int) -> None:
    """`screen` fails if any control character comes through, or any line is too wide."""
    shown = summary(reason=HOSTILE, cluster=HOSTILE)
    events = tuple(ShownEvent(NOW, HOSTILE, True) for _ in range(5))
    log = RankLog(0, tuple(LogLine(HOSTILE, None) for _ in range(5)))
    full = detail(shown, [1.0, 2.0], events=events, log=log)
    everything = snapshot(shown, pending(reason=HOSTILE), detail=full, notes=(HOSTILE,))
    screen(everything, OPEN, width, height)
    screen(everything, ViewState(selected="gpt-3f9a2c"), width, height)


@pytest.mark.parametrize(("width", "height"), SIZES)
def test_jobs_of_which_little_is_known(width: int, height: int) -> None:
    """Pending, or of an older gptctl: no events, no steps, no ranks, no log."""
    nothing = detail(pending(), steps=0, events=(), log=None, memory=None)
    lines = screen(snapshot(pending(), detail=nothing), ViewState(opened="gpt-77b0d1"), width, height)
    if width >= 80:
        assert "no step has been logged yet" in lines
    one = detail(summary(), steps=1, loss=MetricCurve((7,), (3.0,)), tokens_per_second=MetricCurve((), ()))
    screen(snapshot(summary(), detail=one), OPEN, width, height)
    flat = detail(summary(), loss=MetricCurve((1, 2), (1e299, -1e299)), tokens_per_second=MetricCurve((1, 2), (0, 0)))
    screen(snapshot(summary(), detail=flat), OPEN, width, height)


@pytest.mark.parametrize("empty", [None, snapshot(), snapshot(is_past=True)])
def test_before_anything_is_known(empty: TopSnapshot | None) -> None:
    for view in (ViewState(), OPEN, ViewState(shows_help=True), ViewState(is_typing=True, filter="x")):
        screen(empty, view)


def test_without_plotext_curves_are_small(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> None:
        raise UserError("plotext is not installed")

    monkeypatch.setattr(chart, "_plotext", missing)
    shown = summary()
    lines = screen(snapshot(shown, detail=detail(shown, steps=77)), OPEN)
    assert lines[3].startswith("loss     █")


@pytest.mark.parametrize(("width", "height"), SIZES)
def test_the_log_ends_where_the_scroll_says(width: int, height: int) -> None:
    """Scrolled as far as it goes, the first line of the log is the first one shown."""
    shown = summary()
    picture = snapshot(shown, detail=detail(shown, [10.0] * 16))
    look = with_valid_scroll(OPEN._replace(scroll=1000, follows=False), picture, width, height)
    assert with_valid_scroll(look, picture, width, height) == look
    lines = screen(picture, look, width, height)
    titles = [line for line in lines if "log of rank 0" in line]
    if width >= 60 and titles:
        assert f"log of rank 0, {look.scroll} lines further up" in titles[0]
        assert lines[lines.index(titles[0]) + 1].endswith("line 0")
    elif not titles:
        assert (look.scroll, look.follows) == (0, True)


def test_memory_is_named() -> None:
    """The peak of the process and what is in use on its GPU are two numbers."""
    shown = summary()
    lines = screen(snapshot(shown, detail=detail(shown, gpu_memory=4e9)), OPEN, 120)
    assert lines[2].endswith("memory peak 1.2 GB  GPU memory in use 4.0 GB")


def test_questions_and_modes_are_on_the_screen() -> None:
    shown = snapshot(summary(), notes=("gpt-3f9a2c is cancelled",))
    assert screen(shown, ViewState())[-1] == "gpt-3f9a2c is cancelled"
    for width, question in (
        (100, "cancel gpt-3f9a2c? The bundled trainer saves a checkpoint first.  y: cancel it  n: keep it"),
        (80, "cancel gpt-3f9a2c? The bundled trainer saves first.  y: cancel it  n: keep it"),
        (50, "cancel gpt-3f9a2c?  y: cancel it  n: keep it"),
    ):
        assert screen(shown, ViewState(confirming="gpt-3f9a2c"), width)[-1] == question
    assert screen(shown, ViewState(is_typing=True, filter="run"))[-1].startswith("/run")
    assert "paused at" in screen(shown, ViewState(follows=False))[0]
    assert "as of 2026-" in screen(snapshot(summary(), is_past=True), ViewState())[0]
    assert "no job matches the filter" in screen(shown, ViewState(filter="nothing"))[1]


def test_text_is_cut_by_its_width_on_the_screen() -> None:
    assert cut("你好世界", 5) == "你好…"
    assert padded("你好", 6) == "你好  "
    assert padded("7", 3, to_right=True) == "  7"
    assert cut("abc", 3) == "abc"
    assert cut("abc", 0) == ""


def test_sparklines() -> None:
    assert sparkline([]) == ""
    assert sparkline([2.0, 2.0]) == "▁▁"
    assert sparkline([1.0, 8.0]) == "▁█"


def test_log_lines_are_short() -> None:
    prefix = "[2026-11-16 04:25:43,446] [ INFO] -"
    assert short_line(f"{prefix} Save model", 0) == "04:25:43  Save model"
    assert short_line(prefix, 0) == "04:25:43  "
    assert short_line(prefix.replace("INFO", "WARNING") + " x", 0) == "04:25:43  WARNING: x"
    assert short_line("any text", 0) == "any text"


def test_no_state_is_left_out_and_what_runs_comes_first() -> None:
    states = ["COMPLETED"] * 4 + ["CANCELLED", "FAILED", "TIMEOUT", "PENDING", "RUNNING"]
    assert totals([summary(state=state) for state in states]) == (
        "9 jobs: 1 running, 1 pending, 4 completed, 1 cancelled, 1 failed, 1 timeout"
    )


def test_a_short_sparkline_has_the_whole_curve() -> None:
    """A loss that falls all the time never rises in it, whatever the width."""
    job = summary(losses=tuple(5 / (1 + n) for n in range(40)))
    for width in range(90, 130, 5):
        line = next(text for text in screen(snapshot(job), ViewState(), width, 24) if job.job in text)
        curve = [char for char in line if char in "▁▂▃▄▅▆▇█"]
        assert curve == sorted(curve, reverse=True)


def test_tracebacks_keep_their_indentation() -> None:
    assert short_line('    raise ValueError("x")  ', 0) == '    raise ValueError("x")'
