"""Counts of prepared data: documents, tokens, a histogram of lengths. Torch-free and numpy-free."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass
class Counts:
    documents: int = 0
    tokens: int = 0
    text_bytes: int = 0
    longest: int = 0  # tokens of the longest document
    empty: int = 0
    duplicates: int = 0
    replaced: int = 0  # invalid sequences of UTF-8
    skipped: int = 0  # invalid lines
    histogram: dict[str, int] = field(default_factory=dict)  # bits of the length -> documents

    def add_document(self, length: int) -> None:
        self.documents += 1
        self.longest = max(self.longest, length)
        bits = str(length.bit_length())
        self.histogram[bits] = self.histogram.get(bits, 0) + 1

    def add(self, other: Counts) -> None:
        for name in ("documents", "tokens", "text_bytes", "empty", "duplicates", "replaced"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.skipped += other.skipped
        self.longest = max(self.longest, other.longest)
        for bits, number in other.histogram.items():
            self.histogram[bits] = self.histogram.get(bits, 0) + number

    def as_json(self) -> dict[str, Any]:
        return {**asdict(self), "histogram": dict(sorted(self.histogram.items(), key=_bits))}

    @property
    def bytes_per_token(self) -> float:
        return self.text_bytes / self.tokens if self.tokens else 0.0


def _bits(item: tuple[str, int]) -> int:
    return int(item[0])


def counts_of(stored: Mapping[str, Any]) -> Counts:
    """Counts from JSON. Raises TypeError if it has other keys."""
    return Counts(**stored)


def histogram_rows(histogram: Mapping[str, int]) -> Iterable[tuple[str, int]]:
    """`1-1`, `2-3`, `4-7`, … tokens, and the number of documents."""
    filled = {int(bits): number for bits, number in histogram.items()}
    for bits in range(min(filled, default=0), max(filled, default=-1) + 1):
        low = 1 << bits >> 1
        yield f"{low:,}-{max(low, (1 << bits) - 1):,}", filled.get(bits, 0)
