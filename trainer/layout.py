"""The layout of a job: degrees, coordinates, groups, pipeline segments, and their arithmetic.

Axes from outer to inner: dp, pp, sharding, mp; neighbouring ranks differ in mp. Plain integers in,
frozen data out. `layout_rules` checks whether a layout fits. Of configs, this module knows only the
keys of the degrees.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import pairwise

from trainer.named_tuple import NamedTuple

AXES = ("dp", "pp", "sharding", "mp")
DEGREE_KEYS = {
    "dp": "Distributed.dp_degree",
    "pp": "Distributed.pp_degree",
    "sharding": "Distributed.sharding.sharding_degree",
    "mp": "Distributed.mp_degree",
}


class Coordinates(NamedTuple):
    dp: int
    pp: int
    sharding: int
    mp: int


class Layout(NamedTuple):
    """The degrees, in the order of `AXES`."""

    dp: int = 1
    pp: int = 1
    sharding: int = 1
    mp: int = 1

    @property
    def world(self) -> int:
        return math.prod(self)

    @property
    def data_ranks(self) -> int:
        """The number of ranks that read different data."""
        return self.dp * self.sharding

    @property
    def readers(self) -> int:
        """The number of ranks that read the same data: all ranks of one model replica."""
        return self.mp * self.pp

    def coordinates(self, rank: int) -> Coordinates:
        places = []
        for degree in reversed(self):  # the innermost axis changes fastest
            rank, place = divmod(rank, degree)
            places.append(place)
        return Coordinates(*reversed(places))

    def rank(self, at: Coordinates) -> int:
        rank = 0
        for degree, place in zip(self, at):
            rank = rank * degree + place
        return rank

    def group(self, axis: str, rank: int) -> range:
        """The ranks that differ from this one only along one axis, in ascending order."""
        position = AXES.index(axis)
        stride = math.prod(self[position + 1 :])
        first = rank - self.coordinates(rank)[position] * stride
        return range(first, first + self[position] * stride, stride)

    def tied(self, rank: int) -> tuple[int, ...]:
        """The first and last stage of a rank's pipeline, which share the embedding.

        A middle stage is alone: it has none.
        """
        first, *_, last = self.group("pp", rank)
        return (first, last) if rank in (first, last) else (rank,)

    def groups(self, rank: int) -> dict[str, Sequence[int]]:
        """A rank's group along every axis that has more than one rank, and its `tied` ranks.

        The same names in the same order for all ranks, and each name divides all ranks.
        """
        axes = {axis: self.group(axis, rank) for axis, degree in zip(AXES, self) if degree > 1}
        return {**axes, "tied": self.tied(rank)} if self.pp > 1 else {**axes}

    def has_whole_replicas(self, per_node: int) -> bool:
        """Whether every node holds complete model replicas, so that it needs no other node."""
        return per_node % (self.pp * self.sharding * self.mp) == 0

    def data_rank(self, rank: int) -> int:
        at = self.coordinates(rank)
        return at.dp * self.sharding + at.sharding

    def __str__(self) -> str:
        return f"mp {self.mp} × sharding {self.sharding} × pp {self.pp} × dp {self.dp}"


class Machines(NamedTuple):
    """Where a job runs: `nodes` with `per_node` ranks each."""

    nodes: int
    per_node: int

    @property
    def world(self) -> int:
        return self.nodes * self.per_node


class Batch(NamedTuple):
    """Samples per update: of the whole job, of one replica, of one forward pass."""

    global_size: int
    local: int
    micro: int

    @property
    def accumulate(self) -> int:
        return self.local // self.micro


class Shape(NamedTuple):
    """The sizes that the degrees must divide. `vocab` is None if the trainer counts it later."""

    hidden: int
    layers: int
    heads: int
    ffn: int
    vocab: int | None
    vocab_unit: int
    seq_len: int
    sequence_parallel: bool = False
    virtual_pp: int = 1
    pp_schedule: str = "1F1B"


def segments(num_layers: int, parts: int) -> tuple[range, ...]:
    """The layers of each pipeline part. If they do not divide evenly, some parts have one more."""
    bounds = [part * num_layers // parts for part in range(parts + 1)]
    return tuple(range(first, last) for first, last in pairwise(bounds))


def own_chunks(
    layout: Layout, num_layers: int, virtual_pp: int, rank: int
) -> list[tuple[int, range]]:
    """The pipeline chunks of a rank as (number, layers), assigned to stages round-robin."""
    chunks = list(enumerate(segments(num_layers, layout.pp * virtual_pp)))
    return chunks[layout.coordinates(rank).pp :: layout.pp]


UNKNOWN_VOCAB = 256  # for character vocabularies, which are counted later; a generous guess


def padded_vocab(vocab: int, unit: int) -> int:
    """Round up, independently of mp, so that weights and checkpoints fit every layout."""
    return -(-vocab // unit) * unit


def solve_layout(dp: int | None, pp: int, sharding: int, mp: int, world: int | None) -> Layout:
    """Derive dp from the world size if it is None. The result may not fit: see `check_world`."""
    if dp is None:
        dp = max(1, (world or 1) // (pp * sharding * mp))
    return Layout(dp, pp, sharding, mp)


def factorings(world: int) -> Iterator[Layout]:
    for mp in divisors(world):
        for pp in divisors(world // mp):
            for sharding in divisors(world // mp // pp):
                yield Layout(world // mp // pp // sharding, pp, sharding, mp)


def divisors(number: int) -> list[int]:
    small = [divisor for divisor in range(1, math.isqrt(number) + 1) if number % divisor == 0]
    return small + [number // divisor for divisor in reversed(small) if divisor * divisor != number]
