"""The texts of a followed job: steps in short, the progress bar, the count of ranks, the summary. Pure functions."""

from __future__ import annotations

import io
import json
import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gptctl.logs.condense import LONGEST_RECORD, Condenser, Hidden, Piece, RankDetail, Sample
from gptctl.logs.files import FileFilter, Kind
from gptctl.logs.outcome import Outcome, checkpoint_text, next_commands, outcome_rows
from gptctl.logs.printer import Printer
from gptctl.logs.progress import (
    Position,
    StepHistory,
    duration,
    progress_text,
    seconds_per_step,
    step_text,
)
from gptctl.logs.rank_count import RankCount, RankLines, count_text
from gptctl.logs.stream import Follower, LineFilter
from gptctl.logs.terminal_view import FollowedJob, TerminalView
from tests.unit.test_logs import Job, say_on_stderr
from trainer.logline import Evaluation, TrainLine, announced_steps

STAMP = "[2026-11-16 04:25:43,446] [    INFO] - "
DAY = 86400.0


def train(step: int, cost: float = 0.5, speed: float = 2.0, loss: float = 3.25) -> TrainLine:
    return TrainLine(step, 0, step - 1, loss, 0.1, cost, speed, 12345.0, 3086.0, 2.5e-4)


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [
        *((-5, "0:00"), (0.9, "0:00"), (40, "0:40"), (3599, "59:59"), (3600, "1:00:00"), (DAY - 1, "23:59:59")),
        *((DAY, "1 d 00:00"), (DAY + 3661, "1 d 01:01"), (1000 * DAY, "1,000 d 00:00")),
    ],
)
def test_durations(seconds: float, expected: str) -> None:
    """Oracle: the clock, by hand."""
    assert duration(seconds) == expected


def test_the_time_per_step_is_right_where_the_speed_reads_zero() -> None:
    """Oracle: the batch cost; a line that tells nothing is left out; none at all gives no time."""
    slow = train(1, cost=250.0, speed=0.0)  # 0.004 steps per second, as "%.2f" writes it
    assert seconds_per_step([slow]) == 250.0
    assert seconds_per_step([slow, train(2, cost=0.0, speed=0.0)]) == 250.0
    assert seconds_per_step([train(2, cost=float("nan"), speed=4.0)]) == 0.25
    assert seconds_per_step([train(1, 0.0, 0.0), train(2, float("inf"), float("nan"))]) is None
    assert seconds_per_step([]) is None


BAR = "━" * 20 + "─" * 20


@pytest.mark.parametrize(
    ("at", "width", "expected"),
    [
        (Position(50, 100, 62, 40), 119, f" 50% {BAR} step 50/100  1:02 elapsed  0:40 left"),
        (Position(50, 100, 62, 40), 39, f" 50% {BAR[11:29]} 1:02, 0:40 left"),
        (Position(50, 100, 62, 3 * DAY), 119, f" 50% {BAR} step 50/100  1:02 elapsed  3 d 00:00 left"),
        (Position(50, 100, 62, None), 119, f" 50% {BAR} step 50/100  1:02 elapsed"),
        (Position(50, 100, 62, None), 25, f" 50% {BAR[13:28]} 1:02"),
        (Position(100, 100, 62, 0), 119, f"100% {'━' * 40} step 100/100  1:02 elapsed  finishing"),
        (Position(999, 1000, 62, 1), 119, f" 99% {'━' * 39}─ step 999/1000  1:02 elapsed  0:01 left"),
        (Position(120, 100, 62, 0), 119, f"100% {'━' * 40} step 120/100  1:02 elapsed  finishing"),
        (Position(7, 0, 62, None), 119, "step 7/?  1:02 elapsed"),
        (Position(7, 0, 62, 12.0), 119, "step 7/?  1:02 elapsed"),
    ],
)
def test_the_bar(at: Position, width: int, expected: str) -> None:
    """Oracle: the texts, written out. Without a total there is neither a share nor a time that is left."""
    assert progress_text(at, width) == expected


@given(
    step=st.integers(0, 10**9),
    total=st.integers(0, 10**9),
    elapsed=st.floats(0, 1e9),
    left=st.none() | st.floats(0, 1e12),
    width=st.integers(0, 300),
)
def test_the_bar_fits_every_window(step: int, total: int, elapsed: float, left: float | None, width: int) -> None:
    """Oracle: the width; full only when the training is over."""
    text = progress_text(Position(step, total, elapsed, left), width)
    assert len(text) <= width
    assert "\n" not in text
    assert not text.startswith("100%") or step >= total


def test_a_step_in_short() -> None:
    """Oracle: the numbers of the line."""
    assert step_text(train(5), 1000) == "step     5/1000  loss 3.2500   12,345 tokens/s  lr 2.50e-04"
    assert step_text(train(5, loss=float("nan")), 0).startswith("step  5/?  loss nan  ")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("04:25:43 Training: 1,500 steps of 48 samples; data: 9 samples", 1500),
        ("04:25:43 Training: 1,500 steps of 48 samples; the training data has 9 samples", 1500),
        ("500 steps of 48 samples, 1799942 samples to train on", 500),
        ("it takes many steps of 48 samples", None),
        (", steps of 1 samples", None),
    ],
)
def test_the_number_of_steps_that_the_trainer_announces(text: str, expected: int | None) -> None:
    """Oracle: the number in the line."""
    assert announced_steps(text) == expected


# Condensing


def pieces(lines: list[str], rank: int = 0, kind: Kind = "rank") -> list[Piece]:
    condenser = Condenser(kind, rank)
    found = [piece for line in lines for piece in condenser.feed(line)]
    return [*found, *condenser.close()]


def test_the_config_dump_is_counted() -> None:
    """Oracle: the number of indented lines; the record after it is shown, and an indented line elsewhere, too."""
    dump = [f"{STAMP}Resolved config:", "  Global.device    cpu", "  Engine.x    ", "    deeper"]
    assert pieces([*dump, f"{STAMP}next", "  File x.py"]) == [Hidden(3, "config lines"), "04:25:43 next", "  File x.py"]
    assert pieces(dump) == [Hidden(3, "config lines")]


@pytest.mark.parametrize("stamp", [STAMP, ""])
@pytest.mark.parametrize("head", ["Sample text after 'a':", "A sample, after 'a':"])
def test_the_sample_is_one_piece(stamp: str, head: str) -> None:
    """Oracle: the text, whether the trainer stamps each of its lines or only the first."""
    text = ["  indented   ", "", "global step 5 is text here"]
    lines = [f"{STAMP}{head}", *(f"{stamp}{line}" for line in text), f"{STAMP}The training process is complete."]
    sample = Sample("after 'a':\n\n  indented\n\nglobal step 5 is text here")
    assert pieces(lines) == [sample, "04:25:43 The training process is complete."]
    assert pieces([*lines[:-1], *lines[:-1]]) == [sample, sample]


def test_a_line_of_a_script_that_looks_like_a_sample_holds_nothing_back() -> None:
    """Oracle: every line is a piece of its own, since only the trainer's stamp begins a sample; none is held for ever."""
    lines = ["Sample text after 'a':", "Resolved config:", "  text"]
    assert pieces(lines) == lines
    endless = [f"{STAMP}Sample text after 'a':", *("text" for _ in range(LONGEST_RECORD + 5))]
    assert pieces(endless)[1:] == ["text"] * 5


def test_a_warning_ends_the_sample() -> None:
    """Oracle: what is not of the level INFO is no part of it."""
    warning = STAMP.replace("   INFO", "WARNING") + "w"
    assert pieces([f"{STAMP}Sample text after 'a':", f"{STAMP}text", warning]) == [
        Sample("after 'a':\n\ntext"),
        "04:25:43 WARNING: w",
    ]


def test_the_json_style() -> None:
    """Oracle: the same pieces as in the text style; each record is one line."""

    def record(message: str) -> str:
        return json.dumps({"time": "2026-11-16T04:25:43.000+00:00", "level": "INFO", "rank": 0, "message": message})

    lines = [record("Resolved config:\n  a  1\n  b  2"), record("x"), record(str(train(5))), record("one\ntwo")]
    lines += [record("Sample text after 'a':\nfirst\nsecond"), record("The training process is complete.")]
    half = record("Sample text after 'a':\n\ud800")
    assert pieces([half]) == [Sample("after 'a':\n\n?")]  # half a character cannot be printed
    assert pieces(lines) == [
        *(Hidden(2, "config lines"), lines[1], train(5), lines[3]),
        *(Sample("after 'a':\n\nfirst\nsecond"), lines[5]),
    ]


def test_steps_evaluations_and_what_ranks_tell_of_themselves() -> None:
    """Oracle: the numbers in the lines; a line is a detail only in the log of the rank that it names."""
    valid = f"{STAMP}valid step 250, epoch: 0, batch: 4, loss: 1.944205, speed: 8.24 step/s"
    assert pieces([f"{STAMP}{train(5)}", valid]) == [train(5), Evaluation("valid", 250, 1.944205)]
    assert pieces([f"{STAMP}rank 3: mp 1", f"{STAMP}rank 1: mp 1"], rank=3) == [RankDetail(), "04:25:43 rank 1: mp 1"]
    assert pieces([f"{STAMP}rank 0: mp 1", "rank 0: mp 1"]) == [RankDetail(), "rank 0: mp 1"]
    assert pieces(["rank 3: killed"], rank=3) == ["rank 3: killed"]


FAILED = "torch.distributed.elastic.multiprocessing.errors.ChildFailedError: "
REPORT = [
    *(
        "Traceback (most recent call last):",
        '  File "run.py", line 1',
        "    main()",
        FAILED,
        "=" * 60,
        "rank_log.py FAILED",
    ),
    *("Failures:", "  rank : 2", "-" * 60, "Root Cause (first observed failure):", "=" * 60),
]


def test_the_report_of_torchrun_is_counted() -> None:
    """Oracle: its lines; what a node says before and after it is shown, and any other traceback, too."""
    hidden = Hidden(len(REPORT), "lines of torchrun's report")
    assert pieces(["before", *REPORT, "after"], kind="node") == ["before", hidden, "after"]
    assert pieces([*REPORT, *REPORT], kind="node") == [hidden, hidden]
    other = [*REPORT[:3], "RendezvousTimeoutError", "=" * 60]
    assert pieces(other, kind="node") == other
    assert pieces(REPORT) == REPORT


STOPPED = "torch.distributed.elastic.multiprocessing.api.SignalException: Process 12151 got signal: 15"


def test_the_traceback_of_a_stopped_torchrun_is_counted() -> None:
    """Oracle: its lines, the last of which names the signal; the next line is shown, also if it is indented."""
    traceback = [*REPORT[:3], STOPPED]
    hidden = Hidden(4, "lines of torchrun's report")
    assert pieces(["before", *traceback, "  after"], kind="node") == ["before", hidden, "  after"]
    assert pieces([*traceback, *REPORT], kind="node") == [hidden, Hidden(len(REPORT), hidden.what)]
    assert pieces(traceback) == traceback


LINES = st.sampled_from(
    [
        *(f"{STAMP}Resolved config:", "  key  value", "plain", f"{STAMP}record", f"{STAMP}rank 2: own"),
        *(f"{STAMP}Sample text after 'a':", f"{STAMP}{train(5)}", f"{STAMP}The training process is complete."),
        "valid step 2, epoch: 0, batch: 4, loss: nan, speed: 8.24 step/s",
    ]
)


@given(lines=st.lists(LINES, max_size=30))
def test_every_line_is_shown_or_counted(lines: list[str]) -> None:
    """Oracle: the number of lines that went in."""
    told = 0
    for piece in pieces(lines, rank=2):
        if isinstance(piece, Hidden):
            told += 1 + piece.num_lines  # and its title
        elif isinstance(piece, Sample):
            told += 1 + len(piece.text.splitlines()[2:])  # its title, a blank line that was added, the text
        else:
            told += 1
    assert told == len(lines)


# Ranks


@pytest.mark.parametrize(
    ("count", "world", "logs_steps", "expected"),
    [
        (RankCount(), 4, True, "starting …"),
        (RankCount(0, 2, 2), 4, True, "2 of 4 ranks are up"),
        (RankCount(0, 4, 4), 4, True, "4 of 4 ranks are up; waiting for the first step"),
        (RankCount(0, 4, 4), 4, False, "4 of 4 ranks are up"),
        (RankCount(0, 1, 1), 1, False, "1 of 1 rank is up"),
        (RankCount(0, 4, 0), 4, True, "0 of 4 ranks are up"),
        (RankCount(2, 0, 0), 4, True, "attempt 2: starting …"),
        (RankCount(2, 3, 3), 4, True, "attempt 2: 3 of 4 ranks are up"),
    ],
)
def test_the_count_of_ranks_in_words(count: RankCount, world: int, logs_steps: bool, expected: str) -> None:
    """Oracle: the sentences, written out."""
    assert count_text(count, world, logs_steps) == expected


def write_event(job: Job, event: str, rank: int, attempt: int = 0) -> None:
    folder = job.run_dir / f"attempt-{attempt}"
    folder.mkdir(parents=True, exist_ok=True)
    facts = {"event": event, "rank": rank, "node": 0, "host": "h", "pid": 7, "time": 1.0, "exit": 0}
    with (folder / "ranks.0.jsonl").open("a") as file:
        file.write(json.dumps(facts) + "\n")


def test_ranks_are_told_when_there_are_more(tmp_path: Path) -> None:
    """Oracle: one line per new maximum of an attempt; none while the job is not running, none when ranks end."""
    job, said = Job(tmp_path), []
    ranks = RankLines(job.files, 2, True, said.append)
    ranks.update("PENDING")
    ranks.update("RUNNING")
    for event, rank, attempt in [("start", 0, 0), ("start", 1, 0), ("end", 1, 0), ("start", 0, 1)]:
        write_event(job, event, rank, attempt)
        ranks.update("RUNNING")
        ranks.update("RUNNING")
    waiting = "2 of 2 ranks are up; waiting for the first step"
    assert said == ["starting …", "1 of 2 ranks are up", waiting, "attempt 1: 1 of 2 ranks are up"]


def test_a_late_follower_is_not_told_of_ranks_that_are_up(tmp_path: Path) -> None:
    """Oracle: silence; the job may be days beyond its first step."""
    job, said = Job(tmp_path), []
    for rank in range(2):
        write_event(job, "start", rank)
    RankLines(job.files, 2, True, said.append).update("RUNNING")
    assert said == []


# The view


def outcome(state: str, **facts: object) -> Outcome:
    known = {"reason": "", "failure": "", "seconds": 62.0, "attempts": 1, "total_steps": 500, "final_step": 500}
    return Outcome(job="j-1", state=state, **{**known, "checkpoints": (), "folder": "runs/j-1", **facts})


class Recorder:
    """A screen that keeps what is drawn on it."""

    width = 79

    def __init__(self) -> None:
        self.drawn: list[str] = []

    def draw(self, text: str) -> None:
        self.drawn.append(text)

    def erase(self) -> None:
        pass

    def box(self, title: str, text: str) -> None:
        self.drawn.append(f"{title}: {text}")


class Watch:
    def __init__(self, root: Path, total_steps: int = 100, ended: float = math.inf) -> None:
        self.job, self.out, self.screen = Job(root), io.BytesIO(), Recorder()
        followed = FollowedJob("job-1", 2, total_steps, True, 0.0, ended)
        printer = Printer(self.out, say=say_on_stderr)
        self.view = TerminalView(printer, self.screen, self.job.files, followed, condenses=True)
        self.follower = Follower(self.job.files, FileFilter(all_attempts=True), LineFilter(), self.view)

    def look(self) -> str:
        self.view.update("RUNNING")
        self.follower.tick()
        return self.screen.drawn[-1]

    def lines(self) -> list[str]:
        return self.out.getvalue().decode().splitlines()


def test_ranks_are_named_when_several_log_steps(tmp_path: Path) -> None:
    """Oracle: no prefix while rank 0 is alone."""
    watch = Watch(tmp_path)
    watch.job.add("workerlog.0", f"{STAMP}{train(1)}\n")
    watch.look()
    watch.job.add("workerlog.1", f"{STAMP}{train(1)}\n")
    watch.look()
    text = step_text(train(1), 100)
    assert watch.lines() == [text, f"[rank 1] {text}"]


def test_a_restart_goes_back_to_the_count_of_ranks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Oracle: the bar of attempt 0, then the ranks of attempt 1, then its bar; why there is an attempt 1."""
    watch = Watch(tmp_path)
    write_event(watch.job, "start", 0)
    watch.job.add("workerlog.0", f"{STAMP}{train(50)}\n")
    assert watch.look().startswith(" 50% ")
    write_event(watch.job, "start", 0, attempt=1)
    assert watch.look().startswith("attempt 1: 1 of 2 ranks are up")
    watch.job.add("workerlog.0", f"{STAMP}{train(25)}\n", attempt=1)
    assert watch.look().startswith(" 25% ")
    assert capsys.readouterr().err == "attempt 0: no rank has failed (1 started); attempt 1 starts\n"


def test_the_trainer_knows_its_length_better_than_its_config(tmp_path: Path) -> None:
    """Oracle: the line that announces it; in epoch mode the config does not tell."""
    watch = Watch(tmp_path, total_steps=0)
    watch.job.add("workerlog.0", f"{STAMP}{train(10)}\n")
    assert watch.look().startswith("step 10/?  ")
    watch.job.add("workerlog.0", f"{STAMP}Training: 40 steps of 48 samples\n{STAMP}{train(20)}\n")
    assert watch.look().startswith(" 50% ")


def test_an_evaluation_moves_the_bar(tmp_path: Path) -> None:
    """Oracle: the test at the last step, which is not a multiple of Engine.logging_freq and so has no train line."""
    watch = Watch(tmp_path, total_steps=120)
    watch.job.add("workerlog.0", f"{STAMP}{train(100)}\n")
    assert watch.look().startswith(" 83% ")
    watch.job.add("workerlog.0", f"{STAMP}test step 120, epoch: 0, batch: 4, loss: 1.9, speed: 8.24 step/s\n")
    assert watch.look().startswith("100% ")
    assert watch.look().endswith("finishing")


def test_the_clock_of_a_finished_job_has_stopped(tmp_path: Path) -> None:
    """Oracle: the recorded start (1 s after the epoch) and end; today is fifty years later."""
    watch = Watch(tmp_path, ended=19.0)
    write_event(watch.job, "start", 0)
    watch.job.add("workerlog.0", f"{STAMP}{train(100)}\n")
    assert " 0:18 elapsed " in watch.look()


def test_mingpt_logs_no_steps_to_wait_for(tmp_path: Path) -> None:
    """Oracle: the line is shown as it is, and nothing is waited for."""
    watch = Watch(tmp_path)
    for rank in range(2):
        write_event(watch.job, "start", rank)
    assert watch.look().startswith("2 of 2 ranks are up; waiting for the first step")
    watch.job.add("workerlog.0", "[GPU0] Epoch 1 | Iter 0 | Train Loss 4.18\n")
    watch.look()
    assert watch.look().startswith("2 of 2 ranks are up  ")
    assert watch.lines() == ["[rank 0] [GPU0] Epoch 1 | Iter 0 | Train Loss 4.18"]


NUMBERS = st.one_of(st.integers(0, 10**6), st.integers(), st.floats(), st.just(10**400), st.just("9" * 5000)).map(str)
PARTS = st.lists(st.one_of(NUMBERS, st.text(max_size=9)), min_size=10, max_size=10)


@given(parts=PARTS, cost=NUMBERS)
def test_no_line_stops_the_following(tmp_path_factory: pytest.TempPathFactory, parts: list[str], cost: str) -> None:
    """Oracle: no exception, and something is shown, whatever a script writes where the trainer writes numbers."""
    line = (
        f"global step {parts[0]}, epoch: {parts[1]}, batch: {parts[2]}, loss: {parts[3]}, avg_reader_cost: {parts[4]} sec, "
        f"avg_batch_cost: {cost} sec, speed: {parts[5]} step/s, ips_total: {parts[6]} tokens/s, ips: {parts[7]} tokens/s, "
        f"learning rate: {parts[8]}\n{parts[0]} steps of {parts[1]} samples\nvalid step {parts[0]}, epoch: 0, batch: 0, loss: {parts[9]}, speed: 1 step/s\n"
    )
    watch = Watch(tmp_path_factory.mktemp("any"))
    watch.job.add("workerlog.0", line.encode("utf-8", "replace"))
    watch.look()
    watch.view.close()
    assert watch.lines()
    assert outcome_rows(outcome("COMPLETED"), watch.view.history)


# The summary


def test_the_summary_of_a_training() -> None:
    """Oracle: the last loss, the latest evaluations, the mean rate of the lines that were kept."""
    history = StepHistory()
    for step in range(1, 13):
        history.note(train(step)._replace(ips_total=1000.0 * step, loss=9.0 - step / 4))
    for evaluation in (Evaluation("valid", 6, 8.0), Evaluation("valid", 12, 6.5), Evaluation("test", 12, 6.25)):
        history.note(evaluation)
    rows = dict(outcome_rows(outcome("COMPLETED", checkpoints=(500, 250)), history))
    assert rows == {
        "state": "COMPLETED",
        "loss": "6.0000 (step 12), valid 6.5000, test 6.2500",
        "speed": "7,500 tokens/s (mean of the last 10 log lines)",
        "steps": "500 of 500",
        "duration": "1:02",
        "checkpoints": "step 250, 500",
        "files": "runs/j-1",
        "try next": "gptctl logs j-1 --metrics\ngptctl show j-1\ngptctl rerun j-1 --follow -o Engine.max_steps=1000",
    }


def test_the_summary_of_a_failure_names_who_failed_first() -> None:
    """Oracle: the rows, by hand; what is not known is left out."""
    failed = outcome("FAILED", reason="node 1 exited", failure="attempt 1: rank 2 failed first: SIGKILL", attempts=2)
    rows = dict(outcome_rows(failed, StepHistory()))
    assert list(rows) == ["state", "failure", "duration", "files", "try next"]
    assert rows["state"] == "FAILED: node 1 exited"
    assert rows["duration"] == "1:02 in 2 attempts"
    assert rows["try next"].splitlines()[0] == "gptctl logs j-1 --failed"


def test_a_training_whose_steps_only_evaluations_logged_has_a_summary() -> None:
    """Oracle: the evaluation; there is no train line, so no speed is known."""
    history = StepHistory()
    history.note(Evaluation("test", 20, 6.25))
    rows = dict(outcome_rows(outcome("COMPLETED", total_steps=20, final_step=None), history))
    assert (rows["loss"], rows["steps"], "speed" in rows) == ("test 6.2500", "20 of 20", False)


RESUME, RERUN = "gptctl resume j-1 --follow", "gptctl rerun j-1 --follow"


@pytest.mark.parametrize(
    ("state", "checkpoints", "expected"),
    [
        ("STOPPED", (250,), [RESUME, "gptctl logs j-1", "gptctl show j-1", RERUN]),
        ("CANCELLED", (250,), [RESUME, "gptctl logs j-1", "gptctl show j-1", RERUN]),
        ("TIMEOUT", (), ["gptctl logs j-1", "gptctl show j-1", RERUN]),
        ("FAILED", (250,), ["gptctl logs j-1 --failed", RESUME, "gptctl show j-1", RERUN]),
        ("FAILED", (), ["gptctl logs j-1 --failed", "gptctl show j-1", RERUN]),
    ],
)
def test_a_job_with_checkpoints_can_be_resumed(state: str, checkpoints: tuple[int, ...], expected: list[str]) -> None:
    """Oracle: the commands, by hand."""
    assert next_commands(outcome(state, checkpoints=checkpoints)) == expected


def test_many_checkpoints_are_counted() -> None:
    """Oracle: seven of them."""
    assert checkpoint_text(range(100, 800, 100)) == "7, from step 100 to step 700"
    assert checkpoint_text([]) == ""
