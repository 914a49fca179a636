"""What `prepare` leaves at its prefix, and how it reports progress. Oracles: the bytes of other files, the uninterrupted
run, and arithmetic by hand."""

from __future__ import annotations

import os
import resource
import shutil
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest

from gptctl.cli import cli
from tests.conftest import ROOT
from tests.corpus.conftest import write_jsonl
from tests.corpus.test_prepare import COMMAND, many, output_of, run, texts
from tests.terminal import GPTCTL, Run
from trainer.corpus import blocks
from trainer.corpus.prepare import Request, prepare
from trainer.corpus.progress import Progress, Report
from trainer.errors import UserError

ENDINGS = ("_ids.npy", "_idx.npz", "_ids.npz", ".bin", ".idx")


@pytest.mark.parametrize("ending", ENDINGS)
@pytest.mark.parametrize("format", ["npy", "npz", "megatron"])
def test_files_of_other_programs_stay(tmp_path: Path, ending: str, format: str) -> None:
    source, other = write_jsonl(tmp_path / "in.jsonl", ["a"]), tmp_path / f"x{ending}"
    other.write_bytes(b"weeks of work")
    with pytest.raises(UserError, match=f"x{ending} already exists") as caught:
        run(source, tmp_path / "x", output_format=format)
    assert "--overwrite" in caught.value.hint
    assert sorted(os.listdir(tmp_path)) == ["in.jsonl", other.name]
    assert other.read_bytes() == b"weeks of work"


def test_overwriting_leaves_no_file_that_would_be_read_instead(tmp_path: Path) -> None:
    """FleetX's npy and npz come before Megatron's files at the same prefix. No metadata names them."""
    for format in ("npy", "npz", "megatron"):
        run(write_jsonl(tmp_path / "old.jsonl", ["old"]), tmp_path / format, output_format=format)
        for file in tmp_path.glob(f"{format}[._]*"):
            file.rename(tmp_path / file.name.replace(format, "x", 1))
    (tmp_path / "x_meta.json").unlink()
    (tmp_path / "x-y_ids.npy").write_bytes(b"of another prefix")
    run(write_jsonl(tmp_path / "new.jsonl", ["new"]), tmp_path / "x", output_format="megatron", overwrite=True)
    assert texts(tmp_path / "x") == ["new"]
    left = {"old.jsonl", "new.jsonl", "x.bin", "x.idx", "x_meta.json", "x-y_ids.npy"}
    assert set(os.listdir(tmp_path)) == left


def test_shards_as_output_replace_only_their_own(tmp_path: Path) -> None:
    source = write_jsonl(tmp_path / "in.jsonl", ["a"])
    (tmp_path / "x-00007_ids.npy").write_bytes(b"")
    with pytest.raises(UserError, match=r"x-00007_ids\.npy already exists"):
        run(source, tmp_path / "x", merge=False)
    run(source, tmp_path / "x")  # no such name is written, and none is read
    run(source, tmp_path / "x", merge=False, overwrite=True)
    assert texts(tmp_path / "x") == ["a"]
    assert {file.name for file in tmp_path.glob("x*")} == {"x-00000_ids.npy", "x-00000_idx.npz", "x_meta.json"}


class Stopped(Exception):
    pass


def stop_after(count: int) -> Report:
    """Stop after this many chunks were joined."""
    calls = 0

    def stop(progress: Progress) -> None:
        nonlocal calls
        calls += progress.is_joining
        if calls > count:
            raise Stopped

    return stop


@pytest.mark.parametrize("options", [{}, {"output_format": "megatron"}, {"merge": False}], ids=str)
def test_joining_reports_and_can_be_stopped(tmp_path: Path, monkeypatch, options: dict[str, Any]) -> None:
    """After every chunk, the next call continues. Oracle: the run that was not stopped."""
    monkeypatch.setattr(blocks, "BLOCK", 1 << 11)
    source = write_jsonl(tmp_path / "in.jsonl", many(60))
    seen: list[Progress] = []
    request = Request((str(source),), str(tmp_path / "whole" / "x"), shard_mb=0.005, **options)
    prepare(request, seen.append)
    joining = [each for each in seen if each.is_joining]
    assert joining == seen[-len(joining) :]
    assert [each.done for each in joining] == sorted(each.done for each in joining)
    assert 0 < joining[0].done < joining[-1].done <= joining[-1].total
    for each in seen:
        assert "100.0 %" not in each.text
        assert not each.text.endswith("0:00 left")

    request = request._replace(output=str(tmp_path / "parts" / "x"))
    for stops in range(0, len(joining), 3):
        with pytest.raises(Stopped):
            prepare(request, stop_after(stops))
    assert not list((tmp_path / "parts").glob("*.part*"))
    assert not (tmp_path / "parts" / "x_meta.json").exists()
    assert prepare(request).resumed > 2
    assert output_of(tmp_path / "parts") == output_of(tmp_path / "whole")


def test_numbers_of_the_progress(tmp_path: Path, monkeypatch) -> None:
    """Of a real run: documents and bytes only grow, and both rates are those of the numbers that were reported."""
    monkeypatch.setattr(blocks, "BLOCK", 1 << 12)
    source = write_jsonl(tmp_path / "in.jsonl", many(200))
    seen: list[Progress] = []
    prepare(Request((str(source),), str(tmp_path / "x")), seen.append)
    read = [each for each in seen if not each.is_joining]
    assert [each.documents for each in read] == sorted(each.documents for each in read)
    assert (read[-1].documents, read[-1].done) == (200, source.stat().st_size)
    assert {each.total for each in read} == {source.stat().st_size}
    for each in read:
        assert each.rate == pytest.approx(each.documents / each.seconds)
        assert each.eta == pytest.approx(each.seconds / each.done * (each.total - each.done))


@pytest.mark.parametrize(
    ("progress", "text"),
    [
        (Progress(500, 250, 1000, 10.0), "25.0 %: 500 documents, 50 docs/s, 0:30 left"),
        # 400 documents and 500 bytes are those of an earlier call.
        (Progress(500, 600, 1000, 10.0, 500, 400), "60.0 %: 500 documents, 10 docs/s, 0:40 left"),
        (Progress(0, 0, 1000, 1.0), "0.0 %: 0 documents, 0 docs/s"),
        (Progress(36_000, 1, 3_601, 2.0), "0.0 %: 36,000 documents, 18,000 docs/s, 2:00:00 left"),
        (Progress(500, 1000, 1000, 10.0), "99.9 %: 500 documents, 50 docs/s, 0:01 left"),
        (Progress(500, 300, 900, 5.0, is_joining=True), "joining shards: 33.3 %, 0:10 left"),
    ],
)
def test_the_text_of_the_progress(progress: Progress, text: str) -> None:
    assert progress.text == text


def test_what_a_terminal_shows(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "in.jsonl", many(15_000))
    shown = Run(GPTCTL, *"data prepare in.jsonl --output x --shard-mb 1".split(), cwd=tmp_path)
    shown.read_until(" docs/s, 0:")
    assert shown.finish() == 0
    assert " %: " in shown.text
    assert " left\x1b[K" in shown.text


def test_the_end_token_is_that_of_the_documents(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = write_jsonl(tmp_path / "in.jsonl", ["a"])
    words = ["data", "prepare", str(source), "--output", str(tmp_path / "x")]
    cli(words, standalone_mode=False)
    assert "eos_id: 256" in capsys.readouterr().err
    cli([*words, "--overwrite", "--no-eos"], standalone_mode=False)
    assert "eos_id" not in capsys.readouterr().err


def test_a_full_disk_while_the_tokenizer_is_copied(tmp_path: Path, gpt2_files: Path) -> None:
    """The second of its files does not fit. Oracle: the promise of the message, and a run with room."""
    tokenizer = tmp_path / "tokenizer"
    shutil.copytree(gpt2_files, tokenizer)
    # The library skips such lines.
    merges = (gpt2_files / "merges.txt").read_text()
    (tokenizer / "merges.txt").write_text(merges + "#version: 0.2 of nothing\n" * 5000)
    source = write_jsonl(tmp_path / "in.jsonl", many(20))
    command = [*COMMAND, str(source), "--output", str(tmp_path / "data/x"), "--tokenizer", str(tokenizer)]

    def limit() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))

    failed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, preexec_fn=limit)
    assert failed.returncode == 1
    assert "run the same command again: it continues where it was" in failed.stderr
    assert os.listdir(tmp_path / "data/tokenizer") == ["vocab.json"]
    (tmp_path / "data/tokenizer/merges.txt.part7").write_text("left by a killed process")
    assert run(source, tmp_path / "data/x", tokenizer=str(tokenizer)).resumed == 1
    assert texts(tmp_path / "data/x") == many(20)


def test_half_of_another_tokenizer_is_refused(tmp_path: Path, gpt2_files: Path, tokenizer_json: Path) -> None:
    source = write_jsonl(tmp_path / "in.jsonl", ["a"])
    beside = tmp_path / "data" / "tokenizer"
    beside.mkdir(parents=True)
    for name, content in (("vocab.json", "{}"), ("other.model", ""), ("tokenizer.json", tokenizer_json.read_text())):
        (beside / name).write_text(content)
        with pytest.raises(UserError, match="has another tokenizer"):
            run(source, tmp_path / "data" / "x", tokenizer=str(gpt2_files))
        (beside / name).unlink()
    run(source, tmp_path / "data" / "x", tokenizer=str(gpt2_files))
