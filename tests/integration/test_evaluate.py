"""`python -m trainer.tasks.evaluate`. Oracle: transformers' GPT-2 with the same weights, and sums over its logits by hand."""

from __future__ import annotations

import json
import math
import os
import re
import resource
import signal
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from gptctl.jobs.run_metrics import file_rows
from tests.integration.test_samples import token_files
from tests.ranks import Ranks, run, tiny
from tests.trained import json_of, layout_flags, start_task, task, theirs, trained
from trainer.corpus.tokenizer import ByteTokenizer
from trainer.errors import UserError
from trainer.tasks import evaluate
from trainer.tasks.arguments import Opened
from trainer.tasks.tokenizers import tokenizer_of

TEXT = "ten one two three four nine foxes got seven nuts in the night five of the six were eight "
CONTEXT = 16


@pytest.fixture
def output(tmp_path: Path) -> Path:
    (tmp_path / "text.txt").write_text(TEXT)
    return trained(tmp_path)


@torch.no_grad()
def by_hand(text: str, stride: int, length: int = CONTEXT) -> tuple[float, int]:
    """The sum of losses: for each character, the first window in which it is, one after the other."""
    model, vocabulary = theirs()
    tokens = [vocabulary.index(character) for character in text]
    total = 0.0
    for place in range(1, len(tokens)):
        window = max(0, math.ceil((place - length) / stride))
        before = torch.tensor([tokens[window * stride : place]])
        logits = model(before).logits[0, -1, : len(vocabulary)].double()
        total += float(logits.logsumexp(0) - logits[tokens[place]])
    return total, len(tokens) - 1


@pytest.mark.parametrize("stride", [16, 5, 1])
def test_perplexity_is_that_of_transformers(tmp_path: Path, output: Path, stride: int) -> None:
    (result,) = json_of(
        task("evaluate", tmp_path, "output", "text.txt", "--json", "-o", f"Offline_Eval.overlapping_eval={stride}")
    )
    total, count = by_hand(TEXT, stride)
    words = len(TEXT.strip().split(" "))
    assert result["tokens"] == count == len(TEXT) - 1
    assert result["loss"] == pytest.approx(total / count, abs=2e-6)
    assert result["ppl"] == pytest.approx(math.exp(total / count), rel=1e-5)
    assert result["token_ratio"] == (len(TEXT) - 1) / (words - 1)
    assert result["adjusted_ppl"] == pytest.approx(math.exp(min(20, total / (words - 1))), rel=1e-4)
    assert (result["step"], result["window"], result["stride"]) == (240, CONTEXT, stride)


CLOZE = ["one two", "three four", "five six seven", "eight nine", "nine ten one", "two one", "six three", "seven seven"]


def test_cloze_is_that_of_transformers(tmp_path: Path, output: Path) -> None:
    """A text counts if each character of its last word is the likeliest one after all before it."""
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in CLOZE))
    (result,) = json_of(task("evaluate", tmp_path, "output", "a.jsonl", "--cloze", "--json"))
    right = [is_right(text) for text in CLOZE]
    assert 0 < sum(right) < len(right)
    assert (result["examples"], result["correct"]) == (len(right), sum(right))
    assert result["accuracy"] == sum(right) / len(right)


@torch.no_grad()
def is_right(text: str) -> bool:
    model, vocabulary = theirs()
    tokens = [vocabulary.index(character) for character in text]
    logits = model(torch.tensor([tokens[:-1]])).logits[0, :, : len(vocabulary)]
    begin = text.rindex(" ")
    return logits[begin - 1 :].argmax(-1).tolist() == tokens[begin:]


def test_a_table_and_the_metrics_of_the_run(tmp_path: Path, output: Path) -> None:
    before = (output / "metrics.jsonl").read_bytes()
    ended = task("evaluate", tmp_path, "output/step_120", "text.txt")
    assert ended.ok, ended.text
    rows = dict(line.split(maxsplit=1) for line in ended.out[0].splitlines())
    (file,) = output.glob("evaluation.*.json")
    record = json.loads(file.read_text())
    assert record["step"] == int(rows["step"]) == 120
    assert float(rows["ppl"]) == pytest.approx(record["ppl"], rel=1e-5)
    assert f"Recorded in {file}." in ended.err[0]
    cut = "Offline_Eval: max_seq_len 1,024 and overlapping_eval 32: cut to the model's context of 16."
    assert ended.err[0].splitlines().count(cut) == 1
    # A training may be writing to it, and gptctl continues copies of it from their end.
    assert (output / "metrics.jsonl").read_bytes() == before
    (row,) = [row for row in file_rows(output / "metrics.jsonl") if "eval_ppl:text.txt" in row]
    assert (row["step"], row["eval_ppl:text.txt"]) == (120, record["ppl"])
    assert row["loss"]


def test_nothing_is_recorded_for_weights_from_elsewhere(tmp_path: Path, output: Path) -> None:
    (output / "metrics.jsonl").unlink()
    assert task("evaluate", tmp_path, "output", "text.txt").ok
    assert not list(output.glob("evaluation.*"))


def evaluate_with_little_memory(arguments: Sequence[str] | None = None) -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    resource.setrlimit(resource.RLIMIT_AS, [pages * resource.getpagesize() + (768 << 20)] * 2)
    return evaluate.main(arguments)


def test_too_little_memory_is_explained(tmp_path: Path, output: Path) -> None:
    """The memory of the process is limited by the system."""
    (tmp_path / "text.txt").write_text(TEXT * 1000)
    keys = [f"Offline_Eval.{key}" for key in ("batch_size=1000000", "overlapping_eval=1")]
    words = ["output", "text.txt", *(word for key in keys for word in ("-o", key))]
    ended = Ranks(words, 1, tmp_path, {}, evaluate_with_little_memory).wait()
    assert ended.codes == [93], ended.text
    assert re.search(
        r"error: out of memory evaluating batch 1: the process, by `ulimit -[vd]`, has .* tried to allocate .* more\n",
        ended.err[0],
    )
    assert "hint: reduce Offline_Eval.batch_size, or use more ranks: " in ended.err[0]
    assert "Traceback" not in ended.text


def test_documents_are_evaluated_one_by_one(tmp_path: Path, output: Path) -> None:
    texts = [TEXT[:30], TEXT[30:50], "e"]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    (result,) = json_of(task("evaluate", tmp_path, "output", "a.jsonl", "--json"))
    sums = [by_hand(text, 16) for text in texts]
    assert (result["documents"], result["tokens"]) == (3, sum(count for _, count in sums))
    assert result["loss"] == pytest.approx(sum(total for total, _ in sums) / result["tokens"], abs=2e-6)


FLEETX = """\
_base_: ./base.yaml
Model: {module: GPTEvalModule}
Offline_Eval: {eval_path: text.txt, cloze_eval: False, overlapping_eval: 4, batch_size: 3, max_seq_len: 12, logging_freq: 1}
"""
FLEETX_2023 = """\
Global: {device: cpu, seed: 1024, local_batch_size: 8, micro_batch_size: 8}
Data: {Eval: {dataset: {name: LM_Eval_Dataset, input_dir: text.txt, max_seq_len: 12, overlapping_eval: 4}, loader: {num_workers: 1}}}
Distributed: {dp_degree: 1, sharding: {sharding_degree: 1, sharding_stage: 1}}
"""
BASE = """\
Global: {device: cpu, seed: 1024, global_batch_size: , local_batch_size: 8, micro_batch_size: 8}
Engine: {max_steps: 1000, mix_precision: {enable: False}, save_load: {output_dir: ./output, ckpt_dir: }}
Model: {module: GPTModule, name: GPT, type_vocab_size: 16, fused_linear: False}
Distributed: {dp_degree: 1, mp_degree: 1, pp_degree: 1, sharding: {sharding_degree: 1, sharding_stage: 1}}
"""


@pytest.mark.parametrize("text", [FLEETX, FLEETX_2023], ids=["module", "dataset"])
def test_files_of_fleetx(tmp_path: Path, output: Path, text: str) -> None:
    (tmp_path / "base.yaml").write_text(BASE)
    (tmp_path / "eval.yaml").write_text(text)
    (result,) = json_of(task("evaluate", tmp_path, "output", "-c", "eval.yaml", "--json"))
    total, count = by_hand(TEXT, 4, 12)
    assert (result["window"], result["stride"]) == (12, 4)
    assert result["loss"] == pytest.approx(total / count, abs=2e-6)


LAYOUTS = [{"mp": 2}, {"pp": 2}, {"sharding": 2, "stage": 2}, {"sharding": 2, "stage": 3}, {"dp": 2}]
MORE = [{"mp": 4}, {"pp": 4}, {"mp": 2, "pp": 2}, {"sharding": 2, "mp": 2, "stage": 3}, {"dp": 2, "sharding": 2}, {"sharding": 2, "pp": 2}]  # fmt: skip


def in_layout(folder: Path, degrees: dict[str, int]) -> tuple[float, int]:
    """Loss and cloze hits; batches of 2 windows leave some ranks without one in the last round."""
    world = math.prod(degree for axis, degree in degrees.items() if axis != "stage")
    flags = [*layout_flags(**degrees), "-o", "Offline_Eval.batch_size=2", "-o", "Offline_Eval.overlapping_eval=5"]
    (loss,) = json_of(task("evaluate", folder, "output", "text.txt", "--json", *flags, world=world))
    (cloze,) = json_of(task("evaluate", folder, "output", "a.jsonl", "--json", "--cloze", *flags, world=world))
    return loss["loss"], cloze["correct"]


@pytest.mark.parametrize("degrees", LAYOUTS, ids=str)
def test_every_layout_finds_what_one_process_finds(tmp_path: Path, output: Path, degrees: dict[str, int]) -> None:
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in CLOZE))
    alone, together = in_layout(tmp_path, {}), in_layout(tmp_path, degrees)
    assert together == (pytest.approx(alone[0], abs=1e-6), alone[1])
    assert 0 < alone[1] < len(CLOZE)


@pytest.mark.long
@pytest.mark.parametrize("degrees", MORE, ids=str)
def test_more_layouts(tmp_path: Path, output: Path, degrees: dict[str, int]) -> None:
    test_every_layout_finds_what_one_process_finds(tmp_path, output, degrees)


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["output"], 2, "no file to evaluate on"),
        (["output", "nothing.txt"], 2, "cannot read nothing.txt"),
        (["output", "empty.txt"], 2, "empty.txt has no text"),
        (["output", "one.txt"], 2, "one.txt has only one token"),
        (["elsewhere", "text.txt"], 93, "elsewhere contains no usable checkpoint"),
        (
            ["output", "text.txt", "-o", "Model.hidden_size=64"],
            93,
            "is a checkpoint of another model: hidden_size is 32",
        ),
        (["output", "text.txt", "-o", "Distributed.mp_degree=2"], 93, "L0"),
        (["output", "text.txt", "-o", "Offline_Eval.batch_size=0"], 93, "C012 Offline_Eval.batch_size"),
        (["output", "text.txt", "--tokenizer", "bytes"], 93, "the tokenizer has 257 tokens, but the model in"),
        (["output", "text.txt", "--tokenizer", "none.json"], 2, "--tokenizer none.json does not exist"),
        (["output", "text.txt", "--jsn"], 2, "unrecognized arguments: --jsn"),
        (["output", "chinese.txt"], 93, "the vocabulary of this model has no"),
    ],
)
def test_mistakes_are_one_message(tmp_path: Path, output: Path, arguments: list[str], code: int, message: str) -> None:
    for name, text in {"empty": " \n", "one": "e", "chinese": "中文"}.items():
        (tmp_path / f"{name}.txt").write_text(text)
    ended = task("evaluate", tmp_path, *arguments)
    assert ended.codes == [code]
    assert message in ended.err[0]
    assert "Traceback" not in ended.err[0]
    assert "hint: " in ended.err[0]
    assert ended.out[0] == ""
    # The file is read first: a large model takes minutes to load.
    is_late = message.startswith(("one.txt", "the vocabulary"))
    assert ("Loaded" in ended.err[0]) == is_late


def test_a_damaged_checkpoint(tmp_path: Path, output: Path) -> None:
    (file,) = (output / "step_240").glob("*.safetensors")
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    ended = task("evaluate", tmp_path, "output/step_240", "text.txt")
    assert ended.codes == [93]
    assert "cannot load output/step_240" in ended.err[0]


def test_the_tokenizer_of_token_files(tmp_path: Path) -> None:
    """Nobody knows the tokenizer of these files: it must be named, and it must fit."""
    keys = {"dataset": "GPTDataset", "path": "", "input_dir": token_files(tmp_path / "data"), "vocab": 257}
    keys |= {"max_steps": 2, "eval_freq": -1, "test_iters": 0, "Data.Train.dataset.split": "[1,0,0]"}
    assert run(tmp_path, *tiny(**keys)).ok
    (tmp_path / "text.txt").write_text(TEXT)
    ended = task("evaluate", tmp_path, "output", "text.txt")
    assert "it does not name its tokenizer" in ended.err[0]
    assert "--tokenizer bytes" in ended.err[0]
    (result,) = json_of(task("evaluate", tmp_path, "output", "text.txt", "--json", "--tokenizer", "bytes"))
    assert result["tokens"] == len(TEXT) - 1


@pytest.mark.parametrize("recorded", ["right", "wrong"])
def test_the_recorded_tokenizer(tmp_path: Path, recorded: str) -> None:
    """A manifest that names its tokenizer, as `gptctl data prepare` lets it: only that one is used."""
    facts = {"config": {"Model": {"vocab_size": 257}}, "vocabulary": None}
    digest = ByteTokenizer.digest if recorded == "right" else "0" * 64
    facts["tokenizer"] = {"kind": "bytes", "digest": digest, "vocab_size": 257, "eos_id": 256}  # type: ignore[assignment]
    opened = Opened(tmp_path, facts)
    if recorded == "right":
        assert tokenizer_of(opened, None).kind == "bytes"
        assert tokenizer_of(opened, "bytes").kind == "bytes"
        return
    with pytest.raises(UserError, match=r"not the tokenizer that .* was trained with"):
        tokenizer_of(opened, None)


def test_stopped_before_the_end(tmp_path: Path, output: Path) -> None:
    (tmp_path / "long.txt").write_text(TEXT * 2000)
    flags = ["-o", "Offline_Eval.overlapping_eval=1", "-o", "Offline_Eval.logging_freq=1"]
    ranks = start_task("evaluate", tmp_path, "output", "long.txt", *flags)
    while "batch 1 of" not in ranks.logs[0][1].read_text():
        assert ranks.poll(), ranks.logs[0][1].read_text()
    ranks.kill(signal.SIGTERM)
    ended = ranks.wait(60)
    assert ended.codes == [93]
    assert "stopped by SIGTERM before the evaluation was complete" in ended.err[0]
    assert ended.out[0] == ""
    assert os.path.exists(output / "metrics.jsonl")
    assert not list(output.glob("evaluation.*"))
