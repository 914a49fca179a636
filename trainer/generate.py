"""Generates text token by token, with the settings of the `Generation` section."""

from __future__ import annotations

import torch
from torch import Tensor

from trainer.config.sections import Generation
from trainer.model import GPT
from trainer.stop import StopRequest


@torch.no_grad()
def generate(
    model: GPT,
    prompt: list[int],
    vocab_size: int,
    context: int,
    settings: Generation,
    seed: int,
    stop: StopRequest,
) -> list[int]:
    """Generate the tokens after a prompt; fewer if a stop is requested.

    The model sees only the last `context` tokens, because it has no more positions.
    """
    device = model.word_embeddings.weight.device
    random = torch.Generator(device=device).manual_seed(seed)
    tokens = torch.tensor([prompt], device=device)
    was_training = model.training
    model.eval()
    for _ in range(settings.max_dec_len):
        if stop.signal:  # a long sample must not delay a stop request
            break
        # Without the padding of the vocabulary, whose logits are never trained.
        logits = model(tokens[:, -context:])[:, -1, :vocab_size].float()
        tokens = torch.cat([tokens, _next(logits, settings, random)], dim=1)
    model.train(was_training)
    return tokens[0, len(prompt) :].tolist()


def _next(logits: Tensor, settings: Generation, random: torch.Generator) -> Tensor:
    if settings.decode_strategy == "greedy_search":
        return logits.argmax(-1, keepdim=True)
    # Sorted once: top_k and top_p both cut off the tail.
    ranked, order = (logits / settings.temperature).sort(descending=True)
    chances = ranked.softmax(-1)
    if settings.top_k:
        chances[:, settings.top_k :] = 0.0
    # Keep the most likely tokens until their probabilities sum up to top_p; at least one remains.
    before = chances.cumsum(-1) - chances
    chances[before > settings.top_p] = 0.0
    return order.gather(-1, torch.multinomial(chances, 1, generator=random))
