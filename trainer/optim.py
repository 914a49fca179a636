"""AdamW, learning rate and gradient norm.

Every number that decides about an update is on the device: the host starts an update without
knowing its norm or its learning rate, or whether it is skipped. None of them is made with
torch.tensor, because copying a number to a GPU makes the host wait.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.optim.adamw import adamw

from trainer.config.sections import LearningRate
from trainer.config.sections import Optimizer as OptimizerConfig
from trainer.device import behaviour
from trainer.slices import Holders, Piece, Slice

MAX_SUMMED = 1 << 16  # elements per partial sum of squares, see `_summable`


def learning_rate(lr: LearningRate, update: Tensor) -> Tensor:
    """The rate of an update, counted from 1: linear warm-up from 0, then a cosine to min_lr."""
    if lr.name == "none":
        return torch.full_like(update, lr.max_lr)
    warmup = lr.warmup_rate * lr.decay_steps
    share = ((update - warmup) / (lr.decay_steps - warmup)).clamp(max=1.0)
    decayed = lr.min_lr + (lr.max_lr - lr.min_lr) * 0.5 * (1.0 + (math.pi * share).cos())
    # Divisions by zero are in the branch that is not taken.
    return torch.where(update <= warmup, lr.max_lr * update / warmup, decayed)


@dataclass
class Weight:
    """A rank's piece of a parameter, and its fp32 training state.

    Without sharding, O2 has a master copy of the parameter. O2 and data parallelism have a main
    gradient, to which hooks add each micro-batch's gradient. All others use the parameter's own.
    """

    name: str
    parameter: nn.Parameter
    at: Slice
    master: Tensor | None
    exp_avg: Tensor
    exp_avg_sq: Tensor
    step: Tensor
    is_split: bool = False  # split over the ranks of an mp group
    is_tied: bool = False  # the embedding, held by the first and the last pipeline stage
    is_copy: bool = False  # the embedding of the last stage: neither counted nor saved
    holders: Holders = Holders()
    main_gradient: Tensor | None = None

    @property
    def local(self) -> Tensor:
        """The tensor on this rank. Never cached, because FSDP may replace it."""
        return local_part(self.parameter)

    @property
    def fp32(self) -> Tensor:
        return self.local if self.master is None else self.master

    @property
    def own_bytes(self) -> int:
        return self.at.numel * self.parameter.element_size()

    @property
    def optimizer_bytes(self) -> int:
        """Bytes of the moments, and of the master copy in O2."""
        return sum(
            tensor.nbytes
            for tensor in (self.exp_avg, self.exp_avg_sq, self.master)
            if tensor is not None
        )

    @property
    def gradient(self) -> Tensor:
        """The fp32 gradient of an update."""
        if self.main_gradient is not None:
            return self.main_gradient
        assert self.parameter.grad is not None, self.name
        return local_part(self.parameter.grad)


class Optimizer:
    """AdamW for named fp32 weights, with torch's fused kernel.

    Not torch.optim.AdamW, for three reasons. Its state is stored by position, ours by global name,
    so that checkpoints do not depend on the layout. Here the kernel also clips and unscales. And
    start-up is a second faster, because torch's compiler is not imported.
    """

    def __init__(
        self, weights: list[Weight], config: OptimizerConfig, device: torch.device
    ) -> None:
        self.weights, self.config = weights, config
        # Updates that changed the weights: the position in the learning-rate schedule.
        self.updates = torch.zeros((), dtype=torch.float64, device=device)
        self.next_lr = learning_rate(config.lr, self.updates + 1)
        # Biases and norms have no decay. If a parameter has few rows, a rank may hold none of them.
        decayed = [weight for weight in weights if len(weight.at.whole) >= 2 and weight.at.numel]
        others = [weight for weight in weights if len(weight.at.whole) < 2 and weight.at.numel]
        self.groups = [(decayed, config.weight_decay), (others, 0.0)]
        self._shares: Tensor | None = None

    @torch.no_grad()
    def squared_norm(self) -> Tensor:
        """This rank's share of the squared global gradient norm.

        Summed over all ranks, every element counts once, however many ranks hold it.
        """
        counted = [weight for weights, _ in self.groups for weight in weights if not weight.is_copy]
        parts = [
            (part, weight.holders.total)
            for weight in counted
            for part in _summable(weight.gradient)
        ]
        if not parts:
            return torch.zeros_like(self.updates)
        norms = torch._foreach_norm([part for part, _ in parts], 2)
        squares = torch.stack(norms).double().square()
        if self._shares is None:  # only once: copying to a GPU makes the host wait
            self._shares = squares.new_tensor([1 / holders for _, holders in parts])
        return squares @ self._shares

    @torch.no_grad()
    def step(self, norm: Tensor, scale: Tensor) -> None:
        """One update with clipped gradients, which still contain the factor `scale`.

        If their norm is not finite, nothing changes: not the weights, nor the learning rate.
        """
        clip_norm, is_finite = self.config.grad_clip.clip_norm, norm.isfinite().double()
        # One division removes the factor and clips.
        divisor = scale * (norm / clip_norm).clamp(min=1.0) if clip_norm > 0 else scale
        numbers = torch.stack([self.next_lr, divisor, 1.0 - is_finite]).float()
        # Offloaded weights are on the host, which has to wait for these numbers then.
        numbers = numbers.to(self.weights[0].exp_avg.device)
        for weights, weight_decay in self.groups:
            if weights:
                self._update(weights, weight_decay, *numbers.unbind())
        self._round()
        self.updates += is_finite
        self.next_lr = learning_rate(self.config.lr, self.updates + 1)

    @torch.no_grad()
    def _round(self) -> None:
        """O2: copy the fp32 master weights to the half-precision parameters."""
        for weight in self.weights:
            if weight.master is not None:
                weight.local.copy_(weight.master)

    def _update(
        self,
        weights: list[Weight],
        weight_decay: float,
        lr: Tensor,
        grad_scale: Tensor,
        found_inf: Tensor,
    ) -> None:
        adamw(
            [weight.fp32 for weight in weights],
            [weight.gradient for weight in weights],
            [weight.exp_avg for weight in weights],
            [weight.exp_avg_sq for weight in weights],
            [],
            [weight.step for weight in weights],
            fused=True,
            grad_scale=grad_scale,
            found_inf=found_inf,
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
            weight.parameter.grad = None  # not zeros: frees the memory, and saves one addition

    @torch.no_grad()
    def tensors(self) -> dict[str, Piece]:
        """Weights and moments by global name. Not copies: loading overwrites them in place."""
        state: dict[str, Piece] = {}
        for weight in self.weights:
            tensors = {
                f"model.{weight.name}": weight.fp32,
                f"optim.exp_avg.{weight.name}": weight.exp_avg,
                f"optim.exp_avg_sq.{weight.name}": weight.exp_avg_sq,
            }
            # Masters and moments are cut like their parameter, so all of them can be resharded.
            where = (weight.at, weight.holders, weight.is_copy)
            state |= {name: Piece(tensor.detach(), *where) for name, tensor in tensors.items()}
        return state

    def loaded(self, updates: int) -> None:
        """Call this after loading into `tensors`, with the number of updates made so far."""
        for weight in self.weights:
            weight.step.fill_(updates)  # for Adam's bias correction
        self.updates.fill_(updates)
        self.next_lr = learning_rate(self.config.lr, self.updates + 1)
        self._round()


@torch.no_grad()
def new_weight(
    name: str, parameter: nn.Parameter, at: Slice, value: Tensor, has_master: bool
) -> Weight:
    """A weight with its initial value and zero moments."""
    local = local_part(parameter)
    assert tuple(local.shape) == at.sizes, (name, local.shape, at)
    value = value.to(local.device)
    local.copy_(value)
    moments = torch.zeros_like(value)
    step = torch.zeros((), device=value.device)
    return Weight(
        name, parameter, at, value if has_master else None, moments, torch.zeros_like(moments), step
    )


def _summable(gradient: Tensor) -> Sequence[Tensor]:
    """Split gradients on a CPU, where torch adds float32 squares one after the other.

    A sum of 40 million of them would be correct to three digits only.
    """
    if behaviour(gradient.device) != "cpu" or gradient.numel() <= MAX_SUMMED:
        return [gradient]
    return gradient.flatten().split(MAX_SUMMED)


def local_part(tensor: Tensor) -> Tensor:
    """This rank's part of a tensor, which is a DTensor with FSDP. Call it under no_grad."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor
