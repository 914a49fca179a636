"""config.json of Hugging Face's GPT-2, and the Model section that means the same. Torch-free."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from trainer.config.sections import Model

EPSILON = 1e-5  # of our norms, and of GPT-2
# What this model computes, and what else means the same there.
ACTIVATIONS = ("gelu_new", "gelu_pytorch_tanh")
FIXED: dict[str, tuple[Any, ...]] = {
    "model_type": ("gpt2",),
    "activation_function": ACTIVATIONS,
    "scale_attn_weights": (True,),
    "scale_attn_by_inverse_layer_idx": (False,),
    "add_cross_attention": (False,),
    "layer_norm_epsilon": (EPSILON,),
}
SIZES = {
    "n_layer": "num_layers",
    "n_embd": "hidden_size",
    "n_head": "num_attention_heads",
    "n_positions": "max_position_embeddings",
    "vocab_size": "vocab_size",
    "n_inner": "ffn_hidden_size",
}
DROPOUTS = {"resid_pdrop": "hidden_dropout_prob", "attn_pdrop": "attention_probs_dropout_prob"}


def config_json(model: Model, end: int | None, dtype: str) -> dict[str, Any]:
    """The config of a model; `end` is the token after a document, if one is known."""
    is_usual = model.ffn_hidden_size == 4 * model.hidden_size
    return {
        "architectures": ["GPT2LMHeadModel"],
        **{key: values[0] for key, values in FIXED.items()},
        **{key: getattr(model, name) for key, name in SIZES.items()},
        "n_inner": None if is_usual else model.ffn_hidden_size,
        "n_ctx": model.max_position_embeddings,  # its older name, which some programs read
        **{key: getattr(model, name) for key, name in DROPOUTS.items()},
        "embd_pdrop": model.hidden_dropout_prob,
        "initializer_range": model.initializer_range,
        "reorder_and_upcast_attn": False,
        "tie_word_embeddings": True,
        "use_cache": True,
        # GPT-2 begins and ends a document with the same token. Not left out: the default is 50256.
        "bos_token_id": end,
        "eos_token_id": end,
        "dtype": dtype,
        "torch_dtype": dtype,  # its name before transformers 5
    }


def generation_config_json(end: int | None) -> dict[str, Any]:
    return {"_from_model_config": True, "bos_token_id": end, "eos_token_id": end}


def model_values(config: Mapping[str, Any]) -> dict[str, Any]:
    """The keys of the Model section that a config.json sets. Call `mistakes` first."""
    keys = {**SIZES, **DROPOUTS, "initializer_range": "initializer_range"}
    written = {name: config[key] for key, name in keys.items() if config.get(key) is not None}
    if "n_ctx" in config:
        written.setdefault("max_position_embeddings", config["n_ctx"])
    return written


def end_token(config: Mapping[str, Any]) -> int | None:
    """The token after a document, if there is one and only one."""
    end = config.get("eos_token_id")
    return end if type(end) is int and end >= 0 else None


def mistakes(config: Mapping[str, Any]) -> Iterator[str]:
    """What this model cannot compute, or what makes no sense."""
    for key, values in FIXED.items():
        value = config.get(key, values[0])
        if value not in values or isinstance(value, bool) != isinstance(values[0], bool):
            yield f"{key} is {_text(value)}, only {_text(values[0])} is supported"
    for key in ("n_layer", "n_embd", "n_head", "n_positions", "vocab_size", "n_inner", "n_ctx"):
        value = config.get(key)
        if value is not None and not (_is_number(value, int) and 0 < value < 1 << 31):
            yield f"{key} is {_text(value)}, not a positive integer"
    for key in (*DROPOUTS, "embd_pdrop", "initializer_range"):
        value = config.get(key)
        if value is not None and not (_is_number(value, int, float) and 0 <= value < 1):
            yield f"{key} is {_text(value)}, not a number from 0 to 1"


def _is_number(value: object, *kinds: type) -> bool:
    return type(value) in kinds


def _text(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
