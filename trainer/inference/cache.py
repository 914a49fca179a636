"""The session of a text that grows: attention reads the keys and values of earlier tokens again.

Shapes: B samples, H heads, T new tokens, S tokens in the cache, D per head, V vocabulary.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from trainer.model import Head


class Cache:
    """Keys and values of all layers. Call `begin` before each forward pass.

    Shorter texts of a batch have padding on the left: then all of them end at the same place.
    """

    def __init__(self, capacity: int, padding: Tensor | None = None) -> None:
        self.capacity, self.padding = capacity, padding  # (B), or None if there is none
        self.begins = self.ends = 0  # of the tokens of this pass
        self._keys: dict[int, Tensor] = {}
        self._values: dict[int, Tensor] = {}
        self._mask: Tensor | None = None

    def begin(self, length: int) -> None:
        """Make room for the tokens of the next pass."""
        self.begins, self.ends = self.ends, self.ends + length
        self._mask = None
        assert self.ends <= self.capacity, "the cache is full"

    def repeat(self, times: int) -> None:
        """Several copies of each text, which then continue differently."""
        for stored in (self._keys, self._values):
            for layer in stored:
                stored[layer] = stored[layer].repeat_interleave(times, 0)
        if self.padding is not None:
            self.padding = self.padding.repeat_interleave(times)

    def positions(self, length: int, device: torch.device) -> Tensor:
        positions = torch.arange(self.begins, self.begins + length, device=device)
        if self.padding is None:
            return positions
        return (positions - self.padding[:, None]).clamp_(min=0)  # of padding: any that exists

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        keys = _with(self._keys, layer, k, self)
        values = _with(self._values, layer, v, self)
        if self.padding is None and not self.begins:
            return F.scaled_dot_product_attention(q, keys, values, is_causal=True)
        if self.padding is None and q.shape[2] == 1:  # the last token may see all others
            return F.scaled_dot_product_attention(q, keys, values)
        if self._mask is None:  # once for all layers
            self._mask = self._visible(q.device)
        return F.scaled_dot_product_attention(q, keys, values, attn_mask=self._mask)

    def _visible(self, device: torch.device) -> Tensor:
        """(B or 1, 1, T, S): whether a token sees another one, that is: neither later nor padding.

        Padding sees itself: a softmax over nothing would not be a number.
        """
        queries = torch.arange(self.begins, self.ends, device=device)[:, None]
        keys = torch.arange(self.ends, device=device)
        visible = (keys <= queries)[None, None]
        if self.padding is not None:
            visible = visible & (keys >= self.padding[:, None, None, None]) | (keys == queries)
        return visible

    def result(self, head: Head, x: Tensor, weight: Tensor) -> Tensor:
        """The logits (B, V) after the last token, without the padding of the vocabulary."""
        return head.logits(x[:, -1], weight)[:, : head.vocab_size].float()


def _with(stored: dict[int, Tensor], layer: int, new: Tensor, cache: Cache) -> Tensor:
    """Add the keys or values of new tokens; return all of them."""
    if layer not in stored:
        batch, heads, _, size = new.shape
        # All at once: growing would copy everything for every token.
        stored[layer] = new.new_empty((batch, heads, cache.capacity, size))
    stored[layer][:, :, cache.begins : cache.ends] = new
    return stored[layer][:, :, : cache.ends]
