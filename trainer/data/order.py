"""Random order of samples without stored permutations: any position can be computed directly."""

from __future__ import annotations

import hashlib

import numpy as np
import numpy.typing as npt

Numbers = npt.NDArray[np.int64]

_ROUNDS = 4  # of the Feistel network; fewer would not mix enough
_MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)  # an odd constant with well mixed bits


def permuted(numbers: Numbers, size: int, *key: object) -> Numbers:
    """The images of the numbers under a random permutation of range(size), chosen by `key`.

    A Feistel network permutes a power of four >= size. Results outside the range are permuted
    again until they are inside (cycle walking), which keeps it a permutation.
    """
    half = np.uint64(max(1, (int(size - 1).bit_length() + 1) // 2))
    digest = hashlib.sha256(repr(key).encode()).digest()
    round_keys = np.frombuffer(digest[: 8 * _ROUNDS], dtype=np.uint64)
    result = _feistel(numbers.astype(np.uint64), half, round_keys)
    while (outside := result >= size).any():
        result[outside] = _feistel(result[outside], half, round_keys)
    return result.astype(np.int64)


def _feistel(
    numbers: npt.NDArray[np.uint64], half: np.uint64, round_keys: npt.NDArray[np.uint64]
) -> npt.NDArray[np.uint64]:
    mask = (np.uint64(1) << half) - np.uint64(1)
    left, right = numbers >> half, numbers & mask
    with np.errstate(over="ignore"):  # products are meant to wrap around
        for key in round_keys:
            mixed = (right ^ key) * _MULTIPLIER
            mixed ^= mixed >> np.uint64(29)
            mixed = mixed * _MULTIPLIER >> np.uint64(32)
            left, right = right, left ^ (mixed & mask)
    return left << half | right
