"""The model. Oracles: plain attention written out by hand, the parameter formula, and the model itself with one thing changed."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.ranks import TINY, overrides
from trainer.config import Override, load
from trainer.config.presets import PRESETS
from trainer.config.sections import Model
from trainer.estimate import count_parameters
from trainer.layout import padded_vocab
from trainer.model import GPT, build_model, initial_value
from trainer.slices import Slice

CPU = torch.device("cpu")


def model_config(**changes: Any) -> Model:
    keys = {**TINY, "vocab": 61, **changes}
    return load(None, [Override.parse(text) for text in overrides(**keys)]).run.Model


def test_a_character_changes_no_logit_before_it() -> None:
    """Causality: for every position t, a change at t leaves all logits before t bit for bit, and changes those at t."""
    config = model_config()
    model = build_model(config, 1, CPU).eval()
    tokens = torch.randint(0, 61, (2, 16), generator=torch.Generator().manual_seed(0))
    before = model(tokens)
    for place in range(16):
        changed = tokens.clone()
        changed[:, place] = (changed[:, place] + 1) % 61
        after = model(changed)
        assert torch.equal(before[:, :place], after[:, :place])
        assert not torch.equal(before[:, place], after[:, place])


def test_the_forward_pass_is_gpt2s() -> None:
    """Oracle: the same computation with explicit scores, mask, softmax and norms, in float64."""
    config = model_config()
    model = build_model(config, 3, CPU).eval().double()
    tokens = torch.randint(0, 61, (2, 16), generator=torch.Generator().manual_seed(0))
    weights = dict(model.named_parameters())

    def linear(x: Tensor, name: str) -> Tensor:
        return x @ weights[f"{name}.weight"].T + weights[f"{name}.bias"]

    def norm(x: Tensor, name: str) -> Tensor:
        x = (x - x.mean(-1, keepdim=True)) / (x.var(-1, keepdim=True, unbiased=False) + 1e-5).sqrt()
        return x * weights[f"{name}.weight"] + weights[f"{name}.bias"]

    x = weights["word_embeddings.weight"][tokens] + weights["position_embeddings.weight"][:16]
    for layer in ("layers.0", "layers.1"):
        qkv = linear(norm(x, f"{layer}.norm1"), f"{layer}.self_attn.qkv_proj").view(2, 16, 2, 3, 16)
        heads = []
        for head in range(2):
            q, k, v = (qkv[:, :, head, part] for part in range(3))
            scores = q @ k.transpose(1, 2) / math.sqrt(16)
            scores = scores.masked_fill(torch.ones(16, 16, dtype=torch.bool).triu(1), -math.inf)
            heads.append(scores.softmax(-1) @ v)
        x = x + linear(torch.cat(heads, -1), f"{layer}.self_attn.out_proj")
        y = linear(norm(x, f"{layer}.norm2"), f"{layer}.linear1")
        y = 0.5 * y * (1 + torch.tanh(math.sqrt(2 / math.pi) * (y + 0.044715 * y**3)))
        x = x + linear(y, f"{layer}.linear2")
    expected = norm(x, "norm") @ weights["word_embeddings.weight"].T
    assert torch.allclose(model(tokens), expected, atol=1e-10)


@pytest.mark.parametrize("name", PRESETS)
def test_presets_have_the_parameters_of_the_formula(name: str) -> None:
    """Oracle: (V + S)h + l(12h² + 13h) + 2h, with the vocabulary as it is padded."""
    config = load(None, [Override.parse(f"Model.name={name}")]).run.Model
    with torch.device("meta"):
        built = sum(parameter.numel() for parameter in GPT(config).parameters())
    assert config.vocab_size is not None
    padding = (padded_vocab(config.vocab_size, 128) - config.vocab_size) * config.hidden_size
    layers, h = config.num_layers, config.hidden_size
    formula = (config.vocab_size + 1024) * h + layers * (12 * h * h + 13 * h) + 2 * h
    assert built - padding == formula == count_parameters(config)


def test_initial_values_depend_on_name_and_seed_only() -> None:
    """A model of some of the layers has the weights of the whole one; another seed has none of them."""
    config = model_config(layers=4)
    whole = dict(build_model(config, 7, CPU).named_parameters())
    parts = [build_model(config, 7, CPU, range(1)), build_model(config, 7, CPU, range(1, 4))]
    names = [name for part in parts for name, _ in part.named_parameters()]
    assert set(names) == set(whole)
    assert names.count("word_embeddings.weight") == 2  # both ends hold the tied embedding
    for part in parts:
        assert all(torch.equal(parameter, whole[name]) for name, parameter in part.named_parameters())
    other = build_model(config, 8, CPU)
    assert not any(torch.equal(p, whole[name]) for name, p in other.named_parameters() if p.dim() > 1)


def test_the_layers_of_a_cut_model_make_the_logits_of_the_whole() -> None:
    config = model_config(layers=4)
    tokens = torch.arange(16)[None]
    first, second = build_model(config, 7, CPU, range(1)), build_model(config, 7, CPU, range(1, 4))
    assert torch.equal(second.eval()(first.eval()(tokens)), build_model(config, 7, CPU).eval()(tokens))


def test_large_parameters_are_made_in_blocks() -> None:
    """So that a rank can make its rows alone: the first rows do not depend on how many follow."""
    config = model_config()
    whole = Slice.of((3 * (1 << 14), 256))
    tall = initial_value("word_embeddings.weight", whole, config, 1)
    short = initial_value("word_embeddings.weight", Slice.of((1 << 14, 256)), config, 1)
    assert torch.equal(tall[: 1 << 14], short)
    assert abs(float(tall.std()) - 0.02) < 1e-4
    assert not torch.equal(tall[: 1 << 14], tall[1 << 14 : 2 << 14])
    pieces = [whole.chunk(0, 7, index).chunk(1, 2, 1) for index in range(7)]
    made = [initial_value("word_embeddings.weight", piece, config, 1) for piece in pieces]
    assert torch.equal(torch.cat(made), tall[:, 128:])


def gradients(config: Model) -> tuple[Tensor, dict[str, Tensor], int]:
    """Loss, gradients, and the bytes of all tensors kept for the backward pass, views of one tensor counted once."""
    kept: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    model = build_model(config, 1, CPU).train()
    held = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    torch.default_generator.manual_seed(5)
    tokens = torch.randint(0, 61, (4, 16), generator=torch.Generator().manual_seed(0))
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        loss = model(tokens).square().mean()
    loss.backward()
    found = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}
    return loss.detach(), found, sum(size for place, size in kept.items() if place not in held)


@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_recomputing_is_bit_equal_and_saves_bytes(dropout: float) -> None:
    """Oracle: the same model without recomputation. What is dropped: full > full_attn > core_attn > nothing."""
    base = {"dropout": dropout, "attention_dropout": dropout, "layers": 3}
    loss, right, kept = gradients(model_config(**base))
    sizes = [kept]
    for granularity in ("core_attn", "full_attn", "full"):
        config = model_config(**base, **{"Model.use_recompute": True, "Model.recompute_granularity": granularity})
        again, found, kept = gradients(config)
        assert torch.equal(again, loss)
        assert all(torch.equal(found[name], right[name]) for name in right)
        sizes.append(kept)
    assert sizes == sorted(sizes, reverse=True)
    assert len(set(sizes)) == 4


def test_layers_can_be_left_out_of_recomputation() -> None:
    sizes = []
    for layers in ("[]", "[0]", "[0, 1]", "[0, 1, 2]"):
        keys = {"Model.use_recompute": True, "Model.no_recompute_layers": layers, "layers": 3}
        sizes.append(gradients(model_config(**keys))[2])
    assert sizes == sorted(sizes)
    assert len(set(sizes)) == 4
    assert sizes[-1] == gradients(model_config(layers=3))[2]


def test_padding_rows_take_no_part() -> None:
    """61 characters are padded to 128 rows: none of the others gets a gradient from the loss."""
    import torch.nn.functional as F

    model = build_model(model_config(), 1, CPU)
    tokens = torch.randint(0, 61, (4, 16))
    logits = model(tokens)
    assert logits.shape == (4, 16, 128)
    F.cross_entropy(logits[..., :61].flatten(0, 1), tokens.flatten()).backward()
    assert model.word_embeddings.weight.grad is not None
    assert not model.word_embeddings.weight.grad[61:].any()
