"""Weights in. Oracles: transformers' GPT-2, torch's own pickles, and the orders that Megatron-LM and nanoGPT document."""

from __future__ import annotations

import argparse
import json
import os
import pickle
import shutil
import zipfile
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import GPT2Config, GPT2LMHeadModel

from tests.damage import JSON_CASES, NO_FILES
from tests.unit.test_export import trained_tokenizer
from tests.weight_checkpoints import loaded_model, one_thread
from trainer.checkpoint.loading import load_pieces
from trainer.checkpoint.manifest import read_manifest
from trainer.checkpoint.signing import VARIABLE
from trainer.checkpoint.store import damage_of
from trainer.checkpoint_names import is_verified
from trainer.config import Override, load
from trainer.config.sections import Model
from trainer.layout import Machines
from trainer.slices import shapes, whole
from trainer.tasks.export_weights import main as export
from trainer.tasks.import_weights import main
from trainer.weights.checkpoint_weights import weight_shapes

REFUSED, WRONG_USAGE = 93, 2
HEADS, HIDDEN, LAYERS, VOCAB, LENGTH = 3, 24, 2, 101, 20
SIZE = HIDDEN // HEADS  # of a head
SIZES = {"n_layer": LAYERS, "n_embd": HIDDEN, "n_head": HEADS, "vocab_size": VOCAB, "n_positions": LENGTH}


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Iterator[None]:
    with one_thread():
        yield


@cache
def original(**changes: Any) -> GPT2LMHeadModel:
    """A model of the real library, with weights that are large enough to matter, and biases that are not zero."""
    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(**{**SIZES, **changes}, bos_token_id=100, eos_token_id=100)).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return model


def tensors(model: GPT2LMHeadModel | None = None) -> dict[str, Tensor]:
    return {name: tensor.detach().clone() for name, tensor in (model or original()).state_dict().items()}


def saved(tmp_path: Path, content: dict[str, Tensor] | None = None, **config: Any) -> Path:
    """A folder as of Hugging Face, with any tensors and any config."""
    folder = tmp_path / "source"
    original().save_pretrained(folder)
    if content is not None:
        save_file(content, folder / "model.safetensors", {"format": "pt"})
    if config:
        written = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**written, **config}))
    return folder


def imported(tmp_path: Path, source: Path, *more: str, name: str = "checkpoint") -> Path:
    assert main([str(source), "--output", str(tmp_path / name), *more]) == 0
    folder = tmp_path / name / "step_0"
    assert damage_of(folder) == ""
    assert is_verified(folder)
    return folder


def model_of(folder: Path) -> Model:
    return Model(**read_manifest(folder)["config"]["Model"])


def weights_of(folder: Path) -> dict[str, Tensor]:
    """The weights of a checkpoint, by the loader that trainings use."""
    loaded = {f"model.{name}": torch.empty(shape) for name, shape in weight_shapes(model_of(folder)).items()}
    load_pieces(folder, read_manifest(folder), whole(loaded), shapes(loaded))
    return {name.removeprefix("model."): tensor for name, tensor in loaded.items()}


def assert_computes(folder: Path, theirs: GPT2LMHeadModel, atol: float = 1e-5) -> None:
    tokens = torch.randint(VOCAB, (2, LENGTH), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        ours = loaded_model(model_of(folder), weights_of(folder))(tokens)[..., :VOCAB]
        assert (ours - theirs(tokens).logits).abs().max() <= atol


def as_hugging_face(folder: Path) -> None:
    original().save_pretrained(folder)


def without_prefix(folder: Path) -> None:
    original().transformer.save_pretrained(folder)


def in_several_files(folder: Path) -> None:
    original().save_pretrained(folder, max_shard_size="20KB")
    assert len(list(folder.glob("*.safetensors"))) > 2


def with_the_head(folder: Path) -> None:
    as_hugging_face(folder)
    save_file(tensors(), folder / "model.safetensors", {"format": "pt"})
    assert "lm_head.weight" in load_file(folder / "model.safetensors")


def with_masks(folder: Path) -> None:
    """As files of 2019 have them."""
    as_hugging_face(folder)
    masks = {f"h.{n}.attn.bias": torch.ones(1, 1, LENGTH, LENGTH, dtype=torch.uint8) for n in range(LAYERS)}
    masks |= {f"h.{n}.attn.masked_bias": torch.tensor(-1e4) for n in range(LAYERS)}
    bare = {name.removeprefix("transformer."): tensor for name, tensor in tensors().items() if "lm_head" not in name}
    save_file({**bare, **masks}, folder / "model.safetensors", {"format": "pt"})


def as_a_pickle(folder: Path) -> None:
    as_hugging_face(folder)
    (folder / "model.safetensors").unlink()
    torch.save(original().state_dict(), folder / "pytorch_model.bin")  # the head and the embedding share memory


def as_an_old_pickle(folder: Path) -> None:
    """In torch's format before 1.6."""
    as_a_pickle(folder)
    torch.save(original().state_dict(), folder / "pytorch_model.bin", _use_new_zipfile_serialization=False)


def as_pickles_with_an_index(folder: Path) -> None:
    as_a_pickle(folder)
    (folder / "pytorch_model.bin").unlink()
    every = list(original().state_dict().items())
    parts = {"pytorch_model-00001-of-00002.bin": dict(every[:7]), "pytorch_model-00002-of-00002.bin": dict(every[7:])}
    for name, part in parts.items():
        torch.save(part, folder / name)
    index = {name: file for file, part in parts.items() for name in part}
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))


def in_a_cache(folder: Path) -> None:
    """As huggingface_hub keeps it: links from a revision to files named by their hash."""
    blobs = folder.parent / "models--gpt2" / "blobs"
    revision = blobs.parent / "snapshots" / "abc"
    revision.mkdir(parents=True)
    as_hugging_face(blobs)
    for number, file in enumerate(sorted(blobs.iterdir())):
        (revision / file.name).symlink_to(Path("..", "..", "blobs", str(number)))
        file.rename(blobs / str(number))
    folder.symlink_to(revision)


FORMS = [as_hugging_face, without_prefix, in_several_files, with_the_head, with_masks]
FORMS += [as_a_pickle, as_an_old_pickle, as_pickles_with_an_index, in_a_cache]


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.__name__)
def test_every_form_of_hugging_face(tmp_path: Path, form: Callable[[Path], None]) -> None:
    """Oracle: the logits of the model that was saved."""
    source = tmp_path / "source"
    form(source)
    assert_computes(imported(tmp_path, source), original())


def test_a_file_instead_of_its_folder(tmp_path: Path) -> None:
    """config.json beside it is read."""
    assert_computes(imported(tmp_path, saved(tmp_path) / "model.safetensors"), original())


def test_a_file_alone_needs_the_number_of_heads(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_file(tensors(), tmp_path / "alone.safetensors")
    assert main([str(tmp_path / "alone.safetensors"), "--output", str(tmp_path / "no")]) == REFUSED
    assert "-o Model.num_attention_heads=N" in capsys.readouterr().err
    more = ["-o", f"Model.num_attention_heads={HEADS}"]
    assert_computes(imported(tmp_path, tmp_path / "alone.safetensors", *more), original())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_other_types_of_numbers(tmp_path: Path, dtype: torch.dtype) -> None:
    """Exactly the numbers in the file, as float32."""
    source = saved(tmp_path, {name: tensor.to(dtype) for name, tensor in tensors().items()})
    mine = weights_of(imported(tmp_path, source))
    assert torch.equal(mine["position_embeddings.weight"], tensors()["transformer.wpe.weight"].to(dtype).float())
    assert all(tensor.dtype == torch.float32 for tensor in mine.values())


def test_a_padded_vocabulary_is_cut(tmp_path: Path) -> None:
    """Rows that a program added to reach a multiple mean nothing: they are zero here, and exports have none."""
    every = {name: tensor for name, tensor in tensors().items() if name != "lm_head.weight"}
    rows = torch.cat([every["transformer.wte.weight"], torch.full((27, HIDDEN), 7.0)])
    folder = imported(tmp_path, saved(tmp_path, {**every, "transformer.wte.weight": rows}))
    mine = weights_of(folder)["word_embeddings.weight"]
    assert mine.shape == (128, HIDDEN)
    assert not mine[VOCAB:].any()
    assert_computes(folder, original())


def test_another_vocabulary_by_option(tmp_path: Path) -> None:
    folder = imported(tmp_path, saved(tmp_path), "-o", "Model.vocab_size=90", "-o", "Model.vocab_size_divisible_unit=10")  # fmt: skip
    assert torch.equal(weights_of(folder)["word_embeddings.weight"], tensors()["transformer.wte.weight"][:90])


def test_another_width_inside(tmp_path: Path) -> None:
    theirs = original(n_inner=40)
    theirs.save_pretrained(tmp_path / "source")
    folder = imported(tmp_path, tmp_path / "source")
    assert model_of(folder).ffn_hidden_size == 40
    assert_computes(folder, theirs)


MATRICES = ("c_attn.weight", "c_proj.weight", "c_fc.weight")


def nanogpt(prefix: str = "", biases: bool = True) -> dict[str, Any]:
    """nanoGPT's checkpoint: its `from_pretrained` makes these tensors of GPT-2's by transposing the Conv1D weights."""
    model = {
        f"{prefix}{name}": tensor.t().contiguous() if name.endswith(MATRICES) else tensor
        for name, tensor in tensors().items()
        if biases or not name.endswith(".bias")
    }
    arguments = {"n_layer": LAYERS, "n_head": HEADS, "n_embd": HIDDEN, "block_size": LENGTH, "bias": biases}
    arguments |= {"vocab_size": VOCAB, "dropout": 0.0}
    others = {"optimizer": {"state": {0: {"exp_avg": torch.zeros(3)}}}, "iter_num": 5, "best_val_loss": torch.tensor(1.0)}  # fmt: skip
    return {"model": model, "model_args": arguments, **others, "config": {"batch_size": 12}}


@pytest.mark.parametrize("prefix", ["", "_orig_mod."])
def test_nanogpt(tmp_path: Path, capsys: pytest.CaptureFixture[str], prefix: str) -> None:
    """Bit for bit what Hugging Face's names give; with a warning, because nanoGPT has another GELU."""
    torch.save(nanogpt(prefix), tmp_path / "ckpt.pt")
    folder = imported(tmp_path, tmp_path / "ckpt.pt")
    assert "exact GELU" in capsys.readouterr().err
    right = weights_of(imported(tmp_path, saved(tmp_path), name="right"))
    mine = weights_of(folder)
    assert all(torch.equal(mine[name], right[name]) for name in right)
    assert model_of(folder).hidden_dropout_prob == 0.0


def test_nanogpt_without_biases(tmp_path: Path) -> None:
    """Oracle: GPT-2 with biases of zero."""
    torch.save(nanogpt(biases=False), tmp_path / "ckpt.pt")
    theirs = GPT2LMHeadModel(original().config).eval()
    theirs.load_state_dict({name: tensor * (not name.endswith(".bias")) for name, tensor in tensors().items()})
    assert_computes(imported(tmp_path, tmp_path / "ckpt.pt"), theirs)


def rows_of(kind: int, head: int, every: Tensor) -> Tensor:
    """One head of query (0), key (1) or value (2) in GPT-2, with a row for each output."""
    begin = kind * HIDDEN + head * SIZE
    return every[begin : begin + SIZE]


def megatron_order(every: Tensor, version: float) -> Tensor:
    """By hand: 0: (3, heads, size); 1: (heads, size, 3); 2 and later: (heads, 3, size)."""
    heads, kinds = range(HEADS), range(3)
    if version >= 2:
        return torch.cat([rows_of(kind, head, every) for head in heads for kind in kinds])
    if version >= 1:
        of_head = [torch.stack([rows_of(kind, head, every) for kind in kinds], 1) for head in heads]
        return torch.cat([each.reshape(3 * SIZE, *every.shape[1:]) for each in of_head])
    return torch.cat([rows_of(kind, head, every) for kind in kinds for head in heads])


WORDS = {
    "ln_1": "input_layernorm",
    "attn.c_attn": "attention.query_key_value",
    "attn.c_proj": "attention.dense",
    "ln_2": "post_attention_layernorm",
    "mlp.c_fc": "mlp.dense_h_to_4h",
    "mlp.c_proj": "mlp.dense_4h_to_h",
}


def megatron(version: float, encoder: str = "transformer", attention: str = "attention") -> dict[str, Any]:
    """The model of a Megatron checkpoint: nested dictionaries, and flat names for layers."""
    layers: dict[str, Tensor] = {}
    for name, tensor in tensors().items():
        if name.startswith("transformer.h."):
            _, _, number, rest = name.split(".", 3)
            module, _, kind = rest.rpartition(".")
            value = tensor.t() if name.endswith(MATRICES) else tensor
            value = megatron_order(value, version) if module == "attn.c_attn" else value
            word = WORDS[module].replace("attention.", f"{attention}.") if "attn" in module else WORDS[module]
            layers[f"layers.{number}.{word}.{kind}"] = value.contiguous()
    every = tensors()
    layers |= {f"final_layernorm.{kind}": every[f"transformer.ln_f.{kind}"] for kind in ("weight", "bias")}
    padded = torch.cat([every["transformer.wte.weight"], torch.zeros(27, HIDDEN)])
    embedding = {"word_embeddings": {"weight": padded}, "position_embeddings": {"weight": every["transformer.wpe.weight"]}}  # fmt: skip
    return {"language_model": {"embedding": embedding, encoder: layers}}


ARGUMENTS = argparse.Namespace(num_layers=LAYERS, hidden_size=HIDDEN, num_attention_heads=HEADS, max_position_embeddings=LENGTH, padded_vocab_size=128, bias_gelu_fusion=True)  # fmt: skip


@pytest.mark.parametrize("version", [None, 1.0, 2.0, 3.0])
def test_megatron(tmp_path: Path, version: float | None) -> None:
    """All orders of query, key and value. Without a version it is 0, as Megatron-LM reads it."""
    words = {} if version is None else {"checkpoint_version": version}
    newer = {"encoder": "encoder", "attention": "self_attention"} if version == 3.0 else {}
    file = tmp_path / "release" / "mp_rank_00" / "model_optim_rng.pt"
    file.parent.mkdir(parents=True)
    torch.save({"model": megatron(version or 0, **newer), "args": ARGUMENTS, "iteration": 10, **words}, file)
    folder = imported(tmp_path, file.parent.parent, "-o", f"Model.vocab_size={VOCAB}")
    assert_computes(folder, original())


def test_the_newest_iteration_of_megatron(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """By the file in which Megatron notes it. Whatever else is in that file does not lead elsewhere."""
    run, more = tmp_path / "run", ["-o", f"Model.vocab_size={VOCAB}"]
    for iteration in ("iter_0000010", "iter_0000020"):
        (run / iteration / "mp_rank_00").mkdir(parents=True)
    content = {"model": megatron(3.0), "args": ARGUMENTS, "checkpoint_version": 3.0}
    torch.save(content, run / "iter_0000020" / "mp_rank_00" / "model_optim_rng.pt")
    (run / "latest_checkpointed_iteration.txt").write_text("20")
    assert_computes(imported(tmp_path, run, *more), original())
    for bad in ("30", "", "..", "/", "x" * 200, "iter_../../etc", "-1"):
        (run / "latest_checkpointed_iteration.txt").write_text(bad)
        capsys.readouterr()
        refuse(tmp_path, run, capsys, "latest_checkpointed_iteration.txt")


def test_megatron_in_safetensors_needs_a_version(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from trainer.weights.pickles import flattened

    save_file(dict(flattened(megatron(1.0))), tmp_path / "model.safetensors")
    words = ["-o", f"Model.num_attention_heads={HEADS}", "-o", f"Model.vocab_size={VOCAB}"]
    assert main([str(tmp_path / "model.safetensors"), "--output", str(tmp_path / "no"), *words]) == REFUSED
    assert "--megatron-version" in capsys.readouterr().err
    source = tmp_path / "model.safetensors"
    assert_computes(imported(tmp_path, source, *words, "--megatron-version", "1"), original())


def test_megatron_of_several_ranks_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for rank in ("00", "01"):
        (tmp_path / "it" / f"mp_rank_{rank}").mkdir(parents=True)
        torch.save({"model": megatron(3.0)}, tmp_path / "it" / f"mp_rank_{rank}" / "model_optim_rng.pt")
    assert main([str(tmp_path / "it"), "--output", str(tmp_path / "no")]) == REFUSED
    assert "split over 2 ranks" in capsys.readouterr().err


def test_export_import_export_is_bit_equal(tmp_path: Path) -> None:
    """Every file of the folder."""
    first, second = tmp_path / "first", tmp_path / "second"
    assert export([str(imported(tmp_path, saved(tmp_path))), "--output", str(first)]) == 0
    assert export([str(imported(tmp_path, first, name="again")), "--output", str(second)]) == 0
    assert sorted(file.name for file in first.iterdir()) == ["config.json", "generation_config.json", "model.safetensors"]  # fmt: skip
    for file in first.iterdir():
        assert file.read_bytes() == (second / file.name).read_bytes(), file.name
    mine, theirs = load_file(first / "model.safetensors"), tensors()
    assert all(torch.equal(mine[name], theirs[name]) for name in mine)
    assert json.loads((first / "config.json").read_text())["eos_token_id"] == 100


def test_the_tokenizer_is_copied(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Where tasks look for it: beside the checkpoint."""
    source = saved(tmp_path, tensors(original(vocab_size=300)), vocab_size=300)
    trained_tokenizer().save(str(source / "tokenizer.json"))
    folder = imported(tmp_path, source)
    assert (folder.parent / "tokenizer" / "tokenizer.json").read_bytes() == (source / "tokenizer.json").read_bytes()


def test_a_tokenizer_that_is_there_already(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Only an equal one, which a killed import has left, is used; another one is kept."""
    source, there = saved(tmp_path, tensors(original(vocab_size=300)), vocab_size=300), tmp_path / "no" / "tokenizer"
    trained_tokenizer().save(str(source / "tokenizer.json"))
    there.mkdir(parents=True)
    for name, text in (("tokenizer.json", "mine"), ("notes.txt", "mine")):
        (there / name).write_text(text)
        refuse(tmp_path, source, capsys, "tokenizer exists, and is not the tokenizer of these weights")
        assert (there / name).read_text() == "mine"
        (there / name).unlink()
    (there / "tokenizer.json").write_bytes((source / "tokenizer.json").read_bytes())
    (there / "tokenizer.json.part7").write_text("half")
    imported(tmp_path, source, name="no")


@pytest.mark.parametrize(
    ("vocab_size", "hint"), [(1, "use -o Model.vocab_size=280, or remove"), (279, "use -o Model.vocab_size=280")]
)
def test_a_vocabulary_without_some_tokens(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], vocab_size: int, hint: str
) -> None:
    """The embedding has a row for each of them, but the config cuts it."""
    source = saved(tmp_path, tensors(original(vocab_size=320)), vocab_size=vocab_size)
    trained_tokenizer().save(str(source / "tokenizer.json"))
    refuse(tmp_path, source, capsys, f"has 280 tokens, but vocab_size is {vocab_size}", hint)
    assert not (tmp_path / "no").exists()


def test_all_mistakes_of_a_config_at_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = saved(tmp_path, n_head=5, activation_function="relu")
    expected = ("relu", f"n_head is 5 ({source}/config.json), which does not divide the width 24")
    refuse(tmp_path, source, capsys, *expected)


def test_a_file_that_is_cut_off_should_be_fetched_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = saved(tmp_path)
    whole_file = (source / "model.safetensors").read_bytes()
    for size in (len(whole_file) - 1, 100, 4):
        (source / "model.safetensors").write_bytes(whole_file[:size])
        refuse(tmp_path, source, capsys, "hint: fetch the file again")


def test_what_is_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The Model section of a config that can be trained, on stdout; all else on stderr."""
    imported(tmp_path, saved(tmp_path))
    text = capsys.readouterr().out
    (tmp_path / "model.yaml").write_text(text)
    model = load(tmp_path / "model.yaml", [Override("Data.Train.dataset.max_seq_len", "8", "test")], Machines(1, 1)).run.Model  # fmt: skip
    assert (model.num_layers, model.hidden_size, model.vocab_size) == (LAYERS, HIDDEN, VOCAB)
    imported(tmp_path, tmp_path / "source", "--json", name="other")
    assert json.loads(capsys.readouterr().out)["model"]["num_attention_heads"] == HEADS


def test_an_import_is_signed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "a" * 64)
    folder = imported(tmp_path, saved(tmp_path))
    assert read_manifest(folder)["has_optimizer"] is False
    monkeypatch.setenv(VARIABLE, "b" * 64)
    with pytest.raises(ValueError, match="signature does not match"):
        read_manifest(folder)


def changed(name: str, tensor: Tensor | None) -> dict[str, Tensor]:
    """The tensors with one that is other, or missing."""
    every = {key: value for key, value in tensors().items() if key not in ("lm_head.weight", name)}
    return every if tensor is None else {**every, name: tensor}


LAST = "transformer.h.1.mlp.c_fc.weight"
# What is wrong -> tensors, changes of the config, and what the message says.
MISTAKES: dict[str, tuple[dict[str, Tensor] | None, dict[str, Any], list[str]]] = {
    "a missing tensor": (changed(LAST, None), {}, ["layers.1.linear1.weight is missing"]),
    "one bias missing": (changed("transformer.ln_f.bias", None), {}, ["norm.bias is missing"]),
    "another shape": (changed(LAST, torch.zeros(HIDDEN, 5)), {}, ["layers.1.linear1.weight has the shape [24, 5], not [24, 96]"]),
    "a strange name": (changed("transformer.h.0.rotary.weight", torch.zeros(3)), {}, ["'transformer.h.0.rotary.weight' is not a tensor of a GPT-2"]),
    "a name to attack a terminal": (changed("\x1b[2J\n", torch.zeros(3)), {}, ["'\\x1b[2J\\n' is not a tensor of a GPT-2"]),
    "a million layers": (changed("transformer.h.999999.ln_1.weight", torch.zeros(HIDDEN)), {}, ["layers are missing: it has 3, and the last one is 999999"]),
    "integers": (changed(LAST, torch.zeros(HIDDEN, 96, dtype=torch.int8)), {}, ["does not contain floating-point numbers"]),
    "NaN": (changed(LAST, torch.full((HIDDEN, 96), float("nan"))), {}, ["contains NaN or infinity"]),
    "a head of its own": ({**tensors(), "lm_head.weight": torch.zeros(VOCAB, HIDDEN)}, {}, ["'lm_head.weight' is not the embedding"]),
    "no GPT": ({"layers.0.w": torch.zeros(2)}, {}, ["has no weights of a GPT", "'layers.0.w'"]),
    "a vector as embedding": (changed("transformer.wte.weight", torch.zeros(VOCAB)), {}, ["hidden_size is 24"]),
    "a scalar as embedding": (changed("transformer.wte.weight", torch.tensor(1.0)), {}, ["hidden_size is 24"]),
    "another model": (None, {"model_type": "llama"}, ["model_type is 'llama', only 'gpt2'"]),
    "all at once": (None, {"activation_function": "relu", "layer_norm_epsilon": 1e-6, "n_layer": "two", "attn_pdrop": 7}, ["activation_function", "layer_norm_epsilon is 1e-06", "n_layer is 'two'", "attn_pdrop is 7"]),
    "other sizes": (None, {"n_layer": 5, "n_embd": 30, "n_positions": 7}, ["num_layers is 5", "hidden_size is 30", "max_position_embeddings is 7", "but the tensors have 20"]),
    "a larger vocabulary": (None, {"vocab_size": 102}, ["vocab_size is 102", "but the tensors have 101"]),
    "heads that do not divide": (None, {"n_head": 5}, ["Model.num_attention_heads"]),
    "huge numbers": (None, {"n_head": 1 << 40, "n_embd": -3}, ["n_head is 1099511627776", "n_embd is -3"]),
    "lists for numbers": (None, {"n_head": [3], "model_type": ["gpt2"], "vocab_size": {}}, ["n_head is [3]", "model_type", "vocab_size"]),
    "booleans for numbers": (None, {"n_head": True, "scale_attn_weights": 1}, ["n_head is True", "scale_attn_weights is 1"]),
    "scaled by layer": (None, {"scale_attn_by_inverse_layer_idx": True}, ["scale_attn_by_inverse_layer_idx is True"]),
    "cross attention": (None, {"add_cross_attention": True}, ["add_cross_attention"]),
}  # fmt: skip


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str], mistake: str) -> None:
    """All of them at once, without a traceback; and nothing is written."""
    content, config, expected = MISTAKES[mistake]
    refuse(tmp_path, saved(tmp_path, content, **config), capsys, *expected)


def refuse(
    tmp_path: Path, source: Path, capsys: pytest.CaptureFixture[str], *expected: str, code: int = REFUSED
) -> None:
    assert main([str(source), "--output", str(tmp_path / "no")]) == code
    captured = capsys.readouterr()
    for text in expected:
        assert text in captured.err, captured.err
    assert "Traceback" not in captured.err
    assert "\x1b" not in captured.err
    assert captured.out == ""
    assert not list((tmp_path / "no").glob("step_*")) if (tmp_path / "no").exists() else True


def header(content: Any, data: bytes = b"", length: int | None = None) -> bytes:
    text = content if isinstance(content, bytes) else json.dumps(content).encode()
    return (len(text) if length is None else length).to_bytes(8, "little") + text + data


def entry(begin: Any = 0, end: Any = 8, shape: Any = (2,), dtype: Any = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


EIGHT = bytes(8)
CRAFTED: dict[str, bytes] = {
    "empty": b"",
    "seven bytes": b"\1" * 7,
    "a length beyond the file": header({}, length=1 << 62),
    "a huge header": header({}, bytes(1 << 25), length=1 << 25),
    "not JSON": header(b"{'a': 1}"),
    "a list": header([1, 2]),
    "deep": header(b'{"a":' * 5000 + b"1" + b"}" * 5000),
    "NaN": header(b'{"a": {"dtype": "F32", "shape": [NaN], "data_offsets": [0, 8]}}', EIGHT),
    "beyond the end": header({"a": entry(0, 16, (4,))}, EIGHT),
    "before the start": header({"a": entry(-8, 0)}, EIGHT),
    "end before begin": header({"a": entry(8, 0)}, EIGHT),
    "overlapping": header({"a": entry(), "b": entry(4, 12)}, bytes(12)),
    "twice the same": header({"a": entry(), "b": entry()}, EIGHT),
    "a gap": header({"a": entry(), "b": entry(12, 20)}, bytes(20)),
    "bytes behind": header({"a": entry()}, bytes(9)),
    "wrong size": header({"a": entry(shape=(3,))}, EIGHT),
    "product beyond 64 bits": header({"a": entry(shape=(1 << 62, 1 << 62, 4))}, EIGHT),
    "product that overflows to the size": header({"a": entry(shape=(1 << 32, 1 << 31, 4))}, EIGHT),
    "negative dimensions": header({"a": entry(shape=(-1, -2))}, EIGHT),
    "fractions": header({"a": entry(shape=(2.0,))}, EIGHT),
    "booleans": header({"a": entry(False, 8)}, EIGHT),
    "texts": header({"a": entry("0", "8")}, EIGHT),
    "three offsets": header({"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8, 9]}}, EIGHT),
    "unknown type": header({"a": entry(dtype="X9")}, EIGHT),
    "a list as type": header({"a": entry(dtype=["F32"])}, EIGHT),
    "no shape": header({"a": {"dtype": "F32", "data_offsets": [0, 8]}}, EIGHT),
    "not an object": header({"a": 3}, EIGHT),
}


@pytest.mark.parametrize("case", CRAFTED)
def test_crafted_safetensors(tmp_path: Path, capsys: pytest.CaptureFixture[str], case: str) -> None:
    """The safetensors library refuses them as well, or would read what is not there."""
    source = saved(tmp_path)
    (source / "model.safetensors").write_bytes(CRAFTED[case])
    refuse(tmp_path, source, capsys, "model.safetensors")


@pytest.mark.parametrize("case", NO_FILES)
def test_no_file_instead_of_weights(tmp_path: Path, capsys: pytest.CaptureFixture[str], case: str) -> None:
    """FIFOs, devices, links: refused at once."""
    source = saved(tmp_path)
    NO_FILES[case](source / "model.safetensors")
    refuse(tmp_path, source, capsys, "model.safetensors")


@pytest.mark.parametrize("case", JSON_CASES)
def test_a_bad_config(tmp_path: Path, capsys: pytest.CaptureFixture[str], case: str) -> None:
    source = saved(tmp_path)
    JSON_CASES[case](source / "config.json")
    refuse(tmp_path, source, capsys, "config.json")


@pytest.mark.parametrize(
    "files", [["../secret.safetensors"], ["/etc/passwd"], [".."], [""], ["a\0b"], [7], "text", [], ["none.safetensors"]]
)
def test_an_index_that_leads_elsewhere(tmp_path: Path, capsys: pytest.CaptureFixture[str], files: Any) -> None:
    source = saved(tmp_path)
    weights = {str(number): file for number, file in enumerate(files)} if isinstance(files, list) else files
    (source / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weights}))
    refuse(tmp_path, source, capsys, "cannot")


def test_links_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """They could lead to a private file, of which a copy would be left beside the checkpoint."""
    source, secret = saved(tmp_path), tmp_path / "secret"
    secret.write_text("private")
    for name in ("tokenizer.json", "config.json"):
        shutil.copy(source / "config.json", tmp_path / "kept")
        (source / name).unlink(missing_ok=True)
        (source / name).symlink_to(secret)
        refuse(tmp_path, source, capsys, f"{name} is a symbolic link")
        (source / name).unlink()
        shutil.copy(tmp_path / "kept", source / "config.json")
    assert not any(file.read_bytes() == b"private" for file in (tmp_path / "no").rglob("*") if file.is_file())


class Attack:
    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.marker),)


PICKLES: dict[str, Callable[[Path, Path], object]] = {
    "torch.save": lambda file, marker: torch.save({"model": Attack(marker)}, file),
    "old torch.save": lambda file, marker: torch.save({"a": Attack(marker)}, file, _use_new_zipfile_serialization=False),
    "plain pickle": lambda file, marker: file.write_bytes(pickle.dumps(Attack(marker))),
    "in a namespace": lambda file, marker: torch.save({"args": argparse.Namespace(a=Attack(marker))}, file),
}  # fmt: skip


@pytest.mark.parametrize("case", PICKLES)
def test_nothing_is_executed(tmp_path: Path, capsys: pytest.CaptureFixture[str], case: str) -> None:
    """The attack works where a file is trusted, and here it is refused with what it contains."""
    source, marker = tmp_path / "model.pt", tmp_path / "attacked"
    PICKLES[case](source, marker)
    what = "it is not a file of torch.save" if case == "plain pickle" else "it contains posix.mkdir"
    refuse(tmp_path, source, capsys, what, "nothing is executed", "safetensors")
    assert not marker.exists()
    load_trusted = pickle.load if case == "plain pickle" else lambda stream: torch.load(stream, weights_only=False)
    with open(source, "rb") as stream:
        load_trusted(stream)
    assert marker.exists()


def compressed(file: Path) -> None:
    """The same content, deflated: a small file could become terabytes."""
    torch.save(tensors(), file)
    with zipfile.ZipFile(file) as archive:
        content = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in content.items():
            archive.writestr(name, data)


def deep(file: Path) -> None:
    content: dict[str, Any] = {"a": torch.zeros(1)}
    for _ in range(50):
        content = {"a": content}
    torch.save(content, file)


def shared(file: Path) -> None:
    """A thousand layers in the memory of one: a file of some kilobytes that claims to be large."""
    model = nanogpt()
    matrix = {name: tensor for name, tensor in model["model"].items() if name.startswith("transformer.h.0.")}
    for number in range(1000):
        model["model"] |= {name.replace("h.0.", f"h.{number}."): tensor for name, tensor in matrix.items()}
    model["model_args"]["n_layer"] = 1000
    torch.save(model, file)


CRAFTED_PICKLES: dict[str, tuple[Callable[[Path], object], str]] = {
    "text": (lambda file: file.write_text("hello"), "cannot import"),
    "empty": (lambda file: file.write_bytes(b""), "cannot import"),
    "cut": (lambda file: (torch.save(tensors(), file), os.truncate(file, 5000)), "cannot import"),
    "compressed": (compressed, "compressed archive"),
    "a list": (lambda file: torch.save([torch.zeros(2)], file), "no dictionary of tensors"),
    "deep": (deep, "nested more than 8 levels"),
    "expanded": (lambda file: torch.save({**tensors(), LAST: torch.zeros(1).expand(1 << 40)}, file), "larger than what is stored"),
    "sparse": (lambda file: torch.save({**tensors(), LAST: torch.eye(3).to_sparse()}, file), "not a plain tensor"),
    "shared": (shared, "larger than its files"),
}  # fmt: skip


@pytest.mark.parametrize("case", CRAFTED_PICKLES)
def test_crafted_pickles(tmp_path: Path, capsys: pytest.CaptureFixture[str], case: str) -> None:
    write, expected = CRAFTED_PICKLES[case]
    write(tmp_path / "model.pt")
    refuse(tmp_path, tmp_path / "model.pt", capsys, expected)


def test_what_is_refused_beside_weights(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Nothing there, no weights there, several, a checkpoint, another kind of file."""
    refuse(tmp_path, tmp_path / "none", capsys, "does not exist", code=WRONG_USAGE)
    (tmp_path / "empty").mkdir()
    refuse(tmp_path, tmp_path / "empty", capsys, "contains no weights")
    for name in ("a.pt", "b.pt"):
        (tmp_path / "empty" / name).touch()
    refuse(tmp_path, tmp_path / "empty", capsys, "several files: 'a.pt', 'b.pt'")
    checkpoint = imported(tmp_path, saved(tmp_path))
    capsys.readouterr()
    refuse(tmp_path, checkpoint, capsys, "is a checkpoint of this program already")
    (tmp_path / "weights.h5").touch()
    refuse(tmp_path, tmp_path / "weights.h5", capsys, "is not a file with weights")


def test_an_output_that_exists_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = saved(tmp_path)
    imported(tmp_path, source)
    for place in (tmp_path / "checkpoint", source / "config.json"):
        before = sorted(tmp_path.rglob("*"))
        assert main([str(source), "--output", str(place)]) == REFUSED
        assert "--output" in capsys.readouterr().err
        assert sorted(tmp_path.rglob("*")) == before


def test_a_full_disk(tmp_path: Path, small_disk: Path, capsys: pytest.CaptureFixture[str]) -> None:
    theirs = original(n_embd=120)
    theirs.save_pretrained(tmp_path / "source")
    assert main([str(tmp_path / "source"), "--output", str(small_disk / "out")]) == REFUSED
    assert "not enough disk space" in capsys.readouterr().err
    assert not list((small_disk / "out").glob("step_*"))


@pytest.mark.parametrize("wrong", ["Global.seed=1", "Model.num_layers", "Model.nonsense=1", "Model.num_layers=7"])
def test_wrong_options(tmp_path: Path, capsys: pytest.CaptureFixture[str], wrong: str) -> None:
    assert main([str(saved(tmp_path)), "--output", str(tmp_path / "no"), "-o", wrong]) in (REFUSED, WRONG_USAGE)
    error = capsys.readouterr().err
    assert "hint" in error
    assert "Traceback" not in error
