"""What became slower between two files of `make bench`: `python tests/bench/compare.py before.json bench.json`

Every row is compared as new / old: of the ratios to its peer if it has one, which a busy machine changes less, else of its own
values. The interval of this change is found by resampling the rounds of both files. A row is worse or better when the
interval excludes "no change" and the change is more than 5 %; it is the same when the interval is narrow; everything else is
too noisy, and needs so many more rounds. Exit code 1 if a row is worse, 2 if a file cannot be compared.
"""

from __future__ import annotations

import math
import random
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.bench.recorder import load, ratios

TOLERANCE = 0.05  # smaller changes do not matter, and nobody can measure them on a shared machine
LEAST_ROUNDS = 3  # of fewer nobody knows how they vary
# There are dozens of rows, and a false alarm in each comparison would soon be ignored.
CONFIDENCE = 0.99  # of the interval
RESAMPLED = 1000  # times
WORSE, BETTER, SAME, NOISY = "worse", "better", "same", "too noisy"


class Change(NamedTuple):
    """How the cost of a row changed: 1.1 is 10 % more; of a rate, 10 % less."""

    median: float
    low: float
    high: float
    rounds: int  # of the file that has fewer

    @property
    def verdict(self) -> str:
        if self.rounds < LEAST_ROUNDS:
            return NOISY
        if self.low > 1 and self.median > 1 + TOLERANCE:
            return WORSE
        if self.high < 1 and self.median < 1 - TOLERANCE:
            return BETTER
        return SAME if self.low >= 1 - TOLERANCE and self.high <= 1 + TOLERANCE else NOISY

    @property
    def more_rounds(self) -> int:
        """About how many it takes to tell: an interval shrinks with the root of the number of rounds."""
        # The interval has to end before "no change", or inside of the tolerance.
        distance = abs(self.median - 1)
        width = distance if distance > TOLERANCE else max(TOLERANCE - distance, TOLERANCE / 2)
        needed = self.rounds * ((self.high - self.low) / (2 * width)) ** 2
        return max(1, LEAST_ROUNDS - self.rounds, math.ceil(needed) - self.rounds)

    def __str__(self) -> str:
        advice = f": run {self.more_rounds} more round{'s' * (self.more_rounds > 1)}" if self.verdict == NOISY else ""
        return f"{self.median:6.3f}  {self.low:6.3f} to {self.high:6.3f}  {self.verdict}{advice}"


def change_of(old: Sequence[float], new: Sequence[float], more_is_better: bool = False) -> Change:
    """The change of the median, and the interval in which it lies."""
    if more_is_better:
        old, new = new, old
    rng = random.Random(1)  # the same files give the same answer

    def resampled(values: Sequence[float]) -> float:
        return median(rng.choices(values, k=len(values)))

    found = sorted(resampled(new) / resampled(old) for _ in range(RESAMPLED))
    outside = int(RESAMPLED * (1 - CONFIDENCE) / 2)
    return Change(median(new) / median(old), found[outside], found[-1 - outside], min(len(old), len(new)))


def changes(old: dict[str, Any], new: dict[str, Any]) -> Iterator[tuple[str, Change | str]]:
    """Every row of either file, and its change, or why it has none."""
    is_same_machine = old["machine"] == new["machine"]
    for name in dict.fromkeys([*old["rows"], *new["rows"]]):
        before, after = old["rows"].get(name), new["rows"].get(name)
        if not (before and after):
            yield name, "only in the old file" if before else "only in the new file"
        elif before["peer"] and after["peer"]:
            yield name, change_of(ratios(before), ratios(after), after["more_is_better"])
        elif is_same_machine:
            yield name, change_of(before["ours"], after["ours"], after["more_is_better"])
        else:
            yield name, "not compared: it has no peer, and the machines differ"


def main(words: Sequence[str]) -> int:
    if len(words) != 2:
        print("usage: python tests/bench/compare.py OLD NEW", file=sys.stderr)
        return 2
    try:
        old, new = (load(Path(word)) for word in words)
        if not (isinstance(old, dict) and isinstance(new, dict)):
            raise ValueError("not written by `make bench`")
        found = dict(changes(old, new))
    except (OSError, ValueError, KeyError, TypeError, AttributeError, ZeroDivisionError) as error:
        print(f"error: cannot compare {' and '.join(words)}: {type(error).__name__}: {error}", file=sys.stderr)
        return 2
    if old["machine"] != new["machine"]:
        print(f"note: different machines: {old['machine']}, {new['machine']}")
    width = max(map(len, found), default=0)
    print(f"{'row':<{width}}  new/old  interval          verdict")
    for name, change in found.items():
        print(f"{name:<{width}}  {change}")
    verdicts = [change.verdict for change in found.values() if isinstance(change, Change)]
    print(", ".join(f"{verdicts.count(each)} {each}" for each in (WORSE, BETTER, SAME, NOISY)))
    return int(WORSE in verdicts)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
