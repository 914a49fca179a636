"""Learning rate, decay groups, clipping, loss scale. Oracles: the printed rates of FleetX's logs, and torch's own AdamW."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from trainer.config import load
from trainer.config.sections import LearningRate, MixPrecision
from trainer.optim import Optimizer, Weight, new_weight
from trainer.optim import learning_rate as rate_of
from trainer.parallel.data import Buckets
from trainer.precision import GROWTH_INTERVAL, Precision
from trainer.slices import Slice

RUN, CPU = load(None).run, torch.device("cpu")


def number(value: float) -> Tensor:
    return torch.full((), value, dtype=torch.float64)


def learning_rate(lr: LearningRate, update: int) -> float:
    return float(rate_of(lr, number(update)))


def schedule(**keys: Any) -> LearningRate:
    return replace(RUN.Optimizer.lr, **{"max_lr": 1e-5, "min_lr": 5e-5, **keys})


@pytest.mark.parametrize(
    ("decay_steps", "printed"),
    [
        (360000, "5.55556e-09 8.33333e-09 1.11111e-08 1.38889e-08 1.66667e-08 1.94444e-08 2.22222e-08 2.50000e-08 2.77778e-08 3.05556e-08"),
        (320000, "6.25000e-09 9.37500e-09 1.25000e-08 1.56250e-08 1.87500e-08 2.18750e-08 2.50000e-08 2.81250e-08 3.12500e-08 3.43750e-08"),
    ],
)  # fmt: skip
def test_warm_up_prints_the_rates_of_the_logs(decay_steps: int, printed: str) -> None:
    """The line of step n shows the rate of step n + 1."""
    lr = schedule(decay_steps=decay_steps, warmup_rate=0.01)
    assert [f"{learning_rate(lr, step + 1):.5e}" for step in range(1, 11)] == printed.split()


def test_the_curve_at_its_corners() -> None:
    lr = replace(RUN.Optimizer.lr, max_lr=1e-3, min_lr=1e-4, decay_steps=1000, warmup_rate=0.1)
    assert learning_rate(lr, 1) == pytest.approx(1e-5)
    assert learning_rate(lr, 100) == pytest.approx(1e-3)
    assert learning_rate(lr, 550) == pytest.approx((1e-3 + 1e-4) / 2)
    assert learning_rate(lr, 1000) == learning_rate(lr, 10**6) == 1e-4
    rates = [learning_rate(lr, step) for step in range(1, 1001)]
    assert rates[:100] == sorted(rates[:100])
    assert rates[99:] == sorted(rates[99:], reverse=True)


def test_no_schedule_no_warm_up() -> None:
    assert learning_rate(schedule(name="none"), 1) == learning_rate(schedule(name="none"), 10**9) == 1e-5
    assert learning_rate(schedule(warmup_rate=0.0, decay_steps=10), 1) != 0
    assert learning_rate(schedule(warmup_rate=1.0, decay_steps=10), 10) == 1e-5


def module() -> nn.Module:
    torch.default_generator.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.Linear(8, 2))


def weights_of(model: nn.Module, values: list[Tensor] | None = None) -> list[Weight]:
    """Whole weights, and in half precision masters with the given values."""
    return [
        new_weight(name, parameter, Slice.of(parameter.shape), value.detach().clone(), values is not None)
        for (name, parameter), value in zip(model.named_parameters(), values or model.parameters())
    ]


def with_rate(lr: float, **keys: Any) -> Any:
    return replace(RUN.Optimizer, lr=schedule(name="none", max_lr=lr), **keys)


def norm_of(optimizer: Optimizer, scale: float) -> Tensor:
    return optimizer.squared_norm().sqrt() / scale


def test_biases_and_norms_do_not_decay() -> None:
    model = module()
    optimizer = Optimizer(weights_of(model), replace(RUN.Optimizer, weight_decay=0.5), CPU)
    (decayed, rate), (others, none) = optimizer.groups
    assert (rate, none) == (0.5, 0.0)
    assert [weight.name for weight in decayed] == ["0.weight", "2.weight"]
    assert [weight.name for weight in others] == ["0.bias", "1.weight", "1.bias", "2.bias"]


@pytest.mark.parametrize("clip_norm", [0.0, 0.1, 1e9])
def test_an_update_is_that_of_torch(clip_norm: float) -> None:
    """Oracle: clip_grad_norm_ and AdamW, on a gradient that carries a loss scale here."""
    ours, theirs, scale = module(), module(), 1024.0
    config = with_rate(1e-2, grad_clip=replace(RUN.Optimizer.grad_clip, clip_norm=clip_norm))
    optimizer = Optimizer(weights_of(ours), config, CPU)
    oracle = torch.optim.AdamW(
        [
            {"params": [p for p in theirs.parameters() if p.dim() > 1], "weight_decay": config.weight_decay},
            {"params": [p for p in theirs.parameters() if p.dim() == 1], "weight_decay": 0.0},
        ],
        lr=1e-2,
    )
    for step in range(3):
        inputs = torch.randn(16, 4, generator=torch.Generator().manual_seed(step))
        (ours(inputs).square().mean() * scale).backward()
        theirs(inputs).square().mean().backward()
        norm = norm_of(optimizer, scale)
        limit = clip_norm if clip_norm else math.inf
        assert float(norm) == pytest.approx(float(nn.utils.clip_grad_norm_(theirs.parameters(), limit)), rel=1e-6)
        optimizer.step(norm, number(scale))
        oracle.step()
        optimizer.zero_grad()
        oracle.zero_grad()
    for mine, right in zip(ours.parameters(), theirs.parameters()):
        assert torch.allclose(mine, right, atol=1e-6)


@pytest.mark.parametrize("norm", [math.inf, math.nan])
def test_a_skipped_update_leaves_no_trace(norm: float) -> None:
    """Oracle: an optimizer that never saw it. Weights, moments, Adam's own count and the rate are the same afterwards."""
    config, states = replace(RUN.Optimizer, lr=schedule(decay_steps=10, warmup_rate=0.5)), []
    for is_skipping in (True, False):
        model = module()
        optimizer = Optimizer(weights_of(model), config, CPU)
        for update in range(3):
            model(torch.ones(1, 4)).sum().backward()
            if is_skipping and update == 1:
                for _ in range(2):
                    optimizer.step(number(norm), number(1.0))
            optimizer.step(norm_of(optimizer, 1.0), number(1.0))
            optimizer.zero_grad()
        assert (float(optimizer.updates), {float(weight.step) for weight in optimizer.weights}) == (3, {3})
        assert optimizer.next_lr == learning_rate(config.lr, 4)
        states.append([piece.tensor for piece in optimizer.tensors().values()])
    assert all(torch.equal(mine, right) for mine, right in zip(*states))


def test_the_norm_of_many_elements_is_exact() -> None:
    """As many as a real embedding has. Oracle: the sum in float64."""
    parameter = nn.Parameter(torch.zeros(50304, 128))
    parameter.grad = torch.randn(50304, 128, generator=torch.Generator().manual_seed(0)) * 1e-4
    weight = new_weight("w", parameter, Slice.of(parameter.shape), torch.zeros(50304, 128), has_master=False)
    right = float(parameter.grad.double().norm())
    norm = norm_of(Optimizer([weight], RUN.Optimizer, CPU), 1.0)
    assert float(norm) == pytest.approx(right, rel=1e-6)


def test_a_rank_may_have_nothing_to_count() -> None:
    parameter = nn.Parameter(torch.zeros(4, 2))
    weight = new_weight("w", parameter, Slice.of((4, 2)), torch.zeros(4, 2), has_master=False)
    weight.is_copy = True
    assert norm_of(Optimizer([weight], RUN.Optimizer, CPU), 1.0) == 0.0


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
def test_one_bad_element_makes_the_norm_bad(value: float) -> None:
    model = module()
    optimizer = Optimizer(weights_of(model), RUN.Optimizer, CPU)
    model(torch.ones(1, 4)).sum().backward()
    next(model.parameters()).grad[0, 0] = value  # type: ignore[index]
    assert not math.isfinite(norm_of(optimizer, 1.0))


def test_the_loss_scale_halves_and_doubles() -> None:
    precision = Precision(MixPrecision(enable=True, dtype="float16", level="O1", scale_loss=1024.0), "cpu")
    overflow, finite = torch.tensor(False), torch.tensor(True)
    precision.update_scale(overflow)
    assert precision.scale == 512.0
    for _ in range(GROWTH_INTERVAL - 1):
        precision.update_scale(finite)
    assert precision.scale == 512.0
    again = Precision(MixPrecision(enable=True, dtype="float16", level="O1", scale_loss=1.0), "cpu")
    again.restore(precision.state())
    again.update_scale(finite)
    assert again.state() == {"scale": 1024.0, "good_updates": 0}


def test_bfloat16_has_no_loss_scale() -> None:
    precision = Precision(MixPrecision(enable=True, dtype="bfloat16", level="O1", scale_loss=1024.0), "cpu")
    precision.update_scale(torch.tensor(False))
    assert precision.scale == 1.0


def test_pure_half_parameters_have_fp32_masters() -> None:
    """Updates too small for half precision add up in the masters."""
    precision = Precision(MixPrecision(enable=True, dtype="bfloat16", level="O2", scale_loss=1.0), "cpu")
    model = module()
    before = [parameter.detach().clone() for parameter in model.parameters()]
    precision.convert(model)
    optimizer = Optimizer(weights_of(model, before), with_rate(1e-6, weight_decay=0.0), CPU)
    assert all(parameter.dtype == torch.bfloat16 for parameter in model.parameters())
    assert all(torch.equal(weight.master, right) for weight, right in zip(optimizer.weights, before))
    buckets = Buckets(optimizer.weights, 25, 1, None)
    for _ in range(100):
        buckets.begin()
        model(torch.ones(1, 4, dtype=torch.bfloat16)).sum().backward()
        buckets.finish()
        optimizer.step(number(1.0), number(1.0))
        optimizer.zero_grad()
    bias = optimizer.weights[-1]
    assert torch.allclose(bias.master, before[-1] - 1e-4, atol=1e-6)
    assert torch.equal(bias.parameter, bias.master.bfloat16())
