"""Rules for the learning-rate schedule. Reports settings that are probably a mistake."""

from __future__ import annotations

from collections.abc import Iterator

from trainer.config.sections import RunConfig
from trainer.errors import Finding, Rule

# A warning, because FleetX itself published configs with the two values swapped.
LR_ORDER = Rule(
    "T020",
    "min_lr should not be greater than max_lr",
    "warning",
    uses=("Optimizer.lr.min_lr", "Optimizer.lr.max_lr", "Optimizer.lr.name"),
)
# A warning, because it may be a trial of a longer run.
WARM_UP = Rule(
    "T030",
    "the warm-up of the learning rate should end within the run",
    "warning",
    uses=(
        *("Optimizer.lr.decay_steps", "Optimizer.lr.warmup_rate", "Optimizer.lr.name"),
        *("Engine.run_mode", "Engine.max_steps"),
    ),
)
LONGEST_TRIAL = 100  # steps; shorter runs only try whether everything works


def check_schedule(run: RunConfig) -> Iterator[Finding]:
    lr = run.Optimizer.lr
    if lr.name == "none":
        return
    if lr.min_lr > lr.max_lr:
        message = (
            f"min_lr {lr.min_lr:g} is above max_lr {lr.max_lr:g}: "
            "the learning rate would increase during decay"
        )
        yield LR_ORDER.found("Optimizer.lr.min_lr", lr.min_lr, message, "swap min_lr and max_lr")
    # In epoch mode, only the trainer knows the number of steps.
    steps, warm_up = run.Engine.max_steps, lr.warmup_rate * lr.decay_steps
    if run.Engine.run_mode == "step" and LONGEST_TRIAL < steps < warm_up:
        message = (
            f"warm-up takes {warm_up:,.0f} updates (warmup_rate {lr.warmup_rate:g} of decay_steps "
            f"{lr.decay_steps:,}), but the run has {steps:,}: the learning rate would end at "
            f"{lr.max_lr * steps / warm_up:.2g}, not {lr.max_lr:g}"
        )
        hint = f"set Optimizer.lr.decay_steps: {steps}, or leave it empty: as long as the run"
        yield WARM_UP.found("Optimizer.lr.decay_steps", lr.decay_steps, message, hint)
