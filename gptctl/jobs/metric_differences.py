"""How the metrics of two runs differ: the loss at equal steps, the speed, the evaluations. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from gptctl.logs.metric_rows import Row, is_number

SHOWN = 8  # steps at which both losses are shown
# How the names of evaluations start; `eval_time` is none.
EVALUATED = ("valid_loss", "test_loss", "eval_loss:", "eval_ppl:", "eval_adjusted_ppl:", "cloze_")
NEEDED = ("ips_total", *EVALUATED)  # of the rows, besides their loss


class LossAt(NamedTuple):
    """The losses of two runs at a step; None: not finite."""

    step: int
    a: float | None
    b: float | None

    @property
    def difference(self) -> float | None:
        return None if self.a is None or self.b is None else abs(self.a - self.b)

    def is_equal(self, tolerance: float) -> bool:
        return _is_close(self.a, self.b, tolerance)


class LastValue(NamedTuple):
    """The last value of a metric, and its step."""

    step: int
    value: float


class MetricDifferences(NamedTuple):
    losses: list[LossAt]  # of all common steps
    differing: list[LossAt]  # of those, the ones that differ by more than the tolerance
    speeds: tuple[float | None, float | None]  # medians of the tokens per second
    last_steps: tuple[int | None, int | None]
    # The final value of each evaluation, for both runs, and whether they are equal.
    final: dict[str, tuple[LastValue | None, LastValue | None, bool]]

    @property
    def is_equal(self) -> bool:
        """Whether both trained the same. Their speed does not matter: it is never the same."""
        finals = all(is_equal for _, _, is_equal in self.final.values())
        return not self.differing and self.last_steps[0] == self.last_steps[1] and finals

    @property
    def ratio(self) -> float | None:
        a, b = self.speeds
        return b / a if a and b is not None else None

    @property
    def shown(self) -> list[LossAt]:
        """Some of the common steps: the first, the last, where they part, and some between."""
        last = len(self.losses) - 1
        places = {round(last * place / (SHOWN - 1)) for place in range(SHOWN)} if last >= 0 else ()
        chosen = [self.losses[place] for place in places] + self.differing[:1]
        return sorted(set(chosen))

    @property
    def largest(self) -> float | None:
        """The largest difference of two losses; None if there is none, or one is not finite."""
        return max((each.difference for each in self.differing if each.difference), default=None)


def metric_differences(a: Sequence[Row], b: Sequence[Row], tolerance: float) -> MetricDifferences:
    """Compare the rows of two runs, as `run_metrics.whole_run` returns them."""
    one, other = _losses(a), _losses(b)
    losses = [LossAt(step, one[step], other[step]) for step in sorted(one.keys() & other.keys())]
    finals = _finals(a), _finals(b)
    names = sorted({*finals[0], *finals[1]})
    return MetricDifferences(
        losses,
        [each for each in losses if not each.is_equal(tolerance)],
        (_median_speed(a), _median_speed(b)),
        (_last_step(a), _last_step(b)),
        {
            name: (*pair, _is_same(*pair, tolerance))
            for name in names
            for pair in [(finals[0].get(name), finals[1].get(name))]
        },
    )


def _losses(rows: Sequence[Row]) -> dict[int, float | None]:
    # A row of an evaluation alone has no loss; one that is not finite is None.
    return {row["step"]: row["loss"] for row in rows if "loss" in row}


def _median_speed(rows: Sequence[Row]) -> float | None:
    speeds = [row["ips_total"] for row in rows if is_number(row.get("ips_total"))]
    return statistics.median(speeds) if speeds else None


def _last_step(rows: Sequence[Row]) -> int | None:
    return rows[-1]["step"] if rows else None


def _finals(rows: Sequence[Row]) -> dict[str, LastValue]:
    return {
        name: LastValue(row["step"], value)
        for row in rows
        for name, value in row.items()
        if name.startswith(EVALUATED) and is_number(value)
    }


def _is_same(a: LastValue | None, b: LastValue | None, tolerance: float) -> bool:
    return bool(a and b and a.step == b.step and _is_close(a.value, b.value, tolerance))


def _is_close(a: float | None, b: float | None, tolerance: float) -> bool:
    if a is None or b is None:
        return a is b
    return abs(a - b) <= tolerance


def as_json(found: MetricDifferences, names: Mapping[str, Any]) -> dict[str, Any]:
    """As JSON; `names` are facts that come first."""
    first = found.differing[0].step if found.differing else None
    return {
        **names,
        "last_step": dict(zip("ab", found.last_steps)),
        "loss": {
            "common_steps": len(found.losses),
            "differing_steps": len(found.differing),
            "first_difference": first,
            "largest_difference": found.largest,
            "steps": [{**each._asdict(), "difference": each.difference} for each in found.shown],
        },
        "tokens_per_second": {**dict(zip("ab", found.speeds)), "ratio": found.ratio},
        "final": [
            {"name": name, "a": a and a._asdict(), "b": b and b._asdict(), "equal": is_equal}
            for name, (a, b, is_equal) in found.final.items()
        ],
    }
