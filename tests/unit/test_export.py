"""Weights out. Oracles: transformers' GPT2LMHeadModel and AutoTokenizer, the safetensors library, and this project's model."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors import safe_open
from tokenizers import Tokenizer as HuggingFaceTokenizer
from tokenizers import decoders, models, pre_tokenizers, trainers
from torch import Tensor
from transformers import AutoTokenizer, GPT2LMHeadModel

from tests.weight_checkpoints import config, loaded_model, one_thread, random_weights, write_model
from trainer.checkpoint.manifest import read_manifest, write_manifest
from trainer.checkpoint.signing import VARIABLE
from trainer.config.sections import RunConfig
from trainer.corpus.tokenizer import ByteTokenizer, CharacterTokenizer
from trainer.tasks.export_weights import main
from trainer.weights import export as exporting
from trainer.weights import new_folder
from trainer.weights.tokenizer_files import tokenizer_files

REFUSED, WRONG_USAGE = 93, 2
TEXTS = ["", "plain words , and  spaces .\n", "naïve café — 中文，日本語 🙂", "\x00\x7f tabs\t\r\n", "don't  <b>"]


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Iterator[None]:
    with one_thread():
        yield


class Made(NamedTuple):
    """A checkpoint, and what is in it."""

    folder: Path
    run: RunConfig
    weights: dict[str, Tensor]

    def logits(self, tokens: Tensor) -> Tensor:
        with torch.no_grad():
            every = loaded_model(self.run.Model, self.weights)(tokens)
        return every[..., : self.run.Model.vocab_size]


def make(tmp_path: Path, ranks: int = 1, optimizer: bool = True, scale: float = 0.3, **model: Any) -> Made:
    run = config(**model)
    weights = random_weights(run.Model, scale=scale)
    return Made(write_model(tmp_path / "run" / "step_7", run, weights, ranks, optimizer), run, weights)


def exported(made: Made, tmp_path: Path, *more: str, name: str = "export") -> Path:
    assert main([str(made.folder), "--output", str(tmp_path / name), *more]) == 0
    return tmp_path / name


def hugging_face(folder: Path) -> GPT2LMHeadModel:
    model, info = GPT2LMHeadModel.from_pretrained(folder, output_loading_info=True)
    assert not any(info.values()), info  # nothing missing, unexpected or of another shape
    return model.eval()


def tokens_of(run: RunConfig, batch: int = 2) -> Tensor:
    source = torch.Generator().manual_seed(1)
    return torch.randint(run.Model.vocab_size, (batch, run.Model.max_position_embeddings), generator=source)


CASES: dict[str, tuple[dict[str, Any], list[str]]] = {
    "one file": ({}, []),
    "cut by four ranks": ({"ranks": 4}, []),
    "one rank more than heads": ({"ranks": 5}, []),
    "without optimizer": ({"optimizer": False}, []),
    "another width inside": ({"ffn_hidden_size": 40}, []),
    "one head": ({"num_attention_heads": 1}, []),
    "no padding": ({"vocab_size": 128}, []),
    "several files": ({"ranks": 2}, ["--max-shard-size", "20KB"]),
}


QUICK = ("one file", "cut by four ranks", "another width inside", "several files")


@pytest.mark.parametrize(
    "case", [case if case in QUICK else pytest.param(case, marks=pytest.mark.long) for case in CASES]
)
def test_transformers_computes_the_same(tmp_path: Path, case: str) -> None:
    """Logits within 1e-5, and the same greedy text. The embedding has no padding, and the head is tied."""
    sizes, more = CASES[case]
    made = make(tmp_path, **sizes)
    theirs = hugging_face(exported(made, tmp_path, *more))
    tokens = tokens_of(made.run)
    with torch.no_grad():
        difference = (theirs(tokens).logits - made.logits(tokens)).abs().max()
    assert difference <= 1e-5
    assert theirs.lm_head.weight is theirs.transformer.wte.weight
    assert theirs.dtype == torch.float32
    prompt = tokens[:1, :5]
    written = theirs.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=12, do_sample=False)
    for _ in range(12):
        prompt = torch.cat([prompt, made.logits(prompt)[:, -1:].argmax(-1)], 1)
    assert torch.equal(written, prompt)


def test_the_comparison_notices_another_order_of_heads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Far outside of the tolerance: query, key and value swapped, or matrices that happen to be square transposed."""
    from trainer.weights import orders

    made = make(tmp_path)
    tokens = tokens_of(made.run)
    monkeypatch.setattr(orders, "to_kind_first_columns", orders.transposed)
    with torch.no_grad():
        logits = hugging_face(exported(made, tmp_path)).forward(tokens).logits
    assert (logits - made.logits(tokens)).abs().max() > 0.1


def test_several_files_have_an_index(tmp_path: Path) -> None:
    """As in Hugging Face: names, total size, and every tensor in the file that the index says."""
    folder = exported(make(tmp_path), tmp_path, "--max-shard-size", "20KB")
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    files = sorted(set(index["weight_map"].values()))
    assert files == [f"model-{n:05}-of-{len(files):05}.safetensors" for n in range(1, len(files) + 1)]
    assert len(files) > 2
    assert not (folder / "model.safetensors").exists()
    size = 0
    for file in files:
        with safe_open(folder / file, "pt") as opened:
            assert {name for name, where in index["weight_map"].items() if where == file} == set(opened.keys())
            size += sum(opened.get_tensor(name).nbytes for name in opened.keys())  # noqa: SIM118
            assert sum(opened.get_tensor(name).nbytes for name in opened.keys()) <= 20_000 or len(opened.keys()) == 1  # noqa: SIM118
    assert index["metadata"]["total_size"] == size


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_half_precision(tmp_path: Path, dtype: str) -> None:
    """Oracle: torch's own rounding of the float32 export."""
    made = make(tmp_path, ranks=2)
    exact = hugging_face(exported(made, tmp_path)).state_dict()
    folder = exported(made, tmp_path, "--dtype", dtype, name="half")
    half = hugging_face(folder)
    assert half.dtype == getattr(torch, dtype)
    assert all(torch.equal(tensor, exact[name].to(half.dtype)) for name, tensor in half.state_dict().items())


def test_float16_that_would_overflow_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made = make(tmp_path, scale=1e5)
    assert main([str(made.folder), "--output", str(tmp_path / "half"), "--dtype", "float16"]) == REFUSED
    error = capsys.readouterr().err
    assert "float16 cannot represent" in error
    assert "bfloat16" in error
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["run"]


def test_config_and_end_token(tmp_path: Path) -> None:
    made = make(tmp_path, ffn_hidden_size=40)
    folder = exported(made, tmp_path)
    written = json.loads((folder / "config.json").read_text())
    assert written["n_inner"] == 40
    assert (written["n_head"], written["n_embd"], written["n_layer"], written["vocab_size"]) == (3, 24, 3, 101)
    assert (written["activation_function"], written["layer_norm_epsilon"]) == ("gelu_new", 1e-5)
    assert (written["bos_token_id"], written["eos_token_id"]) == (None, None)
    assert hugging_face(folder).generation_config.eos_token_id is None


def test_the_newest_checkpoint_of_a_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made = make(tmp_path)
    assert main([str(made.folder.parent), "--output", str(tmp_path / "out"), "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert (result["checkpoint"], result["step"]) == (str(made.folder), 7)
    assert result["files"] == ["config.json", "generation_config.json", "model.safetensors"]


def test_damage_is_found_while_reading(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One bit of a weight; and nothing of the export is left."""
    made = make(tmp_path, optimizer=False)
    file = made.folder / "rank_0.safetensors"
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    assert main([str(made.folder), "--output", str(tmp_path / "out")]) == REFUSED
    assert "rank_0.safetensors is damaged: wrong checksum" in capsys.readouterr().err
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["run"]


def test_a_crafted_manifest(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It cannot make the export build a model of 60,000 layers, nor read beyond its files."""
    made = make(tmp_path)
    facts = read_manifest(made.folder)
    crafted = json.loads(json.dumps(facts))
    crafted["config"]["Model"]["num_layers"] = 60_000
    write_manifest(
        made.folder, {key: crafted[key] for key in crafted if key not in ("files", "version")}, facts["files"]
    )
    assert main([str(made.folder), "--output", str(tmp_path / "out")]) == REFUSED
    assert "fewer tensors than layers" in capsys.readouterr().err
    crafted = json.loads(json.dumps(facts))
    crafted["tensors"]["model.norm.weight"]["pieces"][0][1] = 1 << 40
    write_manifest(
        made.folder, {key: crafted[key] for key in crafted if key not in ("files", "version")}, facts["files"]
    )
    assert main([str(made.folder), "--output", str(tmp_path / "out")]) == REFUSED
    assert "does not describe model.norm.weight correctly" in capsys.readouterr().err
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["run"]


@pytest.mark.parametrize("is_checked", [True, False])
def test_a_full_disk(
    tmp_path: Path,
    small_disk: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    is_checked: bool,
) -> None:
    """Before anything is written; or in the middle, if others fill the disk meanwhile (the check is off for that)."""
    made = make(tmp_path, hidden_size=120)
    if not is_checked:
        monkeypatch.setattr(new_folder, "_require_space", lambda folder, wanted: None)
    assert main([str(made.folder), "--output", str(small_disk / "out")]) == REFUSED
    error = capsys.readouterr().err
    assert ("not enough disk space" if is_checked else "No space left on device") in error
    assert list(small_disk.iterdir()) == []


@pytest.mark.parametrize("what", ["file", "link", "full folder", "parent is a file"])
def test_what_exists_is_never_overwritten(tmp_path: Path, capsys: pytest.CaptureFixture[str], what: str) -> None:
    made, output = make(tmp_path), tmp_path / "out"
    if what == "file":
        output.write_text("mine")
    elif what == "link":
        output.symlink_to(tmp_path / "run")
    elif what == "full folder":
        output.mkdir()
        (output / "mine").write_text("mine")
    else:
        output.write_text("mine")
        output = output / "inner"
    assert main([str(made.folder), "--output", str(output)]) == REFUSED
    error = capsys.readouterr().err
    assert "--output" in error
    assert "Traceback" not in error
    mine = {"file": output, "full folder": output / "mine", "parent is a file": output.parent}.get(what)
    assert mine is None or mine.read_text() == "mine"


def test_an_empty_folder_and_what_a_killed_export_left(tmp_path: Path) -> None:
    made = make(tmp_path)
    (tmp_path / "out").mkdir()
    part = tmp_path / f"out{new_folder.SUFFIX}"
    part.mkdir()
    (part / "model.safetensors").write_text("half")
    (part / new_folder.MARKER).touch()
    hugging_face(exported(made, tmp_path, name="out"))
    assert not part.exists()
    assert not (tmp_path / "out" / new_folder.MARKER).exists()


@pytest.mark.parametrize("name", ["out.tmp", f"out{new_folder.SUFFIX}"])
def test_a_folder_of_the_user_beside_the_output_is_kept(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    made = make(tmp_path)
    (tmp_path / name).mkdir()
    (tmp_path / name / "thesis.txt").write_text("mine")
    code = main([str(made.folder), "--output", str(tmp_path / "out")])
    assert (tmp_path / name / "thesis.txt").read_text() == "mine"
    assert code == (0 if name == "out.tmp" else REFUSED)
    assert ("no export has made it" in capsys.readouterr().err) == bool(code)


def test_a_stop_request_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = make(tmp_path)
    real = exporting._rounded

    def stopped(tensor: Tensor, dtype: str, name: str) -> Tensor:
        os.kill(os.getpid(), signal.SIGTERM)
        return real(tensor, dtype, name)

    monkeypatch.setattr(exporting, "_rounded", stopped)
    assert main([str(made.folder), "--output", str(tmp_path / "out")]) == 130
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["run"]


def test_a_signed_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With the key it is exported, with another key it is refused."""
    monkeypatch.setenv(VARIABLE, "a" * 64)
    made = make(tmp_path)
    hugging_face(exported(made, tmp_path))
    monkeypatch.setenv(VARIABLE, "b" * 64)
    assert main([str(made.folder), "--output", str(tmp_path / "other")]) == REFUSED
    assert VARIABLE in capsys.readouterr().err


@pytest.mark.parametrize("tokenizer", [ByteTokenizer(), CharacterTokenizer("".join(sorted(set("".join(TEXTS)))))])
def test_transformers_has_the_same_tokens(tmp_path: Path, tokenizer: Any) -> None:
    """Bytes and characters need no files here; there they are tokenizer.json. Ids are equal, and decode to the text."""
    for name, text in tokenizer_files(tokenizer, 20).items():
        (tmp_path / name).write_bytes(text)
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    for text in TEXTS:
        ids = theirs(text)["input_ids"]
        assert ids == tokenizer.encode(text), text
        assert theirs.decode(ids) == text
    assert theirs.eos_token_id == tokenizer.eos_id
    assert theirs.model_max_length == 20
    assert len(theirs) == tokenizer.vocab_size


class FileTokenizer(NamedTuple):
    """A tokenizer of files, as `open_tokenizer` gives one."""

    files: tuple[Path, ...]
    eos_id: int | None
    vocab_size: int = 300
    kind: str = "bpe"
    digest: str = ""


def trained_tokenizer() -> HuggingFaceTokenizer:
    tokenizer = HuggingFaceTokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=300, special_tokens=["<|endoftext|>"], initial_alphabet=alphabet)
    tokenizer.train_from_iterator(["the cat sat on the mat, and the dog did not"] * 20, trainer)
    return tokenizer


@pytest.mark.parametrize("form", ["tokenizer.json", "other.json", "vocab.json and merges.txt"])
def test_tokenizer_files_are_copied(tmp_path: Path, form: str) -> None:
    """Oracle: the tokenizer that was saved."""
    original, source, target = trained_tokenizer(), tmp_path / "source", tmp_path / "target"
    source.mkdir()
    target.mkdir()
    if form.endswith(".json"):
        original.save(str(source / form))
    else:
        original.model.save(str(source))
    files = tokenizer_files(FileTokenizer(tuple(source.iterdir()), original.token_to_id("<|endoftext|>")), 20)  # type: ignore[arg-type]
    for name, text in files.items():
        (target / name).write_bytes(text)
    theirs = AutoTokenizer.from_pretrained(target)
    for text in TEXTS:
        assert theirs(text)["input_ids"] == original.encode(text).ids
    assert theirs.eos_token == "<|endoftext|>"
    assert theirs.eos_token_id == original.token_to_id("<|endoftext|>")


def test_the_tokenizer_of_a_checkpoint_comes_with_it(tmp_path: Path) -> None:
    """Characters are in the manifest, bytes are named there."""
    run = config(vocab_size=300)
    weights = random_weights(run.Model)
    facts = {"tokenizer": {"kind": "bytes", "digest": ByteTokenizer.digest, "vocab_size": 257, "eos_id": 256}}
    made = Made(write_model(tmp_path / "run" / "step_7", run, weights, **facts), run, weights)
    folder = exported(made, tmp_path)
    assert AutoTokenizer.from_pretrained(folder)("a b")["input_ids"] == [97, 32, 98]
    assert hugging_face(folder).config.eos_token_id == 256
    without = exported(made, tmp_path, "--tokenizer", "none", name="without")
    assert not (without / "tokenizer.json").exists()


def test_a_tokenizer_that_does_not_fit_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made = make(tmp_path)
    assert main([str(made.folder), "--output", str(tmp_path / "out"), "--tokenizer", "bytes"]) == REFUSED
    assert "the tokenizer has 257 tokens" in capsys.readouterr().err


@pytest.mark.parametrize(
    "wrong", [["--dtype", "int8"], ["--max-shard-size", "0"], ["--max-shard-size", "5 GB"], ["--nonsense"]]
)
def test_wrong_usage(tmp_path: Path, capsys: pytest.CaptureFixture[str], wrong: list[str]) -> None:
    made = make(tmp_path)
    assert main([str(made.folder), "--output", str(tmp_path / "out"), *wrong]) == WRONG_USAGE
    assert "--help" in capsys.readouterr().err
