"""Blends of corpora: which sample comes from which corpus.

Sample n is taken from the corpus that is furthest behind its share of the first n samples, as in
Megatron's blended data sets. That is computed from the weights alone: neither the seed nor the
layout matters. Weights are used as ratios of integers, so the order repeats, and any position can
be found without a list of all samples.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Sequence
from fractions import Fraction
from functools import cache

import numpy as np
import numpy.typing as npt

from trainer.data.gpt import GPTSplit
from trainer.data.order import Numbers

# Samples until the order repeats, at most; weights are rounded to this. More would take seconds.
_LONGEST_PERIOD = 1 << 16


@cache
def interleaving_of(weights: tuple[float, ...]) -> Interleaving:
    """The same for all splits of a run: it is computed once."""
    return Interleaving(weights)


class Interleaving:
    def __init__(self, weights: Sequence[float]) -> None:
        self.shares = np.array(_integers(weights), np.int64)  # samples per period
        self.period = int(self.shares.sum())
        # Megatron takes the heaviest corpus first, but in later periods the first one: two orders.
        self.order = _largest_deficits(self.shares, 2 * self.period).reshape(2, self.period)
        self.ranks = np.empty_like(self.order)
        for corpus in range(len(self.shares)):
            for order, ranks in zip(self.order, self.ranks):
                ranks[order == corpus] = np.arange(self.shares[corpus])

    def locate(self, numbers: Numbers) -> tuple[Numbers, Numbers]:
        """The corpus of each sample, and its number among the samples of that corpus."""
        periods, places = np.divmod(numbers, self.period)
        half = np.minimum(periods, 1)
        corpora = self.order[half, places]
        return corpora, periods * self.shares[corpora] + self.ranks[half, places]

    def count(self, corpus: int, samples: int) -> int:
        """How many of the first samples come from a corpus."""
        periods, rest = divmod(samples, self.period)
        order = self.order[min(periods, 1)][:rest]
        return periods * int(self.shares[corpus]) + int(np.count_nonzero(order == corpus))

    def capacity(self, sizes: Sequence[int]) -> int:
        """How many samples there are before one of the corpora has to repeat."""
        return min(self._place(corpus, size) for corpus, size in enumerate(sizes))

    def _place(self, corpus: int, number: int) -> int:
        """The place of a sample, by its number in its corpus."""
        periods, rank = divmod(number, int(self.shares[corpus]))
        places = np.flatnonzero(self.order[min(periods, 1)] == corpus)
        return periods * self.period + int(places[rank])


def _integers(weights: Sequence[float]) -> list[int]:
    """The weights as integers with the same ratios, exactly if their sum is small enough."""
    exact = [Fraction(repr(float(weight))) for weight in weights]  # 0.3 means 3/10
    unit = math.lcm(*(weight.denominator for weight in exact))
    whole = [int(weight * unit) for weight in exact]
    divisor = math.gcd(*whole)
    if sum(whole) // divisor <= _LONGEST_PERIOD:
        return [number // divisor for number in whole]
    total = sum(whole)
    return [max(1, round(Fraction(number * _LONGEST_PERIOD, total))) for number in whole]


def _largest_deficits(shares: npt.NDArray[np.int64], samples: int) -> npt.NDArray[np.int64]:
    order, period = np.empty(samples, np.int64), int(shares.sum())
    deficits = np.zeros_like(shares)  # times the period: integers have no rounding errors
    for number in range(samples):
        chosen = int(np.argmax(deficits if number else shares))
        order[number] = chosen
        deficits[chosen] -= period
        deficits += shares
    return order


class Blend:
    """The samples of several splits, in one order."""

    covers_epochs = True

    def __init__(self, splits: Sequence[GPTSplit], interleaving: Interleaving) -> None:
        self.splits, self.interleaving = splits, interleaving
        self.eos = splits[0].eos
        self.size = interleaving.capacity([split.size for split in splits])
        parts = [*(split.digest for split in splits), *interleaving.shares.tolist()]
        self.digest = zlib.crc32(repr(parts).encode())

    def read(self, epochs: Numbers, numbers: Numbers) -> npt.NDArray[np.int64]:
        corpora, places = self.interleaving.locate(numbers % self.size)
        rows = [
            self.splits[corpus].read(epochs[at : at + 1], places[at : at + 1])
            for at, corpus in enumerate(corpora)
        ]
        return np.concatenate(rows)
