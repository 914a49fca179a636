"""The log lines. Oracles: lines of FleetX's and minGPT's published logs, and the regular expression made from them."""

from __future__ import annotations

import io
import json
import re
from datetime import datetime, timezone

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainer.logline import (
    COMPLETE,
    CONFIG_TITLE,
    PREFIX,
    TRAIN_START,
    Evaluation,
    TrainLine,
    announced_steps,
    epoch_line,
    evaluation_line,
    is_config_title,
    is_mingpt_train_line,
    json_line,
    length_line,
    parse_evaluation_line,
    parse_json_line,
    parse_sample_title,
    parse_train_line,
    prefixed,
    sample_title,
)
from trainer.metrics import Log

PUBLISHED = [
    # FleetX, data parallel on 8 GPUs, 65,536 tokens a step
    "[32m[2022-07-27 13:17:17,469] [    INFO] [0m - global step 1, epoch: 0, batch: 0, loss: 11.266701698, avg_reader_cost: 0.24114 sec, avg_batch_cost: 3.90742 sec, speed: 0.26 step/s, ips_total: 16772 tokens/s, ips: 16772 tokens/s, learning rate: 5.55556e-09 [0m",
    # FleetX, group sharding on 8 GPUs, 2,048 tokens a step; with and without the escape byte
    "[32m[2022-07-27 08:53:13,144] [    INFO] [0m - global step 2, epoch: 0, batch: 1, loss: 11.620714188, avg_reader_cost: 0.00040 sec, avg_batch_cost: 2.10704 sec, speed: 0.47 step/s, ips_total: 972 tokens/s, ips: 121 tokens/s, learning rate: 9.37500e-09 [0m",
    "\x1b[32m[2022-07-27 08:53:13,144] [    INFO] \x1b[0m - global step 2, epoch: 0, batch: 1, loss: 11.620714188, avg_reader_cost: 0.00040 sec, avg_batch_cost: 2.10704 sec, speed: 0.47 step/s, ips_total: 972 tokens/s, ips: 121 tokens/s, learning rate: 9.37500e-09 \x1b[0m",
]
LINE = re.compile(
    r"(\x1b?\[32m)?\[\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3}\] \[    INFO\]( \x1b?\[0m)? - global step \d+, epoch: \d+, batch: \d+, "
    r"loss: \d+\.\d{9}, avg_reader_cost: \d+\.\d{5} sec, avg_batch_cost: \d+\.\d{5} sec, speed: \d+\.\d\d step/s, "
    r"ips_total: \d+ tokens/s, ips: \d+ tokens/s, learning rate: \d\.\d{5}e[-+]\d\d( \x1b?\[0m)?"
)
MOMENT = datetime(2022, 7, 27, 13, 17, 17, 469_000)


@pytest.mark.parametrize("text", PUBLISHED)
def test_the_published_lines_are_read_and_written_again(text: str) -> None:
    assert LINE.fullmatch(text)
    line = parse_train_line(text)
    assert line is not None
    assert str(line) in text


def test_the_fields_of_a_published_line() -> None:
    line = parse_train_line(PUBLISHED[1])
    assert line == TrainLine(2, 0, 1, 11.620714188, 0.0004, 2.10704, 0.47, 972, 121, 9.375e-09)
    assert line.ips_total * line.avg_batch_cost == pytest.approx(2048, rel=1e-3)
    assert line.ips == pytest.approx(line.ips_total / 8, rel=0.01)


@pytest.mark.parametrize("coloured", [False, True])
def test_what_is_written_looks_like_what_was_published(coloured: bool) -> None:
    line = TrainLine(12, 0, 11, 3.25, 1e-4, 0.25, 4.0, 4096, 2048, 5e-5)
    text = prefixed(str(line), "INFO", MOMENT, coloured)
    assert LINE.fullmatch(text)
    assert parse_train_line(text) == line
    assert text.startswith(
        "\x1b[32m[2022-07-27 13:17:17,469] [    INFO] \x1b[0m - "
        if coloured
        else "[2022-07-27 13:17:17,469] [    INFO] - global"
    )


@pytest.mark.parametrize("loss", [float("nan"), float("inf")])
def test_a_bad_loss_is_read_back(loss: float) -> None:
    line = TrainLine(1, 0, 0, loss, 0.0, 1.0, 1.0, 1, 1, 1.0)
    read = parse_train_line(str(line))
    assert read is not None
    assert str(read) == str(line)


@pytest.mark.parametrize(
    "text", ["", "valid step 1, epoch: 0, batch: 9, loss: 1.0, speed: 2.00 step/s", PUBLISHED[0][:120], "global step x"]
)
def test_other_lines_are_none(text: str) -> None:
    assert parse_train_line(text) is None


def test_the_other_lines() -> None:
    assert (
        evaluation_line("valid", 500, 0, 9, 10.5, 2.0)
        == "valid step 500, epoch: 0, batch: 9, loss: 10.500000, speed: 2.00 step/s"
    )
    assert epoch_line(3, 1, 0, "Train", 4.188441) == "[GPU3] Epoch 1 | Iter 0 | Train Loss 4.18844"
    assert length_line(1500, 48, 9) == "Training: 1,500 steps of 48 samples; data: 9 samples"
    assert sample_title("it's\n") == 'Sample text after "it\'s\\n":'
    assert epoch_line(0, 10, 0, "Eval", 1.12) == "[GPU0] Epoch 10 | Iter 0 | Eval Loss 1.12000"


# What is written is recognised. Oracle: the numbers and texts that went in.

COUNTS = st.integers(0, 10**9)
LOSSES = st.floats(0, 1e6) | st.sampled_from([float("inf"), float("nan")])
# As a terminal shows them: `prefixed` adds colours, and a space at the end of the line.
SHOWN = st.sampled_from(["{}", "[2022-07-27 13:17:17,469] [    INFO]  - {} "])


@given(counts=st.tuples(COUNTS, COUNTS, COUNTS), loss=LOSSES, rate=st.floats(0, 1e9), shown=SHOWN)
def test_a_train_line_is_recognised(counts: tuple[int, int, int], loss: float, rate: float, shown: str) -> None:
    line = TrainLine(*counts, loss, rate, rate, rate, rate, rate, rate)
    read = parse_train_line(shown.format(line))
    assert read is not None
    assert read[:3] == counts
    assert str(line).startswith(TRAIN_START)
    assert read[3:] == pytest.approx(line[3:], rel=1e-5, abs=0.5, nan_ok=True)


@given(name=st.sampled_from(["valid", "test"]), step=COUNTS, number=COUNTS, loss=LOSSES, shown=SHOWN)
def test_an_evaluation_line_is_recognised(name: str, step: int, number: int, loss: float, shown: str) -> None:
    read = parse_evaluation_line(shown.format(evaluation_line(name, step, number, number, loss, 2.0)))
    assert read is not None
    assert read == Evaluation(name, step, pytest.approx(loss, abs=1e-6, nan_ok=True))


@given(steps=COUNTS, batch_size=COUNTS, samples=COUNTS, shown=SHOWN)
def test_a_length_line_is_recognised(steps: int, batch_size: int, samples: int, shown: str) -> None:
    assert announced_steps(shown.format(length_line(steps, batch_size, samples))) == steps


@given(prompt=st.text())
def test_a_sample_title_is_recognised(prompt: str) -> None:
    for end in ("", " "):
        assert parse_sample_title(sample_title(prompt) + end) == f"after {prompt!r}:"


@given(text=st.text())
def test_a_json_line_is_recognised(text: str) -> None:
    line = json_line(text, "INFO", 3, MOMENT.replace(tzinfo=timezone.utc), {"step": 5})
    assert parse_json_line(line) == text
    assert json.loads(line)["step"] == 5


@pytest.mark.parametrize("level", ["INFO", "WARNING"])
def test_a_prefix_is_recognised(level: str) -> None:
    """With and without colours, which a terminal view removes before it parses."""
    for coloured in (False, True):
        line = re.sub(r"\x1b\[\d+m", "", prefixed("text", level, MOMENT, coloured))
        found = PREFIX.match(line)
        assert found
        assert (found[1], found[2], line[found.end() :].rstrip()) == ("13:17:17", level, "text")


def test_the_config_title_and_the_lines_of_mingpt_are_recognised() -> None:
    assert is_config_title(CONFIG_TITLE)
    assert is_config_title(f"{CONFIG_TITLE} ")
    assert is_mingpt_train_line(epoch_line(3, 1, 0, "Train", 4.188441))
    assert not is_mingpt_train_line(epoch_line(3, 1, 0, "Eval", 4.188441))


@pytest.mark.parametrize(
    "line",
    [
        *("", "text", "rank 3: text", "{", '{"time": "now"}', '{"time": "now", "message": 5}', '{"time": "now'),
        *(", steps of 1 samples", ",, steps of 1 samples", '{"time": "' + '", "a": [' * 20_000),
        PUBLISHED[0].replace("step 1,", f"step {'9' * 5000},"),
        *("many steps of 48 samples", "valid step x, epoch: 0", "Sample text", "Resolved config: no", COMPLETE),
    ],
)
def test_any_other_line_is_not_recognised(line: str) -> None:
    parsers = (parse_train_line, parse_evaluation_line, announced_steps, parse_sample_title, parse_json_line)
    assert [parse(line) for parse in parsers] == [None] * 5
    assert not is_config_title(line)
    assert not is_mingpt_train_line(line)
    assert not PREFIX.match(line)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_colours_on_a_terminal_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    for stream, coloured in ((Terminal(), True), (io.StringIO(), False)):
        Log("fleetx", 0, stream).info("hello")
        assert ("\x1b[32m" in stream.getvalue()) is coloured
    monkeypatch.setenv("NO_COLOR", "1")
    stream = Terminal()
    Log("fleetx", 0, stream).info("hello")
    assert "\x1b" not in stream.getvalue()


def test_styles() -> None:
    stream = io.StringIO()
    Log("json", 0, stream).info("hello")
    assert json.loads(stream.getvalue())["message"] == "hello"
    stream = io.StringIO()
    Log("mingpt", 0, stream).info("hello")
    Log("fleetx", 1, stream).info("hello")
    assert stream.getvalue() == ""
    Log("fleetx", 1, stream).warn("careful")
    assert stream.getvalue().endswith("[ WARNING] - rank 1: careful\n")
