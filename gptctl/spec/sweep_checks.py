"""Compare the checked runs of a sweep: what is wrong only because there are several of them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from gptctl.spec.check import Checked
from gptctl.spec.outputs import OUTPUTS, output_of, shared_output
from gptctl.spec.sweep import RUNS
from trainer.errors import Finding


def check_runs(checks: Sequence[Checked]) -> Iterator[Finding]:
    """Report runs that are equal although their values are written differently, and shared folders.

    Invalid runs have findings of their own.
    """
    valid = [(number, checked) for number, checked in enumerate(checks) if checked.is_valid]
    for first, second in _repeated((number, _meaning(checked)) for number, checked in valid):
        message = f"runs {first} and {second} have the same config"
        yield RUNS.found("parameters", None, message, "remove one of the two values")
        return
    for name in OUTPUTS:
        # Runs that follow each other overwrite each other's checkpoints, too.
        for first, second in _repeated((number, output_of(name, each)) for number, each in valid):
            who, value = f"runs {first} and {second}", output_of(name, checks[first])
            yield shared_output(name, value, who, "give each run another value")
            break


def _repeated(values: Iterable[tuple[int, str]]) -> Iterator[tuple[int, int]]:
    seen: dict[str, int] = {}
    for number, value in values:
        if value and value in seen:
            yield seen[value], number
        seen.setdefault(value, number)


def _meaning(checked: Checked) -> str:
    """What defines the run, as text: configs contain mappings, which have no hash."""
    run = checked.resolved.run if checked.resolved else None
    return repr((run, checked.launch, checked.cluster))
