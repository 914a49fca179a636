"""Training on prepared data, and what checkpoints know of the tokenizer. Oracle: the single-process run, and gptctl's answers."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import ROOT
from tests.corpus.conftest import write_jsonl
from tests.corpus.test_prepare import many
from tests.ranks import run, tiny
from trainer.checkpoint.manifest import read_manifest
from trainer.corpus.metadata import metadata_at
from trainer.corpus.prepare import Request, prepare
from trainer.corpus.tokenizer import open_tokenizer


def data(folder: Path, name: str, seed: int, **options: Any) -> Path:
    source = write_jsonl(folder / f"{name}.jsonl", many(150, seed))
    prepare(Request((str(source),), str(folder / "data" / name), **options))
    return folder / "data" / name


def keys(input_dir: Any, vocab: int = 257, **more: Any) -> dict[str, Any]:
    return {"dataset": "GPTDataset", "path": "", "input_dir": input_dir, "vocab": vocab, "max_steps": 4, **more}


@pytest.fixture(scope="module")
def corpora(tmp_path_factory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("corpora")
    return {
        "a": data(folder, "a", 1),
        "b": data(folder, "b", 2, output_format="megatron"),
        "c": data(folder, "c", 3, output_format="npz"),
    }


def test_a_blend_trains_alike_in_any_layout(tmp_path: Path, corpora: dict[str, Path]) -> None:
    """Three formats at once; one process, and two with data or tensor parallelism."""
    mixed = json.dumps({str(corpora["a"]): 0.5, str(corpora["b"]): 0.3, str(corpora["c"]): 0.2})
    alone = run(tmp_path / "alone", *tiny(**keys(mixed, eval_freq=2, eval_iters=2)))
    assert alone.ok, alone.text
    for name, layout in {"dp": {}, "mp": {"Distributed.mp_degree": 2}}.items():
        other = run(tmp_path / name, *tiny(**keys(mixed, eval_freq=2, eval_iters=2, **layout)), world=2)
        assert other.ok, other.text
        for metric in ("loss", "valid_loss"):
            pairs = [*zip(other.metrics(metric), alone.metrics(metric))]
            assert pairs
            assert max(abs(one - two) for one, two in pairs) < 1e-5
    only = run(tmp_path / "only", *tiny(**keys(corpora["a"])))
    assert only.metrics("loss") != alone.metrics("loss")


def newest(folder: Path) -> dict[str, Any]:
    return read_manifest(max(folder.glob("output/step_*")))


def test_a_checkpoint_knows_its_tokenizer(tmp_path: Path, tokenizer_json: Path, gpt2_files: Path) -> None:
    prefix = data(tmp_path, "x", 1, tokenizer=str(tokenizer_json))
    tokenizer = open_tokenizer(str(tokenizer_json))
    vocab = max(tokenizer.vocab_size, open_tokenizer(str(gpt2_files)).vocab_size)
    ended = run(tmp_path, *tiny(**keys(prefix, vocab)))
    assert ended.ok, ended.text
    expected = {
        "kind": "bpe",
        "digest": tokenizer.digest,
        "vocab_size": tokenizer.vocab_size,
        "eos_id": tokenizer.eos_id,
    }
    assert newest(tmp_path)["tokenizer"] == expected == metadata_at(prefix)[0].tokenizer
    assert open_tokenizer(str(tmp_path / "output" / "tokenizer")).digest == tokenizer.digest
    # The same shapes, but the ids mean other words.
    other = data(tmp_path / "other", "x", 1, tokenizer=str(gpt2_files))
    refused = run(tmp_path, *tiny(**keys(other, vocab, ckpt_dir="auto", max_steps=6)))
    assert not refused.ok
    assert "it was trained on data of another tokenizer" in refused.text


def test_data_of_an_unknown_tokenizer_trains_as_before(tmp_path: Path) -> None:
    prefix = data(tmp_path, "x", 1)
    prefix.with_name("x_meta.json").unlink()
    ended = run(tmp_path, *tiny(**keys(prefix)))
    assert ended.ok, ended.text
    assert newest(tmp_path)["tokenizer"] is None
    assert not (tmp_path / "output" / "tokenizer").exists()


def gptctl(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    environment = {"PATH": "/usr/bin:/bin", "HOME": str(folder), "PYTHONPATH": str(ROOT)}
    return subprocess.run(
        [sys.executable, "-m", "gptctl", *words], cwd=folder, env=environment, capture_output=True, text=True
    )


CONFIG = """
Global: {device: cpu}
Model: {name: GPT, hidden_size: 32, num_layers: 2, num_attention_heads: 2, vocab_size: VOCAB}
Data: {Train: {dataset: {input_dir: PATH, max_seq_len: 16, eos_id: EOS}}}
"""


def validated(folder: Path, path: str, vocab: int, eos: Any = "") -> tuple[int, list[str]]:
    text = CONFIG.replace("VOCAB", str(vocab)).replace("PATH", path).replace("EOS", str(eos))
    (folder / "config.yaml").write_text(text)
    done = gptctl(folder, "validate", "config", "--json")
    return done.returncode, [finding["code"] for finding in json.loads(done.stdout)["findings"]]


def test_validate_finds_a_tokenizer_that_does_not_fit(tmp_path: Path, tokenizer_json: Path) -> None:
    data(tmp_path, "x", 1)
    assert validated(tmp_path, "data/x", 257) == (0, [])
    assert validated(tmp_path, "data", 256) == (1, ["S030"])
    assert validated(tmp_path, "data/x", 257, eos=7) == (0, ["S031"])
    assert validated(tmp_path, "data/x", 257, eos=-1) == (0, [])
    data(tmp_path / "other", "y", 1, tokenizer=str(tokenizer_json))
    assert validated(tmp_path, "{data/x: 1, other/data/y: 2}", 600) == (1, ["S030"])
    assert validated(tmp_path, "{data/x: 1, data: 0}", 600)[1] == ["C012"]
    assert validated(tmp_path, "{}", 600)[1] == ["C012"]


@pytest.mark.long
def test_a_submitted_blend_has_absolute_paths(tmp_path: Path) -> None:
    data(tmp_path, "x", 1)
    data(tmp_path, "y", 2)
    validated(tmp_path, "{data/x: 1, data/y: 2.5}", 257)
    done = gptctl(tmp_path, "submit", "config", "--wait", "-o", "Engine.max_steps=2", "-o", "Global.local_batch_size=2")
    assert done.returncode == 0, done.stdout + done.stderr
    folder = next((tmp_path / ".local" / "state" / "gptctl").rglob("config.json"), None) or next(
        tmp_path.rglob("config.json")
    )
    frozen = json.loads(folder.read_text())["resolved"]["Data"]["Train"]["dataset"]["input_dir"]
    assert frozen == {str(tmp_path / "data" / "x"): 1.0, str(tmp_path / "data" / "y"): 2.5}


def test_the_verbs(tmp_path: Path) -> None:
    """Text to tokens and back, as a user does it: the text is the oracle."""
    (tmp_path / "book.txt").write_text("Hello, 世界!\n" * 400, encoding="utf-8")
    trained = gptctl(tmp_path, "data", "train-tokenizer", "book.txt", "--output", "tok", "--vocab-size", "270")
    assert trained.returncode == 0, trained.stderr
    done = gptctl(tmp_path, "data", "prepare", "book.txt", "--output", "data/book", "--tokenizer", "tok")
    assert done.returncode == 0, done.stderr
    assert "documents  1" in done.stdout
    assert "Model.vocab_size: 2" in done.stderr
    shown = gptctl(tmp_path, "data", "inspect", "data/book", "--doc", "0")
    assert shown.stdout == (tmp_path / "book.txt").read_text()
    facts = json.loads(gptctl(tmp_path, "data", "inspect", "data/book", "--json").stdout)
    ids = json.loads(gptctl(tmp_path, "data", "inspect", "data/book", "--doc", "0", "--json").stdout)["ids"]
    assert (facts["documents"], facts["tokens"], facts["longest"]) == (1, len(ids), len(ids))
    good = gptctl(tmp_path, "data", "verify", "data")
    assert (good.returncode, good.stdout) == (0, f"data: 1 documents, {len(ids):,} tokens, no damage\n")
    (tmp_path / "data" / "book_ids.npy").write_bytes((tmp_path / "data" / "book_ids.npy").read_bytes()[:-2])
    bad = gptctl(tmp_path, "data", "verify", "data")
    assert (bad.returncode, "book_ids.npy has" in bad.stdout) == (1, True)
    assert gptctl(tmp_path, "data", "inspect", "data/none").returncode == 1
    assert "error: no data at data/none" in gptctl(tmp_path, "data", "inspect", "data/none").stderr
