"""What `prepare` may delete, and what happens to it at awkward moments. Oracles: the bytes of the files that are not its
own, and the run that was not disturbed."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import ROOT
from tests.corpus.conftest import write_jsonl
from tests.corpus.test_prepare import many, output_of, run, texts
from trainer.corpus import blocks
from trainer.corpus.inspection import verify
from trainer.corpus.prepare import Request, prepare
from trainer.corpus.progress import Progress
from trainer.errors import UserError


def contents(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in sorted(folder.iterdir()) if file.is_file()}


def interrupted(source: Path, output: Path, **options: Any) -> None:
    """Leave the complete shards of an unfinished call."""

    def stop(progress: Progress) -> None:
        if (output.with_name(f"{output.name}.shards") / "shard-00000.json").exists():
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        prepare(Request((str(source),), str(output), shard_mb=0.001, **options), stop)


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(blocks, "BLOCK", 1 << 11)
    return write_jsonl(tmp_path / "in.jsonl", many(60))


FOREIGN = {
    "inputs": {"a.jsonl": '{"text": "weeks of work"}'},
    "settings of another program": {"settings.json": '{"editor.tabSize": 4}'},
    "shards without settings": {"shard-00000.ids": "x"},
    "one foreign file": {"settings.json": '{"tokenizer": {}, "list_of_input_files": []}', "notes.txt": "x"},
    "damaged settings": {"settings.json": "{", "shard-00000.ids": "x"},
}


@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize("case", [*FOREIGN, "link", "file", "folder inside"])
def test_files_of_others_are_not_deleted(tmp_path: Path, source: Path, case: str, overwrite: bool) -> None:
    shards, mine = tmp_path / "x.shards", tmp_path / "mine"
    mine.mkdir()
    (mine / "a.txt").write_text("mine")
    if case == "link":
        shards.symlink_to(mine)
    elif case == "file":
        shards.write_text("mine")
    else:
        shards.mkdir()
        for name, text in FOREIGN.get(case, {}).items():
            (shards / name).write_text(text)
        if case == "folder inside":
            (shards / "shard-00000.ids").mkdir()
    before = contents(tmp_path), contents(mine), contents(shards) if shards.is_dir() else {}
    with pytest.raises(UserError, match=r"x\.shards (is|contains)") as caught:
        run(source, tmp_path / "x", overwrite=overwrite)
    assert "use another --output" in caught.value.hint
    assert (contents(tmp_path), contents(mine), contents(shards) if shards.is_dir() else {}) == before


def test_an_empty_folder_of_a_call_that_was_killed_at_once(tmp_path: Path, source: Path) -> None:
    (tmp_path / "x.shards").mkdir()
    for name in ("lock", "settings.json.part7"):
        (tmp_path / "x.shards" / name).touch()
    run(source, tmp_path / "x")
    assert not (tmp_path / "x.shards").exists()


def test_every_option_that_differs_is_named(tmp_path: Path, source: Path, tokenizer_json: Path) -> None:
    interrupted(source, tmp_path / "x", documents="line")
    (tmp_path / "new.jsonl").write_text("")
    options: dict[str, Any] = {"append_eos": False, "merge": False, "dedupe": True, "output_format": "npz"}
    with pytest.raises(UserError) as caught:
        run([source, tmp_path / "new.jsonl"], tmp_path / "x", tokenizer=str(tokenizer_json), **options)
    assert caught.value.message.partition(": ")[2].split("; ") == [
        "--tokenizer bytes of 257 tokens, now bpe of 397 tokens",
        "--no-eos not given, now given",
        "--documents line, now file",
        "--output-format npy, now npz",
        "--dedupe not given, now given",
        "--no-merge not given, now given",
        "--shard-mb 0.001, now 128",
        f"INPUT: {tmp_path}/new.jsonl is new",
    ]


def test_an_input_whose_name_is_not_utf8_continues(tmp_path: Path, source: Path) -> None:
    odd = Path(os.fsdecode(os.fsencode(tmp_path) + b"/in\xff.jsonl"))
    odd.write_bytes(source.read_bytes())
    run(odd, tmp_path / "whole" / "x", shard_mb=0.001)
    interrupted(odd, tmp_path / "x")
    assert run(odd, tmp_path / "x", shard_mb=0.001).resumed > 0
    assert output_of(tmp_path / "whole") == output_of(tmp_path)
    interrupted(odd, tmp_path / "y")
    other = odd.rename(os.fsdecode(os.fsencode(tmp_path) + b"/in\xfe.jsonl"))
    with pytest.raises(UserError, match="was begun with other options: INPUT"):
        run(other, tmp_path / "y", shard_mb=0.001)


def test_an_output_whose_name_is_not_utf8_is_refused_at_once(tmp_path: Path, source: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "gptctl",
        "data",
        "prepare",
        str(source),
        "--output",
        os.fsencode(tmp_path) + b"/x\xff",
    ]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 1
    assert "x\\xff' is not UTF-8" in done.stderr
    assert os.listdir(tmp_path) == ["in.jsonl"]


@pytest.mark.parametrize("overwrite", [False, True])
def test_files_of_a_killed_join_are_removed(tmp_path: Path, source: Path, overwrite: bool) -> None:
    """As SIGKILL leaves them, with the number of a thread; those of another prefix stay."""
    interrupted(source, tmp_path / "x")
    for name in (
        "x_ids.npy.part12",
        "x_idx.npz.part12",
        "x_meta.json.part3",
        "y_ids.npy.part12",
        "x-00001_ids.npy.part1",
    ):
        (tmp_path / name).touch()
    run(source, tmp_path / "x", shard_mb=0.001, overwrite=overwrite)
    left = [name for name in sorted(os.listdir(tmp_path)) if ".part" in name]
    assert left == ["x-00001_ids.npy.part1", "y_ids.npy.part12"]


def test_the_old_output_stays_until_the_new_one_is_complete(tmp_path: Path, source: Path) -> None:
    """An interrupted --overwrite changes nothing, and continues with or without that option."""
    run(write_jsonl(tmp_path / "old.jsonl", ["old"]), tmp_path / "x", output_format="npz")
    before = output_of(tmp_path)
    interrupted(source, tmp_path / "x", overwrite=True)
    assert output_of(tmp_path) == before
    assert verify(str(tmp_path / "x"))[1] == []
    assert run(source, tmp_path / "x", shard_mb=0.001).resumed > 0
    assert sorted(output_of(tmp_path)) == ["x_ids.npy", "x_idx.npz", "x_meta.json"]
    assert texts(tmp_path / "x") == many(60)
    with pytest.raises(UserError, match="is already prepared"):
        run(source, tmp_path / "x", shard_mb=0.001)


def test_of_two_tokenizers_in_a_folder_the_second_one_loses(
    tmp_path: Path, source: Path, gpt2_files: Path, tokenizer_json: Path
) -> None:
    """Another prefix is prepared while the first call works; its shards stay, and work elsewhere is not lost."""

    def other(progress: Progress) -> None:
        if not (tmp_path / "data" / "y_meta.json").exists():
            run(source, tmp_path / "data" / "y", tokenizer=str(gpt2_files))

    with pytest.raises(UserError, match="data/tokenizer has another tokenizer"):
        prepare(Request((str(source),), str(tmp_path / "data" / "x"), tokenizer=str(tokenizer_json)), other)
    assert sorted(os.listdir(tmp_path / "data")) == ["tokenizer", "x.shards", "y_ids.npy", "y_idx.npz", "y_meta.json"]
    assert (tmp_path / "data" / "x.shards" / "shard-00000.json").exists()
    assert verify(str(tmp_path / "data"))[1] == []
    assert texts(tmp_path / "data" / "y") == many(60)


def _prepare(source: Path, output: Path, tokenizer: Path, ready: Any, answers: Any) -> None:
    ready.wait()
    try:
        answers.put(run(source, output, tokenizer=str(tokenizer)).prefix.name)
    except UserError as error:
        answers.put(error.message)


def test_two_tokenizers_at_the_same_moment(tmp_path: Path, gpt2_files: Path, tokenizer_json: Path) -> None:
    source = write_jsonl(tmp_path / "in.jsonl", ["a"])
    fork = multiprocessing.get_context("fork")
    for number in range(5):
        folder, ready, answers = tmp_path / str(number), fork.Barrier(2), fork.Queue()
        calls = [("x", gpt2_files), ("y", tokenizer_json)]
        words = [(source, folder / name, files, ready, answers) for name, files in calls]
        processes = [fork.Process(target=_prepare, args=each) for each in words]
        for process in processes:
            process.start()
        found = sorted(answers.get(timeout=60) for _ in processes)
        for process in processes:
            process.join()
        assert found[0] == f"{folder}/tokenizer has another tokenizer"
        assert texts(folder / found[1]) == ["a"]


@pytest.mark.parametrize(
    ("occupied", "message"),
    [
        ("x_ids.npy/", "cannot write to {}/x_ids.npy: Is a directory"),
        ("x.shards/lock>", "{}/x.shards contains lock, which"),
        ("sub", "cannot write to {}/sub/x.shards: Not a directory"),
    ],
)
def test_errors_name_the_file_and_what_to_do(
    tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch, occupied: str, message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    if occupied.endswith("/"):
        Path(occupied).mkdir()
    elif occupied.endswith(">"):
        Path(occupied).parent.mkdir()
        Path(occupied[:-1]).symlink_to("/dev/null")
    else:
        Path(occupied).touch()
    with pytest.raises(UserError, match=message.replace("{}/", "")) as caught:
        run(source, Path("sub/x" if occupied == "sub" else "x"), overwrite=True)
    assert "use another --output" in caught.value.hint
