"""The rows of `gptctl topo --collectives`: what a rank sends in an update, and needs to send."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from trainer.collectives import Row

COLUMNS = ("axis", "operation", "what", "when", "dtype", "size", "calls", "sent", "needed")
UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


def as_json(rows: Sequence[Row]) -> dict[str, Any]:
    """Every row and the sums per axis, in bytes per update."""
    return {
        "collectives": [{**row._asdict(), "sent": row.sent} for row in rows],
        "totals": {axis: {"sent": sent, "needed": needed} for axis, sent, needed in totals(rows)},
    }


def totals(rows: Sequence[Row]) -> list[tuple[str, int, int]]:
    """Bytes that the rank sends per update and those it needs to, by axis, and of all axes."""
    groups = {axis: [row for row in rows if row.axis == axis] for axis in (r.axis for r in rows)}
    return [
        (name, sum(row.sent for row in own), sum(row.needed for row in own))
        for name, own in {**groups, "total": rows}.items()
    ]


def cells(rows: Iterable[Row]) -> list[list[str]]:
    return [
        [
            row.axis,
            row.operation,
            row.what,
            row.when,
            row.dtype,
            size_text(row.nbytes),
            f"{row.calls:,}",
            size_text(row.sent),
            size_text(row.needed),
        ]
        for row in rows
    ]


def total_cells(rows: Sequence[Row]) -> list[list[str]]:
    return [[axis, size_text(sent), size_text(needed)] for axis, sent, needed in totals(rows)]


def reasons(rows: Iterable[Row]) -> list[str]:
    """Why some rows send more than they need to; each reason once, with its axes."""
    axes: dict[str, list[str]] = {}
    for row in rows:
        if row.reason and row.axis not in axes.setdefault(row.reason, []):
            axes[row.reason].append(row.axis)
    return [f"{', '.join(names)}: {reason}" for reason, names in axes.items()]


def size_text(nbytes: int) -> str:
    size, unit = float(nbytes), 0
    while size >= 1024 and unit < len(UNITS) - 1:
        size, unit = size / 1024, unit + 1
    return f"{nbytes} B" if unit == 0 else f"{size:.2f} {UNITS[unit]}"
