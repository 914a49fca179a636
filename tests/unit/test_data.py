"""What the trainer reads. Oracles: samples cut from the tokens by a plain loop, and numbers computed by hand."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from trainer.config.sections import Dataset
from trainer.corpus.token_files import Corpus, open_corpus
from trainer.data import IGNORED, Reader, Start
from trainer.data.chars import Characters, CharSplit
from trainer.data.gpt import GPTSplit
from trainer.data.index import Cache, build, num_epochs, split_bounds
from trainer.data.order import permuted
from trainer.errors import UserError
from trainer.layout import Batch


def write_npz(prefix: Path, documents: list[list[int]], compressed: bool = False, dtype: Any = np.uint16) -> None:
    ids = np.array([token for document in documents for token in document], dtype=dtype)
    lens = np.array([len(document) for document in documents], dtype=np.int32)
    (np.savez_compressed if compressed else np.savez)(f"{prefix}_ids.npz", ids=ids, lens=lens)


def write_pair(prefix: Path, documents: list[list[list[int]]], dtype: Any = np.uint16) -> None:
    """Documents of sentences of tokens."""
    sentences = [sentence for document in documents for sentence in document]
    np.save(f"{prefix}_ids.npy", np.array([token for sentence in sentences for token in sentence], dtype=dtype))
    lens = np.array([len(sentence) for sentence in sentences], dtype=np.int32)
    docs = np.cumsum([0, *(len(document) for document in documents)]).astype(np.int64)
    np.savez(f"{prefix}_idx.npz", lens=lens, docs=docs)


def read_all(corpus: Corpus) -> list[list[int]]:
    return [corpus.read(number, 0, 10**9).tolist() for number in range(len(corpus.lengths))]


DOCUMENTS = [[1, 2, 3], [4], [], [5, 6, 7, 8]]


@pytest.mark.parametrize("compressed", [False, True])
def test_one_file_of_ids_and_lens(tmp_path: Path, compressed: bool) -> None:
    write_npz(tmp_path / "train.data.json", DOCUMENTS, compressed)
    for where in (tmp_path, tmp_path / "train.data.json_ids.npz", tmp_path / "train.data.json"):
        corpus = open_corpus(str(where))
        assert read_all(corpus) == DOCUMENTS
        assert isinstance(corpus.files[0].ids, np.memmap) is not compressed


def test_a_pair_of_files_with_sentences(tmp_path: Path) -> None:
    write_pair(tmp_path / "corpus", [[[1, 2], [3]], [[4]], [], [[5, 6], [7, 8]]])
    for name in ("", "corpus_ids.npy", "corpus_idx.npz", "corpus"):
        assert read_all(open_corpus(str(tmp_path / name))) == DOCUMENTS


def test_all_files_of_a_folder_are_one_corpus(tmp_path: Path) -> None:
    write_npz(tmp_path / "b", [[9, 9]])
    write_npz(tmp_path / "c", [[7], [8]], dtype=np.int32)
    write_pair(tmp_path / "a", [[[1], [2]]])
    (tmp_path / "readme.txt").write_text("nothing")
    assert read_all(open_corpus(str(tmp_path))) == [[1, 2], [9, 9], [7], [8]]


def damaged(tmp_path: Path) -> Iterator[tuple[str, str]]:
    def fresh(name: str) -> Path:
        folder = tmp_path / name
        folder.mkdir()
        return folder

    yield str(tmp_path / "nowhere"), "no data at"
    yield str(fresh("empty")), "contains no token files"
    np.savez(fresh("sum") / "x_ids.npz", ids=np.arange(5, dtype=np.uint16), lens=np.array([2, 2]))
    yield str(tmp_path / "sum"), "the sum of lens is 4, but ids has 5"
    np.savez(fresh("negative") / "x_ids.npz", ids=np.arange(5, dtype=np.uint16), lens=np.array([-1, 6]))
    yield str(tmp_path / "negative"), "lens has values from -1 to 6, expected 0 to 5"
    np.savez(fresh("lack") / "x_ids.npz", ids=np.arange(5, dtype=np.uint16))
    yield str(tmp_path / "lack"), "no array lens"
    np.savez(fresh("kind") / "x_ids.npz", ids=np.ones(5), lens=np.array([5]))
    yield str(tmp_path / "kind"), "float64"
    np.savez(fresh("object") / "x_ids.npz", ids=np.array([[1], [2, 3]], dtype=object), lens=np.array([2]))
    yield str(tmp_path / "object"), "Python objects"
    (fresh("text") / "x_ids.npz").write_text("this is no zip file")
    yield str(tmp_path / "text"), "cannot read token files"
    write_npz(fresh("short") / "x", DOCUMENTS)
    file = tmp_path / "short" / "x_ids.npz"
    file.write_bytes(file.read_bytes()[:-200])
    yield str(tmp_path / "short"), "cannot read token files"
    write_pair(fresh("alone") / "x", [[[1]]])
    (tmp_path / "alone" / "x_ids.npy").unlink()
    yield str(tmp_path / "alone"), "cannot read token files"
    np.save(fresh("docs") / "x_ids.npy", np.arange(5, dtype=np.uint16))
    np.savez(tmp_path / "docs" / "x_idx.npz", lens=np.array([2, 3]), docs=np.array([0, 1]))
    yield str(tmp_path / "docs"), "docs does not match"
    write_npz(fresh("flip") / "x", [[n % 7 for n in range(5000)]], compressed=True)
    file = tmp_path / "flip" / "x_ids.npz"
    content = bytearray(file.read_bytes())
    content[60] ^= 255
    file.write_bytes(content)
    yield str(tmp_path / "flip"), "cannot read token files"
    for name, lens, message in (
        ("float", np.array([2.4, 3.4]), "lens is a 1-dimensional array of float64"),
        ("scalar", np.array(5), "lens is a 0-dimensional array of int64"),
        ("overflow", np.array([2**62] * 4 + [5]), "expected 0 to 5"),
        ("words", np.array(["5"]), "lens is a 1-dimensional array of <U1"),
    ):
        np.savez(fresh(name) / "x_ids.npz", ids=np.arange(5, dtype=np.uint16), lens=lens)
        yield str(tmp_path / name), message
    np.save(fresh("sentence") / "x_ids.npy", np.arange(5, dtype=np.uint16))
    np.savez(tmp_path / "sentence" / "x_idx.npz", lens=np.array([6, -1]), docs=np.array([0, 2]))
    yield str(tmp_path / "sentence"), "lens has values from -1 to 6, expected 0 to 5"
    yield str(tmp_path / "no**pe"), "no data at"


def test_damaged_files_are_one_clear_message(tmp_path: Path) -> None:
    for path, message in damaged(tmp_path):
        with pytest.raises(UserError) as caught:
            open_corpus(path)
        assert message in caught.value.message, path
        assert caught.value.hint


@pytest.mark.parametrize(
    ("split", "documents", "bounds"),
    [
        ((949, 50, 1), 1000, [0, 949, 999, 1000]),
        ((949, 50, 1), 100, [0, 95, 100, 100]),
        ((949, 50, 1), 10, [0, 10, 10, 10]),  # 9.49 and 0.5 round to 9 and 0: the missing one goes to the first
        ((1, 1, 1), 10, [0, 4, 7, 10]),
        ((1,), 7, [0, 7, 7, 7]),
        ((0, 1), 7, [0, 0, 7, 7]),
        ((969, 30, 1), 12345, [0, 11963, 12333, 12345]),
    ],
)
def test_documents_are_split_by_their_shares(split: tuple[int, ...], documents: int, bounds: list[int]) -> None:
    """Oracle: shares rounded one by one; what the sum is too large by is taken from every bound."""
    assert split_bounds(split, documents) == bounds


def samples_by_hand(documents: list[list[int]], order: list[int], seq_len: int) -> list[list[int]]:
    """Oracle: the documents in their order, cut every seq_len tokens, each sample with one token more."""
    tokens = [token for number in order for token in documents[number]]
    return [tokens[first : first + seq_len + 1] for first in range(0, len(tokens) - seq_len, seq_len)]


@pytest.mark.parametrize("num_samples", [1, 7, 20, 25, 26, 60])
@pytest.mark.parametrize("seq_len", [1, 4, 9])
def test_samples_are_those_of_a_plain_loop(tmp_path: Path, num_samples: int, seq_len: int) -> None:
    random = np.random.RandomState(0)
    documents = [random.randint(0, 1000, random.randint(0, 9)).tolist() for _ in range(30)]
    write_npz(tmp_path / "x", documents)
    corpus = open_corpus(str(tmp_path))
    maps = build(range(3, 28), corpus.lengths, seq_len, num_samples, seed=5)
    split = GPTSplit(corpus, maps, seq_len, 1000, None)
    by_hand = samples_by_hand(documents, maps.documents.tolist(), seq_len)
    assert len(maps.samples) == len(by_hand) + 1
    assert split.size == len(by_hand) >= num_samples
    numbers = np.arange(split.size)
    assert sorted(map(tuple, split.read(numbers, numbers).tolist())) == sorted(map(tuple, by_hand))
    assert sorted(maps.shuffle.tolist()) == list(range(split.size))


def test_every_token_is_trained_on_once_per_epoch(tmp_path: Path) -> None:
    """The targets of all samples are all tokens but the first, each as often as there are epochs."""
    documents = [list(range(10 * n, 10 * n + 7)) for n in range(10)]
    write_npz(tmp_path / "x", documents)
    corpus = open_corpus(str(tmp_path))
    maps = build(range(10), corpus.lengths, 3, 60, seed=1)
    epochs = num_epochs(70, 3, 60)
    split = GPTSplit(corpus, maps, 3, 1000, None)
    rows = split.read(np.arange(split.size), np.arange(split.size))
    targets = np.bincount(rows[:, 1:].ravel(), minlength=100)
    used = np.array([token for document in documents for token in document])
    assert targets[used].max() == epochs
    assert targets.sum() == split.size * 3 == (epochs * 70 - 1) // 3 * 3


def test_a_short_last_epoch_is_shuffled_by_itself() -> None:
    """With 2.3 epochs asked for, the samples of the third come last; with 2.9 they are mixed in."""
    lengths = np.full(100, 11, dtype=np.int64)
    per_epoch = (1100 - 1) // 10
    short = build(range(100), lengths, 10, int(2.3 * per_epoch), 3)
    first = (2 * 1100 - 1) // 10
    assert sorted(short.shuffle[:first].tolist()) == list(range(first))
    assert sorted(short.documents[:200].tolist()) == sorted([*range(100)] * 2)
    mixed = build(range(100), lengths, 10, int(2.9 * per_epoch), 3)
    assert sorted(mixed.shuffle[:first].tolist()) != list(range(first))
    assert sorted(mixed.documents.tolist()) == sorted([*range(100)] * 3)


def test_within_one_epoch_the_order_does_not_depend_on_the_length_of_the_run() -> None:
    lengths = np.full(100, 11, dtype=np.int64)
    some, more = build(range(100), lengths, 10, 5, 3), build(range(100), lengths, 10, 100, 3)
    assert all(np.array_equal(a, b) for a, b in zip(some, more))
    assert not np.array_equal(some.shuffle, build(range(100), lengths, 10, 5, 4).shuffle)


FACTS = {"split": "train", "num_samples": 5, "seq_len": 10, "seed": 3}


def test_the_cache_is_read_back_and_has_fleetx_names(tmp_path: Path) -> None:
    maps = build(range(100), np.full(100, 11, dtype=np.int64), 10, 5, 3)
    cache = Cache(tmp_path / "x", FACTS)
    assert cache.load(check=True) is None
    cache.store(maps)
    assert {file.name for file in tmp_path.iterdir()} == {
        f"x_gpt_train_indexmap_5ns_10sl_{name}" for name in ("doc_idx.npy", "sample_idx.npy", "shuffle_idx.npy", "key.json")
    }  # fmt: skip
    loaded = cache.load(check=True)
    assert loaded is not None
    assert all(np.array_equal(a, b) for a, b in zip(loaded, maps))
    assert Cache(tmp_path / "x", {**FACTS, "seed": 4}).load(check=True) is None


def test_maps_that_another_job_replaces_meanwhile_are_not_mixed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The maps of another seed have the same names; here they are stored after the first file was opened."""
    cache, other = Cache(tmp_path / "x", FACTS), Cache(tmp_path / "x", {**FACTS, "seed": 4})
    lengths, load = np.full(100, 11, dtype=np.int64), np.load
    cache.store(build(range(100), lengths, 10, 5, 3))

    def replaced(*given: Any, **more: Any) -> Any:
        maps = load(*given, **more)
        other.store(build(range(100), lengths, 10, 5, 4))
        return maps

    monkeypatch.setattr(np, "load", replaced)
    assert cache.load(check=False) is None
    monkeypatch.undo()
    assert other.load(check=True) is not None


@pytest.mark.parametrize("name", ["doc_idx.npy", "sample_idx.npy", "shuffle_idx.npy", "key.json"])
@pytest.mark.parametrize("damage", ["deleted", "cut", "flipped", "emptied"])
def test_a_damaged_cache_is_not_used(tmp_path: Path, name: str, damage: str) -> None:
    cache = Cache(tmp_path / "x", FACTS)
    cache.store(build(range(100), np.full(100, 11, dtype=np.int64), 10, 5, 3))
    file = tmp_path / f"x_gpt_train_indexmap_5ns_10sl_{name}"
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    changed = {"cut": content[:-7], "flipped": content, "emptied": b""}
    file.unlink() if damage == "deleted" else file.write_bytes(bytes(changed[damage]))
    assert cache.load(check=True) is None


@pytest.mark.parametrize("size", [1, 2, 3, 16, 17, 1000, 48827])
def test_the_order_is_a_permutation(size: int) -> None:
    order = permuted(np.arange(size), size, 1, "train", 0)
    assert sorted(order.tolist()) == list(range(size))
    if size > 16:
        assert not np.array_equal(order, permuted(np.arange(size), size, 1, "train", 1))
        assert abs(np.corrcoef(np.arange(size), order)[0, 1]) < 0.3


def test_positions_of_a_huge_order_cost_nothing() -> None:
    numbers = np.array([0, 1, 10**12 - 1])
    order = permuted(numbers, 10**12, 7)
    assert len(set(order.tolist())) == 3
    assert order.max() < 10**12


@pytest.fixture
def text(tmp_path: Path) -> Path:
    file = tmp_path / "text.txt"
    file.write_text("".join(chr(97 + (n * n + n // 7) % 26) for n in range(1000)) + "é中")
    return file


def test_characters_are_counted_cut_and_split(text: Path) -> None:
    dataset = Dataset(name="CharDataset", path=str(text), max_seq_len=8, train_split=0.9, truncate=0.5)
    characters = Characters(dataset)
    assert characters.length == 501
    assert characters.vocabulary == "".join(sorted(set(text.read_text()[:501])))
    train, valid = CharSplit(characters, "train", 1), CharSplit(characters, "valid", 1)
    assert (train.size, valid.size) == (443, 50)  # of 501 - 8 = 493 windows
    whole = Characters(Dataset(name="CharDataset", path=str(text), max_seq_len=8, truncate=1.0))
    assert whole.decode(whole.tokens[-2:].tolist()) == "é中"


def windows(split: CharSplit, epoch: int = 0) -> list[tuple[int, ...]]:
    numbers = np.arange(split.size)
    return [tuple(row) for row in split.read(np.full(split.size, epoch), numbers).tolist()]


def test_every_window_belongs_to_one_part_and_comes_once_per_epoch(text: Path) -> None:
    """Oracle: all windows of the text, cut by a plain loop."""
    characters = Characters(Dataset(name="CharDataset", path=str(text), max_seq_len=8))
    tokens = characters.tokens.tolist()
    everything = sorted(tuple(tokens[n : n + 9]) for n in range(characters.windows))
    train, valid = CharSplit(characters, "train", 1), CharSplit(characters, "valid", 1)
    assert sorted(windows(train) + windows(valid)) == everything
    assert windows(train, 0) != windows(train, 1)
    assert sorted(windows(train, 0)) == sorted(windows(train, 1))
    assert windows(valid) != windows(CharSplit(characters, "valid", 2))


def test_the_parts_touch_at_two_places_only(text: Path) -> None:
    """So that evaluation does not read what was trained on: at most block windows at each end overlap."""
    characters = Characters(Dataset(name="CharDataset", path=str(text), max_seq_len=8))
    valid = CharSplit(characters, "valid", 1)
    places = sorted((valid.start + n) % characters.windows for n in range(valid.size))
    gaps = sum(b - a > 1 for a, b in pairwise(places))
    assert gaps <= 1


@pytest.mark.parametrize(
    ("content", "message"), [(b"short", "one sample needs 65"), (b"\xff\xfe bad", "is not UTF-8 text")]
)
def test_bad_texts(tmp_path: Path, content: bytes, message: str) -> None:
    file = tmp_path / "text.txt"
    file.write_bytes(content)
    with pytest.raises(UserError, match=message):
        Characters(Dataset(name="CharDataset", path=str(file), max_seq_len=64))


def test_missing_text() -> None:
    with pytest.raises(UserError, match="No such file"):
        Characters(Dataset(name="CharDataset", path="nowhere.txt", max_seq_len=64))


def test_the_demo_corpus_is_the_same_every_time() -> None:
    dataset = Dataset(name="CharDataset", path="builtin", max_seq_len=64)
    first, second = Characters(dataset), Characters(dataset)
    assert first.length == 2_000_000
    assert first.vocabulary == second.vocabulary
    assert np.array_equal(first.tokens, second.tokens)
    assert len(first.vocabulary) < 128


class Counting:
    """A split whose samples say which number they have."""

    size, digest, eos, covers_epochs = 100, 0, 50, False

    def read(self, epochs: Any, numbers: Any) -> Any:
        return (1000 * epochs + numbers % self.size)[:, None] + np.array([[0, 10_000]])


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_the_global_batch_does_not_depend_on_the_number_of_ranks(ranks: int) -> None:
    """Step s has the samples [s·G, (s+1)·G), each rank a contiguous part."""
    for step in range(5):
        parts = [
            Reader(Counting(), Batch(8, 8 // ranks, 1), rank, 100, None).read(step * 8).inputs[:, 0].tolist()
            for rank in range(ranks)
        ]
        assert [number for part in parts for number in part] == list(range(step * 8, step * 8 + 8))


def test_epochs_in_the_stream_of_numbers() -> None:
    whole = Reader(Counting(), Batch(8, 8, 8), 0, 100, None)
    assert whole.read(96).inputs[:, 0].tolist() == [96, 97, 98, 99, 1000, 1001, 1002, 1003]
    # In epoch mode, an incomplete batch takes the first samples of its epoch again.
    assert whole.read(96, 2).inputs[:, 0].tolist() == [2096, 2097, 2098, 2099, 2000, 2001, 2002, 2003]


def test_index_maps_have_the_samples_of_all_epochs() -> None:
    class Mapped(Counting):
        covers_epochs = True

        def read(self, epochs: Any, numbers: Any) -> Any:
            return numbers[:, None] + np.array([[0, 10_000]])

    reader = Reader(Mapped(), Batch(8, 8, 8), 0, 40, None)
    assert reader.read(36, 1).inputs[:, 0].tolist() == [76, 77, 78, 79, 40, 41, 42, 43]


@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
@pytest.mark.parametrize("size", [1, 7, 8, 9, 100])
def test_a_whole_evaluation_counts_every_sample_once(ranks: int, size: int) -> None:
    class Short(Counting):
        eos = None

    Short.size = size
    counted = []
    for rank in range(ranks):
        reader = Reader(Short(), Batch(8, 8 // ranks, 1), rank, size, None)
        for first in range(0, size, 8):
            inputs, labels = reader.read_once(first)
            assert len(inputs) == 8 // ranks
            counted += inputs[labels[:, 0] != IGNORED, 0].tolist()
    assert sorted(counted) == list(range(size))


def test_nothing_is_predicted_after_the_end_of_a_text() -> None:
    """The position whose input is the end token is left out, not the one that predicts it."""
    batch = Reader(Counting(), Batch(100, 100, 100), 0, 100, None).read(0)
    assert batch.labels[50, 0] == IGNORED
    assert batch.num_predicted == 99
    assert batch.labels[49, 0] == 10_049


def test_shuffling_on_top_takes_every_sample_once() -> None:
    reader = Reader(Counting(), Batch(100, 100, 100), 0, 100, shuffle_key=1)
    numbers = reader.read(0).inputs[:, 0].tolist()
    assert sorted(numbers) == list(range(100))
    assert numbers != sorted(numbers)


def test_reading_ahead_gives_the_same_batches_and_the_same_errors() -> None:
    reader = Reader(Counting(), Batch(8, 8, 8), 0, 100, None)
    right = [reader.read(16 + 8 * n).inputs.tolist() for n in range(5)]
    starts = [Start(16 + 8 * n) for n in range(5)]
    for num_workers in (0, 1, 4):
        assert [batch.inputs.tolist() for batch in reader.batches(starts, num_workers)] == right

    class Broken(Counting):
        def read(self, epochs: Any, numbers: Any) -> Any:
            if numbers[0] >= 16:
                raise UserError("the disk is gone")
            return super().read(epochs, numbers)

    batches = Reader(Broken(), Batch(8, 8, 8), 0, 100, None).batches([Start(8 * n) for n in range(5)], 1)
    assert next(batches).num_predicted == next(batches).num_predicted == 8
    with pytest.raises(UserError, match="the disk is gone"):
        next(batches)
