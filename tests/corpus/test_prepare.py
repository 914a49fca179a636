"""`gptctl data prepare`. Oracles: HF tokenizers on the texts, numpy's own readers, Megatron's index format as documented,
and the uninterrupted run for an interrupted one."""

from __future__ import annotations

import gzip
import json
import os
import random
import resource
import signal
import struct
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import tokenizers
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.conftest import ROOT
from tests.corpus.conftest import CHINESE, ENGLISH, write_jsonl
from trainer.corpus import blocks, encoding
from trainer.corpus.inspection import open_data, tokenizer_for, verify
from trainer.corpus.metadata import metadata_at
from trainer.corpus.prepare import Prepared, Request, prepare
from trainer.corpus.token_files import open_corpus
from trainer.errors import UserError

TEXTS = [ENGLISH, CHINESE, "👩‍👩‍👧‍👦 x", "a\u2028b\r\nc", '"\\', " \n", "z" * 5000]
END = 256


def run(inputs: Path | list[Path], output: Path, **options: Any) -> Prepared:
    paths = inputs if isinstance(inputs, list) else [inputs]
    return prepare(Request(tuple(map(str, paths)), str(output), **options))


def documents(prefix: Path) -> list[list[int]]:
    corpus = open_corpus(str(prefix))
    return [corpus.read(number, 0, 1 << 40).tolist() for number in range(len(corpus.lengths))]


def texts(prefix: Path) -> list[str]:
    data = open_data(str(prefix))
    tokenizer = tokenizer_for(data, None)
    return [data.decoded(number, tokenizer) for number in range(len(data.corpus.lengths))]


def many(count: int, seed: int = 0) -> list[str]:
    words = [*(ENGLISH + CHINESE).split(), "数据", "naïve", "😀"]
    choose = random.Random(seed)
    return [" ".join(choose.choices(words, k=choose.randint(1, 60))) for _ in range(count)]


def write_all_formats(folder: Path) -> dict[str, Path]:
    """The same documents in every input format."""
    lines = "".join(json.dumps({"id": 1, "text": text}, ensure_ascii=False) + "\n" for text in TEXTS).encode()
    (folder / "a.jsonl").write_bytes(lines)
    (folder / "crlf.jsonl").write_bytes(lines.replace(b"\n", b"\r\n\r\n"))
    with gzip.open(folder / "b.jsonl.gz", "wb") as stream:
        stream.write(lines)
    half = len(lines) // 2  # two frames, as a parallel compressor writes them
    frames = [zstandard.ZstdCompressor().compress(part) for part in (lines[:half], lines[half:])]
    (folder / "c.jsonl.zst").write_bytes(b"".join(frames))
    table = pyarrow.table({"id": list(range(len(TEXTS))), "text": TEXTS})
    pyarrow.parquet.write_table(table, folder / "d.parquet", row_group_size=2)
    (folder / "files").mkdir()
    for number, text in enumerate(TEXTS):
        (folder / "files" / f"{number}.txt").write_bytes(text.encode())
    return {
        name: folder / name for name in ("a.jsonl", "crlf.jsonl", "b.jsonl.gz", "c.jsonl.zst", "d.parquet", "files")
    }


def test_every_input_format_gives_the_same_tokens(tmp_path: Path) -> None:
    """By hand: the bytes of each text, and 256."""
    expected = [[*text.encode(), END] for text in TEXTS]
    for name, path in write_all_formats(tmp_path).items():
        done = run(path, tmp_path / "out" / name)
        assert documents(tmp_path / "out" / name) == expected, name
        assert texts(tmp_path / "out" / name) == TEXTS
        assert done.counts.documents == len(TEXTS)
        assert done.counts.tokens == sum(map(len, expected))
        assert done.counts.text_bytes == sum(len(text.encode()) for text in TEXTS)


def test_folders_and_patterns(tmp_path: Path) -> None:
    for name in ("b/2.txt", "b/1.txt", "a/3.txt", "a/.hidden.txt", "a/picture.png"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name)
    run(tmp_path, tmp_path / "x" / "folder")
    assert texts(tmp_path / "x" / "folder") == ["a/3.txt", "b/1.txt", "b/2.txt"]
    run([tmp_path / "b" / "*.txt", tmp_path / "b" / "1.txt"], tmp_path / "x" / "pattern")
    assert texts(tmp_path / "x" / "pattern") == ["b/1.txt", "b/2.txt"]
    run(tmp_path / "a", tmp_path / "x" / "all", input_format="text")
    assert texts(tmp_path / "x" / "all") == ["a/3.txt", "a/picture.png"]
    with pytest.raises(UserError, match="no input at"):
        run(tmp_path / "none", tmp_path / "x" / "none")


def test_what_a_document_of_a_text_file_is(tmp_path: Path) -> None:
    file = tmp_path / "in.txt"
    file.write_bytes(b"\n\none\ntwo\n\n\n \nthree\r\n\r\nfour")
    expected = {
        "file": ["\n\none\ntwo\n\n\n \nthree\r\n\r\nfour"],
        "line": ["one", "two", " ", "three", "four"],
        "paragraph": ["one\ntwo", "three", "four"],
    }
    for documents_are, found in expected.items():
        done = run(file, tmp_path / documents_are, documents=documents_are)
        assert texts(tmp_path / documents_are) == found
        assert done.counts.empty == (5 if documents_are == "line" else 0)


@pytest.mark.parametrize("workers", [None, 2])
def test_the_ids_are_those_of_the_library(tmp_path: Path, tokenizer_json: Path, workers: int | None) -> None:
    library = tokenizers.Tokenizer.from_file(str(tokenizer_json))
    source = many(300)
    run(write_jsonl(tmp_path / "in.jsonl", source), tmp_path / "x", tokenizer=str(tokenizer_json), workers=workers)
    end = library.token_to_id("<|endoftext|>")
    assert documents(tmp_path / "x") == [[*each.ids, end] for each in library.encode_batch(source)]


def test_numpy_reads_the_files_of_the_seeds(tmp_path: Path) -> None:
    source = write_jsonl(tmp_path / "in.jsonl", ["ab", "c"])
    run(source, tmp_path / "pair")
    run(source, tmp_path / "single", output_format="npz")
    ids = [97, 98, END, 99, END]
    pair = np.load(tmp_path / "pair_idx.npz", allow_pickle=False)
    assert np.load(tmp_path / "pair_ids.npy", allow_pickle=False).tolist() == ids
    assert (pair["lens"].tolist(), pair["docs"].tolist()) == ([3, 2], [0, 1, 2])
    single = np.load(tmp_path / "single_ids.npz", allow_pickle=False)
    assert (single["ids"].tolist(), single["lens"].tolist()) == (ids, [3, 2])
    assert single["ids"].dtype == np.uint16


def test_megatron_files_are_as_documented(tmp_path: Path) -> None:
    """Byte by byte: header, version 1, dtype 8 (uint16), 2 sequences, 3 entries of documents, lengths, offsets, documents."""
    run(write_jsonl(tmp_path / "in.jsonl", ["ab", "c"]), tmp_path / "x", output_format="megatron")
    header = b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, 8, 2, 3)
    expected = header + struct.pack("<2i", 3, 2) + struct.pack("<2q", 0, 6) + struct.pack("<3q", 0, 1, 2)
    assert (tmp_path / "x.idx").read_bytes() == expected
    assert (tmp_path / "x.bin").read_bytes() == struct.pack("<5H", 97, 98, END, 99, END)


def test_a_large_vocabulary_needs_four_bytes(tmp_path: Path) -> None:
    """A vocabulary of 70,000 words, the last of which is used: code 4 (int32) in Megatron's index."""
    words = {f"w{number}": number for number in range(69_999)} | {"<eos>": 69_999}
    model = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="w0"))
    model.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    model.save(str(tmp_path / "words.json"))
    source = write_jsonl(tmp_path / "in.jsonl", ["w1 w69998"])
    for format in ("npy", "npz", "megatron"):
        done = run(source, tmp_path / format / "x", tokenizer=str(tmp_path / "words.json"), output_format=format)
        assert done.dtype == "int32"
        assert documents(tmp_path / format / "x") == [[1, 69998, 69999]]
    assert (tmp_path / "megatron" / "x.idx").read_bytes()[17] == 4


def test_an_uint16_is_enough_for_65536_tokens_and_no_more() -> None:
    assert [encoding.typecode_of(size) for size in (65536, 65537)] == ["H", "i"]


def test_the_end_of_a_document(tmp_path: Path, piece_model: Path) -> None:
    source = write_jsonl(tmp_path / "in.jsonl", ["ab"])
    run(source, tmp_path / "without", append_eos=False)
    assert documents(tmp_path / "without") == [[97, 98]]
    assert metadata_at(tmp_path / "without")[0].eos_id is None
    run(source, tmp_path / "p" / "chosen", tokenizer=str(piece_model), eos="a")
    assert documents(tmp_path / "p" / "chosen")[0][-1] == open_tokenizer_id(piece_model, "a")


def open_tokenizer_id(model: Path, piece: str) -> int:
    import sentencepiece

    return int(sentencepiece.SentencePieceProcessor(model_file=str(model)).piece_to_id(piece))


def test_a_tokenizer_without_an_end_token_is_refused(tmp_path: Path) -> None:
    model = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0}, unk_token="a"))
    model.save(str(tmp_path / "t.json"))
    source = write_jsonl(tmp_path / "in.jsonl", ["a"])
    with pytest.raises(UserError, match="has no end token") as caught:
        run(source, tmp_path / "x", tokenizer=str(tmp_path / "t.json"))
    assert "--no-eos" in caught.value.hint
    run(source, tmp_path / "x", tokenizer=str(tmp_path / "t.json"), append_eos=False)


@pytest.mark.parametrize("form", ["jsonl", "line", "file"])
def test_exact_copies_are_left_out(tmp_path: Path, form: str) -> None:
    source = ["one", "two", "one", "ONE", "two ", "two"]
    if form == "file":
        (tmp_path / "in").mkdir()
        for number, text in enumerate(source):
            (tmp_path / "in" / f"{number}.txt").write_text(text)
        inputs = tmp_path / "in"
    elif form == "line":
        inputs = tmp_path / "in.txt"
        inputs.write_text("\n".join(source))
    else:
        inputs = write_jsonl(tmp_path / "in.jsonl", source)
    options: dict[str, Any] = {} if form == "jsonl" else {"documents": form}
    done = run(inputs, tmp_path / "x", dedupe=True, **options)
    assert texts(tmp_path / "x") == ["one", "two", "ONE", "two "]
    assert (done.counts.duplicates, done.counts.text_bytes) == (2, 13)
    assert run(inputs, tmp_path / "all", **options).counts.documents == 6


def test_long_copies_are_left_out(tmp_path: Path, monkeypatch) -> None:
    """Documents that are larger than a block are known to be copies only at their end."""
    monkeypatch.setattr(blocks, "BLOCK", 1 << 10)
    long = ENGLISH * 100
    (tmp_path / "in").mkdir()
    for name, text in (("a", long), ("b", "short"), ("c", long), ("d", long + "!")):
        (tmp_path / "in" / f"{name}.txt").write_text(text)
    done = run(tmp_path / "in", tmp_path / "x", dedupe=True, shard_mb=0.001)
    assert texts(tmp_path / "x") == [long, "short", long + "!"]
    assert done.counts.tokens == 2 * len(long.encode()) + 1 + 5 + 3


def test_empty_documents_are_counted_and_left_out(tmp_path: Path) -> None:
    done = run(write_jsonl(tmp_path / "in.jsonl", ["", "a", "", ""]), tmp_path / "x")
    assert (done.counts.empty, done.counts.documents) == (3, 1)
    (tmp_path / "empty.txt").write_text("")
    with pytest.raises(UserError, match=r"no documents found \(1 empty\)$"):
        run(tmp_path / "empty.txt", tmp_path / "y")
    assert not (tmp_path / "y.shards").exists()


BROKEN = b"good \xff\xfe bad\ngood\ncut \xe4\xbd\n"


@pytest.mark.parametrize("form", ["file", "line", "paragraph"])
def test_invalid_utf8_is_counted_and_replaced_or_refused(tmp_path: Path, form: str) -> None:
    """Oracle: Python's own decoder with errors=replace."""
    (tmp_path / "in.txt").write_bytes(BROKEN)
    done = run(tmp_path / "in.txt", tmp_path / "x", documents=form)
    assert "".join(texts(tmp_path / "x")).replace("\n", "") == BROKEN.decode(errors="replace").replace("\n", "")
    assert done.counts.replaced == 3
    with pytest.raises(UserError, match=r"in\.txt, line 1: invalid UTF-8: byte 0xff"):
        run(tmp_path / "in.txt", tmp_path / "y", documents=form, invalid_utf8="refuse")


def test_invalid_utf8_in_json(tmp_path: Path) -> None:
    (tmp_path / "in.jsonl").write_bytes(b'{"text": "ok"}\n{"text": "a\xffb"}\n{"text": "c\\ud800d \\ud83d\\ude00"}\n')
    done = run(tmp_path / "in.jsonl", tmp_path / "x")
    assert texts(tmp_path / "x") == ["ok", "a\ufffdb", "c\ufffdd 😀"]
    assert done.counts.replaced == 2
    with pytest.raises(UserError, match="line 2: invalid UTF-8"):
        run(tmp_path / "in.jsonl", tmp_path / "y", invalid_utf8="refuse")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "not JSON"),
        ("[1]", "not a JSON object"),
        ('{"content": "x"}', "the field 'text' is missing; it has 'content'"),
        ('{"text": 7}', "the field 'text' is not a text"),
        ("[" * 100_000, "not JSON: nested too deeply"),
        ("1" * 5000, "not JSON"),
    ],
)
def test_invalid_lines_are_refused_or_skipped(tmp_path: Path, line: str, message: str) -> None:
    (tmp_path / "in.jsonl").write_text(f'{{"text": "a"}}\n\n{line}\n{{"text": "b"}}\n')
    with pytest.raises(UserError) as caught:
        run(tmp_path / "in.jsonl", tmp_path / "x")
    assert caught.value.message.startswith(f"{tmp_path}/in.jsonl, line 3: {message}")
    assert "--invalid-lines skip" in caught.value.hint
    done = run(tmp_path / "in.jsonl", tmp_path / "x", invalid_lines="skip", overwrite=True)
    assert (texts(tmp_path / "x"), done.counts.skipped) == (["a", "b"], 1)


def test_the_line_of_a_mistake_is_right_in_any_block(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(blocks, "BLOCK", 1 << 9)
    lines = [json.dumps({"text": text}) for text in many(50)]
    (tmp_path / "in.jsonl").write_text("\n".join([*lines, "oops", *lines]))
    with pytest.raises(UserError, match=r"in\.jsonl, line 51: not JSON"):
        run(tmp_path / "in.jsonl", tmp_path / "x")


def test_a_json_line_that_is_too_long(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(blocks, "BLOCK", 1 << 10)
    monkeypatch.setattr(blocks, "LONGEST_LINE", 1 << 12)
    source = write_jsonl(tmp_path / "in.jsonl", ["a", "b" * 3000, "c" * 50_000, "d"])
    with pytest.raises(UserError, match="line 3: the line is longer than"):
        run(source, tmp_path / "x")
    done = run(source, tmp_path / "x", invalid_lines="skip", overwrite=True)
    assert texts(tmp_path / "x") == ["a", "b" * 3000, "d"]
    assert done.counts.skipped == 1


@pytest.mark.parametrize("form", ["file", "line", "paragraph"])
@pytest.mark.parametrize("kind", ["bytes", "tokenizer_json", "piece_model"])
def test_documents_that_are_larger_than_a_block(tmp_path: Path, request, monkeypatch, form: str, kind: str) -> None:
    """Oracle: the library on the whole text. It was cut at spaces, where these tokenizers end a token anyway."""
    monkeypatch.setattr(blocks, "BLOCK", 1 << 10)
    monkeypatch.setattr(blocks, "LONGEST_TEXT", 1 << 11)
    monkeypatch.setattr(encoding, "PART", 300)
    tokenizer = kind if kind == "bytes" else str(request.getfixturevalue(kind))
    long, short = " ".join(many(150)), "short"
    separator = {"file": "\n\n", "line": "\n", "paragraph": "\n\n"}[form]
    (tmp_path / "in.txt").write_text(separator.join([short, long, short, long + "!"]), encoding="utf-8")
    run(tmp_path / "in.txt", tmp_path / "x", documents=form, tokenizer=tokenizer, shard_mb=0.005, append_eos=False)
    whole = (tmp_path / "in.txt").read_text()
    expected = [whole] if form == "file" else [short, long, short, long + "!"]
    assert texts(tmp_path / "x") == expected
    from trainer.corpus.tokenizer import open_tokenizer

    assert documents(tmp_path / "x") == open_tokenizer(tokenizer).encode_batch(expected)


def test_text_without_a_space_is_cut_between_characters(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(blocks, "BLOCK", 1 << 10)
    monkeypatch.setattr(encoding, "PART", 100)
    text = CHINESE.replace(" ", "") * 300
    (tmp_path / "in.txt").write_text(text, encoding="utf-8")
    done = run(tmp_path / "in.txt", tmp_path / "x", invalid_utf8="refuse")
    assert texts(tmp_path / "x") == [text]
    assert done.counts.replaced == 0


@pytest.mark.parametrize("kind", ["bytes", "tokenizer_json"])
def test_any_documents_survive_the_whole_way(tmp_path_factory, request, kind: str) -> None:
    """Over all of Unicode, with blocks and parts so small that most documents are cut. The texts are the oracle."""
    tokenizer = kind if kind == "bytes" else str(request.getfixturevalue(kind))

    @settings(deadline=None, max_examples=20)
    @given(st.lists(st.text(min_size=1, max_size=300), min_size=1, max_size=8))
    def check(source: list[str]) -> None:
        folder = tmp_path_factory.mktemp("way")
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(blocks, "BLOCK", 50)
            patch.setattr(encoding, "PART", 20)
            run(write_jsonl(folder / "in.jsonl", source), folder / "json" / "x", tokenizer=tokenizer, shard_mb=0.0002)
            for number, text in enumerate(source):
                (folder / f"{number}.txt").write_bytes(text.encode())
            files = [folder / f"{number}.txt" for number in range(len(source))]
            run(files, folder / "text" / "x", tokenizer=tokenizer, shard_mb=0.0002)
        assert texts(folder / "json" / "x") == texts(folder / "text" / "x") == source

    check()


OPTIONS: list[dict[str, Any]] = [
    {},
    {"dedupe": True},
    {"merge": False},
    {"output_format": "megatron", "documents": "line"},
    {"output_format": "npz", "documents": "paragraph"},
]


def mixed(folder: Path) -> Path:
    """Files of all formats, with some copies, and one document that spans shards."""
    folder.mkdir()
    source = many(200)
    write_jsonl(folder / "a.jsonl", source[:100])
    with gzip.open(folder / "b.jsonl.gz", "wb") as stream:
        stream.write((folder / "a.jsonl").read_bytes())
    pyarrow.parquet.write_table(pyarrow.table({"text": source[50:200]}), folder / "c.parquet", row_group_size=140)
    (folder / "d.txt").write_text("\n\n".join(source), encoding="utf-8")
    return folder


def output_of(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in sorted(folder.glob("x*")) if file.is_file()}


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_an_interrupted_run_continues(tmp_path: Path, monkeypatch, options: dict[str, Any]) -> None:
    """Oracle: the run that was not interrupted, byte by byte. Every shard fails once."""
    monkeypatch.setattr(blocks, "BLOCK", 1 << 11)
    source = mixed(tmp_path / "in")
    run(source, tmp_path / "whole" / "x", shard_mb=0.01, **options)
    failures = 0

    class Killed(Exception):
        pass

    def interrupt(progress: Any) -> None:
        if progress.documents > 40 * failures + 5 and random.random() < 0.2:
            raise Killed

    random.seed(3)
    while True:
        try:
            request = Request((str(source),), str(tmp_path / "parts" / "x"), shard_mb=0.01, **options)
            done = prepare(request, interrupt)
            break
        except Killed:
            failures += 1
    assert failures > 3
    assert done.resumed > 3
    assert output_of(tmp_path / "parts") == output_of(tmp_path / "whole")
    assert not (tmp_path / "parts" / "x.shards").exists()


def test_the_number_of_workers_changes_nothing(tmp_path: Path, monkeypatch) -> None:
    source = mixed(tmp_path / "in")
    for workers in (None, 1, 3):
        run(source, tmp_path / str(workers) / "x", workers=workers, shard_mb=0.05)
    expected = output_of(tmp_path / "None")
    assert output_of(tmp_path / "1") == output_of(tmp_path / "3") == expected


COMMAND = [sys.executable, "-m", "gptctl", "data", "prepare"]


def test_a_killed_command_continues_and_leaves_no_process(tmp_path: Path) -> None:
    """SIGKILL of the real command, with real workers. Oracle: a run that was not killed."""
    source = write_jsonl(tmp_path / "in.jsonl", many(40_000))
    command = [*COMMAND, str(source), "--shard-mb", "0.2", "--workers", "2", "--output"]
    killed = subprocess.Popen([*command, str(tmp_path / "killed" / "x")], cwd=ROOT, stderr=subprocess.DEVNULL)
    shards = tmp_path / "killed" / "x.shards"
    deadline = time.monotonic() + 60
    while len([*shards.glob("*.json")]) < 5:  # the settings, and some complete shards
        assert killed.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.01)
    workers = Path(f"/proc/{killed.pid}/task/{killed.pid}/children").read_text().split()
    assert len(workers) == 2
    killed.kill()
    killed.wait()
    while any(is_running(pid) for pid in workers):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    done = subprocess.run(
        [*command, str(tmp_path / "killed" / "x"), "--json"], cwd=ROOT, capture_output=True, check=True
    )
    assert json.loads(done.stdout)["resumed_shards"] >= 3
    subprocess.run([*command, str(tmp_path / "whole" / "x")], cwd=ROOT, capture_output=True, check=True)
    assert output_of(tmp_path / "killed") == output_of(tmp_path / "whole")


def is_running(pid: str) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().split()[2] != "Z"
    except OSError:
        return False


def test_a_worker_that_dies_is_a_clear_error(tmp_path: Path) -> None:
    source = write_jsonl(tmp_path / "in.jsonl", many(30_000))
    command = [*COMMAND, str(source), "--output", str(tmp_path / "x"), "--workers", "1", "--shard-mb", "0.2"]
    running = subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 60
    while len([*(tmp_path / "x.shards").glob("*.json")]) < 2:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    worker = Path(f"/proc/{running.pid}/task/{running.pid}/children").read_text().split()[0]
    os.kill(int(worker), signal.SIGKILL)
    _, errors = running.communicate(timeout=60)
    assert running.returncode == 1
    assert "a worker process ended unexpectedly (signal 9)" in errors
    assert "Traceback" not in errors


def test_ctrl_c_says_how_to_continue(tmp_path: Path) -> None:
    source = write_jsonl(tmp_path / "in.jsonl", many(40_000))
    command = [*COMMAND, str(source), "--output", str(tmp_path / "x"), "--shard-mb", "0.2"]
    running = subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 60
    while len([*(tmp_path / "x.shards").glob("*.json")]) < 2:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    running.send_signal(signal.SIGINT)
    _, errors = running.communicate(timeout=60)
    assert running.returncode == 130
    assert "run the same command again to continue" in errors
    assert "Traceback" not in errors


def test_only_the_same_command_continues(tmp_path: Path, monkeypatch) -> None:
    source = write_jsonl(tmp_path / "in.jsonl", many(100))

    def stop(progress: Any) -> None:
        raise KeyboardInterrupt

    def attempt(**options: Any) -> None:
        with pytest.raises(KeyboardInterrupt):
            prepare(Request((str(source),), str(tmp_path / "x"), **options), stop)

    attempt()
    shard = tmp_path / "x.shards" / "shard-00000.json"
    assert not shard.exists()
    monkeypatch.setattr(blocks, "BLOCK", 1 << 11)
    attempt(documents="paragraph", shard_mb=0.001)  # nothing was complete: nothing to continue
    with pytest.raises(KeyboardInterrupt):
        prepare(
            Request((str(source),), str(tmp_path / "x"), shard_mb=0.001), lambda p: stop(p) if shard.exists() else None
        )
    with pytest.raises(UserError, match=r"was begun with other options: --documents file, now line$") as caught:
        run(source, tmp_path / "x", documents="line", shard_mb=0.001)
    assert "--overwrite" in caught.value.hint
    source.write_text(source.read_text() + '{"text": "new"}\n')
    with pytest.raises(UserError, match=r"other options: INPUT: .*in\.jsonl is changed$"):
        run(source, tmp_path / "x", shard_mb=0.001)
    done = run(source, tmp_path / "x", overwrite=True)
    assert (done.counts.documents, done.resumed) == (101, 0)
    with pytest.raises(UserError, match="is already prepared"):
        run(source, tmp_path / "x")


def test_two_commands_do_not_share_shards(tmp_path: Path) -> None:
    from trainer.corpus.shards import ShardFolder

    with ShardFolder(tmp_path / "x").locked(), pytest.raises(UserError, match="another command is writing"):
        run(write_jsonl(tmp_path / "in.jsonl", ["a"]), tmp_path / "x")


def test_a_damaged_shard_is_made_again_or_named(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(blocks, "BLOCK", 1 << 11)
    source = write_jsonl(tmp_path / "in.jsonl", many(200))
    run(source, tmp_path / "whole" / "x", shard_mb=0.005)

    def stop(progress: Any) -> None:
        if progress.documents > 150:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        prepare(Request((str(source),), str(tmp_path / "x"), shard_mb=0.005), stop)
    shards = sorted((tmp_path / "x.shards").glob("*.ids"))
    assert len(shards) > 4
    shards[2].write_bytes(shards[2].read_bytes()[:-2])  # truncated: found by its size
    done = run(source, tmp_path / "x", shard_mb=0.005)
    assert done.resumed == 2
    assert (tmp_path / "x_ids.npy").read_bytes() == (tmp_path / "whole" / "x_ids.npy").read_bytes()
    with pytest.raises(KeyboardInterrupt):
        prepare(Request((str(source),), str(tmp_path / "y"), shard_mb=0.005), stop)
    flipped = sorted((tmp_path / "y.shards").glob("*.ids"))[1]
    data = bytearray(flipped.read_bytes())
    data[7] ^= 1
    flipped.write_bytes(data)
    with pytest.raises(UserError, match=f"{flipped.name} is damaged"):
        run(source, tmp_path / "y", shard_mb=0.005)
    flipped.unlink()  # as the hint says
    run(source, tmp_path / "y", shard_mb=0.005)
    assert (tmp_path / "y_ids.npy").read_bytes() == (tmp_path / "whole" / "x_ids.npy").read_bytes()


def test_a_full_disk_is_a_clear_error_and_costs_one_shard(tmp_path: Path) -> None:
    """A limit on the size of files stands for a full disk: the same kind of error, without a mount."""
    source = write_jsonl(tmp_path / "in.jsonl", many(20_000))
    command = [*COMMAND, str(source), "--output", str(tmp_path / "x"), "--shard-mb", "0.1", "--json"]

    def limit() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (3_000_000, 3_000_000))

    failed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, preexec_fn=limit)
    answer = json.loads(failed.stdout)
    assert failed.returncode == 1
    assert answer["error"] == f"cannot write to {tmp_path}: File too large"
    assert "free some space" in answer["hint"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert json.loads(done.stdout)["resumed_shards"] >= 1
    assert texts(tmp_path / "x") == many(20_000)


def test_shards_as_output(tmp_path: Path, monkeypatch) -> None:
    """Without merging, the prefix and the folder still stand for all documents, in their order."""
    monkeypatch.setattr(blocks, "BLOCK", 1 << 11)
    source = many(200)
    done = run(write_jsonl(tmp_path / "in.jsonl", source), tmp_path / "x" / "y", shard_mb=0.01, merge=False)
    assert len(done.files) > 8
    assert texts(tmp_path / "x" / "y") == texts(tmp_path / "x") == source
    assert verify(str(tmp_path / "x"))[1] == []
    assert len(documents(tmp_path / "x" / "y-00001")) < 200


def test_one_tokenizer_per_folder(tmp_path: Path, tokenizer_json: Path, gpt2_files: Path) -> None:
    source = write_jsonl(tmp_path / "in.jsonl", ["a"])
    run(source, tmp_path / "data" / "x", tokenizer=str(tokenizer_json))
    run(source, tmp_path / "data" / "y", tokenizer=str(tokenizer_json.parent))
    assert [file.name for file in (tmp_path / "data" / "tokenizer").iterdir()] == ["tokenizer.json"]
    with pytest.raises(UserError, match="has another tokenizer"):
        run(source, tmp_path / "data" / "z", tokenizer=str(gpt2_files))


def test_truncated_inputs_are_refused(tmp_path: Path) -> None:
    formats = write_all_formats(tmp_path)
    for name in ("b.jsonl.gz", "c.jsonl.zst", "d.parquet"):
        data = formats[name].read_bytes()
        formats[name].write_bytes(data[: len(data) - 9])
        with pytest.raises(UserError, match=f"cannot read {formats[name]}"):
            run(formats[name], tmp_path / "out")
    pyarrow.parquet.write_table(pyarrow.table({"body": ["x"], "n": [1]}), tmp_path / "e.parquet")
    with pytest.raises(UserError, match="has no column text"):
        run(tmp_path / "e.parquet", tmp_path / "out")
    with pytest.raises(UserError, match="column n has type int64"):
        run(tmp_path / "e.parquet", tmp_path / "out", field="n")
    os.mkfifo(tmp_path / "pipe.jsonl")
    with pytest.raises(UserError, match="is not a regular file"):
        run(tmp_path / "pipe.jsonl", tmp_path / "out")


def test_the_histogram_by_hand(tmp_path: Path) -> None:
    """Lengths with the end token: 2, 3, 4, 9."""
    done = run(write_jsonl(tmp_path / "in.jsonl", ["a", "bb", "ccc", "d" * 8]), tmp_path / "x")
    assert done.counts.histogram == {"2": 2, "3": 1, "4": 1}
    assert open_data(str(tmp_path / "x")).facts()["histogram"] == {"2": 2, "3": 1, "4": 1}
    assert (done.counts.longest, done.counts.bytes_per_token) == (9, 14 / 18)


def peak_memory(command: list[str]) -> int:
    """The largest sum of the resident memory of a command and its children, in kilobytes."""
    running, most = subprocess.Popen(command, cwd=ROOT, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL), 0
    while running.poll() is None:
        total = 0
        try:
            children = Path(f"/proc/{running.pid}/task/{running.pid}/children").read_text().split()
            for pid in [str(running.pid), *children]:
                status = Path(f"/proc/{pid}/status").read_text()
                total += int(next(line for line in status.splitlines() if line.startswith("VmRSS")).split()[1])
        except (OSError, StopIteration):
            continue
        most = max(most, total)
        time.sleep(0.05)
    assert running.returncode == 0
    return most


@pytest.mark.long
def test_memory_does_not_grow_with_the_text(tmp_path: Path, tokenizer_json: Path) -> None:
    """At most 2 GB, and equal within 10 % for 0.2 and 2 GB."""
    lines = "".join(json.dumps({"text": text}) + "\n" for text in many(20_000)).encode()
    peaks = []
    for size in (2e8, 2e9):
        with open(tmp_path / "in.jsonl", "wb") as stream:
            for _ in range(int(size / len(lines))):
                stream.write(lines)
        command = [*COMMAND, str(tmp_path / "in.jsonl"), "--output", str(tmp_path / "x"), "--overwrite"]
        peaks.append(peak_memory([*command, "--tokenizer", str(tokenizer_json)]))
    print(f"peak memory: {peaks[0] / 1e3:.0f} MB for 0.2 GB, {peaks[1] / 1e3:.0f} MB for 2 GB")
    assert max(peaks) < 2e6
    assert peaks[1] < 1.1 * peaks[0]


@pytest.mark.long
@pytest.mark.parametrize("name", ["in.txt", "in.txt.zst"])
def test_a_line_of_a_gigabyte(tmp_path: Path, tokenizer_json: Path, name: str) -> None:
    """As text it is one document; as JSON it is refused with its line. Memory stays below 2 GB, also if 0.1 MB become it."""
    line = (ENGLISH.strip() + " ").encode() * 1000
    opened = zstandard.open if name.endswith(".zst") else open
    with opened(tmp_path / name, "wb") as stream:
        for _ in range(int(1e9 / len(line))):
            stream.write(line)
    command = [*COMMAND, str(tmp_path / name), "--documents", "line", "--workers", "2", "--output", str(tmp_path / "x")]
    assert peak_memory([*command, "--tokenizer", str(tokenizer_json)]) < 2e6
    assert len(open_corpus(str(tmp_path / "x")).lengths) == 1
    with pytest.raises(UserError, match="line 1: the line is longer than 64 MiB"):
        run(tmp_path / name, tmp_path / "y", input_format="jsonl")
