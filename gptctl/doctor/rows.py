"""What the doctor found: one row for each check and node. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Literal, NamedTuple

from trainer.errors import Finding

State = Literal["ok", "notice", "warning", "wrong"]
STATES: tuple[State, ...] = ("ok", "notice", "warning", "wrong")
MAX_NAMED = 4  # nodes in one line of the table


class Row(NamedTuple):
    check: str
    node: str  # empty: not of one node
    state: State
    found: str
    fix: str = ""  # of every row that is not ok

    def as_json(self) -> dict[str, Any]:
        return self._asdict()


def ok(check: str, found: str, node: str = "") -> Row:
    return Row(check, node, "ok", found)


def wrong(check: str, found: str, fix: str, node: str = "") -> Row:
    return Row(check, node, "wrong", found, fix)


def warning(check: str, found: str, fix: str, node: str = "") -> Row:
    return Row(check, node, "warning", found, fix)


def of_finding(finding: Finding) -> Row:
    """A rule of profiles that was broken."""
    states: dict[str, State] = {"error": "wrong", "warning": "warning", "notice": "notice"}
    where = f" ({finding.place})" if finding.place else ""
    return Row(
        "profile",
        "",
        states[finding.level],
        f"{finding.key}{where}: {finding.message}",
        finding.hint,
    )


def is_wrong(rows: Iterable[Row]) -> bool:
    return any(row.state == "wrong" for row in rows)


def merged(rows: Iterable[Row]) -> list[Row]:
    """Nodes of which the same was found, in one row."""
    nodes: dict[Row, list[str]] = {}
    for row in rows:
        nodes.setdefault(row._replace(node=""), []).append(row.node)
    return [row._replace(node=_named(names)) for row, names in nodes.items()]


def _named(nodes: Sequence[str]) -> str:
    names = [*dict.fromkeys(filter(None, nodes))]
    if len(names) <= MAX_NAMED:
        return ", ".join(names)
    return f"{', '.join(names[: MAX_NAMED - 1])}, … ({len(names)} nodes)"


def tally(rows: Sequence[Row]) -> str:
    """`2 wrong, 1 warning`"""
    count = {state: sum(row.state == state for row in rows) for state in STATES}
    words = [f"{count['wrong']} wrong" if count["wrong"] else "nothing is wrong"]
    words += [
        f"{count[state]} {state}{'s' * (count[state] > 1)}"
        for state in ("warning", "notice")
        if count[state]
    ]
    return ", ".join(words)
