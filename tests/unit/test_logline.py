"""The log lines. Oracles: lines of FleetX's and minGPT's published logs, and the regular expression made from them."""

from __future__ import annotations

import io
import json
import re
from datetime import datetime

import pytest

from trainer.logline import TrainLine, epoch_line, evaluation_line, parse_train_line, prefixed
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
    assert epoch_line(0, 10, 0, "Eval", 1.12) == "[GPU0] Epoch 10 | Iter 0 | Eval Loss 1.12000"


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
