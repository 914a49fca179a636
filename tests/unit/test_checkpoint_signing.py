"""Signed checkpoints. Oracles: the tensors that were saved, and what an attacker without the key can change."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.torch_checkpoints import write_torch_checkpoint
from tests.unit.test_checkpoint import Keeper, flip, same, state
from trainer.checkpoint.manifest import SIGNATURE, _checksum, read_manifest
from trainer.checkpoint.signing import VARIABLE, current_keys
from trainer.checkpoint.snapshot import load_snapshot, save_snapshot
from trainer.checkpoint.store import unusable
from trainer.checkpoint_names import is_verified
from trainer.errors import UserError
from trainer.slices import whole

KEY, OTHER = "a" * 64, "0123456789abcdef" * 4


@pytest.fixture
def signed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Keeper:
    """Two checkpoints of a run with a key."""
    monkeypatch.setenv(VARIABLE, KEY)
    keeper = Keeper(tmp_path / "output")
    assert keeper.save(5) == keeper.save(10) == ""
    return keeper


def forge(folder: Path, change: Any) -> None:
    """Change a manifest as somebody without the key: its checksum is right again, its signature is the old one."""
    content = json.loads((folder / "manifest.json").read_text())
    content.pop("checksum")
    change(content)
    (folder / "manifest.json").write_text(json.dumps({**content, "checksum": _checksum(content)}))
    with pytest.MonkeyPatch.context() as context:
        context.delenv(VARIABLE)
        assert unusable(folder) == ""  # without the key, it would be loaded


def test_what_was_signed_is_loaded(signed: Keeper) -> None:
    folder, tensors = signed.load()
    assert folder.name == "step_10"
    assert same(tensors, state(10))
    assert signed.warned == []


def test_without_a_key_a_signed_checkpoint_is_loaded_as_before(signed: Keeper, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE)
    assert same(signed.load()[1], state(10))
    folder = signed.checkpoints.store.folder / "step_10"
    assert SIGNATURE not in read_manifest(folder)
    assert signed.warned == [f"{folder} is signed, but {VARIABLE} is not set: new ones are not signed"]


def test_with_a_key_an_unsigned_checkpoint_is_passed_over(signed: Keeper, monkeypatch: pytest.MonkeyPatch) -> None:
    """Although it is verified: what a marker says does not count."""
    monkeypatch.delenv(VARIABLE)
    signed.save(15)
    monkeypatch.setenv(VARIABLE, KEY)
    newest = signed.checkpoints.store.folder / "step_15"
    assert is_verified(newest)
    folder, tensors = signed.load()
    assert folder.name == "step_10"
    assert same(tensors, state(10))
    assert signed.warned == [f"cannot use {newest}: it is not signed, but {VARIABLE} is set"]


def test_when_none_is_signed_it_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also for a path that the user named, and for a checkpoint of version 1. Never a start from step 0."""
    keeper = Keeper(tmp_path / "output")
    keeper.save(5)
    write_torch_checkpoint(tmp_path / "output" / "step_7", state(7), {"step": 7})
    monkeypatch.setenv(VARIABLE, KEY)
    for where in ("auto", str(tmp_path / "output"), str(tmp_path / "output" / "step_5")):
        keeper.checkpoints._rejected.clear()
        with pytest.raises(UserError, match="contains no usable checkpoint") as error:
            keeper.load(where)
        newest, more = ("step_5", "") if where.endswith("step_5") else ("step_7", "; and 1 more")
        assert error.value.message.endswith(f": {newest}: it is not signed, but {VARIABLE} is set{more}")
        assert f"to load unsigned ones, unset {VARIABLE}" in error.value.hint
    assert all("it is not signed" in text for text in keeper.warned)


def test_with_another_key_the_hint_is_to_add_the_right_one(signed: Keeper, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, OTHER)
    with pytest.raises(UserError) as error:
        signed.load()
    assert error.value.message.endswith(f"step_10: its signature does not match {VARIABLE}; and 1 more")
    assert "add the key that signed it as another line of the key file" in error.value.hint


def test_damage_is_no_question_of_keys(signed: Keeper) -> None:
    for step in (5, 10):
        (signed.checkpoints.store.folder / f"step_{step}" / "rank_0.safetensors").unlink()
    with pytest.raises(UserError) as error:
        signed.load()
    assert ": step_10: " in error.value.message
    assert VARIABLE not in error.value.hint


FORGED: dict[str, Any] = {
    "another step": lambda manifest: manifest.update(step=11),
    "other facts": lambda manifest: manifest.update(samples=7),
    "another place of a tensor": lambda manifest: manifest["tensors"]["model.0"]["pieces"][0].__setitem__(1, 0),
    "another type of a tensor": lambda manifest: manifest["tensors"]["model.0"].update(dtype="F16"),
    "another checksum": lambda manifest: manifest["files"]["rank_0.safetensors"].update(sha256="0" * 64),
    "an unknown fact": lambda manifest: manifest.update(unknown=1),
    "another signature": lambda manifest: manifest.update({SIGNATURE: "0" * 64}),
    "a number as signature": lambda manifest: manifest.update({SIGNATURE: 7}),
    "no ASCII in the signature": lambda manifest: manifest.update({SIGNATURE: "\xe9" * 64}),
}


@pytest.mark.parametrize("name", FORGED)
def test_nothing_in_a_signed_manifest_can_be_changed(signed: Keeper, name: str) -> None:
    newest = signed.checkpoints.store.folder / "step_10"
    forge(newest, FORGED[name])
    folder, tensors = signed.load()
    assert folder.name == "step_5"
    assert same(tensors, state(5))
    assert len(signed.warned) == 1
    assert "signature does not match" in signed.warned[0] or "is not signed" in signed.warned[0]


def test_a_signed_checkpoint_counts_only_for_its_own_step(signed: Keeper) -> None:
    """Otherwise the run could be made to repeat steps from an older checkpoint. A link is a copy, too."""
    output = signed.checkpoints.store.folder
    shutil.copytree(output / "step_5", output / "step_20")
    (output / "step_30").symlink_to("step_5")
    assert signed.load()[0].name == "step_10"
    told = "it is a copy of the checkpoint of step 5"
    assert signed.warned == [f"cannot use {output / name}: {told}" for name in ("step_30", "step_20")]


def test_a_folder_that_the_user_renamed_is_loaded(signed: Keeper, tmp_path: Path) -> None:
    """Its name says nothing about a step. The step inside is signed."""
    shutil.copytree(signed.checkpoints.store.folder / "step_5", tmp_path / "best")
    assert same(signed.load(str(tmp_path / "best"))[1], state(5))


def test_files_of_another_signed_checkpoint_are_refused(signed: Keeper) -> None:
    output = signed.checkpoints.store.folder
    shutil.copy(output / "step_5" / "rank_0.safetensors", output / "step_10" / "rank_0.safetensors")
    folder, tensors = signed.load()
    assert folder.name == "step_5"
    assert same(tensors, state(5))


def test_damage_is_still_found(signed: Keeper) -> None:
    flip(signed.checkpoints.store.folder / "step_10" / "rank_0.safetensors", 900)
    assert signed.load()[0].name == "step_5"
    assert "wrong checksum" in signed.warned[0]


def test_keys_are_rotated(signed: Keeper, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first key signs, all of them are accepted; without the old one, its checkpoints are refused."""
    monkeypatch.setenv(VARIABLE, f"{OTHER}\n{KEY}\n")
    assert same(signed.load()[1], state(10))
    signed.save(15)
    monkeypatch.setenv(VARIABLE, OTHER)
    assert same(signed.load()[1], state(15))
    assert unusable(signed.checkpoints.store.folder / "step_10") == f"its signature does not match {VARIABLE}"


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("", "is set, but empty"),
        (" \n", "is set, but empty"),
        ("# a comment\n", "key 1 is too short: 11 of 32 characters"),
        ("weak!", "key 1 is too short: 5 of 32 characters"),
        (f"{KEY}\n{'b' * 31}", "key 2 is too short: 31 of 32 characters"),
    ],
)
def test_a_weak_key_is_refused_before_anything_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, value: str, message: str
) -> None:
    monkeypatch.setenv(VARIABLE, value)
    with pytest.raises(UserError, match=message) as error:
        Keeper(tmp_path / "output")
    assert "openssl rand -hex 32" in error.value.hint
    assert not any(part in error.value.message for part in ("weak!", "bbb"))
    assert not (tmp_path / "output").exists()


def test_the_key_is_in_no_file_and_no_text(signed: Keeper, capfd: pytest.CaptureFixture[str]) -> None:
    signed.load()
    with pytest.raises(UserError) as error:
        signed.load("/nowhere")
    told = [*signed.said, *signed.warned, repr(error.value), repr(current_keys()), *capfd.readouterr()]
    assert not any(KEY in text for text in told)
    files = [file for file in signed.checkpoints.store.folder.rglob("*") if file.is_file()]
    assert len(files) > 4
    assert not any(KEY.encode() in file.read_bytes() for file in files)


def test_unsigned_checkpoints_do_not_push_out_signed_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Somebody adds newer ones with all markers. Oracle: the two newest signed ones stay."""
    keeper = Keeper(tmp_path / "foreign")
    for step in (20, 25, 30):
        keeper.save(step)
    monkeypatch.setenv(VARIABLE, KEY)
    signed = Keeper(tmp_path / "output", keep_last=2)
    signed.save(5)
    for step in (20, 25, 30):
        shutil.copytree(tmp_path / "foreign" / f"step_{step}", tmp_path / "output" / f"step_{step}")
    signed.save(10)
    assert {"step_5", "step_10"} <= set(os.listdir(tmp_path / "output"))
    assert same(signed.load()[1], state(10))


def test_snapshots_are_signed_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also the type of a tensor, which is not in its checksum: the same bytes would be other numbers."""
    file, tensors = tmp_path / "snapshot.pt", {"model.w": torch.randn(4, 2)}
    tensors |= {f"optim.{moment}.w": torch.randn(4, 2) for moment in ("exp_avg", "exp_avg_sq")}

    def load() -> dict[str, torch.Tensor]:
        found = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}
        load_snapshot(file, whole(found), lambda facts: None)
        return found

    save_snapshot(file, whole(tensors), {"step": 1}, 1)
    assert same(load(), tensors)
    monkeypatch.setenv(VARIABLE, KEY)
    with pytest.raises(UserError, match=f"it is not signed, but {VARIABLE} is set"):
        load()
    save_snapshot(file, whole(tensors), {"step": 1}, 1)
    assert same(load(), tensors)
    content = torch.load(file, weights_only=True)
    content["model_state"]["w"] = content["model_state"]["w"].view(torch.int32)
    torch.save(content, file)
    with pytest.raises(UserError, match="its signature does not match") as error:
        load()
    assert "key that signed it" in error.value.hint
    assert "delete" not in error.value.hint
    monkeypatch.delenv(VARIABLE)
    save_snapshot(file, whole(tensors), {"step": 1}, 1)
    assert same(load(), tensors)
