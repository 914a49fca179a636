"""What metrics.jsonl contains after a resume. Oracle: the records that the test wrote."""

from __future__ import annotations

import io
import json
import os
from pathlib import Path

import pytest
import torch

from tests.ranks import tiny
from trainer.config import Override, load
from trainer.layout import Layout
from trainer.mesh import Mesh
from trainer.metrics import Log, Metrics


@pytest.fixture
def opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    keys = [Override.parse(word) for word in tiny()]

    def once(job: str) -> Metrics:
        monkeypatch.setenv("GPTCTL_JOB", job)
        monkeypatch.setenv("GPTCTL_ATTEMPT", "0")
        mesh = Mesh(Layout(), 0, 0, torch.device("cpu"))
        return Metrics(load(None, keys).run, mesh, Log("json", 0, io.StringIO()), tmp_path, 10)

    return once


def records(file: Path) -> list[tuple[str, int | None]]:
    return [(line["job"], line.get("step")) for line in map(json.loads, file.read_text().splitlines())]


def test_later_records_of_this_job_move(tmp_path: Path, opened) -> None:
    """Those of another job, and lines that are not ours, stay where they are."""
    other, mine = opened("a"), opened("b")
    for metrics in (other, mine):
        for step in (1, 2, 3):
            metrics.record({"step": step})
    with open(tmp_path / "metrics.jsonl", "a") as stream:
        stream.write('{"step": 4, "los')  # killed here
    mine.resume(1)
    mine.record({"step": 2})
    kept = [("a", 1), ("a", 2), ("a", 3), ("b", 1), ("b", None), ("b", 2)]
    assert records(tmp_path / "metrics.jsonl") == kept
    repeated = (tmp_path / "metrics.repeated.jsonl").read_text()
    assert [json.loads(line)["step"] for line in repeated.splitlines()[:2]] == [2, 3]
    assert repeated.endswith('{"step": 4, "los')


def test_a_first_start_writes_nothing(tmp_path: Path, opened) -> None:
    opened("a").resume(0)
    assert list(tmp_path.iterdir()) == []


def test_foreign_lines_stay(tmp_path: Path, opened) -> None:
    foreign = b'not json\n[1]\n{"step": "x"}\n{"step": null}\n\xff\n'
    (tmp_path / "metrics.jsonl").write_bytes(foreign)
    opened("a").resume(0)
    assert (tmp_path / "metrics.jsonl").read_bytes().startswith(foreign)
    assert not (tmp_path / "metrics.repeated.jsonl").exists()


@pytest.mark.parametrize("start", ["", '{"step": 5, "job": "a"}\n'])
def test_a_file_without_lines_is_renamed(tmp_path: Path, opened, start: str) -> None:
    """A terabyte of NULs, made by `truncate`: no memory has room for it, and the run continues."""
    file = tmp_path / "metrics.jsonl"
    file.write_text(start)
    os.truncate(file, 1 << 40)
    (tmp_path / "metrics.jsonl.foreign1").write_text("")
    mine = opened("a")
    mine.resume(3)
    assert records(file) == [("a", None)]
    assert (tmp_path / "metrics.jsonl.foreign2").stat().st_size == 1 << 40
    warned = mine.log.stream.getvalue()
    assert "renamed to metrics.jsonl.foreign2" in warned


def test_a_file_that_cannot_be_rewritten_is_told(tmp_path: Path, opened) -> None:
    """A folder has the name of the second file."""
    mine = opened("a")
    mine.record({"step": 1})
    (tmp_path / "metrics.repeated.jsonl").mkdir()
    mine.resume(0)
    assert "cannot rewrite" in mine.log.stream.getvalue()
    assert records(tmp_path / "metrics.jsonl") == [("a", 1), ("a", None)]
