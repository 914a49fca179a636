"""The numbers of a step on their way from the device to the host, which reads them later.

If the host read them at once, the GPU would be idle until the host has started the next step. So it
reads them when the next step has been started. This also keeps it from running further ahead.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from trainer.device import READ_LAG, HostCopy
from trainer.mesh import Mesh


class Outcome(NamedTuple):
    """What the host knows of a step. The same on all ranks, except for `own_loss`."""

    step: int  # counted from 1
    loss: float
    norm: float  # of the whole gradient, before it is clipped; not finite: the update is skipped
    stops: float  # ranks that have received a stop signal
    updates: float  # that changed the weights, up to and including this step
    next_lr: float
    scale: float  # the loss scale after this step
    own_loss: float  # the mean loss of this rank's samples, only where minGPT's style logs it
    own_times: Sequence[float] = ()  # of all ranks: seconds of a step, without waiting for others


class Outcomes:
    """Outcomes that the host has not read yet."""

    def __init__(self, mesh: Mesh) -> None:
        self.mesh, self.lag = mesh, READ_LAG[mesh.device.type]
        self._pending: deque[tuple[int, HostCopy]] = deque()

    def add(self, step: int, numbers: list[Tensor], own_times: Tensor) -> None:
        """Start to copy the numbers of a step, in the order of `Outcome`."""
        copy = HostCopy(torch.cat([torch.stack(numbers), own_times]))
        self._pending.append((step, copy))

    def read(self, everything: bool) -> list[Outcome]:
        """Read all outcomes but the last `lag` ones, or all of them, which waits for the device.

        All ranks read the same outcomes at the same points, and so decide alike.
        """
        remaining, outcomes = 0 if everything else self.lag, list[Outcome]()
        while len(self._pending) > remaining:
            step, copy = self._pending.popleft()
            outcomes.append(_outcome(step, self.mesh.read_copy(copy)))
            if outcomes[-1].stops:  # the run ends here, and has to know its exact state
                remaining = 0
        return outcomes


def _outcome(step: int, numbers: list[float]) -> Outcome:
    own_times = numbers[len(Outcome._fields) - 2 :]  # after all others but the step
    return Outcome(step, *numbers[: len(numbers) - len(own_times)], own_times=own_times)  # type: ignore[arg-type,misc]
