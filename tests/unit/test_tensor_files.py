"""The files of a checkpoint. Oracles: the safetensors library, the tensors that were saved, and files that were changed."""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor

from tests.torch_checkpoints import change_manifest, positions_in
from trainer.checkpoint import load_tensors, tensor_files
from trainer.checkpoint.loading import Untrusted, _cover, load_pieces
from trainer.checkpoint.manifest import read_manifest, write_manifest
from trainer.checkpoint.sharing import PARTS, Rows, Tied, own_share
from trainer.checkpoint.tensor_files import file_name, tensor_index, write_pieces
from trainer.checksums import Damaged, damage_in
from trainer.errors import UserError
from trainer.slices import Holders, Piece, Slice, shapes, whole

SMALL_BLOCK = 4096


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that small tensors have several blocks."""
    monkeypatch.setattr(tensor_files, "BLOCK", SMALL_BLOCK)


def state() -> dict[str, Tensor]:
    source = torch.Generator().manual_seed(0)
    tensors = {f"model.{n}": torch.randn(8, n + 1, generator=source) for n in range(4)}
    tensors["large"] = torch.randn(100, 37, generator=source)
    tensors["half"] = torch.randn(33, 3, generator=source).bfloat16()
    tensors["long row"] = torch.randn(3, 5000, generator=source)
    return tensors | {"scalar": torch.tensor(3.5), "vector": torch.randn(3000, generator=source)}


def zeros(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}


def checkpoint(folder: Path, ranks: list[dict[str, Piece]]) -> Path:
    """A checkpoint with a file per rank."""
    folder.mkdir()
    written = {file_name(n): write_pieces(folder / file_name(n), pieces) for n, pieces in enumerate(ranks)}
    facts = {"tensors": tensor_index({name: each.tensors for name, each in written.items()})}
    write_manifest(folder, facts, {name: each.facts for name, each in written.items()})
    return folder


def load(folder: Path, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    found = zeros(tensors)
    load_pieces(folder, read_manifest(folder), whole(found), shapes(found))
    return found


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def parts_of(tensors: dict[str, Tensor], ways: int, dim: int) -> list[dict[str, Piece]]:
    """The tensors cut along a dimension, as sharding and tensor parallelism do; others are on the first rank."""
    ranks: list[dict[str, Piece]] = [{} for _ in range(ways)]
    for name, tensor in tensors.items():
        for number in range(ways if tensor.dim() > dim else 1):
            at = Slice.of(tuple(tensor.shape))
            at = at.chunk(dim, ways, number) if tensor.dim() > dim else at
            if at.numel:
                ranks[number][name] = Piece(tensor[at.within(Slice.of(at.whole))].contiguous(), at)
    return ranks


def test_the_safetensors_library_reads_our_files(tmp_path: Path) -> None:
    tensors = state()
    folder = checkpoint(tmp_path / "c", parts_of(tensors, 2, 0))
    for number, pieces in enumerate(parts_of(tensors, 2, 0)):
        file = folder / file_name(number)
        found = load_file(file)
        table = found.pop("checksums")
        assert same(found, {name: piece.tensor for name, piece in pieces.items()})
        with safe_open(file, "pt") as opened:
            positions = json.loads(opened.metadata()["positions"])
        for name, piece in pieces.items():
            assert positions[name] == {"shape": [*piece.at.whole], "offsets": [*piece.at.offsets]}
        assert positions == positions_in(file)
        # By hand: the lengths and checksums in the table are those of the bytes before it.
        data, begin = file.read_bytes(), 0
        for row in table:
            length = int.from_bytes(bytes(row[:8].tolist()), "little")
            assert bytes(row[8:].tolist()) == hashlib.sha256(data[begin : begin + length]).digest()
            assert length <= max(SMALL_BLOCK, 4 * 5000) or begin == 0
            begin += length
        assert begin == len(data) - table.numel()


@pytest.mark.parametrize("dim", [0, 1])
def test_any_part_is_loaded_from_any_other(tmp_path: Path, dim: int) -> None:
    """Saved in three parts along either dimension, loaded in two along either. Oracle: the whole tensors."""
    tensors = state()
    folder = checkpoint(tmp_path / "c", parts_of(tensors, 3, dim))
    assert same(load(folder, tensors), tensors)
    for other in (0, 1):
        for pieces in parts_of(tensors, 2, other):
            blank = {name: piece._replace(tensor=torch.zeros_like(piece.tensor)) for name, piece in pieces.items()}
            load_pieces(folder, read_manifest(folder), blank, shapes(tensors))
            assert all(torch.equal(blank[name].tensor, pieces[name].tensor) for name in pieces)


def test_a_rank_reads_only_the_blocks_it_needs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Oracle: the bytes that it asks the system for."""
    tensors = {"large": torch.randn(1000, 1000), "other": torch.randn(1000, 1000)}
    folder = checkpoint(tmp_path / "c", [whole(tensors)])
    read: list[int] = []
    preadv, pread = os.preadv, os.pread
    monkeypatch.setattr(os, "preadv", lambda *given: [read.append(n := preadv(*given)), n][1])
    monkeypatch.setattr(os, "pread", lambda *given: [read.append(len(data := pread(*given))), data][1])
    at = Slice.of((1000, 1000)).rows(500, 600)
    piece = Piece(torch.zeros(100, 1000), at)
    load_pieces(folder, read_manifest(folder), {"large": piece}, shapes(tensors))
    assert torch.equal(piece.tensor, tensors["large"][500:600])
    table = 40 * read_manifest(folder)["files"][file_name(0)]["blocks"]
    assert sum(read) < piece.tensor.nbytes + table + 3 * SMALL_BLOCK


def test_no_flipped_bit_is_ever_loaded(tmp_path: Path) -> None:
    """300 flips anywhere: all are found by a load of everything, and nothing of a damaged block gets to a tensor."""
    tensors = state()
    folder = checkpoint(tmp_path / "c", [whole(tensors)])
    file, source = folder / file_name(0), random.Random(0)
    good = file.read_bytes()
    for _ in range(300):
        content, place = bytearray(good), source.randrange(len(good))
        content[place] ^= 1 << source.randrange(8)
        file.write_bytes(content)
        found = zeros(tensors)
        with pytest.raises(Damaged, match="wrong checksum"):
            load_pieces(folder, read_manifest(folder), whole(found), shapes(found))
        for name, tensor in found.items():
            assert bool(((tensor == tensors[name]) | (tensor == 0)).all()), name
        assert damage_in(file, read_manifest(folder)["files"][file.name])


def crafted(**changes: Any) -> Callable[[dict[str, Any]], None]:
    """Change the first piece of the tensor `large` in a manifest."""

    def change(manifest: dict[str, Any]) -> None:
        piece = manifest["tensors"]["large"]["pieces"][0]
        for number, name in enumerate(("file", "begin", "offsets", "sizes")):
            piece[number] = changes.get(name, piece[number])

    return change


CRAFTED: dict[str, Callable[[dict[str, Any]], None]] = {
    "another file": crafted(file="../../etc/passwd"),
    "an unknown file": crafted(file="rank_7.safetensors"),
    "a file as a list": crafted(file=["rank_0.safetensors"]),
    "beyond the end": crafted(begin=10**9),
    "before the beginning": crafted(begin=-4),
    "not where a row begins": crafted(begin=1),
    "a fraction": crafted(begin=0.5),
    "a truth value": crafted(begin=True),
    "outside of the tensor": crafted(offsets=[50, 0]),
    "too few dimensions": crafted(offsets=[0]),
    "huge sizes": crafted(sizes=[10**9, 10**9]),
    "no sizes": crafted(sizes=[0, 37]),
    "text as sizes": crafted(sizes="37"),
    "no tensors": lambda manifest: manifest.pop("tensors"),
    "tensors as a list": lambda manifest: manifest.update(tensors=[]),
    "a tensor as a number": lambda manifest: manifest["tensors"].update(large=7),
    "an unknown type": lambda manifest: manifest["tensors"]["large"].update(dtype="object"),
    "huge blocks": lambda manifest: manifest["files"][file_name(0)].update(blocks=10**15),
    "negative blocks": lambda manifest: manifest["files"][file_name(0)].update(blocks=-1),
    "blocks as text": lambda manifest: manifest["files"][file_name(0)].update(blocks="many"),
}


@pytest.mark.parametrize("change", CRAFTED)
def test_a_crafted_manifest_is_one_clear_message(tmp_path: Path, change: str) -> None:
    """Its checksum is right. It is refused before any tensor is allocated or changed."""
    tensors = state()
    folder = checkpoint(tmp_path / "c", [whole(tensors)])
    change_manifest(folder, CRAFTED[change])
    found = zeros(tensors)
    try:
        damage = load_tensors(folder, read_manifest(folder), whole(found), shapes(found))
    except UserError as error:
        assert str(folder) in error.message
    except ValueError as error:  # refused when the manifest was read
        assert "manifest.json" in str(error)
    else:
        assert damage
    assert all(not tensor.any() for name, tensor in found.items() if name == "large")


@pytest.mark.parametrize(
    ("boxes", "is_whole"),
    [
        ([((0, 0), (60, 37)), ((60, 0), (40, 37))], True),
        ([((0, 0), (60, 37))], False),
        ([((0, 0), (60, 37)), ((50, 0), (40, 37))], False),  # as many elements, but a gap
        ([((0, 0), (100, 20)), ((0, 20), (100, 17))], True),
        ([((0, 0), (100, 20)), ((0, 19), (100, 17))], False),
    ],
)
def test_pieces_must_cover_a_tensor(
    tmp_path: Path, boxes: list[tuple[tuple[int, int], tuple[int, int]]], is_whole: bool
) -> None:
    """Otherwise the rest would keep its random values, without an error."""
    whole_tensor = torch.randn(100, 37)
    at = Slice.of((100, 37))
    ranks = []
    for offsets, sizes in boxes:
        part = Slice(at.whole, offsets, sizes)
        ranks.append({"w": Piece(whole_tensor[part.within(at)].contiguous(), part)})
    folder = checkpoint(tmp_path / "c", ranks)
    if is_whole:
        assert same(load(folder, {"w": whole_tensor}), {"w": whole_tensor})
    else:
        with pytest.raises(ValueError, match="w is stored only in part"):
            load(folder, {"w": whole_tensor})


def test_a_pipe_in_a_checkpoint_does_not_block(tmp_path: Path) -> None:
    tensors = state()
    folder = checkpoint(tmp_path / "c", [whole(tensors)])
    (folder / file_name(0)).unlink()
    os.mkfifo(folder / file_name(0))
    with pytest.raises(Damaged, match="is not a regular file"):
        load(folder, tensors)


def test_blocks_that_cut_rows_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No file of ours has them: a row would be copied to a wrong place."""
    tensors = {"w": torch.randn(10, 7)}
    folder = checkpoint(tmp_path / "c", [whole(tensors)])
    change_manifest(folder, lambda manifest: manifest["tensors"]["w"]["pieces"][0].__setitem__(1, 8))
    with pytest.raises(Untrusted, match="do not end where rows end"):
        load(folder, tensors)


def test_tensors_in_the_table_of_checksums_are_refused(tmp_path: Path) -> None:
    """They are in no block: they would keep their random values, without an error."""
    tensors = {"w": torch.randn(8)}
    folder = checkpoint(tmp_path / "c", [whole(tensors)])
    size = (folder / file_name(0)).stat().st_size
    change_manifest(folder, lambda manifest: manifest["tensors"]["w"]["pieces"][0].__setitem__(1, size - 32))
    with pytest.raises(Untrusted, match="beyond the tensors of a file"):
        load(folder, tensors)


def test_a_crafted_manifest_with_many_pieces_takes_no_minutes() -> None:
    """Comparing each of them with all others would. The oracle is a grid, which covers its tensor."""
    shape, began = (2, 20_000), time.process_time()
    grid = [Slice(shape, (row, column), (1, 1)) for row in range(2) for column in range(shape[1])]
    assert _cover(shape, grid)
    assert not _cover(shape, [*grid[1:], grid[1]])
    assert time.process_time() - began < 5


@pytest.mark.parametrize("kind", ["a pipe", "a device", "huge"])
def test_a_manifest_that_cannot_be_one_is_not_read(tmp_path: Path, kind: str) -> None:
    """It would block forever, or fill the memory."""
    file = tmp_path / "manifest.json"
    if kind == "a pipe":
        os.mkfifo(file)
    elif kind == "a device":
        file.symlink_to("/dev/zero")
    else:
        file.touch()
        os.truncate(file, 1 << 40)
    with pytest.raises(ValueError, match=r"manifest.json (is not a regular file|has 1099511627776 bytes)"):
        read_manifest(tmp_path)


def rows_of_all(tensors: dict[str, Tensor], total: int) -> list[dict[str, Rows]]:
    return [
        own_share({name: Piece(t, Slice.of(tuple(t.shape)), Holders(total, number)) for name, t in tensors.items()})
        for number in range(total)
    ]


@pytest.mark.parametrize("total", [1, 2, 3, 8])
def test_what_several_ranks_hold_is_written_once(total: int) -> None:
    """Every row once, and the bytes are shared out: within a row of the largest tensor."""
    tensors = {f"w{number}": torch.zeros(50 * number + 1, 3) for number in range(9)} | {"s": torch.tensor(1.0)}
    shares = rows_of_all(tensors, total)
    for name, tensor in tensors.items():
        rows = sorted(share[name] for share in shares if name in share)
        assert rows[0].begin == 0
        assert rows[-1].end == (len(tensor) if tensor.dim() else 1)
        assert all(before.end == after.begin for before, after in itertools.pairwise(rows))
    sizes = [sum((r.end - r.begin) * (3 if n != "s" else 1) for n, r in share.items()) for share in shares]
    assert max(sizes) - min(sizes) <= 6


def test_two_stages_divide_what_both_hold() -> None:
    """The embedding of a pipeline: 30 % by the first stage, the rest by the last, each with two replicas."""
    tensor, written = torch.zeros(1000, 3), 0
    tied = Tied(frozenset({"e"}), 3 * PARTS // 10)
    for is_copy in (False, True):
        for number in range(2):
            share = own_share({"e": Piece(tensor, Slice.of((1000, 3)), Holders(2, number), is_copy)}, tied=tied)
            assert share["e"].begin == written
            written = share["e"].end
            assert share["e"].end - share["e"].begin == (350 if is_copy else 150)
    assert written == 1000
