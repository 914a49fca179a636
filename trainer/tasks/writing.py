"""From prompts to texts: encodes, generates, decodes. For the command line and for the server."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from trainer.config.sections import Generation
from trainer.corpus.tokenizer import Tokenizer
from trainer.errors import UserError
from trainer.inference.generation import INTERRUPTED, generate
from trainer.inference.network import Network
from trainer.inference.text_stream import TextStream

# Called with the number of a text and its next characters.
Show = Callable[[int, str], None]


class Written(NamedTuple):
    """The continuation of a prompt."""

    text: str
    num_tokens: int
    finish: str  # stop, length or interrupted
    seed: int


def encoded(tokenizer: Tokenizer, prompt: str) -> list[int]:
    """The tokens of a prompt. A document that begins is what follows the end of another one."""
    tokens = tokenizer.encode(prompt)
    if not tokens and tokenizer.eos_id is not None:
        return [tokenizer.eos_id]
    if not tokens:
        raise UserError("the prompt is empty", "this model has no end token: write some text")
    return tokens


def require_room(tokens: Sequence[int], context: int, name: str) -> None:
    """Raise UserError if the model cannot see the whole prompt."""
    if len(tokens) > context:
        message = (
            f"{name} has {len(tokens):,} tokens, but the context of this model has {context:,}"
        )
        raise UserError(message, f"shorten it, or use only its last {context:,} tokens: --truncate")


def write(
    network: Network,
    tokenizer: Tokenizer,
    prompts: Sequence[Sequence[int]],
    settings: Generation,
    seed: int,
    show: Show = lambda number, text: None,
    is_stopped: Callable[[], bool] = lambda: False,
) -> list[Written]:
    """Continue each prompt `num_return_sequences` times, and show text while it is written."""
    count = len(prompts) * settings.num_return_sequences
    streams = [TextStream(tokenizer, settings.stop_words) for _ in range(count)]

    def watch(number: int, token: int) -> bool:
        is_complete = streams[number].add(token)
        show(number, streams[number].take())
        return is_complete

    texts = generate(network, prompts, settings, seed, tokenizer.eos_id, watch, is_stopped)
    written = []
    for number, (text, stream) in enumerate(zip(texts, streams)):
        show(number, stream.finish())
        # The last token may have completed a stop word that no other token made visible.
        finish = "stop" if stream.is_stopped and text.finish != INTERRUPTED else text.finish
        written.append(Written(stream.text, len(text.tokens), finish, text.seed))
    return written
