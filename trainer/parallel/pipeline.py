"""Pipeline parallelism with torch's schedules: every stage holds some of the layers.

1F1B runs a backward pass as soon as possible, so a stage holds the activations of at most pp_degree
micro-batches. Interleaved 1F1B: every stage holds several chunks of layers, which shortens the idle
time at the start and end of an update. GPipe: all forward passes, then all backward passes; it is
the only one that can run with fewer micro-batches than stages.
Shapes are given in advance, so that torch does not have to exchange them in the first step.
Received tensors exist only while a schedule needs them, see `LeanStage`.
"""

from __future__ import annotations

from collections import deque
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
from trainer.loss import Factor
from trainer.mesh import Mesh, wait_for
from trainer.precision import Precision

SENDS_IN_FLIGHT = 4  # per chunk, before the oldest one is waited for


class LeanStage(PipelineStage):
    """A stage whose receive buffers live as long as their micro-batch, and no longer.

    torch allocates the buffers of all micro-batches before the first one arrives and keeps them:
    with 1,536 micro-batches of a 175B model, 72 GiB on a middle stage. Here a buffer is allocated
    when its message is expected. After that, only the forward pass that reads it holds it, until
    its backward pass. The methods below are not public: torch has them as of 2.12.
    """

    def _setup_forward_recv_info(self, num_microbatches: int, has_backward: bool) -> None:
        for number in reversed(range(num_microbatches)):  # one at a time: torch allocates a buffer
            super()._setup_forward_recv_info(1, has_backward)
            self.args_recv_info[number] = _emptied(self.args_recv_info[0])

    def _create_grad_recv_info(self, act_send_info: dict[int, Any]) -> tuple[Any, ...]:
        return _emptied(super()._create_grad_recv_info(act_send_info))

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list[Any]:
        self._allocate(self.args_recv_info[fwd_chunk_id])
        return super().get_fwd_recv_ops(fwd_chunk_id)

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list[Any]:
        if self.has_backward:
            self._allocate(self.grad_recv_info[bwd_chunk_id])
        return super().get_bwd_recv_ops(bwd_chunk_id)

    def _allocate(self, infos: tuple[Any, ...]) -> None:
        for info in infos:
            if not info.is_root_arg:
                meta = info.tensor_meta
                info.buffer = torch.empty(meta.shape, dtype=meta.dtype, device=self.device)

    def _retrieve_recv_activations(self, fwd_chunk_id: int) -> tuple[Tensor, ...]:
        received = super()._retrieve_recv_activations(fwd_chunk_id)
        _emptied(self.args_recv_info[fwd_chunk_id])
        return received

    def _retrieve_recv_grads(self, bwd_chunk_id: int) -> tuple[Tensor, ...]:
        received = super()._retrieve_recv_grads(bwd_chunk_id)
        _emptied(self.grad_recv_info[bwd_chunk_id])
        return received

    def get_fwd_send_ops(self, fwd_chunk_id: int) -> list[Any]:
        """In an evaluation, no backward pass will drop what a forward pass leaves behind."""
        ops = super().get_fwd_send_ops(fwd_chunk_id)
        if not self.has_backward:
            del self.fwd_cache[fwd_chunk_id]
        return ops


class LeanChunk(LeanStage):
    """A stage of an interleaved schedule, which also lets go of what it has sent.

    That schedule would hold every sent tensor until the end of the update. Waiting earlier cannot
    block: the neighbour expects a message before it needs anything that this rank does later.
    """

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self.sending: deque[Any] = deque()

    def get_fwd_send_ops(self, fwd_chunk_id: int) -> list[Any]:
        return self._send(super().get_fwd_send_ops(fwd_chunk_id))

    def get_bwd_send_ops(self, bwd_chunk_id: int) -> list[Any]:
        return self._send(super().get_bwd_send_ops(bwd_chunk_id))

    def _send(self, ops: list[Any]) -> list[Any]:
        """Send now, and leave nothing for the schedule to send and hold."""
        for op in ops:
            self.sending.append(op.op(op.tensor, group=op.group, group_dst=op.group_peer))
        self._wait(SENDS_IN_FLIGHT)
        return []

    def _wait(self, remaining: int) -> None:
        while len(self.sending) > remaining:
            wait_for(self.sending.popleft())

    def perform_reduce_grad(self, grad_scale_factor: int) -> None:
        """The last action of a chunk in an update, which leaves no message under way."""
        self._wait(0)
        super().perform_reduce_grad(grad_scale_factor)


def _emptied(infos: tuple[Any, ...]) -> tuple[Any, ...]:
    for info in infos:
        info.buffer = None
    return infos


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
    ) -> LeanStage:
        kind = LeanStage if run.Model.virtual_pp_degree == 1 else LeanChunk
        batch, tokens = run.Global.micro_batch_size, run.Data.Train.dataset.max_seq_len
        # With sequence parallelism, stages exchange only this rank's part of the sequence.
        length = tokens // mesh.layout.mp if run.Model.sequence_parallel else tokens
        with torch.device("meta"):
            text = torch.empty(batch, tokens, dtype=torch.long)
            hidden = torch.empty(
                (batch, length, run.Model.hidden_size),
                dtype=precision.message_dtype,
                requires_grad=True,
            )
            loss = torch.empty((), requires_grad=True)
        # The first stage reads tokens, and the last one returns the loss.
        into, out = text if index == 0 else hidden, loss if index == total - 1 else hidden
        return kind(
            module,
            index,
            total,
            mesh.device,
            input_args=(into,),
            output_args=(out,),
            group=mesh.groups["pp"],
        )

    def gradients(self, batch: LocalBatch, factor: Factor) -> Tensor:
        """Forward and backward pass of one update; the loss on the last stage, 0 on the others."""
        return self._run(self.schedule.step, batch, factor)

    def loss(self, batch: LocalBatch) -> Tensor:
        return self._run(self.schedule.eval, batch, 1.0)

    def _run(self, act: Callable[..., object], batch: LocalBatch, factor: Factor) -> Tensor:
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
