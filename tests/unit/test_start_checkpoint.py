"""What `validate` and `submit` see of a checkpoint to start from. Oracle: the trainer's own comparison of models."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from gptctl.spec.machine_rules import check_data_here
from gptctl.spec.start_checkpoint import check_start
from trainer.config import load
from trainer.corpus.prepare import Request, prepare
from trainer.errors import Finding
from trainer.layout import Machines

CONFIG = """\
Global: {device: cpu}
Model: {hidden_size: 32, num_layers: 2, num_attention_heads: 2, vocab_size: 257}
Data: {Train: {dataset: {max_seq_len: 16,
  input_dir: data/x}}}
Engine: {save_load: {
  ckpt_dir: start}}
"""


@pytest.fixture
def found(tmp_path: Path, check: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[Finding]]:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.txt").write_text("some text\n")
    prepare(Request(("text.txt",), "data/x"))
    return lambda *overrides: [*check_start(check(CONFIG, *overrides))]


def save(tmp_path: Path, digest: str | None, folder: str = "start/step_3", **model: Any) -> None:
    (tmp_path / "run.yaml").write_text(CONFIG)
    config = json.loads(json.dumps(asdict(load("run.yaml", [], Machines(1, 1)).run)))
    config["Model"].update(model)
    tokenizer = digest and {"kind": "bytes", "digest": digest, "vocab_size": 257, "eos_id": 256}
    (tmp_path / folder).mkdir(parents=True)
    (tmp_path / folder / "manifest.json").write_text(json.dumps({"config": config, "tokenizer": tokenizer}))


def test_a_checkpoint_that_fits(tmp_path: Path, found: Callable[..., list[Finding]]) -> None:
    digest = json.loads(Path("data/x_meta.json").read_text())["tokenizer"]["digest"]
    assert found() == []  # nothing is there: S002
    save(tmp_path, digest)
    assert found() == found("Engine.save_load.ckpt_dir=start/step_3") == []
    assert found("Engine.save_load.ckpt_dir=auto", "Model.num_layers=4") == []
    assert found("Launch.entrypoint=train.py", "Model.num_layers=4") == []


def test_a_checkpoint_of_another_model(tmp_path: Path, found: Callable[..., list[Finding]]) -> None:
    """The newest one counts; a damaged one is passed over. The place is the line of the key."""
    save(tmp_path, None)
    save(tmp_path, None, "start/step_20", num_layers=3, hidden_size=64)
    (tmp_path / "start/step_30").mkdir()
    (tmp_path / "start/step_30/manifest.json").write_text("{")
    (finding,) = found()
    assert "num_layers is 3 there, 2 here; hidden_size is 64 there, 32 here" in str(finding)
    assert str(finding).startswith(f"error: S034 Engine.save_load.ckpt_dir ({tmp_path}/run.yaml:6): start is a")
    (finding,) = found("Engine.save_load.ckpt_dir=start/step_3", "Model.num_layers=4")
    assert str(finding.place) == "-o Engine.save_load.ckpt_dir=start/step_3"


def test_a_checkpoint_of_another_tokenizer(
    tmp_path: Path, found: Callable[..., list[Finding]], check: Callable[..., Any]
) -> None:
    save(tmp_path, "0" * 64)
    (finding,) = found()
    assert "start was trained with another tokenizer than that of data/x_meta.json" in finding.message
    shutil.rmtree("data")
    assert found() == []


def test_what_does_not_fit_the_data_has_its_line(
    found: Callable[..., list[Finding]], check: Callable[..., Any]
) -> None:
    (finding,) = check_data_here(check(CONFIG, "Model.vocab_size=100"))
    assert str(finding.place) == "-o Model.vocab_size=100"
    (finding,) = check_data_here(check(CONFIG.replace("257", "256")))
    assert str(finding).startswith(f"error: S030 Model.vocab_size ({Path.cwd()}/run.yaml:2): the tokenizer of")
