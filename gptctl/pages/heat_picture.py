"""A table of ratios as a small PNG: one pixel for each, so that a page may have a million of them.

Written by hand because it takes twenty lines, and a library for pictures is large.
"""

from __future__ import annotations

import math
import struct
import zlib
from collections.abc import Iterable, Sequence
from itertools import pairwise

# Colours by ratio: below 1 faster than the median, above it slower. They differ in brightness, too,
# and can be told apart on a dark and on a light background.
STOPS = (
    (0.5, (24, 60, 130)),
    (0.9, (70, 120, 190)),
    (1.0, (140, 175, 205)),
    (1.1, (245, 222, 160)),
    (1.25, (242, 140, 40)),
    (1.5, (200, 25, 30)),
    (2.0, (120, 0, 40)),
)
LOWEST, HIGHEST = STOPS[0][0], STOPS[-1][0]
OCTAVES = math.log2(HIGHEST / LOWEST)
LEVELS = 127  # the palette has one colour more: of what is not known
NOTHING = (128, 128, 128)


def level_of(ratio: float | None) -> int:
    """The number of a colour; 0: not known."""
    if ratio is None:
        return 0
    position = math.log2(min(max(ratio, LOWEST), HIGHEST) / LOWEST) / OCTAVES
    return 1 + round(position * (LEVELS - 1))


def ratio_of(level: int) -> float:
    return float(LOWEST * 2 ** (OCTAVES * (level - 1) / (LEVELS - 1)))


def colour_of(ratio: float) -> tuple[int, int, int]:
    for (low, dark), (high, light) in pairwise(STOPS):
        if ratio <= high:
            part = (ratio - low) / (high - low)
            red, green, blue = (round(a + (b - a) * part) for a, b in zip(dark, light))
            return red, green, blue
    return STOPS[-1][1]


def palette() -> list[tuple[int, int, int]]:
    return [NOTHING, *(colour_of(ratio_of(level)) for level in range(1, LEVELS + 1))]


def picture_of(rows: Sequence[Sequence[float | None]]) -> bytes:
    """A PNG with a pixel for each ratio."""
    width = len(rows[0])
    # Each line of a PNG begins with the number of a filter; 0: none.
    lines = b"".join(b"\0" + bytes(map(level_of, row)) for row in rows)
    header = struct.pack(">IIBBBBB", width, len(rows), 8, 3, 0, 0, 0)
    colours = bytes(part for colour in palette() for part in colour)
    parts = ((b"IHDR", header), (b"PLTE", colours), (b"IDAT", zlib.compress(lines, 9)))
    return b"\x89PNG\r\n\x1a\n" + b"".join(_chunks((*parts, (b"IEND", b""))))


def _chunks(parts: Iterable[tuple[bytes, bytes]]) -> Iterable[bytes]:
    for kind, data in parts:
        body = kind + data
        yield struct.pack(">I", len(data)) + body + struct.pack(">I", zlib.crc32(body))
