"""What the trainer records of packages, node, variables and data. Oracles: importlib.metadata, this process, and copies
of the data."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import re
import shutil
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from gptctl.remote.host_sync import MAX_WHOLE, is_synced
from tests.ranks import run, tiny
from trainer.checkpoint_names import ENVIRONMENT
from trainer.config import Override, load
from trainer.corpus.prepare import Request, prepare
from trainer.data import open_data
from trainer.environment import data, packages, variables
from trainer.layout import Layout
from trainer.mesh import Mesh

SECRET = "s3cr3t-of-nobody"


def token_files(folder: Path, seed: int = 0, documents: int = 40) -> Path:
    folder.mkdir(parents=True)
    chance = np.random.default_rng(seed)
    lens = chance.integers(20, 60, documents)
    np.savez(folder / "corpus_ids.npz", ids=chance.integers(0, 50, lens.sum()).astype(np.uint16), lens=lens)
    return folder


def recorded(folder: Path, environ: dict[str, str] | None = None, **keys: Any) -> dict[str, Any]:
    ended = run(folder, *tiny(max_steps=1, **keys), **(environ or {}))
    assert ended.ok, ended.text
    return json.loads((folder / "output" / ENVIRONMENT).read_text())


def facts_of(**keys: Any) -> dict[str, Any]:
    """What is recorded of the data, without a run."""
    mesh = Mesh(Layout(), 0, 0, torch.device("cpu"))
    opened, splits, _ = open_data(load(None, [Override.parse(word) for word in tiny(**keys)]).run, mesh, print)
    return data(opened, splits)


def of_tokens(input_dir: Path, vocab: int = 64) -> dict[str, Any]:
    return facts_of(dataset="GPTDataset", path="", input_dir=input_dir, vocab=vocab)


def test_a_run_records_what_it_uses(tmp_path: Path) -> None:
    found = recorded(tmp_path, {"NCCL_DEBUG": "WARN", "HF_TOKEN": SECRET, "TORCH_TOKEN": SECRET, "MY_NOTE": SECRET})
    assert found["software"]["python"] == platform.python_version()
    assert found["software"]["torch"] == torch.__version__
    assert found["node"]["host"] == os.uname().nodename
    assert found["node"]["cpus"] == len(os.sched_getaffinity(0))
    assert found["variables"]["NCCL_DEBUG"] == "WARN"
    assert found["packages"]["torch"] == torch.__version__
    # Neither values that look secret nor variables that nobody needs to compare runs.
    assert SECRET not in json.dumps(found)


def test_the_packages_are_those_that_python_finds() -> None:
    """By their folders only, which takes a hundredth of the time."""
    listed = importlib.metadata.distributions()
    known = {re.sub(r"[-_.]+", "-", each.name).lower(): each.version for each in listed}
    began = time.perf_counter()
    found = packages(sys.path)
    assert time.perf_counter() - began < 0.1
    assert found == known


def test_the_first_of_two_versions_counts(tmp_path: Path) -> None:
    for place, version in (("a", "2.0"), ("b", "1.0")):
        (tmp_path / place / f"Some_Thing-{version}.dist-info").mkdir(parents=True)
    (tmp_path / "b" / "old-0.5-py3.11.egg-info").mkdir()
    assert packages([str(tmp_path / place) for place in ("a", "missing", "b")]) == {"old": "0.5", "some-thing": "2.0"}


def test_variables_are_bounded_and_writable() -> None:
    odd = os.fsdecode(b"\xff")
    found = variables({"NCCL_X": odd + "x" * 10**6, **{f"OMP_{number}": "" for number in range(1000)}})
    assert len(found["NCCL_X"]) == 500
    assert len(json.dumps(found).encode()) < MAX_WHOLE


def test_the_attempt_has_its_own_file(tmp_path: Path) -> None:
    """Jobs may share an output folder; only the first rank writes, and hosts send the file."""
    attempt = tmp_path / "attempt-3"
    attempt.mkdir(parents=True)
    environ = {"GPTCTL_ATTEMPT_DIR": str(attempt), "GPTCTL_JOB": "gpt-1", "GPTCTL_ATTEMPT": "3"}
    ended = run(tmp_path, *tiny(max_steps=1), world=2, **environ)
    assert ended.ok, ended.text
    found = json.loads((attempt / ENVIRONMENT).read_text())
    assert (found["job"], found["attempt"]) == ("gpt-1", 3)
    assert not (tmp_path / "output" / ENVIRONMENT).exists()
    assert is_synced(ENVIRONMENT)


def test_a_file_that_cannot_be_written_stops_nothing(tmp_path: Path) -> None:
    ended = run(tmp_path, *tiny(max_steps=1), GPTCTL_ATTEMPT_DIR=str(tmp_path / "missing"))
    assert ended.ok, ended.text
    assert f"cannot write {ENVIRONMENT}" in ended.text


def test_the_fingerprint_is_that_of_the_data_wherever_it_is(tmp_path: Path) -> None:
    """Oracle: a copy in another folder has the same one; other documents, or one less, have not."""
    own = token_files(tmp_path / "data")
    copy = shutil.copytree(own, tmp_path / "elsewhere" / "copy")
    others = [token_files(tmp_path / "other", seed=1), token_files(tmp_path / "less", documents=39)]
    first = of_tokens(own)
    assert of_tokens(copy) == first
    assert first["num_files"] == 1
    assert first["files"][0]["tokens"] == int(np.load(own / "corpus_ids.npz")["lens"].sum())
    assert len({first["fingerprint"], *(of_tokens(each)["fingerprint"] for each in others)}) == 3


def test_all_files_of_a_blend_are_recorded(tmp_path: Path) -> None:
    """With other weights it is other data, though the files are the same."""
    places = [token_files(tmp_path / name, seed) for seed, name in enumerate("ab")]
    for place in places:
        os.rename(place / "corpus_ids.npz", place / f"{place.name}_ids.npz")
    blends = [json.dumps(dict(zip(map(str, places), weights))) for weights in ((0.5, 0.5), (0.9, 0.1))]
    found = [facts_of(dataset="GPTDataset", path="", input_dir=blend, vocab=64) for blend in blends]
    assert [each["name"] for each in found[0]["files"]] == ["a", "b"]
    assert found[0]["files"] == found[1]["files"]
    assert found[0]["fingerprint"] != found[1]["fingerprint"]


def test_prepared_data_is_told_apart_by_its_tokens(tmp_path: Path) -> None:
    """Same lengths, other tokens: `gptctl data prepare` has noted their SHA-256. Oracle: the reversed texts."""
    found = []
    for name, step in (("a", 1), ("b", -1)):
        source = tmp_path / name / "text.jsonl"
        source.parent.mkdir()
        texts = [f"document {number} has a few words"[::step] for number in range(60)]
        source.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
        prepare(Request((str(source),), str(tmp_path / name / "data" / "corpus")))
        found.append(of_tokens(tmp_path / name / "data" / "corpus", vocab=257))
    for key, is_equal in {"digests": True, "tokenizer": True, "fingerprint": False}.items():
        assert (found[0][key] == found[1][key]) == is_equal


def test_a_text_is_known_by_its_characters(tmp_path: Path) -> None:
    """Whatever it is called."""
    texts = {"one.txt": "to be or not to be " * 50, "same.txt": "to be or not to be " * 50, "other.txt": "or not " * 99}
    for name, text in texts.items():
        (tmp_path / name).write_text(text)
    prints = [facts_of(path=tmp_path / name)["fingerprint"] for name in texts]
    assert prints[0] == prints[1] != prints[2]
