"""Going on after a stop, wanted or not. Oracle: the run that was never interrupted, bit for bit."""

from __future__ import annotations

import json
import os
import random
import signal
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

import trainer.train
from gptctl.jobs.run_metrics import file_rows
from tests.ranks import Ranks, fork, run, start, tiny
from tests.unit.test_data import write_npz
from trainer.__main__ import main
from trainer.checkpoint import Checkpoints, verification
from trainer.checkpoint.loading import load_pieces
from trainer.checkpoint.manifest import read_manifest
from trainer.checkpoint.store import Store
from trainer.checkpoint_names import is_verified
from trainer.layout import Layout
from trainer.mesh import Mesh
from trainer.slices import shapes, whole

DROPOUT = {"dropout": 0.1, "attention_dropout": 0.1, "micro_batch": 2}


def tensors_of(folder: Path) -> dict[str, Tensor]:
    manifest = read_manifest(folder)
    tensors = {name: torch.zeros(facts["shape"]) for name, facts in manifest["tensors"].items()}
    load_pieces(folder, manifest, whole(tensors), shapes(tensors))
    return tensors


def assert_equal(one: Path, other: Path) -> None:
    """Weights and moments, bit for bit."""
    here, there = tensors_of(one), tensors_of(other)
    assert here.keys() == there.keys()
    assert all(torch.equal(here[name], there[name]) for name in here)


@pytest.mark.parametrize("world", [1, 2])
def test_ten_and_ten_are_twenty(tmp_path: Path, world: int) -> None:
    """With dropout on, and with accumulation."""
    whole = run(tmp_path / "whole", *tiny(max_steps=20, **DROPOUT), world=world)
    half = run(tmp_path / "half", *tiny(max_steps=10, **DROPOUT), world=world)
    rest = run(tmp_path / "half", *tiny(max_steps=20, ckpt_dir="auto", **DROPOUT), world=world)
    assert whole.ok, whole.text
    assert half.ok, half.text
    assert rest.ok, rest.text
    assert rest.metrics() == whole.metrics()
    assert rest.metrics("grad_norm") == whole.metrics("grad_norm")
    assert rest.metrics("lr") == whole.metrics("lr")
    assert_equal(rest.folder / "output" / "step_20", whole.folder / "output" / "step_20")
    assert "Try to load checkpoint from output/step_10" in rest.out[0]
    assert "successfully load checkpoints" in rest.out[0]


def test_dropout_does_not_depend_on_the_number_of_ranks(tmp_path: Path) -> None:
    """Its seed is a function of the step and the micro-batch, so dp2 drops what one process drops."""
    alone = run(tmp_path / "one", *tiny(**DROPOUT))
    two = run(tmp_path / "two", *tiny(**DROPOUT), world=2)
    without = run(tmp_path / "without", *tiny())
    differences = [abs(a - b) for a, b in zip(alone.metrics(), two.metrics())]
    assert max(differences) <= 5e-6
    assert max(abs(a - b) for a, b in zip(alone.metrics(), without.metrics())) > 1e-3


def test_a_checkpoint_of_two_ranks_goes_on_with_one(tmp_path: Path) -> None:
    whole = run(tmp_path / "whole", *tiny(max_steps=20))
    run(tmp_path / "part", *tiny(max_steps=10), world=2)
    rest = run(tmp_path / "part", *tiny(max_steps=20, ckpt_dir="auto"))
    assert rest.ok, rest.text
    assert max(abs(a - b) for a, b in zip(rest.metrics(), whole.metrics())) <= 5e-6


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
@pytest.mark.parametrize("world", [1, 2])
def test_a_signal_saves_and_stops(tmp_path: Path, number: int, world: int) -> None:
    """One rank hears it, several times; all of them stop at the same step, and the next run goes on from there."""
    ranks = start(tmp_path, *tiny(max_steps=100_000, ckpt_dir="auto"), world=world)
    ranks.wait_for("global step 3,")
    for _ in range(3):
        ranks.kill(number, rank=world - 1)
    ended = ranks.wait()
    assert ended.ok, ended.text
    status = ended.status()
    assert status["state"] == "stopped"
    assert status["step"] >= 3
    assert Store(tmp_path / "output").checkpoints()[0].name == f"step_{status['step']}"
    assert "No checkpoint in" in ended.out[0]
    stopped = f"Stopped on request at global step {status['step']}. To resume: set Engine.save_load.ckpt_dir: auto."
    assert stopped in ended.out[0]
    rest = run(tmp_path, *tiny(max_steps=status["step"] + 2, ckpt_dir="auto"), world=world)
    assert rest.ok, rest.text
    assert rest.metrics("step") == list(range(1, status["step"] + 3))
    assert rest.metrics("resumed_from") == [status["step"]]
    assert rest.status()["state"] == "finished"


def stopped_while_it_prepares(arguments: Sequence[str]) -> int:
    def prepare_and_stop(*needed):
        os.kill(os.getpid(), signal.SIGTERM)
        return prepare(*needed)

    prepare, trainer.train.prepare = trainer.train.prepare, prepare_and_stop
    return main(arguments)


def test_a_stop_before_the_first_step_saves_nothing_and_says_so(tmp_path: Path) -> None:
    """Not even step 0: a checkpoint would look like progress. The next run starts at the same step."""
    ended = Ranks(tiny(max_steps=10), 1, tmp_path, {}, stopped_while_it_prepares).wait()
    assert ended.ok, ended.text
    assert ended.status()["state"] == "stopped"
    assert "Stopped on request before global step 1: there was nothing to save." in ended.out[0]
    assert Store(tmp_path / "output").checkpoints() == []
    rest = run(tmp_path, *tiny(max_steps=10))
    assert rest.ok, rest.text
    assert rest.status()["state"] == "finished"


@pytest.mark.parametrize("world", [1, 2])
def test_a_killed_run_goes_on(tmp_path: Path, world: int) -> None:
    """SIGKILL at random moments of whole runs, until 40 steps are done: the losses are those of one run."""
    whole = run(tmp_path / "whole", *tiny(max_steps=40, save_steps=2, **DROPOUT), world=world)
    source, folder = random.Random(world), tmp_path / "killed"
    for attempt in range(4):
        ranks = start(folder, *tiny(max_steps=40, save_steps=2, ckpt_dir="auto", **DROPOUT), world=world)
        if attempt < 3:
            ranks.wait_for("global step")
            time.sleep(source.uniform(0, 0.3))
            ranks.kill(signal.SIGKILL)
        ended = ranks.wait()
    assert ended.ok, ended.text
    # Every step once, whatever the attempts before have recorded: in the file, and in what gptctl reads.
    assert ended.metrics("step") == list(range(1, 41))
    assert ended.metrics() == whole.metrics()
    rows = file_rows(folder / "output/metrics.jsonl")
    assert [(row["step"], row["loss"]) for row in rows] == list(enumerate(whole.metrics(), start=1))


MESH = Mesh(Layout(), 0, 0, torch.device("cpu"))


def state(step: int) -> dict[str, Tensor]:
    source = torch.Generator().manual_seed(step)
    return {f"model.{n}": torch.randn(64, 64, generator=source) for n in range(8)}


def save_loop(folder: Path, first: int) -> int:
    """Saves one step after another until it is killed, and says what it has begun and what is done."""
    checkpoints = Checkpoints(folder, 3, MESH, lambda text: None, lambda text: None)
    checkpoints.open()
    for step in range(first, first + 10_000):
        os.write(1, f"begun {step}\n".encode())
        checkpoints.save(step, whole(state(step)), {"step": step})
        checkpoints.wait()
        os.write(1, f"done {step}\n".encode())
    return 0


def kill_many(tmp_path: Path, kills: int) -> None:
    source, first = random.Random(0), 1
    log, folder = tmp_path / "log", tmp_path / "output"
    for _ in range(kills):
        pid = fork(partial(save_loop, folder, first), tmp_path, {}, log, tmp_path / "err")
        while "begun" not in log.read_text():
            time.sleep(0.001)
        time.sleep(source.uniform(0, 0.08))
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        words = [line.split() for line in log.read_text().splitlines()]
        begun = max(int(step) for word, step in words if word == "begun")
        done = max((int(step) for word, step in words if word == "done"), default=first - 1)
        checkpoints = Checkpoints(folder, 3, MESH, lambda text: None, lambda text: None)
        found = checkpoints.find("auto")
        newest = int(found.name.removeprefix("step_")) if found else 0
        assert done <= newest <= begun <= newest + 1
        if found:
            tensors = {name: torch.zeros_like(tensor) for name, tensor in state(0).items()}
            checkpoints.load(found, whole(tensors), shapes(tensors), lambda facts, folder: None)
            assert all(torch.equal(tensors[name], right) for name, right in state(newest).items())
        first = newest + 1
    assert first > kills / 10  # saves did succeed in between, also on a busy machine


def test_twenty_kills_in_a_save_loop(tmp_path: Path) -> None:
    kill_many(tmp_path, 20)


@pytest.mark.long
def test_two_hundred_kills_in_a_save_loop(tmp_path: Path) -> None:
    kill_many(tmp_path, 200)


@pytest.mark.parametrize(
    ("layout", "world"), [("Distributed.dp_degree=1", 1), ("Distributed.sharding.sharding_degree=2", 2)]
)
def test_a_damaged_newest_checkpoint_is_left_for_the_one_before(tmp_path: Path, layout: str, world: int) -> None:
    """With sharding, only one rank reads the damaged block: all of them fall back."""
    whole = run(tmp_path / "whole", *tiny(max_steps=20, save_steps=5), layout, world=world)
    part = run(tmp_path / "part", *tiny(max_steps=10, save_steps=5), layout, world=world)
    assert part.ok, part.text
    shard = tmp_path / f"part/output/step_10/rank_{world - 1}.safetensors"
    content = bytearray(shard.read_bytes())
    content[len(content) // 2] ^= 1
    shard.write_bytes(content)
    rest = run(tmp_path / "part", *tiny(max_steps=20, save_steps=5, ckpt_dir="auto"), layout, world=world)
    assert rest.ok, rest.text
    assert f"cannot use output/step_10: rank_{world - 1}.safetensors is damaged: wrong checksum" in rest.out[0]
    assert (
        "output/step_10 is newer than the checkpoint that this run resumed from: renamed to step_10.aside1"
        in rest.out[0]
    )
    assert_equal(rest.folder / "output/step_20", whole.folder / "output/step_20")


def test_all_ranks_verify_what_they_wrote_and_old_checkpoints_are_deleted(tmp_path: Path) -> None:
    """Two ranks, five saves. A busy machine may skip verifications, but never keeps more than two verified checkpoints."""
    ended = run(tmp_path, *tiny(max_steps=10, save_steps=2, keep_last=2), world=2)
    assert ended.ok, ended.text
    left = Store(tmp_path / "output").checkpoints()
    assert left[0].name == "step_10"
    assert all((left[0] / f"rank_{rank}.safetensors.verified").exists() for rank in (0, 1))
    assert sum(map(is_verified, left)) <= 2


def slow_disk_of_the_last_rank(arguments: Sequence[str]) -> int:
    """It reads back its first file only when the fourth checkpoint is there."""
    drop = verification.drop_from_cache

    def wait_and_drop(file: Path) -> None:
        while file.parent.name == "step_2" and not Path("output/step_8").exists():
            time.sleep(0.01)
        drop(file)

    if os.environ["RANK"] == "1":
        verification.drop_from_cache = wait_and_drop
    return main(arguments)


def test_all_ranks_verify_the_same_checkpoints(tmp_path: Path) -> None:
    """All skip those for which one of them has no time: a checkpoint counts only if all its files are verified."""
    ended = Ranks(tiny(max_steps=12, save_steps=2), 2, tmp_path, {}, slow_disk_of_the_last_rank).wait()
    assert ended.ok, ended.text
    verified = [len(list((tmp_path / f"output/step_{step}").glob("*.verified"))) for step in range(2, 13, 2)]
    assert [verified[0], *verified[1:4], verified[5]] == [2, 0, 0, 0, 2]
    assert verified[4] in (0, 2)


def restarted_on_the_last_rank(arguments: Sequence[str]) -> int:
    """Only the agent whose rank has failed counts the restart."""
    os.environ["TORCHELASTIC_RESTART_COUNT"] = "1" if os.environ.get("RANK", "0") == "1" else "0"
    return main(arguments)


def test_a_restart_by_torchrun_goes_on_by_itself(tmp_path: Path) -> None:
    """No ckpt_dir is written; the variable that torchrun sets for a second attempt is enough, on any of the ranks."""
    run(tmp_path, *tiny(max_steps=5), world=2)
    rest = Ranks(tiny(max_steps=8), 2, tmp_path, {}, restarted_on_the_last_rank).wait()
    assert rest.ok, rest.text
    assert "Try to load checkpoint from output/step_5" in rest.out[0]


def test_a_restart_before_the_first_save_begins_where_the_first_attempt_began(tmp_path: Path) -> None:
    run(tmp_path / "old", *tiny(max_steps=5))
    keys = {"ckpt_dir": tmp_path / "old/output", "max_steps": 7}
    rest = run(tmp_path / "new", *tiny(**keys), TORCHELASTIC_RESTART_COUNT="1")
    assert rest.ok, rest.text
    assert rest.metrics("step") == [6, 7]


HALF = {"Engine.mix_precision.enable": True, "max_lr": 1e-2}


@pytest.mark.parametrize(
    "precision",
    [
        {"Engine.mix_precision.level": "O2", "Engine.mix_precision.dtype": "bfloat16"},
        {"Engine.mix_precision.scale_loss": 2.0**26},  # the first updates overflow: the scale has to be taken over
    ],
)
def test_ten_and_ten_are_twenty_in_half_precision(tmp_path: Path, precision: dict[str, object]) -> None:
    keys = {**HALF, **precision}
    whole = run(tmp_path / "whole", *tiny(max_steps=20, **keys))
    run(tmp_path / "half", *tiny(max_steps=10, **keys))
    rest = run(tmp_path / "half", *tiny(max_steps=20, ckpt_dir="auto", **keys))
    assert rest.ok, rest.text
    assert rest.metrics() == whole.metrics()
    assert rest.metrics("loss_scale") == whole.metrics("loss_scale")
    if "Engine.mix_precision.scale_loss" in precision:
        assert None in whole.metrics("grad_norm")[:10]


def test_another_precision_resumed_as_float16_starts_with_the_configured_scale(tmp_path: Path) -> None:
    """fp32 has no loss scale: its 1.0 must not be taken over. Oracle: the key. From float16 it is taken over, as above."""
    run(tmp_path, *tiny(max_steps=2))
    keys = {**HALF, "Engine.mix_precision.scale_loss": 1024.0, "max_steps": 4, "ckpt_dir": "auto"}
    rest = run(tmp_path, *tiny(**keys))
    assert rest.ok, rest.text
    assert rest.metrics("loss_scale") == [1.0, 1.0, 1024.0, 1024.0]


def test_token_files_go_on_where_they_stopped(tmp_path: Path) -> None:
    """Three epochs of a small corpus, stopped by a signal somewhere in the middle."""
    source = np.random.RandomState(0)
    documents = [source.randint(0, 90, source.randint(3, 60)).tolist() for _ in range(60)]
    write_npz(tmp_path / "x", documents)
    keys = {"dataset": "GPTDataset", "path": "", "vocab": 90, "input_dir": tmp_path / "x_ids.npz", "max_steps": 40}
    whole = run(tmp_path / "whole", *tiny(**keys))
    assert whole.ok, whole.text
    ranks = start(tmp_path / "part", *tiny(**keys))
    ranks.wait_for("global step 7,")
    ranks.kill(signal.SIGTERM)
    ranks.wait()
    rest = run(tmp_path / "part", *tiny(ckpt_dir="auto", **keys))
    assert rest.ok, rest.text
    assert rest.metrics() == whole.metrics()


def test_another_order_of_the_data_is_said(tmp_path: Path) -> None:
    run(tmp_path, *tiny(max_steps=2))
    rest = run(tmp_path, *tiny(max_steps=4, seed=7, ckpt_dir="auto"))
    assert rest.ok, rest.text
    assert "the order of samples changes" in rest.out[0]


def test_comparing_layouts_touches_no_checkpoint(tmp_path: Path) -> None:
    """check_accuracy saves nothing, not even when it is stopped, and does not share a folder with a run."""
    ranks = start(tmp_path, *tiny(max_steps=100_000, **{"Engine.check_accuracy": True}))
    ranks.wait_for("global step 3,")
    ranks.kill(signal.SIGTERM)
    assert ranks.wait().ok
    assert not list((tmp_path / "output").glob("step*"))
    run(tmp_path, *tiny(max_steps=2))
    again = run(tmp_path, *tiny(**{"Engine.check_accuracy": True}))
    assert again.codes == [93]


def test_a_stop_does_not_wait_for_an_evaluation(tmp_path: Path) -> None:
    ranks = start(tmp_path, *tiny(eval_freq=5, eval_iters=1_000_000), world=2)
    ranks.wait_for("global step 5,")
    time.sleep(0.3)
    ranks.kill(signal.SIGTERM, rank=1)
    ended = ranks.wait(20)
    assert ended.ok, ended.text
    assert ended.status()["state"] == "stopped"
    assert ended.status()["step"] == 5


def test_how_a_run_ended_is_in_its_status(tmp_path: Path) -> None:
    """Interrupted: failed, with the reason. Refused: the word of the run before stays."""
    ranks = start(tmp_path, *tiny(max_steps=100_000))
    ranks.wait_for("global step 3,")
    assert json.loads((tmp_path / "output/status.json").read_text())["state"] == "running"
    ranks.kill(signal.SIGINT)
    ended = ranks.wait()
    assert ended.codes == [130]
    assert ended.status()["state"] == "failed"
    assert ended.status()["reason"] == "KeyboardInterrupt"
    run(tmp_path / "done", *tiny(max_steps=2))
    refused = run(tmp_path / "done", *tiny(max_steps=2))
    assert refused.codes == [93]
    assert refused.status()["state"] == "finished"


def test_a_mistake_of_the_first_rank_ends_all_of_them(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    ended = run(tmp_path, *tiny(output_dir="file"), world=2)
    assert ended.codes == [93, 93]
    assert "Traceback" not in ended.text


def test_a_rank_that_is_gone_is_said_without_a_traceback(tmp_path: Path) -> None:
    ranks = start(tmp_path, *tiny(max_steps=100_000), world=2)
    ranks.wait_for("global step 3,")
    ranks.kill(signal.SIGKILL, rank=1)
    ended = ranks.wait()
    assert ended.codes == [3, -9]
    assert "error: another rank exited unexpectedly" in ended.err[0]
    assert "Traceback" not in ended.text


def test_an_earlier_run_is_not_overwritten(tmp_path: Path) -> None:
    run(tmp_path, *tiny(max_steps=2))
    again = run(tmp_path, *tiny(max_steps=2))
    assert again.codes == [93]
    assert "error: output contains checkpoints of an earlier run" in again.err[0]
    assert "Traceback" not in again.text


def test_a_finished_run_has_nothing_left_to_do(tmp_path: Path) -> None:
    run(tmp_path, *tiny(max_steps=2))
    again = run(tmp_path, *tiny(max_steps=2, ckpt_dir="auto"))
    assert again.ok, again.text
    assert "The training process is complete." in again.out[0]
    assert again.metrics("step") == [1, 2]
