"""Which node each rank belongs to, and which lines of `ranks.<n>.jsonl` node n may write.

A host may be hostile: it must not be able to report on ranks of another host. Pure: data in, data
out.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from itertools import islice
from typing import Any

from gptctl.engine.file_reading import is_whole, json_lines
from gptctl.engine.launch_plan import LaunchPlan

HIGHEST_RANK = 9_999_999  # the seven digits of the name of its log
_RANKS = re.compile(r"ranks\.(0|[1-9]\d{0,6})\.jsonl", re.ASCII)
# What is read of `ranks.<n>.jsonl`. A node with 1,000 ranks that torchrun restarted 9 times has
# 20,000 lines of 250 bytes; a hostile one may send millions, with anything in them.
LARGEST_RECORDS = 8 << 20  # bytes
MOST_EVENTS = 20_000  # lines
FIELDS = (
    *("event", "rank", "node", "host", "pid", "time", "clock", "exit", "signal"),
    *("max_rss_mb", "oom", "log_start"),
)
Event = dict[str, Any]


def node_of_rank(rank: int, plan: LaunchPlan) -> int | None:
    """Return the node that has this rank; None if that is known only once the job runs."""
    # With c10d, torchrun itself numbers the nodes: rank 0 may be on any host.
    return None if plan.form == "c10d" else rank // max(1, plan.per_node)


def may_have_rank(node: int, rank: object, plan: LaunchPlan | None) -> bool:
    """Whether this is a rank of the job that the node can have; `plan`: None if it is lost."""
    if not is_whole(rank, 0, plan.world if plan else HIGHEST_RANK + 1):
        return False
    return plan is None or node_of_rank(rank, plan) in (None, node)


def node_in_name(name: str) -> int | None:
    """Return n of `ranks.<n>.jsonl`; None for another file."""
    found = _RANKS.fullmatch(name)
    return int(found[1]) if found else None


def rank_events(data: bytes) -> list[Event]:
    """Return what the ranks of a node recorded: plain values of the fields that are used."""
    lines = islice(json_lines(data[:LARGEST_RECORDS]), MOST_EVENTS)
    return [
        {name: line[name] for name in FIELDS if not isinstance(line.get(name, []), (list, dict))}
        for line in lines
    ]


def own_records(
    records: Mapping[str, bytes], plan: LaunchPlan | None
) -> tuple[dict[str, bytes], list[str]]:
    """Drop the lines of each node about ranks of other nodes; also return the files with such.

    `records`: the files of an attempt by name; those of other kinds are not changed.
    """
    owners: dict[int, int] = {}
    kept, forged = dict(records), []
    nodes = {node: name for name in records if (node := node_in_name(name)) is not None}
    # In order: with c10d, the first node that recorded a rank keeps it.
    for node, name in sorted(nodes.items()):
        events = rank_events(records[name])
        own = [event for event in events if _is_own(event, node, plan)]
        if plan and plan.form == "c10d" and not plan.is_elastic:
            own = _of_group(own, plan, number=0)
            own = [event for event in own if owners.setdefault(event["rank"], node) == node]
        if len(own) < len(events):
            forged.append(name)
        if plan and plan.is_elastic:
            # Not forged: torchrun numbers the nodes again whenever one joins or is lost.
            own = _of_group(own, plan, number=-1)
        if len(own) < len(events):
            kept[name] = b"".join(json.dumps(event).encode() + b"\n" for event in own)
    return kept, forged


def _is_own(event: Event, node: int, plan: LaunchPlan | None) -> bool:
    # A record of an older version may lack the node.
    is_of_node = event.get("node") is None or is_whole(event["node"], node, node + 1)
    return is_of_node and may_have_rank(node, event.get("rank"), plan)


def _of_group(events: list[Event], plan: LaunchPlan, number: int) -> list[Event]:
    """Keep one group of ranks, by the number of its start: torchrun gives a node one at a time."""
    size = max(1, plan.per_node)
    # The record of a start may be lost.
    starts = [event for event in events if event.get("event") == "start"] or events
    group = starts[number]["rank"] // size if starts else 0
    return [event for event in events if event["rank"] // size == group]
