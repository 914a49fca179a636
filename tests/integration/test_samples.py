"""Which samples a run takes. Oracle: one pass over every sample per epoch, in any batch size and on any number of ranks."""

from __future__ import annotations

import errno
import os
import re
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import trainer.data.gpt
import trainer.durable
from tests.integration.test_mingpt import MINGPT
from tests.ranks import Ended, run, tiny
from tests.unit.test_data import write_npz
from trainer.config import Override, load
from trainer.config.resolve import batch_of
from trainer.data import IGNORED, Reader, open_data
from trainer.data.chars import Characters, CharSplit
from trainer.data.gpt import GPTSplit
from trainer.data.index import build
from trainer.layout import Layout, Machines
from trainer.logline import announced_steps
from trainer.mesh import Mesh
from trainer.model import build_model

TEXT = 885 + 16  # characters, so 885 samples of 16


class Taken:
    """Writes down which samples the ranks of a run train on."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.file = folder / "taken"
        for split in (CharSplit, GPTSplit):
            monkeypatch.setattr(split, "read", self.noting(split.read))

    def noting(self, read: Any) -> Any:
        def noted(split: Any, epochs: Any, numbers: Any) -> Any:
            with open(self.file, "a") as stream:  # one write per batch: lines of ranks do not mix
                stream.write("".join(f"{epoch} {number}\n" for epoch, number in zip(epochs, numbers)))
            return read(split, epochs, numbers)

        return noted

    def by_epoch(self) -> dict[int, Counter[int]]:
        found: dict[int, Counter[int]] = {}
        for line in self.file.read_text().splitlines():
            epoch, number = map(int, line.split())
            found.setdefault(epoch, Counter())[number] += 1
        return found


def epochs(folder: Path, **changes: Any) -> Ended:
    keys = {"Engine.run_mode": "epoch", "Engine.num_train_epochs": 2, "max_steps": 0, "test_iters": 0}
    keys |= {"Data.Train.loader.num_workers": 0, "micro_batch": 1, "layers": 1, "hidden": 8, "heads": 1}
    ended = run(folder, *tiny(**{**keys, **changes}))
    assert ended.ok, ended.text
    return ended


@pytest.mark.parametrize("batch", [12, 50])
def test_an_epoch_resumed_with_another_batch_size_is_one_pass(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, batch: int
) -> None:
    """528 of 885 samples in 33 batches of 16, the rest in others: of the first epoch, less than one batch is left out."""
    text = tmp_path / "text.txt"
    text.write_text("".join(chr(97 + n * n % 23) for n in range(TEXT)))
    taken = Taken(tmp_path, monkeypatch)
    data = {"path": text, "Data.Train.dataset.train_split": 1.0}
    epochs(tmp_path, global_batch=16, max_steps=33, **data)
    ended = epochs(tmp_path, global_batch=batch, ckpt_dir="auto", **data)
    first, second = taken.by_epoch()[0], taken.by_epoch()[1]
    assert set(first.values()) == set(second.values()) == {1}
    assert (len(first), len(second)) == (528 + 357 // batch * batch, 885 // batch * batch)
    assert ended.metrics("step") == list(range(1, 33 + 357 // batch + 885 // batch + 1))
    assert ended.metrics("max_steps")[-1] == len(ended.metrics())
    assert [*filter(None, map(announced_steps, ended.text.splitlines()))][-1] == len(ended.metrics())
    assert "order of samples changes" not in ended.text


def test_token_files_are_read_once_per_epoch_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two epochs of token files are one order of twice as many samples, of which none is taken twice."""
    write_npz(tmp_path / "x", [[n % 90 for n in range(length)] for length in range(20, 60)])
    taken = Taken(tmp_path, monkeypatch)
    data = {"dataset": "GPTDataset", "path": "", "input_dir": tmp_path, "vocab": 90, "eval_freq": -1}
    data |= {"Data.Train.dataset.split": "[1,0,0]"}
    epochs(tmp_path, global_batch=16, max_steps=9, **data)  # an epoch of 6 steps, and half of another
    ended = epochs(tmp_path, global_batch=5, ckpt_dir="auto", **data)
    numbers = Counter(number for epoch in taken.by_epoch().values() for number in epoch.elements())
    per_epoch = (sum(range(20, 60)) - 1) // 16
    assert set(numbers.values()) == {1}
    assert len(numbers) == 6 * 16 + 48 + (per_epoch - 48) // 5 * 5
    assert "order of samples changes" not in ended.text


@pytest.mark.parametrize("world", [1, 4])
def test_mingpt_evaluates_every_sample_once(tmp_path: Path, world: int) -> None:
    """Oracle: the mean over all windows of the valid split, computed from the snapshot. 45 windows, batches of 80."""
    (tmp_path / "gpt.yaml").write_text(MINGPT + "Global: {device: cpu}\n")
    text = "".join("the quick brown fox "[n * n % 19] for n in range(900))
    (tmp_path / "text.txt").write_text(text)
    keys = ["trainer_config.max_epochs=1", f"trainer_config.batch_size={80 // world}"]
    ended = run(tmp_path, "-c", "gpt.yaml", *keys, world=world)
    assert ended.ok, ended.text
    assert len(re.findall("Eval Loss", ended.out[-1])) == 1
    assert ended.metrics("valid_loss") == [pytest.approx(mean_by_hand(tmp_path), abs=1e-5)]


@torch.no_grad()
def mean_by_hand(folder: Path) -> float:
    path = Override.parse(f"data_config.path={folder / 'text.txt'}")
    resolved = load(str(folder / "gpt.yaml"), [path], Machines(1, 1)).run
    characters = Characters(resolved.Data.Train.dataset)
    split = CharSplit(characters, "valid", resolved.Global.seed)
    sizes = replace(resolved.Model, vocab_size=len(characters.vocabulary))
    model = build_model(sizes, resolved.Global.seed, torch.device("cpu")).eval()
    snapshot = torch.load(folder / "gpt_snapshot.pt", weights_only=True)
    model.load_state_dict(snapshot["model_state"])
    numbers = np.arange(split.size)
    tokens = torch.from_numpy(split.read(0 * numbers, numbers))
    return float(model(tokens[:, :-1], tokens[:, 1:])) / tokens[:, 1:].numel()


def token_files(folder: Path) -> Path:
    folder.mkdir()
    write_npz(folder / "x", [[n % 90 for n in range(length)] for length in range(20, 60)])
    return folder


TOKENS = {"dataset": "GPTDataset", "path": "", "vocab": 90, "max_steps": 2, "eval_freq": -1, "test_iters": 0}
TOKENS |= {"Data.Train.dataset.split": "[1,0,0]"}


@pytest.fixture
def read_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of token files in which nothing can be created, not even by root."""
    data = token_files(tmp_path / "data")
    real = os.open

    def refuse(path: Any, flags: int, *more: Any, **keys: Any) -> int:
        if flags & os.O_CREAT and str(path).startswith(f"{data}/"):
            raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(path))
        return real(path, flags, *more, **keys)

    def opening(file: Any, mode: str = "r", *more: Any, **keys: Any) -> Any:
        if not mode.startswith("r") and str(file).startswith(f"{data}/"):
            raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(file))
        return builtin(file, mode, *more, **keys)

    builtin = open
    monkeypatch.setattr(os, "open", refuse)
    monkeypatch.setattr(trainer.durable, "open", opening, raising=False)
    return data


def test_index_maps_of_read_only_data_are_built_once_for_all_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, read_only: Path
) -> None:
    """In the user's cache folder; built by one rank of one run, and found by the next run."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    count_builds(tmp_path, monkeypatch)
    before = sorted(os.listdir(read_only))
    for output in ("one", "two"):
        keys = {**TOKENS, "input_dir": read_only, "output_dir": output}
        ended = run(tmp_path, *tiny(**keys), world=2)
        assert ended.ok, ended.text
    assert (tmp_path / "built").read_text() == "train\n"
    (folder,) = (tmp_path / "cache" / "gptctl").iterdir()
    assert len([*folder.glob("x_gpt_train_indexmap_*")]) == 4
    assert sorted(os.listdir(read_only)) == before


def count_builds(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def noted(*facts: Any) -> Any:
        with open(folder / "built", "a") as stream:
            stream.write("train\n")
        return build(*facts)

    monkeypatch.setattr(trainer.data.gpt, "build", noted)


def test_a_cache_folder_of_ones_own(tmp_path: Path) -> None:
    data = token_files(tmp_path / "data")
    keys = {**TOKENS, "input_dir": data, "Data.cache_dir": tmp_path / "mine"}
    assert run(tmp_path, *tiny(**keys)).ok
    assert sorted(os.listdir(data)) == ["x_ids.npz"]
    assert len([*(tmp_path / "mine").glob("data-*/x_gpt_*")]) == 5  # four of the maps, and the largest id


def test_nowhere_to_write_index_maps_is_one_clear_message(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, read_only: Path
) -> None:
    (tmp_path / "file").write_text("no folder can be created below a file")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    ended = run(tmp_path, *tiny(**{**TOKENS, "input_dir": read_only}), world=2)
    assert 93 in ended.codes
    assert "error: cannot save index maps: " in ended.text
    assert "(Read-only file system)" in ended.text
    assert "hint: set Data.cache_dir" in ended.text


@pytest.mark.parametrize(
    ("keys", "eos"),
    [
        ({}, 50256),
        ({"Model.vocab_size": 50304}, 50256),
        ({"Model.vocab_size": 65536}, None),  # of another tokenizer, where 50256 is any word
        ({"Model.vocab_size": 32000}, None),
        ({"Model.name": "gpt-cpm-large-cn"}, 7),
        ({"Model.vocab_size": 65536, "Data.Train.dataset.eos_id": 2}, 2),
        ({"Data.Train.dataset.eos_id": -1}, -1),
    ],
)
def test_the_end_of_a_document_is_that_of_the_tokenizer(keys: dict[str, Any], eos: int | None) -> None:
    overrides = [Override.parse(f"{key}={value}") for key, value in {"Global.device": "cpu", **keys}.items()]
    data = load(None, overrides, Machines(1, 1)).run.Data
    assert data.Train.dataset.eos_id == data.Eval.dataset.eos_id == eos


@pytest.mark.parametrize(("key", "eos"), [({"Data.Train.dataset.eos_id": 2}, 2), ({"Data.Train.dataset.eos_id": -1}, None), ({}, None)])  # fmt: skip
def test_nothing_is_predicted_after_the_token_of_the_key(tmp_path: Path, key: dict[str, Any], eos: int | None) -> None:
    """From the config to the labels. Oracle: the inputs, of which many are the token 2."""
    keys = {**TOKENS, "input_dir": token_files(tmp_path / "data"), **key}
    resolved = load(None, [Override.parse(word) for word in tiny(**keys)], Machines(1, 1)).run
    mesh = Mesh(Layout(), 0, 0, torch.device("cpu"))
    _, splits, length = open_data(resolved, mesh, print)
    batch = Reader(splits.train, batch_of(resolved), 0, length.samples_per_epoch, None).read(0)
    assert bool((batch.inputs == 2).any())
    assert torch.equal(batch.labels == IGNORED, batch.inputs == eos if eos else torch.zeros_like(batch.labels) == 1)
