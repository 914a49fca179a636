"""The parts of a run under one name, handed from one chapter of the training to the next."""

from __future__ import annotations

from dataclasses import dataclass

from trainer.config.sections import RunConfig
from trainer.data import Length, Splits
from trainer.mesh import Mesh
from trainer.metrics import Log, Metrics
from trainer.optim import Optimizer, Precision
from trainer.parallel import Parallel
from trainer.stop import StopRequest


@dataclass
class Progress:
    step: int = 0  # updates so far, those that were skipped included
    updates: int = 0  # updates that changed the weights: the position in the learning-rate schedule
    samples: int = 0  # consumed so far: the position in the data
    skipped: int = 0  # updates skipped in a row, up to now


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
    progress: Progress
