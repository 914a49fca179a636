"""The optimizer's side of an update: decay groups, learning rate, gradient norm, loss scale, half precision."""

from __future__ import annotations

import math
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from trainer.config.sections import LearningRate, MixPrecision
from trainer.config.sections import Optimizer as OptimizerConfig

GROWTH_INTERVAL = 1000  # updates without overflow after which the loss scale doubles, as in Paddle
HALVES = {"float16": torch.float16, "bfloat16": torch.bfloat16}


def learning_rate(lr: LearningRate, update: int) -> float:
    """The rate of the n-th update, counted from 1: linear warm-up from 0, then a cosine down to min_lr."""
    if lr.name == "none":
        return lr.max_lr
    warmup = lr.warmup_rate * lr.decay_steps
    if update <= warmup:
        return lr.max_lr * update / warmup
    if update >= lr.decay_steps:
        return lr.min_lr
    share = (update - warmup) / (lr.decay_steps - warmup)
    return lr.min_lr + (lr.max_lr - lr.min_lr) * 0.5 * (1.0 + math.cos(math.pi * share))


class Precision:
    """What mixed precision changes: the type of the forward pass, and the loss scale of float16."""

    def __init__(self, config: MixPrecision, device: str) -> None:
        self.half = HALVES[config.dtype] if config.enable else None
        self.is_pure = config.enable and config.level == "O2"
        self.device = device
        self.is_dynamic = self.half is torch.float16
        self.scale = config.scale_loss if self.is_dynamic else 1.0
        self.good_updates = 0

    def autocast(self) -> AbstractContextManager[Any]:
        return torch.autocast(self.device, self.half) if self.half and not self.is_pure else nullcontext()

    def judge(self, finite: bool) -> None:
        """Lowers the scale after an overflow, raises it after many updates without one."""
        if not self.is_dynamic:
            return
        self.good_updates = self.good_updates + 1 if finite else 0
        if not finite:
            self.scale /= 2
        elif self.good_updates == GROWTH_INTERVAL:
            self.scale, self.good_updates = self.scale * 2, 0

    def state(self) -> dict[str, float]:
        return {"scale": self.scale, "good_updates": self.good_updates}

    def restore(self, state: dict[str, float]) -> None:
        if self.is_dynamic:
            self.scale, self.good_updates = state["scale"], int(state["good_updates"])


@dataclass
class Weight:
    """A parameter under its name, and the fp32 tensor that the optimizer changes: itself, or a master copy (O2)."""

    name: str
    parameter: nn.Parameter
    master: Tensor


class Optimizer:
    """AdamW over named fp32 weights. Its state has global names, so that checkpoints do not depend on the layout."""

    def __init__(self, model: nn.Module, config: OptimizerConfig, precision: Precision) -> None:
        named = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
        self.weights = [Weight(name, parameter, parameter) for name, parameter in named]
        if precision.is_pure:
            self.weights = [Weight(name, value, value.detach().float().clone()) for name, value in named]
            model.to(precision.half)
        self.clip_norm = config.grad_clip.clip_norm
        decayed = [weight.master for weight in self.weights if weight.parameter.dim() >= 2]
        others = [weight.master for weight in self.weights if weight.parameter.dim() < 2]  # biases and norms
        groups = [
            {"params": decayed, "weight_decay": config.weight_decay},
            {"params": others, "weight_decay": 0.0},
        ]
        betas = (config.beta1, config.beta2)
        self.adam = torch.optim.AdamW(groups, lr=0.0, betas=betas, eps=config.epsilon, fused=True)

    def gradient_norm(self, scale: float) -> float:
        """The global norm of the unscaled gradient; not finite when any element is not."""
        gradients = [weight.parameter.grad for weight in self.weights if weight.parameter.grad is not None]
        return float(torch.nn.utils.get_total_norm(gradients)) / scale

    def step(self, lr: float, norm: float, scale: float) -> None:
        """One update with clipped gradients; `scale` is the loss scale still in them."""
        factor = 1.0 / scale
        if 0 < self.clip_norm < norm:
            factor *= self.clip_norm / norm
        self._settle_gradients(factor)
        for group in self.adam.param_groups:
            group["lr"] = lr
        self.adam.step()
        self._publish()

    def zero_grad(self) -> None:
        for weight in self.weights:
            weight.parameter.grad = None

    def _settle_gradients(self, factor: float) -> None:
        for weight in self.weights:
            if weight.master is not weight.parameter and weight.parameter.grad is not None:
                weight.master.grad = weight.parameter.grad.float()
        if factor != 1.0:
            torch._foreach_mul_(
                [weight.master.grad for weight in self.weights if weight.master.grad is not None], factor
            )

    def _publish(self) -> None:
        for weight in self.weights:
            if weight.master is not weight.parameter:
                weight.parameter.data.copy_(weight.master)
                weight.master.grad = None

    def tensors(self) -> dict[str, Tensor]:
        """Weights and moments under their global names, as they are: what is loaded into them is used."""
        state: dict[str, Tensor] = {}
        for weight in self.weights:
            adam = self._moments(weight.master)
            state[f"model.{weight.name}"] = weight.master.detach()
            state[f"optim.exp_avg.{weight.name}"] = adam["exp_avg"]
            state[f"optim.exp_avg_sq.{weight.name}"] = adam["exp_avg_sq"]
        return state

    @property
    def updates(self) -> int:
        return int(self._moments(self.weights[0].master)["step"])

    def loaded(self, updates: int) -> None:
        """To be called when `tensors` were overwritten: counts on from there."""
        for weight in self.weights:
            self._moments(weight.master)["step"].fill_(updates)
        self._publish()

    def _moments(self, master: Tensor) -> dict[str, Tensor]:
        state = self.adam.state[master]
        if not state:  # before the first update
            state["step"] = torch.zeros((), dtype=torch.float32, device=master.device)
            state["exp_avg"] = torch.zeros_like(master, memory_format=torch.preserve_format)
            state["exp_avg_sq"] = torch.zeros_like(master, memory_format=torch.preserve_format)
        return state
