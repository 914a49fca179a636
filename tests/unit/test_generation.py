"""Text from a model. Oracles: transformers' GPT-2 with the same weights, and plain loops without a cache."""

from __future__ import annotations

import math
from collections import Counter
from copy import deepcopy
from typing import Any

import pytest
import torch

from tests.gpt2 import gpt2_of
from tests.ranks import TINY, overrides
from trainer.config import Override, load
from trainer.config.sections import Generation, RunConfig
from trainer.inference.cache import Cache
from trainer.inference.generation import INTERRUPTED, LENGTH, STOP, generate
from trainer.inference.network import Network, arrange_for_decoding, network_of
from trainer.inference.sampling import Sampler
from trainer.model import GPT, build_model

CPU = torch.device("cpu")
GREEDY = "greedy_search"


def run_config(**changes: Any) -> RunConfig:
    keys = {**TINY, "vocab": 61, "Model.vocab_size_divisible_unit": 8, **changes}
    return load(None, [Override.parse(text) for text in overrides(**keys)]).run


def large_weights(run: RunConfig) -> GPT:
    """Initial weights are so small that all tokens are about as likely: larger ones make the order of logits clear."""
    model = build_model(run.Model, 1, CPU).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(len(name))) * 0.3)
    return model


@pytest.fixture(scope="module")
def net() -> Network:
    run = run_config()
    return network_of(large_weights(run), run)


def texts_of(net: Network, prompts: list[list[int]], seed: int = 1, **keys: Any) -> list[list[int]]:
    eos = keys.pop("eos", None)
    return [text.tokens for text in generate(net, prompts, Generation(**keys), seed, eos)]


def without_cache(net: Network, prompt: list[int], count: int) -> list[int]:
    """The likeliest tokens, each from a whole forward pass over the last 16 tokens."""
    tokens = list(prompt)
    with torch.no_grad():
        for _ in range(count):
            tokens.append(int(net.part(torch.tensor([tokens[-16:]]))[0, -1, :61].argmax()))
    return tokens[len(prompt) :]


@torch.no_grad()
def test_logits_with_a_cache_are_those_without_and_those_of_transformers(net: Network) -> None:
    """Each pass takes 5, 1, 3, 1, 6 more tokens of a text. Oracles: one pass over all of it, ours and transformers'."""
    tokens = torch.randint(0, 61, (3, 16), generator=torch.Generator().manual_seed(5))
    whole = net.part(tokens)[..., :61]
    theirs = gpt2_of(net.part, run_config().Model)(tokens).logits[..., :61]
    assert float((whole - theirs).abs().max()) < 1e-5
    cache, end = Cache(16), 0
    for length in (5, 1, 3, 1, 6):
        cache.begin(length)
        logits = net(tokens[:, end : end + length], cache)
        end += length
        assert logits is not None
        assert float((logits - whole[:, end - 1]).abs().max()) < 1e-5


@torch.no_grad()
def test_the_storage_for_decoding_changes_no_value(net: Network) -> None:
    """Oracle: the same model before. Sums in another order differ by rounding only."""
    model, tokens = deepcopy(net.part), torch.randint(0, 61, (2, 16), generator=torch.Generator().manual_seed(2))
    before, values = model(tokens), {name: value.clone() for name, value in model.named_parameters()}
    arrange_for_decoding(model)
    assert all(torch.equal(value, values[name]) for name, value in model.named_parameters())
    assert not model.word_embeddings.weight.is_contiguous()
    assert float((model(tokens) - before).abs().max()) < 1e-5


@torch.no_grad()
def test_padding_changes_no_logit(net: Network) -> None:
    """Texts of 1, 4 and 7 tokens in a batch. Oracle: each of them alone."""
    prompts = [[3], [5, 6, 7, 8], [9, 8, 7, 6, 5, 4, 3]]
    together = texts_of(net, prompts, max_dec_len=9, decode_strategy=GREEDY)
    assert together == [texts_of(net, [prompt], max_dec_len=9, decode_strategy=GREEDY)[0] for prompt in prompts]
    cache = Cache(8, torch.tensor([6, 3, 0]))
    cache.begin(7)
    logits = net(torch.tensor([[0] * (7 - len(prompt)) + prompt for prompt in prompts]), cache)
    assert logits is not None
    for row, prompt in zip(logits, prompts):
        alone = net.part(torch.tensor([prompt]))[0, -1, :61]
        assert float((row - alone).abs().max()) < 1e-5


def test_greedy_text_is_that_of_transformers(net: Network) -> None:
    theirs = gpt2_of(net.part, run_config().Model)
    prompts = [[1, 2, 3], [4, 5, 6]]
    ids = theirs.generate(
        torch.tensor(prompts), attention_mask=torch.ones(2, 3, dtype=torch.long), do_sample=False,
        max_new_tokens=13, min_new_tokens=13, suppress_tokens=[61, 62, 63], pad_token_id=0, eos_token_id=63,
    )  # fmt: skip
    assert texts_of(net, prompts, max_dec_len=13, decode_strategy=GREEDY) == ids[:, 3:].tolist()


@pytest.mark.parametrize("penalty", [1.3, 5.0, 0.5])
def test_the_repetition_penalty_is_that_of_transformers(net: Network, penalty: float) -> None:
    theirs = gpt2_of(net.part, run_config().Model)
    ids = theirs.generate(
        torch.tensor([[1, 2, 3]]), attention_mask=torch.ones(1, 3, dtype=torch.long), do_sample=False,
        max_new_tokens=13, repetition_penalty=penalty, suppress_tokens=[61, 62, 63], pad_token_id=0, eos_token_id=63,
    )  # fmt: skip
    ours = texts_of(net, [[1, 2, 3]], max_dec_len=13, decode_strategy=GREEDY, repetition_penalty=penalty)
    assert ours[0] == ids[0, 3:].tolist()
    if penalty == 5.0:
        assert ours != texts_of(net, [[1, 2, 3]], max_dec_len=13, decode_strategy=GREEDY)


@pytest.mark.parametrize("length", [2, 15, 16, 40])
def test_text_goes_on_after_the_context_is_full(net: Network, length: int) -> None:
    """Oracle: a loop that shows the model the last 16 tokens each time, as nanoGPT does."""
    prompt = [(7 * n + 1) % 61 for n in range(length)]
    ours = texts_of(net, [prompt], max_dec_len=30, decode_strategy=GREEDY)
    assert ours[0] == without_cache(net, prompt, 30)


def test_texts_of_different_lengths_slide_together(net: Network) -> None:
    prompts = [[1, 2], [(3 * n) % 61 for n in range(20)], [9] * 10]
    ours = texts_of(net, prompts, max_dec_len=25, decode_strategy=GREEDY)
    assert ours == [without_cache(net, prompt, 25) for prompt in prompts]


@pytest.mark.parametrize(
    "keys",
    [{"decode_strategy": GREEDY}, {"top_k": 1}, {"top_k": 0, "top_p": 1e-9}, {"temperature": 1e-6}],
)
def test_greedy_top_k_and_top_p_agree_at_their_limits(net: Network, keys: dict[str, Any]) -> None:
    """One candidate is left by each of them: the likeliest token, found by a plain loop."""
    assert texts_of(net, [[1, 2]], max_dec_len=20, **keys)[0] == without_cache(net, [1, 2], 20)


def test_seeds_decide_and_batches_do_not(net: Network) -> None:
    keys: dict[str, Any] = {"max_dec_len": 20, "top_k": 0, "top_p": 1.0}
    three = texts_of(net, [[1, 2]], seed=7, num_return_sequences=3, **keys)
    assert three == [texts_of(net, [[1, 2]], seed=7 + number, **keys)[0] for number in range(3)]
    assert three[0] != three[1] != three[2]
    two = texts_of(net, [[1, 2], [3, 4, 5]], seed=7, num_return_sequences=2, **keys)
    assert two[:2] == three[:2]
    assert len(two) == 4


LOGITS = [2.0, 1.0, 0.5, 0.0, -1.0]


def shares(**keys: Any) -> list[float]:
    """How often each token is drawn from LOGITS."""
    count = 4000
    sampler = Sampler(Generation(**keys), range(count), None, CPU)
    drawn = sampler.next(torch.tensor(LOGITS).repeat(count, 1))
    counted = Counter(drawn.tolist())
    return [counted[token] / count for token in range(len(LOGITS))]


def softmax(logits: list[float]) -> list[float]:
    powers = [math.exp(logit) for logit in logits]
    return [power / sum(powers) for power in powers]


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({"top_k": 0, "top_p": 1.0}, softmax(LOGITS)),
        ({"top_k": 0, "top_p": 1.0, "temperature": 0.5}, softmax([2 * logit for logit in LOGITS])),
        ({"top_k": 2, "top_p": 1.0}, [*softmax(LOGITS[:2]), 0, 0, 0]),
        # Probabilities are 0.56, 0.21, 0.13, 0.08, 0.03: of 0.7, two tokens are needed.
        ({"top_k": 0, "top_p": 0.7}, [*softmax(LOGITS[:2]), 0, 0, 0]),
        ({"top_k": 4, "top_p": 0.8}, [*softmax(LOGITS[:3]), 0, 0]),
        # As in FleetX, of the probabilities before top-k: 0.56 is not enough, so both stay.
        ({"top_k": 2, "top_p": 0.7}, [*softmax(LOGITS[:2]), 0, 0, 0]),
        ({"top_k": 99, "top_p": 1.0}, softmax(LOGITS)),
    ],
)
def test_draws_follow_the_probabilities(keys: dict[str, Any], expected: list[float]) -> None:
    """Oracle: softmax by hand over the tokens that are left. 4,000 draws: four standard deviations are 0.032."""
    assert shares(**keys) == pytest.approx(expected, abs=0.032)


def test_a_text_ends_with_its_end_token_but_not_before_min_dec_len(net: Network) -> None:
    greedy = without_cache(net, [1, 2], 12)
    eos = greedy[4]
    first = greedy.index(eos)
    assert texts_of(net, [[1, 2]], max_dec_len=12, min_dec_len=0, decode_strategy=GREEDY, eos=eos) == [greedy[:first]]
    longer = texts_of(net, [[1, 2]], max_dec_len=12, min_dec_len=first + 3, decode_strategy=GREEDY, eos=eos)[0]
    assert longer[:first] == greedy[:first]
    assert len(longer) >= first + 3
    assert eos not in longer


def test_why_a_text_ended(net: Network) -> None:
    settings = Generation(max_dec_len=5, decode_strategy=GREEDY)
    (text,) = generate(net, [[1]], settings, 1)
    assert (text.finish, len(text.tokens)) == (LENGTH, 5)
    (text,) = generate(net, [[1]], settings, 1, watch=lambda number, token: True)
    assert (text.finish, len(text.tokens)) == (STOP, 1)
    asked: list[int] = []
    (text,) = generate(net, [[1]], settings, 1, is_stopped=lambda: asked.append(1) or len(asked) > 3)
    assert (text.finish, len(text.tokens)) == (INTERRUPTED, 3)


def test_a_finished_text_waits_for_the_others(net: Network) -> None:
    """The second text ends after its second token; the first is not disturbed."""
    seen: list[tuple[int, int]] = []

    def watch(number: int, token: int) -> bool:
        seen.append((number, token))
        return number == 1 and len([1 for n, _ in seen if n == 1]) == 2

    settings = Generation(max_dec_len=6, decode_strategy=GREEDY)
    texts = generate(net, [[1, 2], [3]], settings, 1, watch=watch)
    assert [len(text.tokens) for text in texts] == [6, 2]
    assert texts[0].tokens == without_cache(net, [1, 2], 6)
    assert [token for number, token in seen if number == 1] == texts[1].tokens
