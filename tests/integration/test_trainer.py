"""The trainer as it is started, what it logs and what it refuses. Oracles: published numbers, and what was asked for."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest

from tests.conftest import ROOT
from tests.ranks import Ranks, run, start, tiny
from tests.unit.test_data import write_npz
from tests.unit.test_logline import LINE
from trainer.__main__ import main
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
    assert "Model Size: 0.00 B" in text


def test_metrics_have_every_field(tmp_path: Path) -> None:
    ended = run(tmp_path, *tiny(max_steps=2))
    first = json.loads((tmp_path / "output/metrics.jsonl").read_text().splitlines()[0])
    assert set(first) == {"step", "epoch", "loss", "lr", "grad_norm", "loss_scale", "tokens_per_second", "step_time", "reader_time", "memory", "mfu"}  # fmt: skip
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


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        ({"RANK": "5"}, "RANK=5 and LOCAL_WORLD_SIZE=1 do not fit WORLD_SIZE=1"),
        ({"WORLD_SIZE": "2"}, "WORLD_SIZE=2, but RANK is not set"),
        ({"RANK": "abc"}, "RANK=abc makes no sense"),
    ],
)
def test_half_a_world_is_refused_at_once(tmp_path: Path, environ: dict[str, str], message: str) -> None:
    ended = run(tmp_path, *tiny(), **environ)
    assert ended.codes == [93]
    assert message in ended.err[0]
    assert "Traceback" not in ended.text


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
    assert re.search(r"A sample, after '.+':\n.*\[    INFO\] - ", ended.out[0])


@pytest.mark.long
def test_the_demo_reaches_a_loss_below_two(tmp_path: Path) -> None:
    ended = run(tmp_path, "-c", str(ROOT / "templates/configs/char-gpt.yaml"), world=2, seconds=900)
    assert ended.ok, ended.text
    assert ended.metrics("test_loss")[0] < 2.0
    assert ended.metrics()[-1] < 2.0


def test_json_lines(tmp_path: Path) -> None:
    ended = run(tmp_path, *tiny(**{"Engine.log_style": "json"}))
    records = [json.loads(line) for line in ended.out[0].splitlines()]
    assert [record["step"] for record in records if "step" in record] == list(range(1, 11))


def test_reader_cost_is_the_time_spent_waiting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A dataset that takes 60 ms for a batch, beside a step of a few."""
    read = CharSplit.read

    def slow(*arguments: object) -> object:
        time.sleep(0.06)
        return read(*arguments)  # type: ignore[arg-type]

    fast = train_lines(run(tmp_path / "fast", *tiny()).out[0])
    monkeypatch.setattr(CharSplit, "read", slow)
    slowed = train_lines(run(tmp_path / "slow", *tiny()).out[0])
    assert np.median([line.avg_reader_cost for line in fast]) < 0.01
    assert 0.03 < np.median([line.avg_reader_cost for line in slowed]) < 0.08
    assert all(line.avg_reader_cost <= line.avg_batch_cost for line in slowed)


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


MINGPT = """
data_config: {path: text.txt, block_size: 8, truncate: 0.5, train_split: 0.9}
gpt_config: {n_layer: 2, n_head: 2, n_embd: 16}
trainer_config: {max_epochs: 10, batch_size: 20, data_loader_workers: 4, grad_norm_clip: 1.0, snapshot_path: gpt_snapshot.pt, save_every: 3, use_amp: False}
optimizer_config: {weight_decay: 0.1, learning_rate: 0.003}
"""
ITERATION = r"\[GPU(\d)\] Epoch (\d+) \| Iter (\d+) \| (Train|Eval) Loss (\d\.\d{5})"


@pytest.fixture
def mingpt(tmp_path: Path) -> Path:
    (tmp_path / "gpt.yaml").write_text(MINGPT + "Global: {device: cpu}\n")
    (tmp_path / "text.txt").write_text("the quick brown fox jumps over the lazy dog. " * 20)
    return tmp_path


def test_mingpt_lines_on_four_ranks(mingpt: Path) -> None:
    """450 characters: 442 windows, 397 to train on; batches of 4 · 20: 5 iterations, so only the first is shown."""
    ended = run(mingpt, "-c", "gpt.yaml", "trainer_config.max_epochs=2", world=4)
    assert ended.ok, ended.text
    for rank, text in enumerate(ended.out):
        lines = text.splitlines()
        assert lines[:3] == ["Data has 450 characters, 28 unique.", "number of parameters: 0.01M", "Snapshot not found. Training model from scratch"]  # fmt: skip
        found = re.findall(ITERATION, text)
        assert [line[:4] for line in found] == [
            (str(rank), epoch, "0", kind) for epoch in "12" for kind in ("Train", "Eval")
        ]
        assert 2.9 < float(found[0][4]) < 3.8  # ln(28) = 3.33
        assert float(found[2][4]) < float(found[0][4])
    assert len(ended.metrics()) == 10


def test_snapshots_every_three_epochs(mingpt: Path) -> None:
    """At 3, 6 and 9 of 10, each before that epoch's evaluation; the last state is kept as well."""
    ended = run(mingpt, "-c", "gpt.yaml")
    assert ended.ok, ended.text
    lines = ended.out[0].splitlines()
    saved = [number for number, line in enumerate(lines) if line.startswith("Snapshot saved")]
    assert [lines[number] for number in saved] == [f"Snapshot saved at epoch {epoch}" for epoch in (3, 6, 9)]
    for number, epoch in zip(saved, (3, 6, 9)):
        assert lines[number - 1].startswith(f"[GPU0] Epoch {epoch} | Iter 0 | Train Loss")
        assert lines[number + 1].startswith(f"[GPU0] Epoch {epoch} | Iter 0 | Eval Loss")
    assert lines[-1] == "Save model to gpt_snapshot.pt"
    again = run(mingpt, "-c", "gpt.yaml", "trainer_config.max_epochs=11")
    assert "Resuming training from snapshot at Epoch 10" in again.out[0]
    assert re.findall(ITERATION, again.out[0])[0][1] == "11"


def test_a_snapshot_goes_on_with_another_number_of_ranks(mingpt: Path) -> None:
    """Batches are per rank, so an epoch has other steps: 5 on four ranks, 10 on two. Epoch 4 follows epoch 3."""
    run(mingpt, "-c", "gpt.yaml", "trainer_config.max_epochs=3", world=4)
    rest = run(mingpt, "-c", "gpt.yaml", "trainer_config.max_epochs=4", world=2)
    assert rest.ok, rest.text
    assert "Resuming training from snapshot at Epoch 3" in rest.out[1]
    assert {line[1] for line in re.findall(ITERATION, rest.out[0])} == {"4"}
    assert len(rest.metrics()) == 15 + 10


def test_interrupted_after_six_epochs_it_continues_at_seven(mingpt: Path) -> None:
    whole = run(mingpt, "-c", "gpt.yaml", "Engine.save_load.snapshot_path=whole.pt", "output_dir=whole")
    ranks = start(mingpt, "-c", "gpt.yaml")
    ranks.wait_for("Snapshot saved at epoch 6")
    ranks.kill(signal.SIGKILL)
    ranks.wait()
    rest = run(mingpt, "-c", "gpt.yaml")
    assert rest.ok, rest.text
    assert "Resuming training from snapshot at Epoch 6" in rest.out[0]
    tail = re.findall(ITERATION, whole.out[0])[12:]
    assert re.findall(ITERATION, rest.out[0]) == tail
    assert tail[0][1] == "7"


@pytest.mark.skipif("TINYSHAKESPEARE" not in os.environ, reason="TINYSHAKESPEARE names no copy of tinyshakespeare.txt")
def test_tinyshakespeare_is_counted_as_published(mingpt: Path) -> None:
    keys = [
        f"data_config.path={os.environ['TINYSHAKESPEARE']}",
        "data_config.truncate=0.05",
        "data_config.block_size=128",
    ]
    ended = run(mingpt, "-c", "gpt.yaml", *keys, "trainer_config.max_epochs=1", "Engine.max_steps=1")
    assert ended.out[0].startswith("Data has 55769 characters, 59 unique.\n")


def test_the_resolved_config_is_a_config(tmp_path: Path) -> None:
    """YAML, and the JSON that it resolves to, train alike; `Launch` is not the trainer's."""
    from trainer.__main__ import parse
    from trainer.config import load

    _, words = parse(tiny())
    (tmp_path / "run.json").write_text(load(None, words).as_json())
    (tmp_path / "run.yaml").write_text("Launch: {nodes: 7, nonsense: 1}\n")
    from_json = run(tmp_path / "json", "-c", str(tmp_path / "run.json"))
    from_yaml = run(tmp_path / "yaml", "-c", str(tmp_path / "run.yaml"), *tiny())
    assert from_json.ok, from_json.text
    assert from_json.metrics() == from_yaml.metrics()


def refused(tmp_path: Path) -> Iterator[tuple[list[str], str, str]]:
    """Arguments, and what the message and the hint have to say."""
    data = tmp_path / "data"
    data.mkdir()
    tokens = {"dataset": "GPTDataset", "path": "", "vocab": 100, "input_dir": data}
    yield tiny(**tokens), "holds no token files", "_ids.npz"
    yield tiny(**{**tokens, "input_dir": tmp_path / "none"}), "there is no data at", "input_dir"
    write_npz(tmp_path / "big", [[1, 2, 300] * 20])
    yield (
        tiny(**{**tokens, "input_dir": tmp_path / "big_ids.npz"}),
        "token id 300 is outside of the vocabulary of 100",
        "tokenizer",
    )
    np.savez(tmp_path / "sum_ids.npz", ids=np.arange(90, dtype=np.uint16), lens=np.array([80]))
    yield tiny(**{**tokens, "input_dir": tmp_path / "sum_ids.npz"}), "lens add up to 80, but there are 90 ids", "anew"
    write_npz(tmp_path / "short", [[1, 2, 3]])
    yield (
        tiny(**{**tokens, "input_dir": tmp_path / "short_ids.npz"}),
        "has 3 tokens, one sample needs 17",
        "max_seq_len",
    )
    (tmp_path / "a.txt").write_text("too short")
    yield tiny(path=tmp_path / "a.txt"), "has 9 characters, one sample needs 17", "max_seq_len"
    yield tiny(path=tmp_path / "b.txt"), "cannot be read: No such file", "path"
    yield tiny(path="s3://bucket/text"), "s3://", ""
    yield tiny(device="gpu"), "torch sees no GPU here", "Global.device: cpu"
    yield ["--device", "gpu", *tiny()[1:]], "torch sees no GPU here", "Global.device: cpu"
    yield tiny(vocab=10), "different characters", "empty"
    yield tiny(**{"Distributed.mp_degree": 2, "Distributed.dp_degree": 1}), "L001", "dp_degree"
    yield tiny(layers="many"), "Model.num_layers", ""
    yield ["-c", str(tmp_path / "none.yaml")], "none.yaml", ""
    yield tiny(output_dir=tmp_path / "a.txt"), "is a file", "output_dir"
    yield ["-c"], "-c needs a value", "--help"
    yield ["run.yaml"], "neither a flag nor KEY=VALUE", "--help"
    yield tiny(ckpt_dir=tmp_path / "none"), "holds no checkpoint that can be used", "ckpt_dir"
    yield tiny(output_dir=tmp_path / "a.txt" / "output"), "cannot be written", "output_dir"
    yield tiny(**{"Nonsense.key": 1}), "C010", ""


def test_bad_input_is_one_clear_message(tmp_path: Path) -> None:
    for number, (arguments, message, hint) in enumerate(refused(tmp_path)):
        ended = run(tmp_path / f"case{number}", *arguments)
        assert ended.codes == [93], (message, ended.text)
        assert message in ended.err[0], ended.text
        assert hint in ended.err[0], ended.text
        assert "Traceback" not in ended.text, ended.text


def test_axes_that_are_not_built_yet_say_so(tmp_path: Path) -> None:
    ended = run(tmp_path, *tiny(**{"Distributed.mp_degree": 2}), world=2)
    assert set(ended.codes) <= {93, -9}
    assert "Distributed.mp_degree 2: the trainer cannot do this yet" in ended.err[0]


def test_a_checkpoint_of_another_model_is_refused(tmp_path: Path) -> None:
    run(tmp_path, *tiny(max_steps=2))
    text = tmp_path / "text.txt"
    text.write_text("".join(map(chr, range(40, 136))) * 50)  # as many characters as the demo corpus has, but others
    for change, message in (
        ({"hidden": 64}, "hidden_size 32 there, 64 here"),
        ({"heads": 4}, "num_attention_heads 2 there, 4 here"),
        ({"layers": 3}, "num_layers 2 there, 3 here"),
        ({"path": text}, "its vocabulary has other characters"),
    ):
        ended = run(tmp_path, *tiny(max_steps=4, ckpt_dir="auto", **change))
        assert ended.codes == [93]
        assert f"is a checkpoint of another model: {message}" in ended.err[0]
        assert "Traceback" not in ended.text
    assert run(tmp_path, *tiny(max_steps=4, ckpt_dir="auto")).ok


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "disk"
    folder.mkdir()
    if subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=700k", "tmpfs", str(folder)], capture_output=True
    ).returncode:
        pytest.skip("mounting a tmpfs needs root")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def test_a_full_disk_costs_no_step(tmp_path: Path, small_disk: Path) -> None:
    """Room for one checkpoint: training goes on to the end, the first one stays, and the end says what is missing."""
    ended = run(tmp_path, *tiny(save_steps=4, output_dir=small_disk / "output"))
    assert ended.codes == [93]
    assert [line.step for line in train_lines(ended.out[0])] == list(range(1, 11))
    assert [folder.name for folder in (small_disk / "output").glob("step_*")] == ["step_4"]
    assert re.search(r"checkpoint of step 8 is not saved: .*; those before are kept", ended.out[0])
    assert "error: the last checkpoint could not be saved: " in ended.err[0]
    assert "Traceback" not in ended.text
    subprocess.run(["mount", "-o", "remount,size=20m", str(small_disk)], check=True)
    rest = run(tmp_path, *tiny(output_dir=small_disk / "output", ckpt_dir="auto"))
    assert rest.ok, rest.text
    assert train_lines(rest.out[0])[0].step == 5


def test_a_disk_that_is_full_from_the_start(tmp_path: Path, small_disk: Path) -> None:
    """Not even the lock file can say whose it is: the run trains, and ends with what is missing."""
    (small_disk / "filler").write_bytes(bytes(690 * 1024))
    with contextlib.suppress(OSError), open(small_disk / "more", "wb", buffering=0) as stream:
        while stream.write(bytes(4096)):
            pass
    ended = run(tmp_path, *tiny(max_steps=3, output_dir=small_disk / "output"))
    assert ended.codes == [93]
    assert len(train_lines(ended.out[0])) == 3
    assert "error: the last checkpoint could not be saved" in ended.err[0]
    assert "Traceback" not in ended.text


def test_a_read_only_folder_is_refused_before_training(tmp_path: Path, small_disk: Path) -> None:
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    ended = run(tmp_path, *tiny(output_dir=small_disk / "output"))
    assert ended.codes == [93]
    assert "cannot be written: Read-only file system" in ended.err[0]
    assert "Traceback" not in ended.text


def test_a_read_only_data_folder_is_no_obstacle(tmp_path: Path, small_disk: Path) -> None:
    write_npz(small_disk / "x", [[1, 2, 3] * 100] * 5)
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    ended = run(tmp_path, *tiny(dataset="GPTDataset", path="", vocab=100, input_dir=small_disk, max_steps=3), world=2)
    assert ended.ok, ended.text
    assert "index maps cannot be kept beside the data (Read-only file system)" in ended.out[0]


def test_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    assert "python -m trainer -c run.yaml" in capsys.readouterr().out
