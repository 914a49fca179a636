"""The order of samples as a function of numbers only: nothing is stored, and any position can be asked for."""

from __future__ import annotations

import hashlib

import numpy as np
import numpy.typing as npt

Numbers = npt.NDArray[np.int64]

_ROUNDS = 4
_MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)


def permuted(numbers: Numbers, size: int, *key: object) -> Numbers:
    """Where a keyed permutation of range(size) puts the numbers: a Feistel network that walks until it is inside."""
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
    with np.errstate(over="ignore"):
        for key in round_keys:
            mixed = (right ^ key) * _MULTIPLIER
            mixed ^= mixed >> np.uint64(29)
            mixed = mixed * _MULTIPLIER >> np.uint64(32)
            left, right = right, left ^ (mixed & mask)
    return left << half | right
