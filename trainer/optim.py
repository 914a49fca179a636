"""The optimizer's side of an update: decay groups, learning rate, gradient norm, loss scale, half precision."""

from __future__ import annotations

import math
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.adamw import adamw

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
    """A parameter under its name, the fp32 tensor that updates change (itself, or a master copy in O2), its moments."""

    name: str
    parameter: nn.Parameter
    master: Tensor
    exp_avg: Tensor
    exp_avg_sq: Tensor
    step: Tensor

    @property
    def gradient(self) -> Tensor:
        assert self.parameter.grad is not None, self.name
        return self.parameter.grad.float()


class Optimizer:
    """AdamW over named fp32 weights, by torch's fused kernel.

    Not torch.optim.AdamW: its state is found by position, ours by global names, so that checkpoints do not depend on
    the layout; clipping and unscaling happen inside the kernel; and the start is a second faster, since torch's
    compiler is not imported.
    """

    def __init__(self, model: nn.Module, config: OptimizerConfig, precision: Precision) -> None:
        self.config = config
        named = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
        self.weights = [_new_weight(name, parameter, precision.is_pure) for name, parameter in named]
        if precision.is_pure:
            model.to(precision.half)
        # Biases and norms do not decay.
        decayed = [weight for weight in self.weights if weight.parameter.dim() >= 2]
        others = [weight for weight in self.weights if weight.parameter.dim() < 2]
        self.groups = [(decayed, config.weight_decay), (others, 0.0)]

    def gradient_norm(self, scale: float) -> float:
        """The global norm of the unscaled gradient; not finite when any element is not."""
        gradients = [weight.parameter.grad for weight in self.weights if weight.parameter.grad is not None]
        norms = torch._foreach_norm(gradients, 2, torch.float32)  # half gradients are not copied for it
        return float(torch.linalg.vector_norm(torch.stack(norms))) / scale

    def step(self, lr: float, norm: float, scale: float) -> None:
        """One update with clipped gradients; `scale` is the loss scale still in them."""
        clip_norm = self.config.grad_clip.clip_norm
        divisor = scale * (norm / clip_norm if 0 < clip_norm < norm else 1.0)
        for weights, weight_decay in self.groups:
            self._update(weights, lr, weight_decay, divisor)
        for weight in self.weights:
            if weight.master is not weight.parameter:
                weight.parameter.data.copy_(weight.master)

    @torch.no_grad()
    def _update(self, weights: list[Weight], lr: float, weight_decay: float, divisor: float) -> None:
        adamw(
            [weight.master for weight in weights],
            [weight.gradient for weight in weights],
            [weight.exp_avg for weight in weights],
            [weight.exp_avg_sq for weight in weights],
            [],
            [weight.step for weight in weights],
            fused=True,
            grad_scale=torch.tensor(divisor, device=weights[0].master.device) if divisor != 1.0 else None,
            amsgrad=False,
            beta1=self.config.beta1,
            beta2=self.config.beta2,
            lr=lr,
            weight_decay=weight_decay,
            eps=self.config.epsilon,
            maximize=False,
        )

    def zero_grad(self) -> None:
        for weight in self.weights:
            weight.parameter.grad = None

    def tensors(self) -> dict[str, Tensor]:
        """Weights and moments under their global names, as they are: what is loaded into them is used."""
        state: dict[str, Tensor] = {}
        for weight in self.weights:
            state[f"model.{weight.name}"] = weight.master.detach()
            state[f"optim.exp_avg.{weight.name}"] = weight.exp_avg
            state[f"optim.exp_avg_sq.{weight.name}"] = weight.exp_avg_sq
        return state

    def loaded(self, updates: int) -> None:
        """To be called when `tensors` were overwritten: counts on from there."""
        for weight in self.weights:
            weight.step.fill_(updates)
            if weight.master is not weight.parameter:
                weight.parameter.data.copy_(weight.master)


def _new_weight(name: str, parameter: nn.Parameter, has_master: bool) -> Weight:
    master = parameter.detach().float().clone() if has_master else parameter
    moments = torch.zeros_like(parameter, dtype=torch.float32, requires_grad=False)
    step = torch.zeros((), device=parameter.device)
    return Weight(name, parameter, master, moments, torch.zeros_like(moments), step)
