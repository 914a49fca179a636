"""Half precision: the dtype of parameters, computations and messages, and the loss scale.

                            parameters         computed in         optimizer
    fp32                    fp32               fp32                fp32
    O1                      fp32               half, by autocast   fp32
    O2                      half               half                fp32, with master weights
    O1 or O2 with sharding  fp32 shards,       half                fp32: the shards are the
                            gathered in half                       master weights

In all of them, gradients are added up, reduced and clipped in fp32, and pipeline stages exchange
half-precision hidden states.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor, nn

from trainer.config.sections import MixPrecision
from trainer.loss import Factor, OnDevice
from trainer.model import GPT

GROWTH_INTERVAL = 1000  # updates without overflow before the loss scale doubles, as in Paddle
HALVES = {"float16": torch.float16, "bfloat16": torch.bfloat16}


class Precision:
    """The dtypes of a run, and the loss scale of float16.

    The scale and its counter are on the device: the host must not have to wait for an update before
    it starts the next one.
    """

    def __init__(self, config: MixPrecision, device: str, is_sharded: bool = False) -> None:
        self.half = HALVES[config.dtype] if config.enable else None
        self.device = device
        # With sharding, FSDP casts: O1 and O2 are the same there.
        self.has_masters = config.enable and config.level == "O2" and not is_sharded
        self.uses_autocast = config.enable and config.level == "O1" and not is_sharded
        self.is_dynamic = self.half is torch.float16
        scale = config.scale_loss if self.is_dynamic else 1.0
        self.scale = torch.full((), scale, dtype=torch.float64, device=device)
        self.good_updates = torch.zeros((), dtype=torch.float64, device=device)

    @property
    def message_dtype(self) -> torch.dtype:
        """The dtype of the hidden states that pipeline stages exchange."""
        return self.half or torch.float32

    def convert(self, part: nn.Module) -> None:
        """O2: convert the parameters. Without sharding, which needs fp32 parameters."""
        if self.has_masters:
            part.to(self.half)

    def runnable(self, part: GPT) -> nn.Module:
        """The module to call for a forward pass."""
        if not self.uses_autocast:
            return part
        assert self.half is not None
        return Autocast(part, self.device, self.half)

    def update(self) -> AbstractContextManager[object]:
        """The context of all passes of an update.

        O1: torch drops the half-precision weights when the outermost autocast context ends. Without
        this one, every micro-batch in flight in a pipeline would keep weights of its own. It is
        disabled, because autocast must not be active in backward passes.
        """
        return torch.autocast(self.device, enabled=False) if self.uses_autocast else nullcontext()

    def scaled(self, factor: float) -> Factor:
        """A factor of the loss, times the loss scale."""
        return OnDevice((self.scale * factor).float()) if self.is_dynamic else factor

    def update_scale(self, is_finite: Tensor) -> None:
        """Halve the scale after an overflow, double it after many updates without one."""
        if not self.is_dynamic:
            return
        finite = is_finite.double()  # 0: gradients times the scale exceeded float16
        self.good_updates.add_(1).mul_(finite)
        grows = (self.good_updates == GROWTH_INTERVAL).double()
        self.scale.mul_(0.5 + 0.5 * finite + grows)  # 0.5, 1 or 2
        self.good_updates.mul_(1 - grows)

    def state(self) -> dict[str, float]:
        return {"scale": float(self.scale), "good_updates": int(self.good_updates)}

    def restore(self, state: dict[str, float]) -> None:
        if self.is_dynamic:  # a run may resume in another precision
            self.scale.fill_(state["scale"])
            self.good_updates.fill_(state["good_updates"])


class Autocast(nn.Module):
    """Runs a part of the model in autocast, between half-precision inputs and outputs."""

    def __init__(self, part: GPT, device: str, half: torch.dtype) -> None:
        super().__init__()
        self.part, self.device, self.dtype = part, device, half

    def forward(self, x: Tensor, labels: Tensor | None = None, factor: Factor = 1.0) -> Tensor:
        if not self.part.is_first:
            x = x.float()  # the residual stream is fp32 inside a stage
        with torch.autocast(self.device, self.dtype):
            y: Tensor = self.part(x, labels, factor)
        return y if self.part.is_last else y.to(self.dtype)
