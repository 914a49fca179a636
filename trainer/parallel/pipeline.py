"""Pipeline parallelism with torch's schedules: every stage holds some of the layers.

1F1B runs a backward pass as soon as possible, so a stage holds the activations of at most pp_degree
micro-batches. Interleaved 1F1B: every stage holds several chunks of layers, which shortens the idle
time at the start and end of an update. GPipe: all forward passes, then all backward passes; it is
the only one that can run with fewer micro-batches than stages.
Shapes are given in advance, so that torch does not have to exchange them in the first step.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
)

from trainer.config.sections import RunConfig
from trainer.data import LocalBatch
from trainer.mesh import Mesh
from trainer.optim import Precision


class Pipeline:
    """Runs the micro-batches of an update through all stages at once."""

    def __init__(
        self, run: RunConfig, mesh: Mesh, precision: Precision, chunks: list[tuple[int, nn.Module]]
    ) -> None:
        self.device = mesh.device
        total = mesh.layout.pp * run.Model.virtual_pp_degree
        self.is_first, self.is_last = chunks[0][0] == 0, chunks[-1][0] == total - 1
        stages: Any = [
            self._stage(run, mesh, precision, index, total, module) for index, module in chunks
        ]
        count = run.Engine.accumulate_steps
        # `factor` scales the loss already, so torch must not scale the gradients again.
        settings: Any = {"loss_fn": _output_is_loss, "scale_grads": False}
        kind: Any = ScheduleGPipe if run.Distributed.pp_schedule == "GPipe" else Schedule1F1B
        if run.Model.virtual_pp_degree > 1:
            self.schedule = ScheduleInterleaved1F1B(stages, count, **settings)
        else:
            self.schedule = kind(stages[0], count, **settings)

    def _stage(
        self,
        run: RunConfig,
        mesh: Mesh,
        precision: Precision,
        index: int,
        total: int,
        module: nn.Module,
    ) -> PipelineStage:
        batch, tokens = run.Global.micro_batch_size, run.Data.Train.dataset.max_seq_len
        # With sequence parallelism, stages exchange only this rank's part of the sequence.
        length = tokens // mesh.layout.mp if run.Model.sequence_parallel else tokens
        dtype = precision.half if precision.is_pure else torch.float32
        with torch.device("meta"):
            text = torch.empty(batch, tokens, dtype=torch.long)
            hidden = torch.empty(
                batch, length, run.Model.hidden_size, dtype=dtype, requires_grad=True
            )
            loss = torch.empty((), requires_grad=True)
        # The first stage reads tokens, and the last one returns the loss.
        into, out = text if index == 0 else hidden, loss if index == total - 1 else hidden
        return PipelineStage(
            module,
            index,
            total,
            mesh.device,
            input_args=(into,),
            output_args=(out,),
            group=mesh.groups["pp"],
        )

    def gradients(self, batch: LocalBatch, factor: float) -> Tensor:
        """Forward and backward pass of one update; the loss on the last stage, 0 on the others."""
        return self._run(self.schedule.step, batch, factor)

    def loss(self, batch: LocalBatch) -> Tensor:
        return self._run(self.schedule.eval, batch, 1.0)

    def _run(self, act: Callable[..., object], batch: LocalBatch, factor: float) -> Tensor:
        settings: dict[str, object] = {"return_outputs": False}
        inputs = [batch.inputs.to(self.device, non_blocking=True)] if self.is_first else []
        losses: list[Tensor] = []
        if self.is_last:
            labels = batch.labels.to(self.device, non_blocking=True)
            # torch passes `target` to the loss function, `labels` and `factor` to the last stage.
            settings |= {"target": labels, "losses": losses, "labels": labels, "factor": factor}
        act(*inputs, **settings)
        if not losses:
            return torch.zeros((), device=self.device)
        return torch.stack([loss.detach() for loss in losses]).sum()


def _output_is_loss(loss: Tensor, _: Tensor) -> Tensor:
    """The loss function that torch's schedules require; the last stage computes the loss itself."""
    return loss
