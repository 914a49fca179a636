"""The table that the doctor prints: one row for each check and node. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Literal, NamedTuple

from gptctl.text import count
from trainer.errors import Finding

State = Literal["ok", "notice", "warning", "wrong"]
STATES: tuple[State, ...] = ("ok", "notice", "warning", "wrong")
MAX_NAMED = 4  # nodes in one line of the table


class Row(NamedTuple):
    check: str
    node: str  # empty: the check is not about one node
    state: State
    found: str
    fix: str = ""  # never empty unless the state is ok; of `firewall`, lines for a root shell

    def as_json(self) -> dict[str, Any]:
        return self._asdict()


def ok(check: str, found: str, node: str = "") -> Row:
    return Row(check, node, "ok", found)


def notice(check: str, found: str, fix: str, node: str = "") -> Row:
    return Row(check, node, "notice", found, fix)


def warning(check: str, found: str, fix: str, node: str = "") -> Row:
    return Row(check, node, "warning", found, fix)


def wrong(check: str, found: str, fix: str, node: str = "") -> Row:
    return Row(check, node, "wrong", found, fix)


def profile_row(finding: Finding) -> Row:
    """The row for a rule that the profile breaks."""
    states: dict[str, State] = {"error": "wrong", "warning": "warning", "notice": "notice"}
    where = f" ({finding.place})" if finding.place else ""
    found = f"{finding.key}{where}: {finding.message}"
    return Row("profile", "", states[finding.level], found, finding.hint)


def is_wrong(rows: Iterable[Row]) -> bool:
    return any(row.state == "wrong" for row in rows)


def merged(rows: Iterable[Row]) -> list[Row]:
    """One row for all nodes with the same result."""
    nodes: dict[Row, list[str]] = {}
    for row in rows:
        nodes.setdefault(row._replace(node=""), []).append(row.node)
    return [row._replace(node=_named(names)) for row, names in nodes.items()]


def _named(nodes: Sequence[str]) -> str:
    names = [*dict.fromkeys(filter(None, nodes))]
    if len(names) <= MAX_NAMED:
        return ", ".join(names)
    # A thousand names would hide the rest of the table; --json lists them all.
    return f"{', '.join(names[: MAX_NAMED - 1])}, … ({len(names)} nodes)"


def tally(rows: Sequence[Row]) -> str:
    """`2 problems, 1 warning`"""
    number = {state: sum(row.state == state for row in rows) for state in STATES}
    problems = count(number["wrong"], "problem") if number["wrong"] else "no problems"
    others = [count(number[state], state) for state in ("warning", "notice") if number[state]]
    return ", ".join([problems, *others])
