"""Generates text token by token, with the settings of the `Generation` section."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from trainer.config.sections import Generation
from trainer.inference.cache import Cache
from trainer.inference.network import Network
from trainer.inference.sampling import Sampler

STOP, LENGTH, INTERRUPTED = "stop", "length", "interrupted"

# Called with the number of a text and its next token: returns whether the text is complete.
Watch = Callable[[int, int], bool]


@dataclass
class Text:
    """The tokens of one text, and why it ended."""

    prompt: Sequence[int]
    seed: int
    tokens: list[int] = field(default_factory=list)
    finish: str = ""

    def last(self, count: int) -> list[int]:
        """Its last tokens, with those of the prompt."""
        missing = count - len(self.tokens)
        return [*self.prompt[-missing:], *self.tokens] if missing > 0 else self.tokens[-count:]


@torch.no_grad()
def generate(
    network: Network,
    prompts: Sequence[Sequence[int]],
    settings: Generation,
    seed: int,
    eos: int | None = None,
    watch: Watch = lambda number, token: False,
    is_stopped: Callable[[], bool] = lambda: False,
) -> list[Text]:
    """Continue each prompt `num_return_sequences` times; the copies of a prompt are neighbours.

    The network sees only the last tokens of a text, as many as it has positions. All ranks return
    the same texts.
    """
    copies = settings.num_return_sequences
    starts = [prompt for prompt in prompts for _ in range(copies)]
    texts = [Text(prompt, seed + number) for number, prompt in enumerate(starts)]
    writer = _Writer(network, texts, settings, eos)
    logits = writer.read([prompt[-network.context :] for prompt in prompts], copies)
    for _ in range(settings.max_dec_len):
        if is_stopped():
            break
        chosen = writer.choose(logits)
        for number, (text, token) in enumerate(zip(texts, chosen.tolist())):
            if not text.finish:
                _take(text, token, settings.max_dec_len, eos, partial(watch, number))
        if all(text.finish for text in texts):
            break
        logits = writer.advance(chosen)
    network.finish()
    for text in texts:
        text.finish = text.finish or INTERRUPTED
    return texts


def _take(
    text: Text, token: int, longest: int, eos: int | None, ends: Callable[[int], bool]
) -> None:
    """Add a token to a text; the end token is not a part of it."""
    if token == eos:
        text.finish = STOP
        return
    text.tokens.append(token)
    if ends(token):
        text.finish = STOP
    elif len(text.tokens) == longest:
        text.finish = LENGTH


class _Writer:
    """The network with the cache of some texts."""

    def __init__(
        self, network: Network, texts: Sequence[Text], settings: Generation, eos: int | None
    ) -> None:
        self.network, self.texts, self.settings = network, texts, settings
        self.sampler = Sampler(settings, [text.seed for text in texts], eos, network.device)
        self.sampler.read([text.prompt for text in texts], network.vocab_size, network.device)
        self.cache = Cache(0)

    def read(self, prompts: Sequence[Sequence[int]], copies: int = 1) -> Tensor | None:
        """Fill a new cache with texts, and return the logits after each of them."""
        longest = max(map(len, prompts))
        capacity = min(self.network.context, longest + self.settings.max_dec_len)
        missing = [longest - len(prompt) for prompt in prompts]
        padding = torch.tensor(missing, device=self.network.device) if any(missing) else None
        self.cache = Cache(capacity, padding)
        self.cache.begin(longest)
        rows = [[0] * empty + list(prompt) for empty, prompt in zip(missing, prompts)]
        logits = self.network(torch.tensor(rows), self.cache)
        if copies > 1:  # prompts are read once for all their copies
            self.cache.repeat(copies)
            logits = logits if logits is None else logits.repeat_interleave(copies, 0)
        return logits

    def choose(self, logits: Tensor | None) -> Tensor:
        """The next token of each text: the last stage chooses, and tells the others."""
        if logits is None:
            chosen = torch.zeros(len(self.texts), dtype=torch.long, device=self.network.device)
        else:
            chosen = self.sampler.next(logits)
        return self.network.from_last_stage(chosen)

    def advance(self, chosen: Tensor) -> Tensor | None:
        """The logits after one more token of each text."""
        if self.cache.ends == self.cache.capacity:
            # Every position is taken. Without its first token, all tokens of a text move by one
            # position, so nothing in the cache is valid any more.
            return self.read([text.last(self.network.context) for text in self.texts])
        self.cache.begin(1)
        return self.network(chosen[:, None], self.cache)
