"""The training loop. Read it from top to bottom: `train` first, then the steps that it calls.

    python -m trainer -c run.yaml                        one process
    torchrun --nproc-per-node 2 -m trainer -c run.yaml   several processes

This file does not know how the model is split or replicated (`parallel`), which ranks exist
(`mesh`), how data is stored (`data`), or how checkpoints are written (`checkpoint`).
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from trainer.banner import announce
from trainer.checkpoint import Checkpoints
from trainer.collectives import SUMMARY
from trainer.config.resolve import batch_of
from trainer.config.sections import RunConfig
from trainer.data import LocalBatch, Reader, Start, open_data
from trainer.environment import record_environment
from trainer.errors import UserError
from trainer.event_names import EVALUATING, EVALUATION, FINISHED, FIRST_STEP, GROUP, STOP
from trainer.events import Events
from trainer.inference.generation import generate
from trainer.inference.network import network_of
from trainer.logline import COMPLETE, epoch_line, evaluation_line, sample_title
from trainer.loss import multiplier
from trainer.mesh import Mesh
from trainer.metrics import Log, Metrics
from trainer.optim import Optimizer
from trainer.outcomes import Outcome, Outcomes
from trainer.parallel import parallelize
from trainer.precision import Precision
from trainer.resume import (
    choose_checkpoint,
    how_to_resume,
    keep_tokenizer,
    output_dir,
    output_folder,
    restore,
    save,
    whole_model,
)
from trainer.state import Progress, Training
from trainer.status import status_file
from trainer.step_times import OPTIMIZER, measured, timed_waits
from trainer.stop import StopRequest
from trainer.tracking import tracking

if TYPE_CHECKING:
    from trainer.profiler import Recorder

MAX_SKIPPED = 100  # updates in a row without a finite gradient: the run will not recover
MINGPT_FREQ = 100  # iterations between log lines in minGPT's style


def train(run: RunConfig, mesh: Mesh, log: Log, stop: StopRequest) -> None:
    # Lock the folder and choose the checkpoint first: if that fails, no model has to be built.
    events = Events(output_dir(run), mesh.is_first, log.warn)
    with output_folder(run, mesh, log, events) as checkpoints:
        events.add(GROUP, ranks=mesh.world)
        checkpoint = choose_checkpoint(run, mesh, checkpoints)
        with status_file(output_dir(run), mesh, log) as report:
            t = prepare(run, mesh, log, stop, events)
            keep_tokenizer(t)
            record_environment(t)
            restore(t, checkpoints, checkpoint)
            first_step = t.progress.step
            # A profile is written last: there may be no time for it, or no space for both.
            with tracking(t), profiling(t) as recorder:
                events.add(FIRST_STEP, step=first_step + 1, resumed=first_step)
                if run_steps(t, checkpoints, recorder):
                    finish(t, checkpoints)
                    report("finished", step=t.progress.step)
                    events.add(FINISHED, step=t.progress.step)
                    log.info(COMPLETE)
                else:
                    has_trained = t.progress.step > first_step
                    signal = stop.signal or "sent to another rank"
                    events.add(STOP, step=t.progress.step, signal=signal)
                    if has_trained:
                        save_unless_checking(t, checkpoints)
                    report("stopped", step=t.progress.step, signal=signal)
                    log.info(stop_text(t.progress.step, has_trained))


def stop_text(step: int, has_trained: bool) -> str:
    if not has_trained:
        return f"Stopped on request before global step {step + 1}: there was nothing to save."
    return f"Stopped on request at global step {step}. To resume: {how_to_resume()}."


def prepare(run: RunConfig, mesh: Mesh, log: Log, stop: StopRequest, events: Events) -> Training:
    """Create data, model and optimizer at step 0. `t.run` also has the vocabulary of the data."""
    run, splits, length = open_data(run, mesh, log.warn)
    is_sharded = mesh.layout.sharding > 1
    precision = Precision(run.Engine.mix_precision, mesh.device.type, is_sharded)
    parallel = parallelize(run, mesh, precision)
    optimizer = Optimizer(parallel.weights, run.Optimizer, mesh.device)
    metrics = Metrics(run, mesh, log, output_dir(run), length.max_steps)
    announce(run, mesh, log, splits, length, parallel.weights)
    outcomes, progress = Outcomes(mesh), Progress()
    return Training(
        run,
        mesh,
        log,
        stop,
        splits,
        length,
        parallel,
        precision,
        optimizer,
        metrics,
        events,
        outcomes,
        progress,
    )


def profiling(t: Training) -> AbstractContextManager[Recorder | None]:
    """The profiler, if the config asks for one."""
    if not t.run.Profiler.enable:
        return nullcontext()
    from trainer.profiler import Recorder  # here: without a profile, nothing of it is loaded

    return Recorder(t)


def run_steps(t: Training, checkpoints: Checkpoints, recorder: Recorder | None = None) -> bool:
    """Train up to the last step. Returns False if a stop was requested before.

    The host only starts the computations of a step. It reads their numbers later (`Outcomes`),
    unless something needs the exact state now.
    """
    num_workers = t.run.Data.Train.loader.num_workers
    batches = reader(t, "train").batches(batch_starts(t), num_workers)
    t.mesh.heartbeat.tick("before the first step")
    if t.progress.step < t.length.max_steps and stop_is_requested(t):
        return False
    t.parallel.train()
    with timed_waits(t.metrics.clock.spans):
        if recorder is None:
            return run_batches(t, batches, checkpoints)
        is_complete = run_batches(t, recorder.batches(batches), checkpoints)
        recorder.stop()  # what follows is not a step
        return is_complete


def run_batches(t: Training, batches: Iterator[LocalBatch], checkpoints: Checkpoints) -> bool:
    clock = t.metrics.clock
    begin_step(t)
    for batch in batches:
        # The time until here counts as avg_reader_cost.
        clock.data_is_here(is_logged(t, t.progress.step + 1))
        t.mesh.heartbeat.tick(f"at global step {t.progress.step + 1}")
        summary, own_loss = compute_gradients(t, batch)
        update_weights(t, summary, own_loss)
        clock.is_computed()
        outcomes = t.outcomes.read(everything=exact_state_is_needed(t))
        clock.end()
        t.events.completed(t.progress.step)
        for outcome in outcomes:
            take_note(t, outcome)
        if save_is_due(t):
            t.mesh.heartbeat.tick(f"saving at global step {t.progress.step}")
            save(t, checkpoints, is_regular=True)
        is_last = t.progress.step == t.length.max_steps
        if any(outcome.stops for outcome in outcomes) and not is_last:
            return False
        if evaluation_is_due(t) and not evaluate_and_log(t) and not is_last:
            return False
        begin_step(t)
    return True


def batch_starts(t: Training) -> Iterator[Start]:
    """Where the batches of all remaining steps start in the data.

    In step mode they follow one another; in epoch mode every epoch starts with a new batch.
    """
    first, samples, size = t.progress.step, t.progress.samples, t.run.Global.global_batch_size
    for step in range(first, t.length.max_steps):
        if t.run.Engine.run_mode == "epoch":
            epoch, _, sample = t.length.position(step)
            yield Start(sample, epoch)
        else:
            yield Start(samples + (step - first) * size)


def stop_is_requested(t: Training) -> bool:
    """Whether any rank has received a stop signal. All must decide alike, so all of them wait."""
    return t.mesh.total(bool(t.stop.signal))[0] > 0


def begin_step(t: Training) -> None:
    t.metrics.clock.begin()
    t.mesh.heartbeat.tick(f"reading data for global step {t.progress.step + 1}")


def exact_state_is_needed(t: Training) -> bool:
    """Whether the host has to know everything about the step that was just started."""
    is_last = t.progress.step == t.length.max_steps
    return is_logged(t, t.progress.step) or is_last or save_is_due(t) or evaluation_is_due(t)


def is_logged(t: Training, step: int) -> bool:
    return step % t.run.Engine.logging_freq == 0


def compute_gradients(t: Training, batch: LocalBatch) -> tuple[Tensor, Tensor]:
    """Forward and backward pass of one update. Returns the summary of the step and the own loss.

    The summary is summed over all ranks, all of them in one message: the loss, the square of the
    gradient's norm, the number of predicted tokens, and the number of ranks asked to stop.
    In logged steps, each rank adds its own time of a step: the sum has those of all ranks.
    Ranks with different data average their gradients, hence the factor data_ranks. Losses and
    gradients are divided by the number of tokens of a batch and contain the float16 loss scale,
    until `update_weights` puts both right.
    """
    layout = t.mesh.layout
    factor = t.precision.scaled(layout.data_ranks / t.metrics.tokens_per_step)
    own = t.parallel.gradients(batch, factor, t.progress.step).double()
    square = t.optimizer.squared_norm().to(own.device)  # offloaded gradients are on the host
    num_predicted = batch.num_predicted
    own_loss = own / multiplier(factor) / max(1, num_predicted)
    if own_loss_is_due(t, t.progress.step):
        t.mesh.summed(own_loss, "pp")  # only the last stage has one
    told = [num_predicted / layout.readers, float(bool(t.stop.signal))]
    if is_logged(t, t.progress.step + 1):
        told += own_times(t)
    summary = torch.stack([own, square, *(torch.full_like(own, number) for number in told)])
    return t.mesh.summed(summary), own_loss


def own_times(t: Training) -> list[float]:
    """This rank's time of a step, without waiting for others, in its place among all ranks."""
    times = [0.0] * t.mesh.world
    times[t.mesh.rank] = t.metrics.clock.own_time
    return times


def update_weights(t: Training, summary: Tensor, own_loss: Tensor) -> None:
    """One optimizer step, unless the gradient is not finite. The device decides.

    The summary is the same on all ranks, so either all of them skip the update or none. A skipped
    update counts as a step and consumes its samples, but does not advance the learning rate.
    """
    loss, square, num_predicted, stops = summary[:SUMMARY].unbind()
    # The loss should be a mean over predicted tokens; a batch may predict nothing.
    predicted = num_predicted.clamp(min=1.0) / t.metrics.tokens_per_step
    scale = t.precision.scale * predicted
    norm = square.sqrt() / scale
    with measured(t.metrics.clock.spans, OPTIMIZER):
        t.optimizer.step(norm, scale)
    t.precision.update_scale(norm.isfinite())  # after the step: its gradients have the old scale
    t.optimizer.zero_grad()
    t.progress.step += 1
    t.progress.samples += t.run.Global.global_batch_size
    # All ranks of an mp group have the same loss, and only the last stage of a pipeline has one.
    loss = loss / scale / t.mesh.layout.data_ranks / t.mesh.layout.mp
    updates, next_lr = t.optimizer.updates, t.optimizer.next_lr
    numbers = [loss, norm, stops, updates, next_lr, t.precision.scale, own_loss]
    t.outcomes.add(t.progress.step, numbers, summary[SUMMARY:])


def take_note(t: Training, outcome: Outcome) -> None:
    """Log a step, and count updates and skipped updates."""
    t.progress.updates = int(outcome.updates)
    log_own_loss(t, outcome)
    if math.isfinite(outcome.norm):
        t.progress.skipped = 0
    else:
        t.progress.skipped += 1
        warn_of_skip(t, outcome)
    log_step(t, outcome)


def own_loss_is_due(t: Training, step: int) -> bool:
    """In minGPT's style, every rank logs the mean loss of its own samples. Steps count from 0."""
    _, number = t.length.epoch_and_batch(step)
    return t.log.style == "mingpt" and number % MINGPT_FREQ == 0


def log_own_loss(t: Training, outcome: Outcome) -> None:
    if own_loss_is_due(t, outcome.step - 1):
        epoch, number = t.length.epoch_and_batch(outcome.step - 1)
        t.log.plain(epoch_line(t.mesh.rank, epoch + 1, number, "Train", outcome.own_loss))


def warn_of_skip(t: Training, outcome: Outcome) -> None:
    scale = f", loss scale is now {outcome.scale:g}" if t.precision.is_dynamic else ""
    if t.mesh.is_first:
        t.log.warn(
            f"global step {outcome.step}: the gradient norm is {outcome.norm}, "
            f"update skipped{scale}"
        )
    if t.progress.skipped == MAX_SKIPPED:
        hint = "lower Optimizer.lr.max_lr, use bfloat16, or check the data of these steps"
        raise UserError(f"no progress: {MAX_SKIPPED} updates in a row had no finite gradient", hint)


def log_step(t: Training, outcome: Outcome) -> None:
    if is_logged(t, outcome.step):
        epoch, batch = t.length.epoch_and_batch(outcome.step - 1)
        # FleetX logs the rate after the scheduler has advanced, so this is that of the next update.
        t.metrics.logged(
            outcome.step,
            epoch,
            batch,
            outcome.loss,
            outcome.next_lr,
            outcome.norm,
            outcome.scale,
            t.progress.samples,
        )
        t.metrics.record_rank_times(outcome.step, outcome.own_times)


def is_due(t: Training, steps: int, epochs: int) -> bool:
    """Whether something is due that happens every n steps, or in epoch mode every n epochs."""
    if t.run.Engine.run_mode == "epoch":
        finished, batch = t.length.epoch_and_batch(t.progress.step)
        return batch == 0 and finished % epochs == 0
    return steps > 0 and t.progress.step % steps == 0


def save_is_due(t: Training) -> bool:
    keeping = t.run.Engine.save_load
    return not t.run.Engine.check_accuracy and is_due(t, keeping.save_steps, keeping.save_epoch)


def evaluation_is_due(t: Training) -> bool:
    wanted = t.run.Engine.eval_freq > 0 or t.log.style == "mingpt"
    return wanted and not t.run.Engine.check_accuracy and is_due(t, t.run.Engine.eval_freq, 1)


def evaluate_and_log(t: Training) -> bool:
    """Evaluate on the valid split. Returns False if a stop was requested meanwhile."""
    with t.metrics.clock.stalled("eval"):
        return evaluate_regularly(t)


def evaluate_regularly(t: Training) -> bool:
    engine = t.run.Engine
    if t.log.style == "mingpt":  # minGPT evaluates the whole split every time
        everything = (
            math.ceil(t.splits.valid.size / t.run.Global.global_batch_size) if t.splits.valid else 0
        )
        return evaluate(t, "valid", 0, everything, is_whole=True)
    # Each evaluation uses the batches after those of the previous one.
    finished, _ = t.length.epoch_and_batch(t.progress.step)
    by_epoch = engine.run_mode == "epoch"
    evaluations = (finished if by_epoch else t.progress.step // engine.eval_freq) - 1
    return evaluate(t, "valid", evaluations * engine.eval_iters, engine.eval_iters)


@torch.no_grad()
def evaluate(t: Training, name: str, first: int, iterations: int, is_whole: bool = False) -> bool:
    """Log the mean loss of some batches of a split, starting with batch number `first`.

    `is_whole`: every sample counts once. Otherwise samples are used again after the last one.
    Returns False if a stop was requested meanwhile.
    """
    if getattr(t.splits, name) is None or iterations == 0:
        return True
    t.events.add(EVALUATING, step=t.progress.step, split=name)
    began, batches = time.perf_counter(), reader(t, name)
    total, count = torch.zeros((), dtype=torch.float64, device=t.mesh.device), 0
    epoch, _ = t.length.epoch_and_batch(t.progress.step - 1)
    t.parallel.train(False)  # no dropout
    for number in range(iterations):
        t.mesh.heartbeat.tick(f"evaluating at global step {t.progress.step}, batch {number + 1}")
        if stop_is_requested(t):  # which does not wait for the end of the evaluation
            t.parallel.train()
            return False
        start = (first + number) * t.run.Global.global_batch_size
        batch = batches.read_once(start) if is_whole else batches.read(start)
        loss = t.parallel.runner.loss(batch).double()
        total, count = total + loss, count + batch.num_predicted
        if t.log.style == "mingpt" and number % MINGPT_FREQ == 0:
            own = float(t.mesh.summed(loss, "pp"))
            if batch.num_predicted:  # a rank may have none of the last samples
                mean = own / batch.num_predicted
                t.log.plain(epoch_line(t.mesh.rank, epoch + 1, number, "Eval", mean))
    t.parallel.train()
    layout = t.mesh.layout
    loss_sum, num_predicted = t.mesh.total(float(total) / layout.mp, count / layout.readers)
    mean, speed = loss_sum / max(1.0, num_predicted), iterations / (time.perf_counter() - began)
    t.log.info(evaluation_line(name, t.progress.step, epoch, iterations - 1, mean, speed))
    t.metrics.record({"step": t.progress.step, f"{name}_loss": mean})
    seconds = round(time.perf_counter() - began, 3)
    t.events.add(EVALUATION, step=t.progress.step, split=name, loss=mean, seconds=seconds)
    return True


def finish(t: Training, checkpoints: Checkpoints) -> None:
    """Save the last checkpoint, run the test evaluation, and log a sample of a character GPT."""
    save_unless_checking(t, checkpoints)  # first: an error in the test run must not lose the model
    if t.log.style != "mingpt" and not t.run.Engine.check_accuracy:
        evaluate(t, "test", 0, t.run.Engine.test_iters)
        write_sample(t, checkpoints)


def save_unless_checking(t: Training, checkpoints: Checkpoints) -> None:
    """Save the last state and wait until it is on disk. Raises UserError if that fails."""
    if t.run.Engine.check_accuracy:
        return
    t.mesh.heartbeat.tick(f"saving at global step {t.progress.step}")
    save(t, checkpoints, is_regular=False)
    if failure := checkpoints.wait():
        hint = f"fix the cause, then resume from the newest checkpoint: {how_to_resume()}"
        raise UserError(f"cannot save the last checkpoint: {failure}", hint)


def write_sample(t: Training, checkpoints: Checkpoints) -> None:
    """Log a sample text on the first rank.

    If no rank holds the whole model, load it from the checkpoint that was just saved.
    """
    characters, samples = t.splits.characters, t.run.Generation.num_return_sequences
    if characters is None or not samples or not t.mesh.is_first:
        return
    model = t.parallel.parts[0]
    if t.mesh.world > t.mesh.layout.dp:
        model = whole_model(t, checkpoints)
    context = t.run.Data.Train.dataset.max_seq_len
    first = reader(t, "test" if t.splits.test else "train").read(0)
    prompt = first.inputs[0, : context // 2 + 1].tolist()
    model.eval()
    texts = generate(
        network_of(model, t.run),
        [prompt],
        t.run.Generation,
        t.run.Global.seed,
        is_stopped=lambda: bool(t.stop.signal),  # a long sample must not delay a stop request
    )
    model.train()
    for text in texts:
        t.log.info(f"{sample_title(characters.decode(prompt))}\n{characters.decode(text.tokens)}")


def reader(t: Training, name: str) -> Reader:
    split, batch = getattr(t.splits, name), batch_of(t.run)
    part = getattr(t.run.Data, {"train": "Train", "valid": "Eval", "test": "Test"}[name])
    by_epoch = t.run.Engine.run_mode == "epoch" and name == "train"
    epoch_length = t.length.samples_per_epoch if by_epoch else split.size
    shuffle_key = t.run.Global.seed if part.sampler.shuffle else None
    return Reader(split, batch, t.mesh.data_rank, epoch_length, shuffle_key, t.mesh.device)
