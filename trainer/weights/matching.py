"""Finds the weights of a GPT in a source, and checks them: all mistakes are reported at once."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from trainer.config import Override, load
from trainer.config.sections import RunConfig
from trainer.errors import UserError
from trainer.layout import Machines
from trainer.weights import gpt2_config
from trainer.weights.checkpoint_weights import EMBEDDING, weight_shapes
from trainer.weights.families import (
    HUGGING_FACE,
    NANOGPT,
    Family,
    Found,
    is_megatron,
    megatron,
    recognise,
)
from trainer.weights.orders import MATRICES
from trainer.weights.safetensors_format import FLOATS, Shape, shown
from trainer.weights.sources import Source, Stored

LISTED = 20  # mistakes in a message
POSITIONS = "position_embeddings.weight"
FIRST_QKV, FIRST_LINEAR = "layers.0.self_attn.qkv_proj.weight", "layers.0.linear1.weight"
NEEDED = (EMBEDDING, POSITIONS, FIRST_QKV, FIRST_LINEAR)
EXACT_GELU = (
    "these weights were trained with the exact GELU, this program uses GPT-2's approximation: "
    "outputs differ slightly"
)


class Matched(NamedTuple):
    """The weights of a source, by our names."""

    source: Source
    family: Family
    stored: dict[str, Stored]
    heads: list[str]  # output matrices: must equal the embedding
    run: RunConfig
    shapes: dict[str, Shape]  # here
    notes: list[str]

    def read(self, name: str) -> Tensor:
        """A parameter in float32 and in our order; rows that only pad the vocabulary are zero."""
        shape = self.shapes[name]
        if name not in self.stored:  # a model without biases
            return torch.zeros(shape)
        tensor = self.stored[name].read()
        if name == EMBEDDING:
            rows = self.run.Model.vocab_size
            padded = torch.zeros(shape)
            padded[:rows] = tensor[:rows]
            return padded
        converter = self.family.converter(name)
        return converter(tensor, self.run.Model.num_attention_heads).float().contiguous()


def match(source: Source, overrides: Sequence[Override], version: float | None) -> Matched:
    """Match the tensors of a source with the parameters of a GPT. Raises UserError."""
    column = int(is_megatron(source.tensors))
    found = recognise(source.tensors, column)
    stored = {ours: source.tensors[theirs] for ours, theirs in found.parameters.items()}
    _require_gpt(source, stored)
    mistakes = [*gpt2_config.mistakes(source.config), *_indivisible(source, stored, overrides)]
    _refuse(source, [*_unusable(found), *mistakes, *_impossible(source, stored)])
    family = _family(source, stored, column, version)
    sizes = _sizes(stored, family)
    _refuse(source, _contradictions(source, sizes, overrides))
    run = _resolved(source, sizes, overrides)
    shapes = weight_shapes(run.Model)
    _refuse(source, _differences(stored, shapes, family))
    exact = family is NANOGPT or source.config.get("activation_function") == "gelu"
    return Matched(source, family, stored, found.heads, run, shapes, [EXACT_GELU] * exact)


def _refuse(source: Source, mistakes: Iterator[str] | list[str]) -> None:
    listed = list(mistakes)
    if not listed:
        return
    more = [f"and {len(listed) - LISTED} more"] if len(listed) > LISTED else []
    lines = "".join(f"\n  {line}" for line in listed[:LISTED] + more)
    hint = "use the weights of a GPT-2: learned positions, GELU, one embedding for input and output"
    raise UserError(f"cannot import {source.where}:{lines}", hint)


def _require_gpt(source: Source, stored: Mapping[str, Stored]) -> None:
    missing = [name for name in NEEDED if name not in stored]
    if missing:
        names = ", ".join(shown(name) for name in sorted(source.tensors)[:4])
        hint = "names of GPT-2 in Hugging Face, nanoGPT and Megatron (language_model.*) are known"
        message = f"{source.where} has no weights of a GPT; its tensors are: {names or 'none'}"
        raise UserError(message, hint)


def _unusable(found: Found) -> Iterator[str]:
    for name in found.unknown:
        yield f"{shown(name)} is not a tensor of a GPT-2"
    layers = sorted({int(name.split(".")[1]) for name in found.parameters if "layers." in name})
    # Before a model of that size is made: a name can claim a million layers.
    if layers != list(range(len(layers))):
        yield f"layers are missing: it has {len(layers)}, and the last one is {layers[-1]}"


def _indivisible(
    source: Source, stored: Mapping[str, Stored], overrides: Sequence[Override]
) -> Iterator[str]:
    """Together with what else is wrong in config.json."""
    heads, width = source.config.get("n_head"), stored[EMBEDDING].shape[1:]
    is_asked = any(each.key == "Model.num_attention_heads" for each in overrides)
    if not is_asked and type(heads) is int and heads > 0 and width and width[0] % heads:
        yield (
            f"n_head is {heads} ({source.config_place}), which does not divide the width "
            f"{width[0]}: fix it, or use -o Model.num_attention_heads=N"
        )


def _impossible(source: Source, stored: Mapping[str, Stored]) -> Iterator[str]:
    """In a pickle, many tensors can share a little memory, and claim to be a huge model."""
    smallest = min(dtype.itemsize for dtype in FLOATS.values())
    if smallest * sum(math.prod(each.shape) for each in stored.values()) > source.size:
        yield "its tensors are larger than its files"


def _family(
    source: Source, stored: Mapping[str, Stored], column: int, version: float | None
) -> Family:
    if column == 1:
        version = source.version if version is None else version
        if version is None:
            hint = "use --megatron-version 0, 1, 2 or 3: its checkpoint_version"
            message = f"{source.where} does not say in which order query, key and value are"
            raise UserError(message, hint)
        return megatron(version)
    # A Conv1D has a row for each input, a Linear for each output, of which there are three times
    # as many.
    rows, *columns = stored[FIRST_QKV].shape
    return HUGGING_FACE if columns == [3 * rows] else NANOGPT


def _sizes(stored: Mapping[str, Stored], family: Family) -> dict[str, int]:
    """The sizes of the model, by its tensors. Tensors of other shapes are found later."""
    shapes = {name: stored[name].shape for name in NEEDED}
    layers = {name.split(".")[1] for name in stored if name.startswith("layers.")}
    return {
        "num_layers": len(layers),
        "hidden_size": shapes[EMBEDDING][-1] if shapes[EMBEDDING] else 0,
        "max_position_embeddings": shapes[POSITIONS][0] if shapes[POSITIONS] else 0,
        "vocab_size": shapes[EMBEDDING][0] if shapes[EMBEDDING] else 0,
        "ffn_hidden_size": (shapes[FIRST_LINEAR] or (0,))[-1 if family is HUGGING_FACE else 0],
    }


def _contradictions(
    source: Source, sizes: Mapping[str, int], overrides: Sequence[Override]
) -> Iterator[str]:
    claims = {each.key.partition(".")[2]: (str(each.value), each.source) for each in overrides}
    for key, value in gpt2_config.model_values(source.config).items():
        claims.setdefault(key, (str(value), source.config_place))
    for key, size in sizes.items():
        claimed, place = claims.get(key, (str(size), ""))
        # A vocabulary may be padded: only its first rows are used then.
        may_differ = key == "vocab_size" and re.fullmatch("[1-9][0-9]{0,8}", claimed)
        is_fine = claimed == str(size) or (may_differ and int(claimed) <= size)
        if not is_fine:
            yield f"{key} is {claimed[:40]} ({place}), but the tensors have {size}"
    if "num_attention_heads" not in claims:
        yield "the number of attention heads is unknown: use -o Model.num_attention_heads=N"


def _resolved(source: Source, sizes: Mapping[str, int], overrides: Sequence[Override]) -> RunConfig:
    """A complete config with this model; the other sections have their defaults."""
    place = source.config_place or str(source.where)
    values: dict[str, Any] = {"name": "GPT", **sizes, **gpt2_config.model_values(source.config)}
    asked = [str(each.value) for each in overrides if each.key == "Model.vocab_size"]
    vocabulary = int(asked[-1] if asked else values["vocab_size"])
    end = gpt2_config.end_token(source.config)
    end = end if end is not None and end < vocabulary else None
    data = {
        "Data.Train.dataset.max_seq_len": sizes["max_position_embeddings"],
        "Data.Train.dataset.eos_id": -1 if end is None else end,
    }
    keys = {**{f"Model.{key}": value for key, value in values.items()}, **data}
    written = [Override(key, str(value), place) for key, value in keys.items()]
    try:
        return load(None, [*written, *overrides], Machines(1, 1)).run
    except UserError as error:
        message = f"cannot import {source.where}: this is not a valid model"
        raise UserError(message, error.hint, error.exit_code, error.findings) from None


def _differences(
    stored: Mapping[str, Stored], shapes: Mapping[str, Shape], family: Family
) -> Iterator[str]:
    """What is missing, or has another shape or type than the model needs."""
    has_biases = any(name.endswith(".bias") for name in stored)
    for name, shape in shapes.items():
        if name not in stored:
            # nanoGPT trains without any bias if asked to: zeros compute the same.
            if has_biases or not name.endswith(".bias"):
                yield f"{name} is missing"
            continue
        there = stored[name].shape
        wanted = shape[::-1] if family is HUGGING_FACE and name.endswith(MATRICES) else shape
        if name == EMBEDDING:
            wanted = (there[0], shape[1])  # its rows are compared with the vocabulary before
        if there != wanted:
            yield f"{name} has the shape {list(there)}, not {list(wanted)}"
        if not stored[name].is_float:
            yield f"{name} does not contain floating-point numbers"
