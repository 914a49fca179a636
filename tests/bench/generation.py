"""Tokens per second of text generation against transformers' `generate`: same weights, same cores, interleaved rounds.

    python tests/bench/generation.py [--rounds 5] [--threads 2] [--tokens 64]

Greedy, with a key-value cache, from prompts of random tokens. Texts that differ are counted and printed. The ratio is the
median over rounds of ours / theirs in the same round: what disturbs the machine disturbs both.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

parser = argparse.ArgumentParser()
parser.add_argument("--rounds", type=int, default=5)
parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
parser.add_argument("--tokens", type=int, default=64)
parser.add_argument("--only", help="a part of a name")
arguments = parser.parse_args()
os.environ["OMP_NUM_THREADS"] = str(arguments.threads)
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import torch

from tests.bench.recorder import record
from tests.gpt2 import gpt2_of
from trainer.config import Override, load
from trainer.config.sections import Generation
from trainer.inference.generation import generate
from trainer.inference.network import arrange_for_decoding, network_of
from trainer.model import build_model

# name -> layers, hidden, heads, prompts, tokens of a prompt
CASES = {
    "small (8 layers, 256), 1 prompt": (8, 256, 8, 1, 32),
    "small (8 layers, 256), 8 prompts": (8, 256, 8, 8, 32),
    "GPT-2 (12 layers, 768), 1 prompt": (12, 768, 12, 1, 32),
    "GPT-2 (12 layers, 768), 8 prompts": (12, 768, 12, 8, 32),
    "GPT-2 (12 layers, 768), long prompt": (12, 768, 12, 1, 512),
}
VOCAB = 50257


def measure(layers: int, hidden: int, heads: int, prompts: int, length: int) -> tuple[list[float], list[float]]:
    """Tokens per second of each round: ours, theirs."""
    keys = {"Model.name": "GPT", "Model.num_layers": layers, "Model.hidden_size": hidden}
    keys |= {"Model.num_attention_heads": heads, "Model.vocab_size": VOCAB, "Global.device": "cpu"}
    run = load(None, [Override.parse(f"{key}={value}") for key, value in keys.items()]).run
    model = build_model(run.Model, 1, torch.device("cpu")).eval()
    theirs = gpt2_of(model, run.Model)
    arrange_for_decoding(model)  # as `load_network` does
    network = network_of(model, run)
    tokens = torch.randint(0, VOCAB, (prompts, length), generator=torch.Generator().manual_seed(1))
    count = arguments.tokens
    settings = Generation(max_dec_len=count, decode_strategy="greedy_search")

    def ours_once() -> list[list[int]]:
        return [text.tokens for text in generate(network, tokens.tolist(), settings, 1)]

    def theirs_once() -> list[list[int]]:
        unused = list(range(VOCAB, theirs.config.vocab_size))
        ids = theirs.generate(
            tokens, attention_mask=torch.ones_like(tokens), do_sample=False, max_new_tokens=count,
            min_new_tokens=count, suppress_tokens=unused, pad_token_id=unused[0], eos_token_id=unused[0],
        )  # fmt: skip
        return ids[:, length:].tolist()

    same = sum(a == b for a, b in zip(ours_once(), theirs_once()))  # and a warm-up
    if same < prompts:
        print(f"  {prompts - same} of {prompts} texts differ: two tokens were about as likely")
    rates: tuple[list[float], list[float]] = ([], [])
    for _ in range(arguments.rounds):
        for found, act in zip(rates, (ours_once, theirs_once)):
            began = time.perf_counter()
            act()
            found.append(prompts * count / (time.perf_counter() - began))
    return rates


def main() -> None:
    threads, rounds = torch.get_num_threads(), arguments.rounds
    print(f"{threads} threads, {arguments.tokens} tokens after each prompt, {rounds} rounds, tokens/s (median)")
    for name, sizes in CASES.items():
        if arguments.only and arguments.only not in name:
            continue
        ours, theirs = measure(*sizes)
        ratios = [a / b for a, b in zip(ours, theirs)]
        record(f"generation, {name}", ours=ours, peer=theirs, unit="tokens/s", more_is_better=True)
        print(
            f"{name:<36} ours {statistics.median(ours):8.1f}   transformers {statistics.median(theirs):8.1f}   "
            f"ratio {statistics.median(ratios):.2f} ({min(ratios):.2f}-{max(ratios):.2f})",
            flush=True,
        )


if __name__ == "__main__":
    main()
