"""What the trainer and `gptctl data` read. Oracles: Megatron's documented formats and its blending rule, numbers by hand."""

from __future__ import annotations

import json
import os
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.conftest import ROOT
from tests.corpus.conftest import ENGLISH, write_jsonl
from trainer.corpus.inspection import open_data, tokenizer_for, verify
from trainer.corpus.metadata import common_tokenizer, metadata_at, misfit
from trainer.corpus.prepare import Request, prepare
from trainer.corpus.token_files import Corpus, open_corpus
from trainer.data.blend import Interleaving
from trainer.errors import UserError

CODES = {"uint8": 1, "int8": 2, "int16": 3, "int32": 4, "int64": 5, "float64": 6, "float32": 7, "uint16": 8}


def write_megatron(
    prefix: Path, sentences: list[list[int]], documents: list[int], dtype: str = "uint16", modes: bytes = b""
) -> None:
    """As Megatron's IndexedDatasetBuilder writes it. `documents`: sequences before each document, and the total."""
    lengths = [len(sentence) for sentence in sentences]
    ids = np.array([token for sentence in sentences for token in sentence], dtype=dtype)
    places = np.cumsum([0, *lengths])[:-1] * ids.itemsize
    header = struct.pack("<9sQBQQ", b"MMIDIDX\x00\x00", 1, CODES[dtype], len(lengths), len(documents))
    parts = [np.array(lengths, "<i4").tobytes(), places.astype("<i8").tobytes(), np.array(documents, "<i8").tobytes()]
    prefix.with_name(prefix.name + ".bin").write_bytes(ids.tobytes())
    prefix.with_name(prefix.name + ".idx").write_bytes(b"".join([header, *parts, modes]))


def read_all(corpus: Corpus) -> list[list[int]]:
    return [corpus.read(number, 0, 1 << 40).tolist() for number in range(len(corpus.lengths))]


@pytest.mark.parametrize("dtype", [name for name in CODES if not name.startswith("float")])
def test_megatron_data_is_read(tmp_path: Path, dtype: str) -> None:
    """Two documents of three sentences, an empty document, and modes, which are ignored."""
    write_megatron(tmp_path / "x_text_document", [[1, 2], [3], [4, 5, 6]], [0, 2, 2, 3], dtype, b"\0\0\0")
    for name in ("", "x_text_document", "x_text_document.bin", "x_text_document.idx"):
        assert read_all(open_corpus(str(tmp_path / name))) == [[1, 2, 3], [], [4, 5, 6]]


def test_all_formats_of_a_folder_are_one_corpus(tmp_path: Path) -> None:
    write_megatron(tmp_path / "b", [[3]], [0, 1])
    np.savez(tmp_path / "a_ids.npz", ids=np.array([1, 2], np.uint16), lens=np.array([2]))
    np.save(tmp_path / "c_ids.npy", np.array([4], np.int32))
    np.savez(tmp_path / "c_idx.npz", lens=np.array([1]), docs=np.array([0, 1]))
    assert read_all(open_corpus(str(tmp_path))) == [[1, 2], [3], [4]]


def changed(file: Path, at: int, data: bytes) -> None:
    content = bytearray(file.read_bytes())
    content[at : at + len(data)] = data
    file.write_bytes(content)


def damage(folder: Path) -> list[tuple[str, Any]]:
    index, tokens = folder / "x.idx", folder / "x.bin"
    return [
        (r"x\.bin has 10 bytes, but x\.idx describes 12", lambda: tokens.write_bytes(tokens.read_bytes()[:-2])),
        (r"x\.idx has \d+ bytes instead of", lambda: index.write_bytes(index.read_bytes()[:-1])),
        ("is not a Megatron index", lambda: index.write_bytes(index.read_bytes()[:20])),
        ("is not a Megatron index", lambda: changed(index, 0, b"TNTIDX")),
        ("has format version 2", lambda: changed(index, 9, b"\2")),
        ("the tokens are float32", lambda: changed(index, 17, b"\7")),
        (r"an unknown type \(code 99\)", lambda: changed(index, 17, b"\x63")),
        (r"x\.idx has \d+ bytes instead of", lambda: changed(index, 18, struct.pack("<Q", 1 << 60))),
        ("a sequence has a negative length", lambda: changed(index, 34, struct.pack("<i", -1))),
        ("do not follow one another", lambda: changed(index, 34, struct.pack("<i", 2))),
        ("the documents do not match", lambda: changed(index, 34 + 24, struct.pack("<q", 1))),
        ("describes 24|do not follow one another", lambda: changed(index, 17, b"\4")),  # int32 instead of uint16
        (r"x\.bin", tokens.unlink),
    ]


def test_damaged_megatron_data_is_one_clear_message(tmp_path: Path) -> None:
    for number in range(len(damage(tmp_path))):
        folder = tmp_path / str(number)
        folder.mkdir()
        write_megatron(folder / "x", [[1, 2, 3], [4, 5, 6]], [0, 1, 2])
        message, act = damage(folder)[number]
        act()
        with pytest.raises(UserError, match=message) as caught:
            open_corpus(str(folder))
        assert caught.value.hint


def test_a_pipe_in_the_place_of_a_bin_does_not_block(tmp_path: Path) -> None:
    write_megatron(tmp_path / "x", [[1]], [0, 1])
    (tmp_path / "x.bin").unlink()
    os.mkfifo(tmp_path / "x.bin")
    with pytest.raises(UserError, match="is not a regular file"):
        open_corpus(str(tmp_path))


def megatron_blend(weights: list[float], size: int) -> tuple[list[int], list[int]]:
    """Megatron's rule, as in its build_blending_indices: take from the data set with the largest error."""
    total = sum(weights)
    counts, corpora, numbers = [0] * len(weights), [], []
    for sample in range(size):
        errors = [weight / total * max(sample, 1) - count for weight, count in zip(weights, counts)]
        chosen = errors.index(max(errors))
        corpora.append(chosen)
        numbers.append(counts[chosen])
        counts[chosen] += 1
    return corpora, numbers


# Ratios that floats represent exactly, so that Megatron's own arithmetic has no rounding errors.
WEIGHTS = [[1.0], [1, 1], [3, 1], [1, 3], [0.5, 0.25, 0.25], [1, 2, 5], [7, 1, 8], [0.125, 0.375, 0.5], [1, 1, 1, 1]]


@pytest.mark.parametrize("weights", WEIGHTS, ids=str)
def test_blends_have_the_order_of_megatron(weights: list[float]) -> None:
    corpora, numbers = Interleaving(weights).locate(np.arange(200))
    assert (corpora.tolist(), numbers.tolist()) == megatron_blend(weights, 200)


@pytest.mark.parametrize(
    "weights", [[0.3, 0.7], [1 / 3, 2 / 3], [0.123456789, 0.5, 0.376543211], [1e-9, 1], [5, 1, 1]], ids=str
)
def test_a_blend_keeps_its_shares(weights: list[float]) -> None:
    """Each count is within one sample of its share, and samples of a corpus come in their order, none twice."""
    blend, size = Interleaving(weights), 30_000
    corpora, numbers = blend.locate(np.arange(size))
    for corpus, weight in enumerate(weights):
        own = numbers[corpora == corpus]
        assert own.tolist() == list(range(len(own)))
        assert abs(len(own) - weight / sum(weights) * size) <= 2
        assert blend.count(corpus, size) == len(own)


def test_a_blend_ends_where_a_corpus_does() -> None:
    """By hand: 3 to 1 is the order 0 0 1 0 (Megatron's errors: start, .75-1.., ...); sizes 7 and 2."""
    blend = Interleaving([3, 1])
    corpora, numbers = blend.locate(np.arange(50))
    needed = [
        max(numbers[: end + 1][corpora[: end + 1] == 0], default=-1) < 7
        and max(numbers[: end + 1][corpora[: end + 1] == 1], default=-1) < 2
        for end in range(50)
    ]
    assert blend.capacity([7, 2]) == needed.index(False)


def prepared(folder: Path, name: str, texts: list[str], **options: Any) -> Path:
    write_jsonl(folder / f"{name}.jsonl", texts)
    prepare(Request((str(folder / f"{name}.jsonl"),), str(folder / "data" / name), **options))
    return folder / "data" / name


def test_the_metadata_of_a_path(tmp_path: Path, tokenizer_json: Path) -> None:
    first = prepared(tmp_path, "a", ["x"])
    prepared(tmp_path, "b", ["y"], output_format="megatron")
    assert [each.file.name for each in metadata_at(tmp_path / "data")] == ["a_meta.json", "b_meta.json"]
    for name in ("a", "a_ids.npy", "a_idx.npz"):
        assert [each.file.name for each in metadata_at(tmp_path / "data" / name)] == ["a_meta.json"]
    assert [each.file.name for each in metadata_at(tmp_path / "data" / "b.bin")] == ["b_meta.json"]
    metadata = metadata_at(first)[0]
    assert metadata.tokenizer == {
        "kind": "bytes",
        "digest": metadata.tokenizer["digest"],
        "vocab_size": 257,
        "eos_id": 256,
    }
    assert misfit(metadata, 257) is None
    assert "has 257 tokens, but Model.vocab_size is 256" in misfit(metadata, 256)[0]
    other = metadata_at(prepared(tmp_path / "other", "c", ["z"], tokenizer=str(tokenizer_json)))[0]
    with pytest.raises(UserError, match="come from different tokenizers"):
        common_tokenizer([metadata, other])


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"version": 1}', '{"version": 1, "tokenizer": {}, "files": {}}'])
def test_damaged_metadata_is_ignored(tmp_path: Path, content: str) -> None:
    prefix = prepared(tmp_path, "a", ["x"])
    prefix.with_name("a_meta.json").write_text(content)
    assert metadata_at(prefix) == []
    assert read_all(open_corpus(str(prefix))) == [[120, 256]]


@pytest.mark.parametrize("format", ["npy", "npz", "megatron"])
def test_verify_finds_every_changed_byte(tmp_path: Path, format: str) -> None:
    prefix = prepared(tmp_path, "a", [ENGLISH, "two"], output_format=format)
    assert verify(str(prefix))[1] == []
    for name in metadata_at(prefix)[0].files:
        file = prefix.with_name(name)
        data = file.read_bytes()
        changed(file, len(data) // 2, bytes([data[len(data) // 2] ^ 1]))
        assert [problem for problem in verify(str(prefix))[1] if f"{name} is damaged" in problem]
        file.write_bytes(data[:-1])
        assert f"has {len(data) - 1} bytes instead of {len(data)}" in verify(str(prefix))[1][0]
        file.write_bytes(data)


def test_verify_compares_data_and_tokenizer(tmp_path: Path) -> None:
    """Data whose checksums are right, but that another program wrote."""
    prefix = prepared(tmp_path, "a", ["ab", "cd"])
    file = prefix.with_name("a_meta.json")
    meta = json.loads(file.read_text())
    for change, message in (
        ({"tokenizer": {**meta["tokenizer"], "vocab_size": 256}}, "token id 256 is outside the vocabulary of 256"),
        ({"tokenizer": {**meta["tokenizer"], "eos_id": 98}}, "document 0 does not end with token 98"),
        ({"counts": {**meta["counts"], "tokens": 5}}, "5 tokens, but the data has 6"),
        ({"files": {"../x": {"bytes": 0, "sha256": ""}}}, "outside of its folder"),
    ):
        file.write_text(json.dumps({**meta, **change}))
        assert message in verify(str(tmp_path / "data"))[1][0]


def test_inspection_refuses_another_tokenizer(tmp_path: Path, tokenizer_json: Path, gpt2_files: Path) -> None:
    prefix = prepared(tmp_path, "a", ["x"], tokenizer=str(tokenizer_json))
    data = open_data(str(prefix))
    assert data.decoded(0, tokenizer_for(data, None)) == "x"
    with pytest.raises(UserError, match="not the tokenizer of"):
        tokenizer_for(data, str(gpt2_files))
    with pytest.raises(UserError, match="there is no document 1"):
        data.document(1)
    (tmp_path / "data" / "tokenizer" / "tokenizer.json").write_text(tokenizer_json.read_text() + "\n")
    with pytest.raises(UserError, match="not the tokenizer of"):
        tokenizer_for(data, None)


FACTS = {"bytes": 4, "sha256": "0"}
DAMAGED: list[Any] = [5, None, [], {}, {**FACTS, "bytes": "4"}, {**FACTS, "bytes": -1}, {**FACTS, "sha256": None}]
DAMAGED += [{**FACTS, "blocks": wrong} for wrong in ("1", None, -1, 1.5, [])]


@pytest.mark.parametrize("facts", DAMAGED, ids=str)
def test_damaged_entries_of_metadata(tmp_path: Path, facts: Any) -> None:
    prefix = prepared(tmp_path, "a", ["x"])
    file = prefix.with_name("a_meta.json")
    meta = json.loads(file.read_text())
    file.write_text(json.dumps({**meta, "files": {**meta["files"], "a_ids.npy": facts}}))
    for path in (prefix, prefix.parent, f"{prefix}_ids.npy"):
        assert verify(str(path))[1] == [f"{file}: damaged metadata"]


@pytest.mark.parametrize("content", ["", "[]", '{"version": 1}', '{"files": 5}', '{"files": null}', '{"files": []}'])
def test_metadata_that_is_damaged_as_a_whole(tmp_path: Path, content: str) -> None:
    prefix = prepared(tmp_path, "a", ["x"])
    file = prefix.with_name("a_meta.json")
    meta = json.loads(file.read_text())
    file.write_text(json.dumps({**meta, **json.loads(content)}) if "files" in content else content)
    assert verify(str(prefix))[1] == [f"{file}: damaged metadata"]


def test_damage_is_one_line_and_a_fix(tmp_path: Path) -> None:
    prefix = prepared(tmp_path, "a", ["x"])
    changed(prefix.with_name("a_ids.npy"), 130, b"\1")
    done = gptctl("data", "verify", str(prefix))
    expected = f"error: {prefix}_ids.npy is damaged: wrong checksum\nhint: restore it from a copy, or prepare"
    assert (done.returncode, done.stdout[: len(expected)]) == (1, expected)


def gptctl(*words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "gptctl", *words]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True)


@pytest.mark.parametrize("lengths", [[], [0], [0, 0]])
def test_data_without_any_token(tmp_path: Path, lengths: list[int]) -> None:
    """Documents may be empty, and the end token is missing in none of them."""
    prefix = prepared(tmp_path, "a", ["x"])
    np.save(f"{prefix}_ids.npy", np.empty(0, np.uint16))
    np.savez(f"{prefix}_idx.npz", lens=np.array(lengths, int), docs=np.arange(len(lengths) + 1))
    meta = json.loads(prefix.with_name("a_meta.json").read_text())
    counts = {**meta["counts"], "documents": len(lengths), "tokens": 0, "longest": 0}
    prefix.with_name("a_meta.json").write_text(json.dumps({**meta, "files": {}, "counts": counts}))
    data, problems = verify(str(prefix.parent))
    assert (problems, data.num_tokens, len(data.corpus.lengths)) == ([], 0, len(lengths))


def test_missing_and_unfinished_data(tmp_path: Path) -> None:
    for act in (open_data, verify):
        with pytest.raises(UserError, match="no data at") as caught:
            act(str(tmp_path / "x"))
        assert caught.value.hint.startswith("write the --output of gptctl data prepare")

    def stop(progress: Any) -> None:
        raise KeyboardInterrupt

    source = write_jsonl(tmp_path / "in.jsonl", ["a"])
    with pytest.raises(KeyboardInterrupt):
        prepare(Request((str(source),), str(tmp_path / "x")), stop)
    for act in (open_data, verify):
        with pytest.raises(UserError, match="x is not complete: prepare did not finish") as caught:
            act(str(tmp_path / "x"))
        assert "run the same gptctl data prepare command again" in caught.value.hint
    prepare(Request((str(source),), str(tmp_path / "x")))
    assert verify(str(tmp_path / "x"))[1] == []
