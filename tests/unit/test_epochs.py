"""Epochs by samples. Oracle: a plain loop that takes batches from one list of samples per epoch."""

from __future__ import annotations

from dataclasses import replace

import pytest

from trainer.config.sections import RunConfig
from trainer.data.epochs import Length, run_length, samples_to_index

DEFAULTS = RunConfig()


def configured(batch: int, epochs: int, drop_last: bool, max_steps: int = 0) -> RunConfig:
    data = DEFAULTS.Data
    sampler = replace(data.Train.sampler, drop_last=drop_last)
    engine = replace(DEFAULTS.Engine, run_mode="epoch", num_train_epochs=epochs, max_steps=max_steps)
    return replace(
        DEFAULTS,
        Global=replace(DEFAULTS.Global, global_batch_size=batch),
        Engine=engine,
        Data=replace(data, Train=replace(data.Train, sampler=sampler)),
    )


def loop(samples: int, sizes: list[tuple[int, int]], epochs: int, drop_last: bool) -> list[tuple[int, int, int]]:
    """(epoch, batch, first sample) of each step; `sizes`: batch sizes, each with its number of steps."""
    steps = [size for size, count in sizes for _ in range(count)]
    taken: list[tuple[int, int, int]] = []
    for epoch in range(epochs):
        sample = batch = 0
        while sample < samples and len(taken) < len(steps):
            size = steps[len(taken)]
            if drop_last and sample + size > samples:
                break
            taken.append((epoch, batch, sample))
            sample, batch = sample + size, batch + 1
            if drop_last and sample + size > samples:
                break  # its batch size ended this epoch, which a smaller one does not reopen
    return taken


def positions(length: Length, first: int, end: int) -> list[tuple[int, int, int]]:
    return [tuple(length.position(step)) for step in range(first, end)]  # type: ignore[misc]


@pytest.mark.parametrize("drop_last", [True, False])
@pytest.mark.parametrize("later", [1, 4, 12, 16, 50, 300])
@pytest.mark.parametrize("first_steps", [1, 33, 55, 60, 110])
def test_a_run_with_two_batch_sizes_takes_what_a_loop_takes(drop_last: bool, later: int, first_steps: int) -> None:
    """885 samples, three epochs: batches of 16 at first, then of another size."""
    before = run_length(run := configured(16, 3, drop_last), 885)
    start = before.position(first_steps)
    now = configured(later, 3, drop_last)
    after = run_length(now, 885).resumed(now, first_steps, start)
    wanted = loop(885, [(16, first_steps), (later, 10_000)], 3, drop_last)
    taken = positions(before, 0, first_steps) + positions(after, first_steps, after.max_steps)
    assert taken == wanted
    assert samples_to_index(run, before) == samples_to_index(now, run_length(now, 885)) == 3 * 885


def test_a_limit_of_steps_holds_after_a_resume() -> None:
    run = configured(16, 3, True, max_steps=40)
    length = run_length(run, 885)
    assert length.max_steps == length.resumed(run, 33, length.position(33)).max_steps == 40


def test_a_finished_run_has_no_steps_left() -> None:
    run = configured(16, 2, True)
    length = run_length(run, 885)
    ended = length.resumed(run, 110, length.position(110))
    assert (ended.max_steps, ended.epoch_and_batch(109)) == (110, (1, 0))


def test_batches_larger_than_the_data_are_one_step_per_epoch() -> None:
    assert run_length(configured(1000, 3, True), 885)[:2] == (3, 1)
