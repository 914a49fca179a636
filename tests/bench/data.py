"""How fast text becomes tokens: `python tests/bench/data.py [MB]` (or `make bench`), a few minutes for 50 MB.

In turns, on the same cores and the same file of JSON lines (the sources and documents of this Python, as one document per
file), with one BPE of 32,000 tokens:

alone      Hugging Face's `tokenizers`: `encode_batch` of texts that are in memory already, with its own threads. Nothing
           is read, parsed or written. `gptctl data prepare` should reach 0.9 of it.
prepare    `gptctl data prepare` as a user runs it: start of Python and of the workers, reading, parsing, tokenizing,
           shards, joining, checksums. Its output is compared with the ids of `alone`.
Megatron   the loop of its tools/preprocess_data.py: a pool with `imap` in chunks of 32 lines, `json.loads` and a call of
           transformers' fast tokenizer per document, and the parent that writes each document to a .bin file.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

import numpy as np
import tokenizers

from tests.bench.recorder import record

VOCABULARY, ROUNDS, CHUNK = 32_000, 3, 1000
CORES = len(os.sched_getaffinity(0))


def texts(megabytes: float) -> Iterator[str]:
    """Real text: what Python has installed here, again and again if that is not enough."""
    size = 0
    while True:
        for folder in (sysconfig.get_paths()["stdlib"], sysconfig.get_paths()["purelib"]):
            for file in sorted(Path(folder).rglob("*")):
                if file.suffix in (".py", ".md", ".rst", ".txt") and 200 < file.stat().st_size < 100_000:
                    text = file.read_text(encoding="utf-8", errors="ignore")
                    yield text
                    size += len(text.encode())
                    if size >= megabytes * 1e6:
                        return


def train(documents: list[str], file: Path) -> None:
    trained = tokenizers.ByteLevelBPETokenizer()
    some = documents[:: max(1, len(documents) // 1000)]
    trained.train_from_iterator(some, vocab_size=VOCABULARY, special_tokens=["<|endoftext|>"], show_progress=False)
    trained.save(str(file))


def alone(folder: Path) -> float:
    """The seconds of `encode_batch`, in a fresh process."""
    done = subprocess.run(
        [sys.executable, __file__, "--alone", str(folder)],
        env={**os.environ, "TOKENIZERS_PARALLELISM": "true", "RAYON_NUM_THREADS": str(CORES)},
        capture_output=True,
        text=True,
        check=True,
    )
    return float(done.stdout)


def encode_alone(folder: Path) -> None:
    tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    with open(folder / "in.jsonl", encoding="utf-8") as lines:
        documents = [json.loads(line)["text"] for line in lines]
    began = time.perf_counter()
    for first in range(0, len(documents), CHUNK):
        tokenizer.encode_batch(documents[first : first + CHUNK])
    print(time.perf_counter() - began)


def prepare(folder: Path) -> float:
    began = time.perf_counter()
    command = ["data", "prepare", "in.jsonl", "--output", "out/x", "--tokenizer", "tokenizer.json", "--overwrite"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    subprocess.run(
        [sys.executable, "-m", "gptctl", *command], cwd=folder, env=environment, capture_output=True, check=True
    )
    return time.perf_counter() - began


_megatron: Any = None  # the tokenizer of a process of the pool, as Megatron's Encoder keeps it


def _start(file: str) -> None:
    global _megatron
    from transformers import PreTrainedTokenizerFast

    _megatron = PreTrainedTokenizerFast(tokenizer_file=file, eos_token="<|endoftext|>")


def _encode(line: str) -> tuple[list[int], int]:
    ids = _megatron(json.loads(line)["text"]).input_ids
    if ids:
        ids.append(_megatron.eos_token_id)
    return ids, len(line)


def megatron(folder: Path) -> float:
    """Its process_json_file, without its own modules."""
    began = time.perf_counter()
    lengths = []
    with (
        multiprocessing.Pool(CORES, _start, (str(folder / "tokenizer.json"),)) as pool,
        open(folder / "in.jsonl", encoding="utf-8") as lines,
        open(folder / "megatron.bin", "wb") as stream,
    ):
        for ids, _ in pool.imap(_encode, lines, 32):
            stream.write(np.array(ids, dtype=np.uint16).tobytes(order="C"))
            lengths.append(len(ids))
    np.array(lengths, np.int32).tofile(folder / "megatron.idx")
    return time.perf_counter() - began


def check(folder: Path, documents: list[str]) -> None:
    """Both wrote the ids of the library."""
    tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    end = tokenizer.token_to_id("<|endoftext|>")
    ids = np.load(folder / "out" / "x_ids.npy", mmap_mode="r")
    assert np.array_equal(ids, np.fromfile(folder / "megatron.bin", np.uint16))
    first = [token for each in tokenizer.encode_batch(documents[:50]) for token in (*each.ids, end)]
    assert ids[: len(first)].tolist() == first


def main(megabytes: float) -> None:
    programs: dict[str, Callable[[Path], float]] = {"alone": alone, "prepare": prepare, "Megatron": megatron}
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        documents = [*texts(megabytes)]
        train(documents, folder / "tokenizer.json")
        with open(folder / "in.jsonl", "w", encoding="utf-8") as stream:
            stream.writelines(json.dumps({"text": text}) + "\n" for text in documents)
        size = sum(len(text.encode()) for text in documents) / 1e6
        seconds: dict[str, list[float]] = {name: [] for name in programs}
        for _ in range(ROUNDS):
            for name, program in programs.items():
                seconds[name].append(program(folder))
        check(folder, documents)
    print(f"{len(documents):,} documents, {size:.0f} MB of text, {CORES} cores, median of {ROUNDS} rounds")
    for name, times in seconds.items():
        print(f"  {name:<9} {size / median(times):6.2f} MB/s   {len(documents) / median(times):8.0f} docs/s")
    for name in ("alone", "Megatron"):
        ratios = sorted(theirs / ours for theirs, ours in zip(seconds[name], seconds["prepare"]))
        record(f"prepare of {size:.0f} MB against {name}", ours=seconds["prepare"], peer=seconds[name])
        print(f"  prepare is {median(ratios):.2f} × {name} ({ratios[0]:.2f} to {ratios[-1]:.2f})")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--alone"]:
        encode_alone(Path(sys.argv[2]))
    else:
        main(float(sys.argv[1]) if len(sys.argv) > 1 else 50)
