"""The names that Hugging Face, nanoGPT and Megatron give to the weights of a GPT, and their orders.

A family says which parameter of ours a name means, and how to convert it. Knows no files.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from trainer.weights import orders
from trainer.weights.orders import QKV_BIAS, QKV_WEIGHT, Converter

Shape = tuple[int, ...]

# Our names, those of GPT-2 in Hugging Face and nanoGPT, and those of Megatron.
OUTSIDE = {
    "word_embeddings": ("wte", "embedding.word_embeddings"),
    "position_embeddings": ("wpe", "embedding.position_embeddings"),
    "norm": ("ln_f", "transformer.final_layernorm"),
}
IN_LAYER = {
    "norm1": ("ln_1", "input_layernorm"),
    "self_attn.qkv_proj": ("attn.c_attn", "attention.query_key_value"),
    "self_attn.out_proj": ("attn.c_proj", "attention.dense"),
    "norm2": ("ln_2", "post_attention_layernorm"),
    "linear1": ("mlp.c_fc", "mlp.dense_h_to_4h"),
    "linear2": ("mlp.c_proj", "mlp.dense_4h_to_h"),
}
_KIND = r"\.(weight|bias)"
# torch.compile, DistributedDataParallel, and the dictionaries around a model.
_WRAPPERS = re.compile(r"^(?:_orig_mod\.|module\.|model\.)+")
_GPT2_LAYER = re.compile(r"h\.(0|[1-9][0-9]{0,5})\.(.+)" + _KIND)
_MEGATRON_LAYER = re.compile(r"transformer\.layers\.(0|[1-9][0-9]{0,5})\.(.+)" + _KIND)
_OUTSIDE = re.compile(r"(.+)" + _KIND)
# The causal mask, which old files contain; the state of NVIDIA's Transformer Engine.
_UNUSED = re.compile(r"h\.[0-9]+\.attn\.(bias|masked_bias)|.*\._extra_state")
HEADS = ("lm_head.weight", "output_layer.weight")  # the same tensor as the embedding, or refused


class Family(NamedTuple):
    name: str
    converters: Mapping[str, Converter]  # by the end of our name
    column: int  # of the tables above

    def converter(self, parameter: str) -> Converter:
        fitting = (each for end, each in self.converters.items() if parameter.endswith(end))
        return next(fitting, orders.same)


_GPT2_BIAS = {QKV_BIAS: orders.from_kind_first}
_CONV1D = {
    QKV_WEIGHT: orders.from_kind_first_columns,
    **dict.fromkeys(orders.MATRICES[1:], orders.transposed),
}
HUGGING_FACE = Family("Hugging Face", {**_GPT2_BIAS, **_CONV1D}, 0)
NANOGPT = Family("nanoGPT", {**_GPT2_BIAS, QKV_WEIGHT: orders.from_kind_first}, 0)


def megatron(version: float) -> Family:
    """The order of query, key and value by `checkpoint_version`, as Megatron-LM documents it."""
    if version >= 2:  # (H, 3, D), as here
        return Family("Megatron", {}, 1)
    order = orders.from_kind_last if version >= 1 else orders.from_kind_first
    return Family("Megatron", {QKV_WEIGHT: order, QKV_BIAS: order}, 1)


class Found(NamedTuple):
    """The tensors of a file by our names, and what else it contains."""

    parameters: dict[str, str]  # our name -> the name in the file
    heads: list[str]  # output matrices: equal to the embedding, or they cannot be used
    unknown: list[str]


def is_megatron(names: Iterable[str]) -> bool:
    return any(name.endswith("query_key_value.weight") for name in names)


def recognise(names: Iterable[str], column: int) -> Found:
    found = Found({}, [], [])
    for name in names:
        bare = _bare(name, column)
        ours = _parameter(bare, column)
        if bare in HEADS:
            found.heads.append(name)
        elif ours and ours not in found.parameters:
            found.parameters[ours] = name
        elif not _UNUSED.fullmatch(bare):
            found.unknown.append(name)
    return found


def _bare(name: str, column: int) -> str:
    """The name without what surrounds it in some files."""
    bare = _WRAPPERS.sub("", name)
    if column == 0:
        return bare.removeprefix("transformer.")
    bare = bare.removeprefix("language_model.")
    # Newer versions of Megatron have other words for the same.
    bare = re.sub(r"^encoder\.", "transformer.", bare)
    return bare.replace(".self_attention.", ".attention.")


def _parameter(bare: str, column: int) -> str | None:
    layer = (_GPT2_LAYER, _MEGATRON_LAYER)[column].fullmatch(bare)
    if layer:
        ours = _ours(IN_LAYER, layer[2], column)
        return f"layers.{int(layer[1])}.{ours}.{layer[3]}" if ours else None
    outside = _OUTSIDE.fullmatch(bare)
    ours = _ours(OUTSIDE, outside[1], column) if outside else None
    return f"{ours}.{outside[2]}" if ours and outside else None


def _ours(table: Mapping[str, tuple[str, str]], theirs: str, column: int) -> str | None:
    return next((ours for ours, names in table.items() if names[column] == theirs), None)


def hugging_face_name(parameter: str) -> str:
    """The name of a parameter of ours in GPT2LMHeadModel."""
    module, _, kind = parameter.rpartition(".")
    if not module.startswith("layers."):
        return f"transformer.{OUTSIDE[module][0]}.{kind}"
    _, layer, inner = module.split(".", 2)
    return f"transformer.h.{layer}.{IN_LAYER[inner][0]}.{kind}"
