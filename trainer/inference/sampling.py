"""Chooses the next token of each text from its logits.

Shapes: B texts, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from trainer.config.sections import Generation


class Sampler:
    """Every text has a random stream of its own: what is drawn does not depend on its batch."""

    def __init__(
        self, settings: Generation, seeds: Sequence[int], eos: int | None, device: torch.device
    ) -> None:
        self.settings, self.eos = settings, eos
        self.random = [torch.Generator(device=device).manual_seed(seed) for seed in seeds]
        self.seen: Tensor | None = None  # (B, V): tokens of the text, for the repetition penalty
        self.length = 0  # tokens that were chosen for each text

    def read(self, texts: Sequence[Sequence[int]], vocab_size: int, device: torch.device) -> None:
        """Note the tokens of the prompts."""
        if self.settings.repetition_penalty != 1.0:
            self.seen = torch.zeros((len(texts), vocab_size), dtype=torch.bool, device=device)
            for row, tokens in zip(self.seen, texts):
                row[torch.tensor(tokens, device=device)] = True

    def next(self, logits: Tensor) -> Tensor:
        """The next tokens (B), from logits (B, V)."""
        logits = self._penalized(logits)
        if self.eos is not None and self.length < self.settings.min_dec_len:
            logits[:, self.eos] = -torch.inf
        chosen = logits.argmax(-1) if self._is_greedy else self._drawn(logits)
        if self.seen is not None:
            self.seen.scatter_(1, chosen[:, None], True)
        self.length += 1
        return chosen

    @property
    def _is_greedy(self) -> bool:
        return self.settings.decode_strategy == "greedy_search"

    def _penalized(self, logits: Tensor) -> Tensor:
        """As in CTRL (Keskar et al., 2019): closer to unlikely, whatever the sign of a logit."""
        if self.seen is None:
            return logits
        penalty = self.settings.repetition_penalty
        lowered = torch.where(logits > 0, logits / penalty, logits * penalty)
        return torch.where(self.seen, lowered, logits)

    def _drawn(self, logits: Tensor) -> Tensor:
        top_k, top_p = self.settings.top_k, self.settings.top_p
        # In half precision, a low temperature would make them infinite.
        logits = logits.float() / self.settings.temperature
        order = None
        ranked = logits
        # Sorted only as far as needed: sorting a whole vocabulary takes longer than a small model.
        if 0 < top_k < logits.shape[-1]:
            ranked, order = logits.topk(top_k)
        elif top_p < 1.0:
            ranked, order = logits.sort(descending=True)
        chances = (ranked - logits.logsumexp(-1, keepdim=True)).exp()
        if order is not None:
            # Keep the most likely tokens until their probabilities reach top_p, at least one.
            before = chances.cumsum(-1) - chances
            chances[before > top_p] = 0.0
        drawn = torch.stack(
            [torch.multinomial(row, 1, generator=one) for row, one in zip(chances, self.random)]
        )
        return (drawn if order is None else order.gather(-1, drawn)).squeeze(-1)
