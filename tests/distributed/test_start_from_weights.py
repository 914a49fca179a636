"""Training from weights alone, in any layout. Oracles: transformers' loss on the first batch, and one process."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from transformers import GPT2LMHeadModel

from tests.distributed.layouts import ALONE, Case, cases
from tests.distributed.test_resume import tensors_of
from tests.ranks import Ended, run, tiny
from tests.weight_checkpoints import one_thread
from trainer.checkpoint import tensor_files
from trainer.checkpoint.manifest import read_manifest
from trainer.config import Override, load
from trainer.config.resolve import batch_of
from trainer.data import Reader, open_data
from trainer.layout import Layout, Machines
from trainer.mesh import Mesh
from trainer.tasks.export_weights import main as export
from trainer.tasks.import_weights import main as import_weights

LOSS = 5e-6
STEPS = 3
LOAD = "Engine.save_load.load_optimizer"


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Iterator[None]:
    with one_thread():
        yield


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint with moments and a place in the data, which nobody may take over."""
    folder = tmp_path_factory.mktemp("trained")
    ended = run(folder, *tiny(**ALONE.keys(), max_steps=5, max_lr=1e-2))
    assert ended.ok, ended.text
    return folder / "output" / "step_5"


@pytest.fixture(scope="module")
def exported(trained: Path) -> Path:
    folder = trained.parent.parent / "export"
    assert export([str(trained), "--output", str(folder)]) == 0
    return folder


@pytest.fixture(scope="module")
def imported(exported: Path) -> Path:
    folder = exported.parent / "imported"
    assert import_weights([str(exported), "--output", str(folder)]) == 0
    return folder


def start(folder: Path, checkpoint: Path, case: Case = ALONE, **changes: object) -> Ended:
    keys = {**case.keys(), "max_steps": STEPS, "ckpt_dir": checkpoint, **changes}
    return run(folder, *tiny(**keys), world=case.world)


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory, imported: Path) -> Ended:
    ended = start(tmp_path_factory.mktemp("alone"), imported)
    assert ended.ok, ended.text
    return ended


def first_batch() -> tuple[torch.Tensor, torch.Tensor]:
    """The inputs and labels of step 1 of every run here."""
    wanted = [Override.parse(text) for text in tiny(**ALONE.keys(), max_steps=STEPS)]
    resolved = load(None, wanted, Machines(1, 1))
    mesh = Mesh(Layout(), 0, 0, torch.device("cpu"))
    opened, splits, _ = open_data(resolved.run, mesh, print)
    batch = Reader(splits.train, batch_of(opened), 0, splits.train.size, None).read(0)
    return batch.inputs.long(), batch.labels.long()


def test_the_first_loss_is_that_of_transformers(exported: Path, alone: Ended) -> None:
    """On the same batch. So the weights that were imported are the ones that are trained."""
    inputs, labels = first_batch()
    with torch.no_grad():
        logits = GPT2LMHeadModel.from_pretrained(exported).eval()(inputs).logits
        right = float(torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()))
    assert abs(alone.metrics()[0] - right) <= LOSS
    assert len(alone.metrics()) == STEPS
    assert "Training starts at step 0, with the weights of" in alone.out[0]


LAYOUTS = [Case(dp=2), Case(mp=2), Case(pp=2), Case(sharding=2)]
MORE = [
    Case(sharding=2, stage=3),
    Case(mp=2, sequence=True),
    Case(pp=2, virtual=2),
    Case(dp=2, mp=2),
    Case(sharding=2, pp=2),
]


@pytest.mark.parametrize(
    "case", [*cases(LAYOUTS), *(pytest.param(case, id=case.name, marks=pytest.mark.long) for case in MORE)]
)
def test_any_layout_starts_from_imported_weights(tmp_path: Path, imported: Path, alone: Ended, case: Case) -> None:
    """Three steps: losses and norms of one process."""
    ended = start(tmp_path, imported, case)
    assert ended.ok, ended.text
    assert len(ended.metrics()) == STEPS
    assert max(abs(a - b) for a, b in zip(ended.metrics(), alone.metrics())) <= LOSS
    norms = zip(ended.metrics("grad_norm"), alone.metrics("grad_norm"))
    assert max(abs(a / b - 1) for a, b in norms) <= LOSS


def test_fine_tuning_takes_only_the_weights(tmp_path: Path, trained: Path, alone: Ended) -> None:
    """Bit for bit what the same weights without any optimizer state give: step, rates, data and moments are new."""
    ended = start(tmp_path, trained, **{LOAD: False})
    assert ended.ok, ended.text
    assert ended.metrics() == alone.metrics()
    assert ended.metrics("lr") == alone.metrics("lr")
    mine, right = (tensors_of(each.folder / "output" / f"step_{STEPS}") for each in (ended, alone))
    # The rows that pad the vocabulary were trained, too: they only decay, and no token means them.
    del mine["model.word_embeddings.weight"], right["model.word_embeddings.weight"]
    assert all(torch.equal(mine[name], right[name]) for name in right)


def test_resuming_is_something_else(tmp_path: Path, trained: Path, alone: Ended) -> None:
    """So the comparison above can fail."""
    ended = start(tmp_path, trained, max_steps=5 + STEPS)
    assert ended.ok, ended.text
    assert ended.metrics() != alone.metrics()


@pytest.mark.parametrize("precision", [{"Engine.mix_precision.enable": True, "Engine.mix_precision.level": "O2", "Engine.mix_precision.dtype": "bfloat16"}])  # fmt: skip
def test_master_weights_are_rounded(tmp_path: Path, imported: Path, alone: Ended, precision: dict[str, object]) -> None:
    """In O2 the model computes with copies: without them, its first loss would be that of random weights."""
    ended = start(tmp_path, imported, **precision)
    assert ended.ok, ended.text
    assert abs(ended.metrics()[0] - alone.metrics()[0]) < 0.02


def test_a_restart_resumes_what_the_fine_tuning_saved(tmp_path: Path, trained: Path) -> None:
    """Not from step 0 again. Oracle: the run without a restart, bit for bit."""
    keys = {LOAD: False, "max_steps": 6}
    whole = start(tmp_path / "whole", trained, **keys)
    first = start(tmp_path / "part", trained, **{**keys, "max_steps": 3})
    arguments = tiny(**{**ALONE.keys(), **keys, "ckpt_dir": trained})
    again = run(tmp_path / "part", *arguments, GPTCTL_ATTEMPT="1")
    assert all(each.ok for each in (whole, first, again)), again.text
    assert again.metrics() == whole.metrics()
    resumed = run(tmp_path / "part", *tiny(**{**ALONE.keys(), **keys, "max_steps": 7, "ckpt_dir": "auto"}))
    assert resumed.ok, resumed.text
    assert len(resumed.metrics()) == 7


def test_a_run_may_continue_in_the_folder_of_its_weights(
    tmp_path: Path, exported: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The imported checkpoint is its step 0. If a later one turns out to be damaged, nothing of it is left in memory.

    Oracle: the first run from the same weights, bit for bit."""
    monkeypatch.setattr(tensor_files, "BLOCK", 4096)  # so that a part of the damaged one is loaded
    folder = tmp_path / "run"
    assert import_weights([str(exported), "--output", str(folder)]) == 0
    keys = {**ALONE.keys(), "output_dir": folder, "ckpt_dir": "auto", "max_steps": STEPS}
    ended = run(tmp_path / "one", *tiny(**keys))
    assert ended.ok, ended.text
    right = tensors_of(folder / f"step_{STEPS}")
    shard = folder / f"step_{STEPS}" / "rank_0.safetensors"
    content = bytearray(shard.read_bytes())
    content[-20_000] ^= 1  # among the last moments
    shard.write_bytes(content)
    again = run(tmp_path / "two", *tiny(**keys))
    assert again.ok, again.text
    assert "is damaged: wrong checksum" in again.text
    assert (folder / f"step_{STEPS}.aside1").exists()
    mine = tensors_of(folder / f"step_{STEPS}")
    assert all(torch.equal(mine[name], right[name]) for name in right)


def test_what_is_refused(tmp_path: Path, trained: Path, exported: Path, imported: Path) -> None:
    """A folder of Hugging Face with the command that imports it, another model, and a mixture of two runs."""
    for place in (exported, exported / "model.safetensors"):
        ended = start(tmp_path / "a", place)
        assert ended.codes == [93]
        output = exported if place == exported else place.with_suffix("")
        assert f"gptctl import {place} --output {output}-checkpoint" in ended.err[0]
    flags = ["--model_name_or_path", str(exported), *tiny(**ALONE.keys())]
    assert "gptctl import" in run(tmp_path / "b", *flags).err[0]
    ended = start(tmp_path / "c", imported, hidden=64)
    assert ended.codes == [93]
    assert "is a checkpoint of another model: hidden_size is 32 there, 64 here" in ended.err[0]
    ended = start(tmp_path / "d", trained, **{LOAD: False, "output_dir": trained.parent})
    assert ended.codes == [93]
    assert "load_optimizer is False" in ended.err[0]
    assert all("Traceback" not in each.text for each in (ended,))


def test_the_flag_of_paddlenlp_starts_from_imported_weights(tmp_path: Path, imported: Path, alone: Ended) -> None:
    """`--model_name_or_path FOLDER`."""
    keys = {**ALONE.keys(), "max_steps": STEPS}
    ended = run(tmp_path, "--model_name_or_path", str(imported), *tiny(**keys))
    assert ended.ok, ended.text
    assert ended.metrics() == alone.metrics()


def test_an_imported_checkpoint_has_no_moments(imported: Path) -> None:
    facts = read_manifest(imported / "step_0")
    assert facts["step"] == 0
    assert facts["has_optimizer"] is False
    assert all(name.startswith("model.") for name in facts["tensors"])
