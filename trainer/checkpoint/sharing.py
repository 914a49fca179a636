"""Divides the writing of a checkpoint among the ranks that hold the same pieces."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from trainer.mesh import Mesh
from trainer.slices import Piece

PARTS = 1000  # resolution of a share


class Rows(NamedTuple):
    """Rows of a piece. A scalar is one row."""

    begin: int
    end: int


class Tied(NamedTuple):
    """Pieces that two pipeline stages hold, and how many parts of them the first stage writes."""

    names: frozenset[str] = frozenset()
    first: int = PARTS


NOTHING_TIED = Tied()


def share_out(pieces: dict[str, Piece], mesh: Mesh) -> dict[str, Rows]:
    """The rows that this rank writes. All ranks call it together, once."""
    names = sorted(name for name, piece in pieces.items() if piece.is_copy)
    tied = Tied(frozenset().union(*mesh.gather(names)))
    if tied.names:
        others = {name: piece for name, piece in pieces.items() if name not in tied.names}
        own = bytes_of(others, own_share(others, mesh.disks))
        shared = {name: piece for name, piece in pieces.items() if name in tied.names}
        half = bytes_of(shared, own_share(_originals(shared), mesh.disks))
        tied = tied._replace(first=_balanced(mesh.gather((own, half, bool(names)))))
    return own_share(pieces, mesh.disks, tied)


def own_share(
    pieces: dict[str, Piece], disks: int = 1, tied: Tied = NOTHING_TIED
) -> dict[str, Rows]:
    """The rows of every piece that this rank writes.

    The bytes of all pieces that the same ranks hold are one line, which these ranks cut into equal
    parts, at the ends of rows. Replicas are numbered consecutively, and so are those of one disk.
    """
    share: dict[str, Rows] = {}
    for kind in {(piece.holders, name in tied.names) for name, piece in pieces.items()}:
        holders, is_tied = kind
        alike = {
            name: pieces[name]
            for name in sorted(pieces)
            if (pieces[name].holders, name in tied.names) == kind
        }
        total = sum(piece.tensor.nbytes for piece in alike.values())
        first = total * tied.first // PARTS if is_tied else total
        is_copy = any(piece.is_copy for piece in alike.values())
        begin, length = (first, total - first) if is_copy else (0, first)
        here = holders.total // disks
        number = holders.number % here
        bounds = [begin + length * each // here for each in (number, number + 1)]
        share |= _rows_between(alike, *bounds)
    return share


def _rows_between(pieces: dict[str, Piece], begin: int, end: int) -> dict[str, Rows]:
    """The rows of a line of pieces that start in this range of bytes."""
    found, place = {}, 0
    for name, piece in pieces.items():
        row = piece.at.row_numel * piece.tensor.itemsize
        if row and piece.tensor.numel():
            count = piece.tensor.nbytes // row
            first, last = (min(max(-(-(at - place) // row), 0), count) for at in (begin, end))
            if first < last:
                found[name] = Rows(first, last)
        place += piece.tensor.nbytes
    return found


def _originals(pieces: dict[str, Piece]) -> dict[str, Piece]:
    return {name: piece._replace(is_copy=False) for name, piece in pieces.items()}


def bytes_of(pieces: dict[str, Piece], share: dict[str, Rows]) -> int:
    return sum(
        (rows.end - rows.begin) * pieces[name].at.row_numel * pieces[name].tensor.itemsize
        for name, rows in share.items()
    )


def _balanced(loads: Iterable[tuple[int, int, bool]]) -> int:
    """How many parts of the tied pieces the first stage writes, to write as much as the last.

    A load is what a rank writes anyway, its share of the tied pieces, and whether its are copies.
    """
    loads = list(loads)
    first = max(own for own, half, is_copy in loads if half and not is_copy)
    last = max(own for own, _, is_copy in loads if is_copy)
    shared = max(half for _, half, _ in loads)
    return min(max(PARTS * (shared + last - first) // (2 * shared), 0), PARTS)
