"""The length of a run and of its epochs. An epoch is one pass over the samples, in any batch size.

In epoch mode, a run knows its position by epoch and sample: it may resume with another batch size.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from trainer.config.sections import RunConfig


class Position(NamedTuple):
    """A position in the data of a run in epoch mode; a checkpoint records it."""

    epoch: int = 0
    batch: int = 0  # batches of this epoch before it, whatever their size was
    sample: int = 0  # samples of this epoch before it


class Length(NamedTuple):
    """The length of a run, and the position of each of its steps."""

    max_steps: int
    steps_per_epoch: int
    batch_size: int = 1
    samples_per_epoch: int = 1
    # Where this process began: after a resume, its epoch may have had batches of another size.
    first_step: int = 0
    start: Position = Position()
    steps_left: int | None = None  # of the epoch of `start`; None: all

    def position(self, step: int) -> Position:
        """The position of a step, all counted from 0."""
        done, (epoch, batch, sample) = step - self.first_step, self.start
        left = self.steps_per_epoch if self.steps_left is None else self.steps_left
        if done < left:
            return Position(epoch, batch + done, sample + done * self.batch_size)
        later, batch = divmod(done - left, self.steps_per_epoch)
        return Position(epoch + 1 + later, batch, batch * self.batch_size)

    def position_of_sample(self, number: int) -> Position:
        """The position of a sample in step mode, where batches run on from epoch to epoch."""
        epoch, sample = divmod(number, self.samples_per_epoch)
        return Position(epoch, math.ceil(sample / self.batch_size), sample)

    def epoch_and_batch(self, step: int) -> tuple[int, int]:
        """Epoch and batch of a step, all counted from 0."""
        epoch, batch, _ = self.position(step)
        if batch < 0:  # a step before this process began, which resumed at the start of an epoch
            return max(0, epoch - 1), 0
        return epoch, batch

    def resumed(self, run: RunConfig, step: int, start: Position) -> Length:
        """The length of a run in epoch mode that resumes here: its epochs end where they would."""
        left = self.steps_per_epoch
        if start.sample:
            drops = run.Data.Train.sampler.drop_last
            left = num_batches(self.samples_per_epoch - start.sample, self.batch_size, drops)
        epochs = run.Engine.num_train_epochs - start.epoch
        end = step + left + (epochs - 1) * self.steps_per_epoch if epochs > 0 else step
        limit = run.Engine.max_steps
        return self._replace(
            max_steps=min(end, limit) if limit > 0 else end,
            first_step=step,
            start=start,
            steps_left=left,
        )


def run_length(run: RunConfig, samples_per_epoch: int) -> Length:
    """The length of a run from its beginning.

    In step mode, an epoch of a CharDataset is one pass over the text. The index maps of a
    GPTDataset cover all passes that the run needs, which count as one epoch.
    """
    size, engine = run.Global.global_batch_size, run.Engine
    # A batch that is larger than the data takes samples twice.
    per_epoch = max(1, num_batches(samples_per_epoch, size, run.Data.Train.sampler.drop_last))
    if engine.run_mode == "step":
        is_mapped = run.Data.Train.dataset.name == "GPTDataset"
        per_epoch = engine.max_steps if is_mapped else per_epoch
        return Length(engine.max_steps, per_epoch, size, samples_per_epoch)
    steps = per_epoch * engine.num_train_epochs
    steps = min(steps, engine.max_steps) if engine.max_steps > 0 else steps
    return Length(steps, per_epoch, size, samples_per_epoch)


def num_batches(samples: int, size: int, drops_last: bool) -> int:
    return max(0, samples // size if drops_last else math.ceil(samples / size))


def samples_to_index(run: RunConfig, length: Length) -> int:
    """The samples that the index maps of a run need.

    In epoch mode, those of whole epochs, so that the order of samples does not change with the
    batch size. It does if `max_steps` ends the run in another epoch then; the log says so.
    """
    if run.Engine.run_mode == "step":
        return run.Global.global_batch_size * length.max_steps
    return length.samples_per_epoch * math.ceil(length.max_steps / length.steps_per_epoch)
