"""The answer of `gptctl why` for people: one name and one text per line. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from gptctl.jobs.progress_text import age_text, status_pairs
from gptctl.text import count

Row = tuple[str, str]
Facts = dict[str, Any]


def why_pairs(facts: Facts, now: float) -> list[Row]:
    """The lines of the answer, the most important first; what is not known has none."""
    reason = f": {facts['reason']}" if facts["reason"] else ""
    rows: list[Row] = [("state", f"{facts['state']}{reason}")]
    if facts["waiting"]:
        rows += _waiting_rows(facts["waiting"])
    if facts["running"]:
        rows += _running_rows(facts["running"], now)
    rows += _failure_rows(facts)
    rows += _earlier_rows(facts)
    rows += _numbered("try", facts["commands"])
    return [(name, text) for name, text in rows if text]


def _numbered(name: str, texts: Sequence[str]) -> list[Row]:
    """A line for each text; only the first one is named."""
    return [("" if number else name, text) for number, text in enumerate(texts)]


def _waiting_rows(waiting: Facts) -> Iterator[Row]:
    never = "; it will never start as it is" if waiting["never_starts"] else ""
    yield "waits", f"{waiting['cause']}{never}" if waiting["cause"] else "for an unknown reason"
    yield "fix", waiting["fix"]
    yield "nodes", _nodes(waiting)
    yield "priority", _place(waiting)
    yield "expected", waiting["expected_start"]
    yield from _numbered("sooner", [_sooner(each) for each in waiting["sooner"]])
    yield "not asked", waiting["not_asked"]


def _sooner(change: Facts) -> str:
    when = f"would start {change['start']}" if change["start"] else "could start now"
    return f"{change['option']}: {when}" + (f": {change['why']}" if change["why"] else "")


def _nodes(waiting: Facts) -> str:
    wanted, total = waiting["nodes_wanted"], waiting["nodes_total"]
    if wanted is None:
        return ""
    if total is None:
        return f"it needs {wanted}"
    unusable = waiting["nodes_unusable"]
    lost = f", {unusable} unusable" if unusable else ""
    idle = f"{waiting['nodes_idle']} of {total} in {waiting['partition']} are idle{lost}"
    return f"it needs {wanted}; {idle}"


def _place(waiting: Facts) -> str:
    if waiting["priority"] is None:
        return ""
    ahead, pending = waiting["ahead"], count(waiting["pending"], "pending job")
    place = f"{ahead} of {pending} come before it" if ahead else f"the first of {pending}"
    return f"{waiting['priority']}; {place}"


def _running_rows(running: Facts, now: float) -> Iterator[Row]:
    if running["progress"] is None:
        yield "progress", "it has logged no step yet"
    yield from status_pairs(running, now)
    idle, usual = running["idle"], running["usual_interval"]
    if idle is None or not running["seems_stuck"]:
        return
    if usual is None:
        yield "stuck?", f"no log line for {age_text(idle)}"
    else:
        took = f"it usually logs one every {usual:,.1f} s"
        yield "stuck?", f"no step for {age_text(idle)}; {took}. An evaluation may take longer"


def _failure_rows(facts: Facts) -> Iterator[Row]:
    failure, likely = facts["failure"], facts["likely_cause"]
    if failure:
        yield "first", _who(failure)
    if likely is None:
        if failure:
            yield "cause", "not one that gptctl knows: read the last lines of its log"
        return
    if likely["code"]:
        yield "cause", f"{likely['code']} {likely['title']}: {likely['cause']}"
        is_new = likely["where"] not in ("state", "the failure") and likely["line"]
        yield "seen in", f"{likely['where']}: {likely['line']}" if is_new else ""
    yield "fix", likely["fix"]


def _who(failure: Facts) -> str:
    """`rank 3 on gpu7 (node 1, attempt 0), then 7 ranks because of it`"""
    rank, node, host = (failure.get(name) for name in ("rank", "node", "host"))
    who = f"node {node}" if rank is None else f"rank {rank}"
    on = f" on {host}" if host and host != "?" else ""
    where = [f"node {node}"] if rank is not None and node is not None else []
    place = ", ".join([*where, f"attempt {failure['attempt']}"])
    after = count(failure["followed"], "rank") if failure["followed"] else ""
    return f"{who}{on} ({place})" + (f", then {after} because of it" if after else "")


def _earlier_rows(facts: Facts) -> Iterator[Row]:
    earlier = facts["recovered_from"]
    if facts["state"] == "COMPLETED":
        yield "result", "it completed: there is nothing to fix"
    if earlier:
        yield "recovered", f"from attempt {earlier['attempt']}: {earlier['reason']}"
