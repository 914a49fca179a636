"""Compare what is recorded of two runs. Pure: it reads nothing.

`compare(a, b)` with a and b swapped gives the same differences, with the sides swapped.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from gptctl.jobs.config_differences import affects_training
from gptctl.jobs.metric_differences import MetricDifferences, as_json, metric_differences
from gptctl.jobs.run_facts import SECTIONS, Facts, Value, Values
from gptctl.logs.metric_rows import Row


class Run(NamedTuple):
    """One side of a comparison."""

    job: str  # its id, or the path of a file
    facts: Facts
    rows: Sequence[Row]
    lineage: tuple[str, ...] = ()  # the jobs of the run, oldest first
    created: float | None = None


class ComparedValue(NamedTuple):
    """A value of both runs; None: one of them does not have it."""

    key: str
    a: Value | None
    b: Value | None

    @property
    def is_equal(self) -> bool:
        return bool(self.a and self.b and self.a.compared == self.b.compared)

    def as_json(self, section: str) -> dict[str, Any]:
        sides = {"a": self.a, "b": self.b}
        return {
            "key": self.key,
            **{side: each and each.value for side, each in sides.items()},
            **{f"{side}_from": (each and each.origin) or None for side, each in sides.items()},
            "equal": self.is_equal,
            **({"training": affects_training(self.key)} if section == "config" else {}),
        }


class Section(NamedTuple):
    name: str
    values: list[ComparedValue]
    lacking: tuple[list[str], list[str]]  # files that only the other run has
    is_recorded: bool  # whether either run has any file of it

    @property
    def differences(self) -> list[ComparedValue]:
        return [each for each in self.values if not each.is_equal]

    @property
    def is_equal(self) -> bool:
        return not self.differences and not any(self.lacking)


class Comparison(NamedTuple):
    a: Run
    b: Run
    sections: list[Section]
    metrics: MetricDifferences
    tolerance: float

    @property
    def is_equal(self) -> bool:
        return self.metrics.is_equal and all(section.is_equal for section in self.sections)


def compare(a: Run, b: Run, tolerance: float) -> Comparison:
    sections = [_section(name, a.facts, b.facts) for name in SECTIONS]
    return Comparison(a, b, sections, metric_differences(a.rows, b.rows, tolerance), tolerance)


def _section(name: str, a: Facts, b: Facts) -> Section:
    one, other = a.get(name, {}), b.get(name, {})
    known = [
        {source for source, values in side.items() if values is not None} for side in (one, other)
    ]
    # The values of a file that only one of them has cannot be compared.
    both = sorted(known[0] & known[1])
    values = [_merged(side, both) for side in (one, other)]
    keys = sorted({*values[0], *values[1]}, key=lambda key: (not affects_training(key), key))
    compared = [ComparedValue(key, values[0].get(key), values[1].get(key)) for key in keys]
    lacking = (sorted(known[1] - known[0]), sorted(known[0] - known[1]))
    # An older version had not all keys of today: a default is not a difference.
    shared = [each for each in compared if not _is_new_key(each)]
    return Section(name, shared, lacking, bool(known[0] | known[1]))


def _merged(side: dict[str, Values | None], sources: Sequence[str]) -> Values:
    """The values of these sources; of a variable, what was planned is known best."""
    merged: Values = {}
    for source in sources:
        for key, value in (side[source] or {}).items():
            merged.setdefault(key, value)
    return merged


def _is_new_key(compared: ComparedValue) -> bool:
    only = [each for each in (compared.a, compared.b) if each is not None]
    return len(only) == 1 and only[0].origin == "default"


def comparison_json(found: Comparison, everything: bool) -> dict[str, Any]:
    """As JSON: the differences; with `everything`, equal values too."""
    return {
        **{side: _run_json(run) for side, run in (("a", found.a), ("b", found.b))},
        "equal": found.is_equal,
        "tolerance": found.tolerance,
        "sections": {
            section.name: {
                "equal": section.is_equal,
                "recorded": section.is_recorded,
                "not_recorded": dict(zip("ab", section.lacking)),
                "values": [
                    each.as_json(section.name)
                    for each in (section.values if everything else section.differences)
                ],
            }
            for section in found.sections
        },
        "metrics": as_json(found.metrics, {"equal": found.metrics.is_equal}),
    }


def _run_json(run: Run) -> dict[str, Any]:
    return {"job": run.job, "run": list(run.lineage), "created": run.created}
