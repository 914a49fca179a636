"""The oracle of all that runs a trained model: transformers' own GPT-2 with our weights."""

from __future__ import annotations

import os

os.environ["HF_HUB_OFFLINE"] = "1"  # nothing is downloaded

import torch
from transformers import GPT2Config, GPT2LMHeadModel

from trainer.config.sections import Model
from trainer.model import GPT

NAMES = {
    "word_embeddings.weight": "transformer.wte.weight",
    "position_embeddings.weight": "transformer.wpe.weight",
    "norm.weight": "transformer.ln_f.weight",
    "norm.bias": "transformer.ln_f.bias",
}
IN_LAYER = {
    "norm1": "ln_1",
    "norm2": "ln_2",
    "self_attn.qkv_proj": "attn.c_attn",
    "self_attn.out_proj": "attn.c_proj",
    "linear1": "mlp.c_fc",
    "linear2": "mlp.c_proj",
}


def gpt2_of(model: GPT, config: Model) -> GPT2LMHeadModel:
    """transformers' model with the same weights. Its rows of q, k, v are (3, head, D), ours (head, 3, D)."""
    theirs = GPT2LMHeadModel(
        GPT2Config(
            vocab_size=model.word_embeddings.weight.shape[0],
            n_positions=config.max_position_embeddings,
            n_embd=config.hidden_size,
            n_layer=config.num_layers,
            n_head=config.num_attention_heads,
            n_inner=config.ffn_hidden_size,
            attn_implementation="sdpa",
            bos_token_id=0,
            eos_token_id=0,
        )
    )
    state = {"lm_head.weight": model.word_embeddings.weight.detach().clone()}
    for name, value in model.state_dict().items():
        state[their_name(name)] = their_value(name, value.detach().clone(), config.num_attention_heads)
    missing = theirs.load_state_dict(state, strict=False)
    assert not missing.unexpected_keys
    assert all(name.endswith(("attn.bias", "attn.masked_bias")) for name in missing.missing_keys)
    return theirs.eval()


def their_name(name: str) -> str:
    if name in NAMES:
        return NAMES[name]
    _, layer, rest = name.split(".", 2)
    module, _, kind = rest.rpartition(".")
    return f"transformer.h.{layer}.{IN_LAYER[module]}.{kind}"


def their_value(name: str, value: torch.Tensor, heads: int) -> torch.Tensor:
    if "qkv_proj" in name:
        value = value.unflatten(0, (heads, 3, -1)).transpose(0, 1).flatten(0, 2)
    is_product = "proj.weight" in name or ("linear" in name and name.endswith("weight"))
    return value.T.contiguous() if is_product else value  # their Conv1D has (inputs, outputs)
