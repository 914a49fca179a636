"""The state of a run, passed between the functions of `train.py`."""

from __future__ import annotations

from dataclasses import dataclass

from trainer.config.sections import RunConfig
from trainer.data import Length, Splits
from trainer.events import Events
from trainer.mesh import Mesh
from trainer.metrics import Log, Metrics
from trainer.optim import Optimizer
from trainer.outcomes import Outcomes
from trainer.parallel import Parallel
from trainer.precision import Precision
from trainer.stop import StopRequest


@dataclass
class Progress:
    step: int = 0  # updates so far, including skipped ones
    updates: int = 0  # updates that changed the weights, as far as the host has read outcomes
    samples: int = 0  # samples consumed so far: the position in the data
    skipped: int = 0  # updates skipped in a row until now


@dataclass
class Training:
    """Everything a run consists of."""

    run: RunConfig
    mesh: Mesh
    log: Log
    stop: StopRequest
    splits: Splits
    length: Length
    parallel: Parallel
    precision: Precision
    optimizer: Optimizer
    metrics: Metrics
    events: Events
    outcomes: Outcomes
    progress: Progress
