"""The commands of examples/text-to-model, one after the other. Oracle: transformers, for the exported model."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import ROOT
from tests.pages import commands

EXAMPLE = ROOT / "examples/text-to-model"
pytestmark = pytest.mark.long


def run(folder: Path, line: str) -> str:
    environment = {
        **os.environ,
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "HOME": str(folder / "home"),
        "GPTCTL_HOME": str(folder / "records"),
        "OMP_NUM_THREADS": "1",
    }
    done = subprocess.run(line, shell=True, cwd=folder, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, f"$ {line}\n{done.stdout[-3000:]}{done.stderr[-3000:]}"
    return done.stdout


def test_from_a_folder_of_text_to_an_exported_model(tmp_path: Path) -> None:
    shutil.copyfile(EXAMPLE / "config.yaml", tmp_path / "config.yaml")
    (tmp_path / "books").mkdir()
    lines = [f"{number}. The cat sat on mat {number % 7}, and the dog saw it.\n\n" for number in range(3000)]
    for part in range(3):
        (tmp_path / f"books/ch{part}.txt").write_text("".join(lines[part::3]), encoding="utf-8")
    typed = [each.line for each in commands(EXAMPLE / "README.md")]
    assert len(typed) == 10
    for line in typed:
        run(tmp_path, line)

    # The same words, by another library.
    from transformers import AutoTokenizer, GPT2LMHeadModel

    asked = "gptctl generate first 'The cat' --greedy --max-length 12 --json"
    ours = json.loads(run(tmp_path, asked))
    model = GPT2LMHeadModel.from_pretrained(tmp_path / "books-hf")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "books-hf")
    ids = tokenizer("The cat", return_tensors="pt")
    theirs = model.generate(**ids, max_new_tokens=12, do_sample=False)[0, ids["input_ids"].shape[1] :]
    assert ours["text"] == tokenizer.decode(theirs, skip_special_tokens=True)

    # As a job: the same text in its log.
    detached = json.loads(run(tmp_path, f"{asked.replace('--json', '')} --detach --json"))
    run(tmp_path, f"gptctl wait {detached['job']}")
    assert ours["text"].strip().splitlines()[0] in run(tmp_path, f"gptctl logs {detached['job']}")
