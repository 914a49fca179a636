"""The ranks of a job that run on this machine, found by what rank_log.py recorded and by /proc."""

from __future__ import annotations

import os
from typing import NamedTuple

from gptctl.engine.contract import RUN_DIR_VARIABLE
from gptctl.engine.file_reading import json_lines, read_bytes
from gptctl.engine.processes import PROC
from gptctl.engine.run_folder import RunFolder


class LiveRank(NamedTuple):
    """A rank whose process runs."""

    rank: int
    node: int
    pid: int


def live_ranks(folder: RunFolder) -> list[LiveRank]:
    """The ranks of the latest attempt on this machine, by number."""
    started: dict[int, LiveRank] = {}
    for file in sorted(folder.attempt(folder.attempts() - 1).glob("ranks.*.jsonl")):
        for event in json_lines(read_bytes(file)):
            match event:
                # torchrun may have restarted the rank: the last start counts.
                case {"event": "start", "rank": int(rank), "node": int(node), "pid": int(pid)}:
                    started[rank] = LiveRank(rank, node, pid)
    return [found for _, found in sorted(started.items()) if _runs_here(folder, found)]


def _runs_here(folder: RunFolder, found: LiveRank) -> bool:
    # Another process may have the pid by now, here or on another host with the same folder.
    variables = environment_of(found.pid)
    is_own = variables.get(RUN_DIR_VARIABLE) == str(folder.path)
    # A rank that torchrun forked was started with torchrun's variables, but has a name of its own.
    names = {variables.get("RANK"), _name_of(found.pid).removeprefix("rank ")}
    return is_own and str(found.rank) in names


def _name_of(pid: int) -> str:
    try:
        return (PROC / str(pid) / "comm").read_text(errors="replace").strip()
    except OSError:
        return ""


def environment_of(pid: int) -> dict[str, str]:
    """The variables with which a process was started; empty if it has exited."""
    try:
        pairs = (PROC / str(pid) / "environ").read_bytes().split(b"\0")
    except OSError:
        return {}
    split = [os.fsdecode(pair).partition("=") for pair in pairs if pair]
    return {name: value for name, _, value in split}
