"""Weights of others where a checkpoint is expected. Oracles: the folders that these programs write, and the shell's own words."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from tests.conftest import codes, save_checkpoint
from trainer.config import Override, load
from trainer.config.foreign_weights import foreign_weights, import_hint
from trainer.layout import Machines


@pytest.mark.parametrize(
    "file", ["model.safetensors", "model.safetensors.index.json", "pytorch_model.bin", "ckpt.pt", "mp_rank_00/x"]
)
def test_folders_of_others(tmp_path: Path, file: str) -> None:
    (tmp_path / file).parent.mkdir(exist_ok=True)
    (tmp_path / file).touch()
    assert "contains weights of another program" in foreign_weights(str(tmp_path))


def test_what_is_ours_or_nothing(tmp_path: Path) -> None:
    """Checkpoints, folders of them, an empty folder, and what does not exist."""
    save_checkpoint(tmp_path / "output", 3)
    (tmp_path / "output" / "step_3" / "ckpt.pt").touch()
    (tmp_path / "empty").mkdir()
    for place in ("output", "output/step_3", "empty", "none", "../auto"):
        assert foreign_weights(str(tmp_path / place)) == ""
    assert foreign_weights("auto") == ""


@pytest.mark.parametrize("name", ["gpt2", "my gpt's", "a;b", "中文"])
def test_the_command_can_be_pasted(tmp_path: Path, name: str) -> None:
    """A file as well as a folder, whatever its name."""
    (tmp_path / name).mkdir()
    (tmp_path / f"{name}.pt").touch()
    for place in (f"{tmp_path / name}/", f"{tmp_path / name}.pt"):
        command = import_hint(place).partition(": ")[2].rpartition("; then")[0]
        assert shlex.split(command) == ["gptctl", "import", place, "--output", f"{tmp_path / name}-checkpoint"]


@pytest.mark.parametrize(("ckpt_dir", "is_told"), [("", True), ("auto", True), ("./other", False)])
def test_a_switch_without_effect_is_a_notice(ckpt_dir: str, is_told: bool) -> None:
    keys = {"load_optimizer": "False", "ckpt_dir": ckpt_dir}
    overrides = [Override(f"Engine.save_load.{key}", value, "test") for key, value in keys.items()]
    assert ("N004" in codes(load(None, overrides, Machines(1, 1)))) == is_told
