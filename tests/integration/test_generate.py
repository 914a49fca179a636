"""`python -m trainer.tasks.generate`. Oracle: transformers' `generate` with the same weights; one process for all layouts."""

from __future__ import annotations

import json
import math
import os
import pty
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from tests.integration.test_evaluate import BASE
from tests.ranks import run, tiny
from tests.trained import COUNTING, json_of, layout_flags, start_task, task, theirs, trained

PROMPTS = ["one two th", "six s", "nine ten", "four f"]


@pytest.fixture
def output(tmp_path: Path) -> Path:
    (tmp_path / "prompts.txt").write_text("\n".join(PROMPTS) + "\n")
    return trained(tmp_path)


def continued(prompt: str, count: int) -> str:
    """What transformers writes after a prompt, as far as the context reaches."""
    model, vocabulary = theirs()
    tokens = torch.tensor([[vocabulary.index(character) for character in prompt]])
    unused = list(range(len(vocabulary), model.config.vocab_size))
    ids = model.generate(
        tokens, attention_mask=torch.ones_like(tokens), do_sample=False, max_new_tokens=count,
        suppress_tokens=unused, pad_token_id=unused[0], eos_token_id=unused[0],
    )  # fmt: skip
    return "".join(vocabulary[token] for token in ids[0, tokens.shape[1] :])


def test_greedy_text_is_that_of_transformers(tmp_path: Path, output: Path) -> None:
    flags = ["--greedy", "--max-length", 6, "--json"]
    found = json_of(task("generate", tmp_path, "output", *PROMPTS, *flags))
    assert [text["text"] for text in found] == [continued(prompt, 6) for prompt in PROMPTS]
    assert [text["prompt"] for text in found] == PROMPTS
    assert found[0]["text"] == "ree fo"
    assert {text["finish_reason"] for text in found} == {"length"}
    assert [text["prompt_tokens"] for text in found] == [len(prompt) for prompt in PROMPTS]


def test_one_prompt_is_streamed(tmp_path: Path, output: Path) -> None:
    ended = task("generate", tmp_path, "output", "one two th", "--greedy", "--max-length", 6)
    assert ended.out == ["one two three fo\n"]
    assert "6 tokens in" in ended.err[0]


def test_several_texts_are_separated(tmp_path: Path, output: Path) -> None:
    flags = ["--greedy", "--max-length", 2, "--num-return-sequences", 2]
    ended = task("generate", tmp_path, "output", "one two th", "six s", *flags)
    line = "-" * 15
    assert ended.out == [f"one two thre\n{line}\none two thre\n{line}\nsix sev\n{line}\nsix sev\n"]


@pytest.mark.parametrize(
    ("flags", "text", "reason"),
    [
        (["--stop", " "], "ree", "stop"),
        (["--stop", "four", "--stop", "x"], "ree ", "stop"),
        (["--stop", "zzz"], "ree four f", "length"),
    ],
)
def test_stop_words(tmp_path: Path, output: Path, flags: list[str], text: str, reason: str) -> None:
    (found,) = json_of(
        task("generate", tmp_path, "output", "one two th", "--greedy", "--max-length", 10, "--json", *flags)
    )
    assert (found["text"], found["finish_reason"]) == (text, reason)


def test_stop_words_in_a_file_of_fleetx(tmp_path: Path, output: Path) -> None:
    (tmp_path / "base.yaml").write_text(BASE)
    (tmp_path / "generation.yaml").write_text(
        "_base_: ./base.yaml\nModel: {module: GPTGenerationModule}\n"
        "Generation: {top_k: 50, top_p: 0.75, temperature: 1.0, min_dec_len: 1, max_dec_len: 12, num_return_sequences: 1, "
        'decode_strategy: greedy_search, use_topp_sampling: True, inference: True, early_finish: True, stop_words: ["\\n", " f"]}\n'
    )
    (found,) = json_of(task("generate", tmp_path, "output", "one two th", "-c", "generation.yaml", "--json"))
    assert found["text"] == "ree"


def test_seeds(tmp_path: Path, output: Path) -> None:
    """The texts of a prompt depend on the seed and on its number, not on the batches."""
    flags = ["--max-length", 20, "--temperature", 2, "--top-p", 1, "--num-return-sequences", 2, "--json"]
    first = json_of(task("generate", tmp_path, "output", "--prompts", "prompts.txt", *flags, "--seed", 5))
    again = json_of(
        task("generate", tmp_path, "output", "--prompts", "prompts.txt", *flags, "--seed", 5, "--batch-size", 3)
    )
    other = json_of(task("generate", tmp_path, "output", "--prompts", "prompts.txt", *flags, "--seed", 6))
    assert first == again
    assert [text["seed"] for text in first] == list(range(5, 13))
    assert [text["text"] for text in other] != [text["text"] for text in first]
    assert len({text["text"] for text in first}) > 4


LAYOUTS = [{"mp": 2}, {"pp": 2}, {"sharding": 2, "stage": 3}, {"dp": 2}]
MORE = [{"mp": 2, "pp": 2}, {"dp": 2, "mp": 2}, {"sharding": 2, "mp": 2, "stage": 2}, {"pp": 4}]


@pytest.mark.parametrize("degrees", LAYOUTS, ids=str)
def test_every_layout_writes_what_one_process_writes(tmp_path: Path, output: Path, degrees: dict[str, int]) -> None:
    """More tokens than the context: caches are filled again. Drawn, not greedy: ranks must draw alike."""
    world = math.prod(degree for axis, degree in degrees.items() if axis != "stage")
    flags = ["--prompts", "prompts.txt", "--max-length", 24, "--batch-size", 2, "--json", "--repetition-penalty", 1.1]
    alone = json_of(task("generate", tmp_path, "output", *flags))
    assert json_of(task("generate", tmp_path, "output", *flags, *layout_flags(**degrees), world=world)) == alone
    assert [text["prompt"] for text in alone] == PROMPTS


@pytest.mark.long
@pytest.mark.parametrize("degrees", MORE, ids=str)
def test_more_layouts(tmp_path: Path, output: Path, degrees: dict[str, int]) -> None:
    test_every_layout_writes_what_one_process_writes(tmp_path, output, degrees)


@pytest.mark.long
@pytest.mark.parametrize("program", ["evaluate", "generate"])
def test_under_the_real_torchrun(tmp_path: Path, output: Path, program: str) -> None:
    words = {
        "evaluate": ["prompts.txt", "-o", "Offline_Eval.overlapping_eval=4"],
        "generate": ["one two th", "--greedy"],
    }
    (tmp_path / "prompts.txt").write_text("one two three four five six seven eight nine ten ")
    command = [sys.executable, "-m", f"trainer.tasks.{program}", "output", *words[program], "--json"]
    alone = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
    torchrun = [str(Path(sys.executable).with_name("torchrun")), "--nproc-per-node", "2", *command[1:]]
    together = subprocess.run(
        [*torchrun, *layout_flags(mp=2)], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    found, expected = json.loads(together.stdout), json.loads(alone.stdout)
    for name in ("text", "tokens", "step"):
        assert found.get(name) == expected.get(name)
    if program == "evaluate":
        assert found["loss"] == pytest.approx(expected["loss"], abs=1e-6)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["output"], "no prompt"),
        (["output", "one two three four"], "prompt 1 has 18 tokens, but the context of this model has 16"),
        (["output", ""], "the prompt is empty"),
        (["output", "中"], "the vocabulary of this model has no '中'"),
        (["output", "one", "--top-p", "2"], "C012 Generation.top_p (--top-p 2): 2.0 is above 1"),
        (["output", "one", "--max-length", "0"], "C012 Generation.max_dec_len"),
        (["output", "one", "--temperature", "1e-320"], "C012 Generation.temperature (--temperature 1e-320)"),
        (["output", "one", "--temperature", "0"], "use --greedy"),
        (["output", "one", "--repetition-penalty", "1e-320"], "C012 Generation.repetition_penalty"),
        (["output", "fine", "\udcff\udcfe"], "prompt 2 is not valid UTF-8"),
        (["output", "one", "--stop", "\udcff"], "--stop is not valid UTF-8"),
        (["output", "one", "--temperature", "warm"], "C011 Generation.temperature (--temperature warm)"),
        (["output", "one", "--stop", ""], "C014 Generation.stop_words"),
        (["output", "one", "--batch-size", "0"], "--batch-size 0: invalid"),
        (["output", "one", "--num-return-sequences", "0"], "--num-return-sequences 0: nothing to write"),
        (["output", "--prompts", "nothing"], "cannot read nothing"),
        (["output", "--prompts", "blank.txt"], "blank.txt has no prompt"),
    ],
)
def test_mistakes_are_one_message(tmp_path: Path, output: Path, arguments: list[str], message: str) -> None:
    (tmp_path / "blank.txt").write_text("\n \n")
    ended = task("generate", tmp_path, *arguments)
    usage = ("no prompt", "--batch-size", "--num-return-sequences", "cannot read", "blank.txt", "use --greedy")
    usage += ("prompt 2 is not", "--stop is not")
    assert ended.codes == [2 if message.startswith(usage) else 93]
    assert message in ended.err[0]
    assert "Traceback" not in ended.err[0]
    assert "hint: " in ended.err[0]


def test_the_end_of_a_long_prompt(tmp_path: Path, output: Path) -> None:
    prompt = "seven eight nine one two th"
    (found,) = json_of(
        task("generate", tmp_path, "output", prompt, "--truncate", "--greedy", "--max-length", 1, "--json")
    )
    model, vocabulary = theirs()
    tokens = torch.tensor([[vocabulary.index(character) for character in prompt[-16:]]])
    assert found["text"] == vocabulary[int(model(tokens).logits[0, -1, : len(vocabulary)].argmax())]


def test_a_stop_request_ends_a_long_text(tmp_path: Path, output: Path) -> None:
    ranks = start_task("generate", tmp_path, "output", "one two th", "--max-length", 1_000_000)
    while len(ranks.logs[0][0].read_text()) < 20:
        assert ranks.poll(), ranks.logs[0][1].read_text()
    ranks.kill(signal.SIGTERM)
    ended = ranks.wait(30)
    assert ended.codes == [93]
    assert "stopped by SIGTERM" in ended.err[0]


def read_until(terminal: int, text: str, seconds: float = 60) -> str:
    seen, deadline = "", time.monotonic() + seconds
    while text not in seen and time.monotonic() < deadline:
        if select.select([terminal], [], [], 0.1)[0]:
            seen += os.read(terminal, 4096).decode()
    assert text in seen, seen
    return seen


def test_a_conversation_on_a_terminal(tmp_path: Path, output: Path) -> None:
    """A real terminal: prompts typed in, a mistake in between, Ctrl-C during a text, Ctrl-D at the end."""
    master, slave = pty.openpty()
    command = [sys.executable, "-m", "trainer.tasks.generate", "output", "--greedy", "--max-length", "1000000"]
    process = subprocess.Popen(command, cwd=tmp_path, stdin=slave, stdout=slave, stderr=slave, start_new_session=True)
    os.close(slave)
    try:
        read_until(master, "> ")
        os.write(master, b"one two th\n")
        read_until(master, "one two three four five")
        process.send_signal(signal.SIGINT)
        read_until(master, "\r\n> ")
        os.write(master, "中\n".encode())
        assert "error: the vocabulary" in read_until(master, "\r\n> ")
        os.write(master, b"six s\n")
        read_until(master, "six seven")
        process.send_signal(signal.SIGINT)
        read_until(master, "\r\n> ")
        os.write(master, b"\x04")
        assert process.wait(30) == 0
    finally:
        process.kill()
        process.wait()
        os.close(master)


def test_samples_of_the_training_are_made_the_same_way(tmp_path: Path, output: Path) -> None:
    """The trainer's own sample, with the prompt that it names: `generate` writes the same text."""
    (tmp_path / "counting.txt").write_text(COUNTING)
    ended = run(
        tmp_path / "new", *tiny(path=tmp_path / "counting.txt", max_steps=5, samples=1), "Generation.max_dec_len=40"
    )
    assert ended.ok, ended.text
    lines = [line.partition(" - ")[2] for line in ended.out[0].splitlines()]
    title = next(number for number, line in enumerate(lines) if line.startswith("Sample text after "))
    prompt = lines[title][len("Sample text after '") : -2]
    (found,) = json_of(task("generate", tmp_path / "new", "output", prompt, "--json"))
    assert found["text"].strip() == lines[title + 1].strip()
