"""How many logits exist at a time: the loss computes them so, and the estimates count on it.

For a large vocabulary, the loss is computed for a chunk of tokens at a time.
"""

from __future__ import annotations

LARGE_VOCAB = 32_768  # rows of the embedding on a rank
CHUNK_LOGITS = {"cpu": 1 << 22, "cuda": 1 << 27}  # GPUs need large matrix products to be fast


def chunk_length(device: str, rows: int) -> int:
    """Tokens per chunk."""
    return max(1, CHUNK_LOGITS[device] // rows)
