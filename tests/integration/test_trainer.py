"""The trainer as it is started, what it logs and what it refuses. Oracles: published numbers, and what was asked for."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest

from tests.conftest import ROOT
from tests.ranks import Ranks, run, tiny
from tests.unit.test_data import write_npz
from tests.unit.test_logline import LINE
from trainer.__main__ import main
from trainer.banner import model_size
from trainer.config.read import paths_of
from trainer.config.sections import RunConfig
from trainer.data.chars import CharSplit
from trainer.logline import TrainLine, parse_train_line


def train_lines(text: str) -> list[TrainLine]:
    return [line for line in map(parse_train_line, text.splitlines()) if line]


@pytest.mark.parametrize(
    ("decay_steps", "rates"),
    [
        (360000, "5.55556e-09 8.33333e-09 1.11111e-08 1.38889e-08 1.66667e-08 1.94444e-08 2.22222e-08 2.50000e-08 2.77778e-08 3.05556e-08"),
        (320000, "6.25000e-09 9.37500e-09 1.25000e-08 1.56250e-08 1.87500e-08 2.18750e-08 2.50000e-08 2.81250e-08 3.12500e-08 3.43750e-08"),
    ],
)  # fmt: skip
def test_ten_lines_with_the_published_learning_rates(tmp_path: Path, decay_steps: int, rates: str) -> None:
    """Oracles: the rates of FleetX's logs, its line as a regular expression, tokens per step = ips_total · batch cost."""
    ended = run(tmp_path, *tiny(decay_steps=decay_steps, max_lr=1e-5, **{"Optimizer.lr.min_lr": 5e-5}))
    assert ended.ok, ended.text
    written = [line for line in ended.out[0].splitlines() if "global step" in line]
    assert len(written) == 10
    assert all(LINE.fullmatch(line) for line in written)
    assert [line.rsplit(" ", 1)[1] for line in written] == rates.split()
    for number, line in enumerate(train_lines(ended.out[0])):
        assert (line.step, line.epoch, line.batch) == (number + 1, 0, number)
        assert line.ips_total * line.avg_batch_cost == pytest.approx(8 * 16, rel=0.02)
        assert line.speed * line.avg_batch_cost == pytest.approx(1, rel=0.02)
        assert line.ips == pytest.approx(line.ips_total, abs=1)


def test_ips_is_the_rate_of_one_rank(tmp_path: Path) -> None:
    ended = run(tmp_path, *tiny(), world=2)
    assert ended.ok, ended.text
    for line in train_lines(ended.out[0]):
        assert line.ips == pytest.approx(line.ips_total / 2, abs=1)
    assert not train_lines(ended.out[1])
    assert (
        "rank 1: mp 1 × sharding 1 × pp 1 × dp 2 on cpu, groups: mp [1], sharding [1], pp [1], dp [0, 1]"
        in ended.out[1]
    )
    assert "The distributed run, total device num:2, distinct dataflow num:2." in ended.out[0]


def test_everything_comes_when_it_is_due(tmp_path: Path) -> None:
    ended = run(tmp_path, *tiny(logging_freq=3, eval_freq=4, eval_iters=2, save_steps=4, max_steps=10))
    assert ended.ok, ended.text
    text = ended.out[0]
    assert [line.step for line in train_lines(text)] == [3, 6, 9]
    assert re.findall(r"valid step (\d+), epoch: 0, batch: 1, loss: \d+\.\d{6}, speed: \d+\.\d\d step/s", text) == [
        "4",
        "8",
    ]
    assert re.findall(r"test step (\d+), epoch: 0, batch: 19, loss: \d+\.\d{6}, speed", text) == ["10"]
    assert re.findall(r"Save model to output/(step_\d+)", text) == ["step_4", "step_8", "step_10"]
    assert sorted(folder.name for folder in (tmp_path / "output").glob("step_*")) == ["step_10", "step_4", "step_8"]
    assert text.rstrip().endswith("The training process is complete.")
    assert ended.status()["state"] == "finished"
    assert "Model.hidden_size                            32" in text
    assert re.search(r"Model Size: \d\d\.\d\d K \(\d\d,\d{3} parameters\)", text)


def test_the_banner_is_one_record_with_the_config_and_eight_lines(tmp_path: Path) -> None:
    """Oracles: the keys of the sections, one indented line each, and a prefix on every other line."""
    ended = run(tmp_path, *tiny(max_steps=2, save_steps=1000))
    assert ended.ok, ended.text
    lines = ended.out[0].splitlines()
    start = next(number for number, line in enumerate(lines) if line.endswith("[    INFO] - Resolved config:"))
    keys = [line.split()[0] for line in lines[start + 1 :] if line.startswith("  ") and not line.startswith("   ")]
    assert keys == list(paths_of(RunConfig))
    rest = [line for line in lines[start + 1 + len(keys) :] if re.match(r"\[[-\d]{10} [:\d]{8},\d{3}\] \[", line)]
    first_step = next(number for number, line in enumerate(rest) if "global step 1," in line)
    assert first_step <= 8
    assert "Checkpoints: output, every 1,000 steps and at the end" in ended.out[0]


@pytest.mark.parametrize(
    ("parameters", "text"),
    [
        (37_760, "37.76 K (37,760 parameters)"),
        (803_584, "0.80 M (803,584 parameters)"),
        (354_871_296, "354.87 M (354,871,296 parameters)"),
        (1_313_722_368, "1.31 B (1,313,722,368 parameters)"),
    ],
)
def test_a_model_size_reads_well(parameters: int, text: str) -> None:
    """Oracle: `Model Size: 1.31 B` in FleetX's log, and the parameters of 345M and 1.3B by its formula."""
    assert model_size(parameters) == text


def test_metrics_have_every_field(tmp_path: Path) -> None:
    ended = run(tmp_path, *tiny(max_steps=2))
    first = json.loads((tmp_path / "output/metrics.jsonl").read_text().splitlines()[0])
    assert set(first) == {"step", "max_steps", "epoch", "loss", "lr", "grad_norm", "loss_scale", "tokens_per_second", "step_time", "reader_time", "memory", "mfu", "time", "clock", "samples", "tokens", "compute_time", "wait_time", "optimizer_time"}  # fmt: skip
    parts = ("reader_time", "compute_time", "wait_time", "optimizer_time")
    assert sum(first[part] for part in parts) == pytest.approx(first["step_time"], abs=1e-5)
    assert (first["samples"], first["tokens"]) == (8, 8 * 16)
    assert 0 < first["mfu"] < 1.5
    assert first["memory"] > 1 << 26
    assert f"loss: {first['loss']:.9f}" in ended.out[0]


def test_check_accuracy_neither_evaluates_nor_saves(tmp_path: Path) -> None:
    keys = {"Engine.check_accuracy": True, "eval_freq": 2, "eval_iters": 2, "save_steps": 2, "dropout": 0.5}
    ended, plain = run(tmp_path / "check", *tiny(**keys)), run(tmp_path / "plain", *tiny())
    assert ended.ok, ended.text
    assert "valid step" not in ended.out[0]
    assert "Save model" not in ended.out[0]
    assert ended.metrics() == plain.metrics()


def test_evaluation_drops_nothing_and_training_goes_on_dropping(tmp_path: Path) -> None:
    """Rates so small that the weights do not change: evaluation sees the initial ones, whatever the dropout."""
    keys = {"max_lr": 1e-12, "eval_freq": 5, "eval_iters": 2, "Optimizer.lr.min_lr": 0}
    plain = run(tmp_path / "plain", *tiny(**keys))
    dropping = run(tmp_path / "dropping", *tiny(dropout=0.5, attention_dropout=0.5, **keys))
    assert dropping.metrics("valid_loss") == pytest.approx(plain.metrics("valid_loss"), abs=1e-5)
    assert (
        plain.metrics("valid_loss")[0] != plain.metrics("valid_loss")[1]
    )  # the second one goes on where the first ended
    differences = [abs(a - b) for a, b in zip(dropping.metrics(), plain.metrics())]
    assert min(differences) > 1e-4  # after the evaluation too
    assert len({round(value, 9) for value in differences}) == 10  # and each step drops something else


def test_padding_rows_take_no_part_in_the_loss(tmp_path: Path) -> None:
    """96 characters padded to 96, 128 or 512 rows: the first loss is near ln(96) = 4.56, not near ln(512) = 6.24."""
    losses = [
        run(tmp_path / str(unit), *tiny(**{"Model.vocab_size_divisible_unit": unit})).metrics()
        for unit in (1, 128, 512)
    ]
    for padded in losses[1:]:
        assert padded[0] == pytest.approx(losses[0][0], abs=0.1)  # other rows, other random numbers: only nearly
        assert abs(padded[0] - np.log(96)) < 0.2


def test_no_evaluation_in_epoch_mode_either(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("abcdefgh" * 20)
    keys = {
        "path": tmp_path / "text.txt",
        "Engine.run_mode": "epoch",
        "Engine.num_train_epochs": 2,
        "eval_iters": 1,
        "max_steps": 0,
    }
    with_it = run(tmp_path / "with", *tiny(eval_freq=1, **keys))
    without = run(tmp_path / "without", *tiny(eval_freq=0, **keys))
    assert with_it.out[0].count("valid step") == 2
    assert "valid step" not in without.out[0]
    assert "test step" in with_it.out[0]


def test_the_report_of_validate_is_a_config(
    tmp_path: Path, gptctl: Callable[..., subprocess.CompletedProcess[str]]
) -> None:
    (tmp_path / "run.yaml").write_text("Global: {device: cpu}\n")
    words = [word for key in tiny() for word in ("-o", key)]
    report = gptctl("validate", "run.yaml", "--gpus-per-node", "1", "--resolved", "--json", *words)
    assert report.returncode == 0, report.stderr
    (tmp_path / "report.json").write_text(report.stdout)
    ended = run(tmp_path / "run", "-c", str(tmp_path / "report.json"))
    assert ended.ok, ended.text


def test_rewritten_data_is_read_as_it_is_now(tmp_path: Path) -> None:
    """As many tokens and documents as before, but of other lengths: the kept index maps do not fit any more."""
    keys = {"dataset": "GPTDataset", "path": "", "vocab": 100, "input_dir": tmp_path / "x_ids.npz", "max_steps": 3}
    tokens = [n % 90 for n in range(5000)]
    write_npz(tmp_path / "x", [tokens[n : n + 100] for n in range(0, 5000, 100)])
    assert run(tmp_path / "a", *tiny(**keys)).ok
    write_npz(tmp_path / "x", [[token] for token in tokens[:49]] + [tokens[49:]])
    again = run(tmp_path / "b", *tiny(**keys))
    assert again.ok, again.text


def test_logs_that_cannot_be_written_do_not_end_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Standard output closed, full, or of a terminal that knows ASCII only."""
    for number, change in enumerate(("os.close(1); sys.stdout = None", "os.dup2(os.open('/dev/full', 1), 1)", "sys.stdout.reconfigure(encoding='ascii')")):  # fmt: skip

        def entry(arguments: Sequence[str], change: str = change) -> int:
            exec(change, {"os": os, "sys": sys})
            return main(arguments)

        folder = tmp_path / str(number)
        folder.mkdir()
        ended = Ranks(tiny(max_steps=2), 1, folder, {}, entry).wait()
        assert ended.ok, ended.text
        assert len(ended.metrics()) == 2


def test_the_demo_learns_and_writes(tmp_path: Path) -> None:
    """The same model for a tenth of the time: from about ln(96) = 4.6 down, and a sample of text at the end."""
    config = str(ROOT / "templates/configs/char-gpt.yaml")
    ended = run(tmp_path, "-c", config, "Engine.max_steps=60", "Engine.logging_freq=1", "Engine.test_iters=2")
    assert ended.ok, ended.text
    losses = ended.metrics()
    assert 4.3 < losses[0] < 4.9
    assert losses[-1] < 3.2
    assert re.search(r"Sample text after '.+':\n.*\[    INFO\] - ", ended.out[0])


@pytest.mark.long
def test_the_demo_reaches_a_loss_below_two(tmp_path: Path) -> None:
    """Four ranks, as `make demo` starts them."""
    ended = run(tmp_path, "-c", str(ROOT / "templates/configs/char-gpt.yaml"), world=4, seconds=900)
    assert ended.ok, ended.text
    assert ended.metrics("test_loss")[0] < 2.0
    assert ended.metrics()[-1] < 2.0


def test_json_lines(tmp_path: Path) -> None:
    ended = run(tmp_path, *tiny(**{"Engine.log_style": "json"}))
    records = [json.loads(line) for line in ended.out[0].splitlines()]
    assert [record["step"] for record in records if "step" in record] == list(range(1, 11))


def test_reader_cost_is_the_time_spent_waiting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A dataset that takes 60 ms or more for a batch, and notes how long: on a busy machine, sleeping takes longer."""
    read, notes = CharSplit.read, tmp_path / "notes"

    def slow(*arguments: object) -> object:
        begin = time.perf_counter()
        time.sleep(0.06)
        found = read(*arguments)  # type: ignore[arg-type]
        with notes.open("a") as file:
            print(time.perf_counter() - begin, file=file)
        return found

    on_demand = tiny(**{"Data.Train.loader.num_workers": 0})
    fast = train_lines(run(tmp_path / "fast", *on_demand).out[0])
    monkeypatch.setattr(CharSplit, "read", slow)
    slowed = train_lines(run(tmp_path / "slow", *on_demand).out[0])
    noted = [float(line) for line in notes.read_text().splitlines()]
    assert len(noted) == len(slowed) == len(fast) == 10
    # The rest of a step is neither reading nor nothing.
    assert np.median([line.avg_reader_cost / line.avg_batch_cost for line in fast]) < 0.5
    assert all(line.avg_reader_cost < line.avg_batch_cost for line in slowed)
    waited = np.array([line.avg_reader_cost for line in slowed])
    assert all(waited > np.array(noted) - 1e-4)
    assert np.median(waited / noted) < 1.3


PADDLENLP = """--model_type gpt --model_name_or_path gpt-nano --input_dir ./data --output_dir out/task --max_seq_len 32
--micro_batch_size 2 --global_batch_size 4 --sharding_degree 1 --mp_degree 1 --dp_degree 1 --pp_degree 1
--use_sharding false --use_amp false --use_recompute true --max_lr 0.00015 --min_lr 0.00001 --max_steps 20
--save_steps 10 --decay_steps 320000 --weight_decay 0.01 --warmup_rate 0.01 --grad_clip 1.0 --logging_freq 1
--eval_freq 10 --device cpu""".split()


def test_the_flags_of_paddlenlp(tmp_path: Path) -> None:
    """All 25 of them, on token files of its format."""
    source = np.random.RandomState(0)
    (tmp_path / "data").mkdir()
    documents = [source.randint(0, 50257, source.randint(20, 60)).tolist() for _ in range(200)]
    write_npz(tmp_path / "data" / "train.data.json", documents)
    ended = run(tmp_path, *PADDLENLP)
    assert ended.ok, ended.text
    lines = train_lines(ended.out[0])
    assert [line.step for line in lines] == list(range(1, 21))
    assert abs(lines[0].loss - np.log(50257)) < 0.5
    assert "valid step 10" in ended.out[0]
    assert (tmp_path / "out/task/step_20/manifest.json").exists()
    again = run(tmp_path, *[word.replace("gpt-nano", "out/task/step_20") for word in PADDLENLP if word], "Model.name=gpt-nano", "output_dir=out/next", "max_steps=22")  # fmt: skip
    assert again.ok, again.text
    assert [line.step for line in train_lines(again.out[0])] == [21, 22]


def test_the_resolved_config_is_a_config(tmp_path: Path) -> None:
    """YAML, and the JSON that it resolves to, train alike; `Launch` is not the trainer's."""
    from trainer.config import load
    from trainer.config.flags import parse_arguments

    _, words = parse_arguments(tiny())
    (tmp_path / "run.json").write_text(load(None, words).as_json())
    (tmp_path / "run.yaml").write_text("Launch: {nodes: 7, nonsense: 1}\n")
    from_json = run(tmp_path / "json", "-c", str(tmp_path / "run.json"))
    from_yaml = run(tmp_path / "yaml", "-c", str(tmp_path / "run.yaml"), *tiny())
    assert from_json.ok, from_json.text
    assert from_json.metrics() == from_yaml.metrics()


def test_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    assert "python -m trainer -c run.yaml" in capsys.readouterr().out
