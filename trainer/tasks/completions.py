"""Requests for completions and their answers, as in OpenAI's API. Knows nothing of HTTP.

What a client sends is checked here, key by key: a request that is not understood is refused, never
guessed. https://platform.openai.com/docs/api-reference/completions
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from trainer.config.sections import LOWEST_TEMPERATURE, Generation
from trainer.corpus.tokenizer import Tokenizer
from trainer.errors import UserError
from trainer.tasks.writing import Written, encoded

MOST_TEXTS = 16  # prompts × n of a request
MOST_STOPS = 16
LONGEST_STOP = 200  # characters
# Keys of OpenAI's that this server accepts only with the value that means nothing.
NEUTRAL: Mapping[str, tuple[object, ...]] = {
    "logprobs": (None, 0, False),
    "suffix": (None, ""),
    "best_of": (None, 1),
    "logit_bias": (None, {}),
    "frequency_penalty": (None, 0),
    "presence_penalty": (None, 0),
    "echo": (None, False),
}
KNOWN = {
    *("model", "prompt", "max_tokens", "min_tokens", "temperature", "top_p", "top_k", "n"),
    *("repetition_penalty", "stop", "seed", "stream", "stream_options", "user", *NEUTRAL),
}


class BadRequest(Exception):
    """A request that cannot be answered: HTTP status, message, and the key that is wrong."""

    def __init__(self, message: str, key: str | None = None, status: int = 400) -> None:
        super().__init__(message)
        self.message, self.key, self.status = message, key, status

    def as_json(self) -> dict[str, Any]:
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        error = {"message": self.message, "type": kind, "param": self.key, "code": None}
        return {"error": error}


class Request(NamedTuple):
    """What to write. It travels to other ranks as JSON."""

    prompts: list[list[int]]
    settings: Generation
    seed: int
    is_streamed: bool
    has_usage: bool  # at the end of a stream

    @property
    def num_prompt_tokens(self) -> int:
        return sum(map(len, self.prompts))


class Served(NamedTuple):
    """What requests are checked against."""

    name: str
    tokenizer: Tokenizer
    vocab_size: int
    context: int
    settings: Generation
    new_seed: Callable[[], int]


def read_request(body: Mapping[str, Any], served: Served) -> Request:
    """Check a request. Raises BadRequest."""
    if unknown := sorted(body.keys() - KNOWN):
        raise BadRequest(
            f"unknown key: {unknown[0]}; known: {', '.join(sorted(KNOWN))}", unknown[0]
        )
    for key, values in NEUTRAL.items():
        if not any(body.get(key) is value or body.get(key) == value for value in values):
            raise BadRequest(f"{key} is not supported by this server", key)
    if body.get("model") not in (None, "", served.name):
        raise BadRequest(f"this server has only {served.name}", "model", 404)
    prompts = _prompts(body.get("prompt"), served)
    settings = _settings(body, prompts, served)
    if len(prompts) * settings.num_return_sequences > MOST_TEXTS:
        raise BadRequest(f"prompts × n may be at most {MOST_TEXTS}", "n")
    options = body.get("stream_options")
    if options is not None and not isinstance(options, dict):
        raise BadRequest("stream_options must be an object", "stream_options")
    return Request(
        prompts,
        settings,
        _integer(body, "seed", served.new_seed(), 0, (1 << 62) - 1),
        _boolean(body, "stream"),
        bool((options or {}).get("include_usage")),
    )


def _prompts(given: object, served: Served) -> list[list[int]]:
    """A text, tokens, or a list of either."""
    if given is None:
        raise BadRequest("prompt is missing", "prompt")
    is_one = isinstance(given, str) or (
        isinstance(given, list) and all(type(token) is int for token in given)
    )
    several = [given] if is_one else given
    if not isinstance(several, list) or not several:
        raise BadRequest("prompt must be a text, a list of tokens, or a list of these", "prompt")
    if len(several) > MOST_TEXTS:
        raise BadRequest(f"at most {MOST_TEXTS} prompts", "prompt")
    return [_tokens(prompt, served) for prompt in several]


def _tokens(prompt: object, served: Served) -> list[int]:
    if isinstance(prompt, str):
        try:
            tokens = encoded(served.tokenizer, prompt)
        except UserError as error:
            raise BadRequest(f"{error.message}; {error.hint}", "prompt") from None
    elif isinstance(prompt, list) and prompt and all(type(token) is int for token in prompt):
        tokens = prompt
        if not all(0 <= token < served.vocab_size for token in tokens):
            raise BadRequest(f"tokens must be in 0…{served.vocab_size - 1}", "prompt")
    else:
        raise BadRequest("each prompt must be a text or a list of tokens", "prompt")
    if len(tokens) >= served.context:
        message = (
            f"the prompt has {len(tokens):,} tokens; with the completion, the context of this "
            f"model has {served.context:,}"
        )
        raise BadRequest(message, "prompt")
    return tokens


def _settings(body: Mapping[str, Any], prompts: list[list[int]], served: Served) -> Generation:
    """The settings of the server with those of the request."""
    own, room = served.settings, served.context - max(map(len, prompts))
    longest = _integer(body, "max_tokens", min(own.max_dec_len, room), 1, served.context)
    if longest > room:
        message = f"max_tokens may be at most {room:,}: the context has {served.context:,} tokens"
        raise BadRequest(message, "max_tokens")
    least = _integer(body, "min_tokens", min(own.min_dec_len, longest), 0, longest)
    temperature = _number(body, "temperature", own.temperature, 0, 100)
    if 0 < temperature < LOWEST_TEMPERATURE:
        message = f"temperature must be 0 (greedy), or from {LOWEST_TEMPERATURE:g} to 100"
        raise BadRequest(message, "temperature")
    # A temperature of 0 means the most likely token.
    strategy = "greedy_search" if temperature == 0 else own.decode_strategy
    if "temperature" in body and temperature:
        strategy = "sampling"
    top_p = _number(body, "top_p", own.top_p, 0, 1)
    return replace(
        own,
        max_dec_len=longest,
        min_dec_len=least,
        temperature=temperature or own.temperature,
        decode_strategy=strategy,
        top_p=top_p or 1e-9,  # 0: only the most likely token
        top_k=_integer(body, "top_k", own.top_k, 0, served.vocab_size),
        repetition_penalty=_number(body, "repetition_penalty", own.repetition_penalty, 0.01, 100),
        num_return_sequences=_integer(body, "n", 1, 1, MOST_TEXTS),
        stop_words=_stops(body.get("stop"), own),
    )


def _stops(given: object, own: Generation) -> tuple[str, ...]:
    if given is None:
        return own.stop_words
    words = [given] if isinstance(given, str) else given
    if (
        not isinstance(words, list)
        or len(words) > MOST_STOPS
        or not all(isinstance(word, str) and 0 < len(word) <= LONGEST_STOP for word in words)
    ):
        message = f"stop must be a text of at most {LONGEST_STOP} characters, or up to {MOST_STOPS}"
        raise BadRequest(message, "stop")
    return tuple(words)


def _integer(body: Mapping[str, Any], key: str, default: int, low: int, high: int) -> int:
    value = body.get(key)
    if value is None:
        return default
    if type(value) is not int or not low <= value <= high:
        raise BadRequest(f"{key} must be an integer from {low:,} to {high:,}", key)
    return value


def _number(body: Mapping[str, Any], key: str, default: float, low: float, high: float) -> float:
    value = body.get(key)
    if value is None:
        return default
    if type(value) not in (int, float) or not (math.isfinite(value) and low <= value <= high):
        raise BadRequest(f"{key} must be a number from {low:g} to {high:g}", key)
    return float(value)


def _boolean(body: Mapping[str, Any], key: str) -> bool:
    value = body.get(key)
    if value not in (None, True, False) or type(value) is int:
        raise BadRequest(f"{key} must be true or false", key)
    return bool(value)


def answer(ident: str, created: int, name: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
    """The object of a completion, or of a part of it."""
    return {
        "id": ident,
        "object": "text_completion",
        "created": created,
        "model": name,
        "choices": choices,
    }


def choice(number: int, text: str, finish: str | None) -> dict[str, Any]:
    # OpenAI's clients know two reasons; a text that ran out of time is too short as well.
    reason = finish if finish in (None, "stop") else "length"
    return {"index": number, "text": text, "logprobs": None, "finish_reason": reason}


def usage(request: Request, texts: list[Written]) -> dict[str, int]:
    written = sum(text.num_tokens for text in texts)
    return {
        "prompt_tokens": request.num_prompt_tokens,
        "completion_tokens": written,
        "total_tokens": request.num_prompt_tokens + written,
    }
