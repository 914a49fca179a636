"""Which host each file of a job is copied from. A host may be hostile: it must not be able to write
into the copies of another host's files.

The name of a file tells its owner. Where it does not, the first host that offers a file owns it for
ever: the journal `file-owners` in the job's folder here remembers that for later commands.
"""

from __future__ import annotations

import os
import re
import threading
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple
from urllib.parse import quote_from_bytes, unquote_to_bytes

from gptctl.engine.file_reading import append_line, read_text
from gptctl.engine.launch_plan import LaunchPlan
from gptctl.engine.rank_owners import node_of_rank
from gptctl.text import clean, some_of

JOURNAL = "file-owners"
BATCH_LOG = "batch.log"  # of Slurm
MAX_JOURNAL = 256 << 20  # bytes: a name has at most 4 KB, most have 60 bytes
MAX_REFUSED = 100  # files of one host that the journal names; a hostile one may offer millions
MAX_NAMED = 5  # files that one message names
OWNED, REFUSED, TOLD = "owned", "refused", "told"
_OF_NODE = re.compile(r"node\.(\d{1,7})\..+|ranks\.(\d{1,7})\.jsonl", re.ASCII)
_OF_RANK = re.compile(r"(?:workerlog\.|stacks\.|nccl_trace_rank_)(\d{1,7})", re.ASCII)
FIRST = 0  # the node that runs the supervisor: it alone knows how the job ends


def owner_by_name(path: str, plan: LaunchPlan) -> int | None:
    """Return the node that a file belongs to by its name; None: the first that offers it.

    `path` is relative to the job's folder on this machine.
    """
    folder, _, _ = path.partition("/")
    name = os.path.basename(path)
    if folder == "output":
        # With c10d, torchrun itself numbers the nodes: rank 0 may be on any host.
        return None if plan.form == "c10d" else FIRST
    if folder != "work" and (found := _OF_NODE.fullmatch(name)):
        return int(found[1] or found[2])
    if folder != "work" and (found := _OF_RANK.fullmatch(name)):
        return node_of_rank(int(found[1]), plan)
    # A script may write anything to its own folder, and to that of the logs.
    is_free = folder == "work" or (folder == "logs" and name != BATCH_LOG)
    return None if is_free else FIRST


class Journal(NamedTuple):
    """What is remembered about the files of a job."""

    owners: dict[str, int]  # node by path
    num_owned: Counter[tuple[int, str]]  # files by node and series, such as all `workerlog.N`
    refused: dict[str, set[str]]  # paths that a host offered, by its name
    untold: dict[str, list[str]]  # those of them that the user has not been told yet

    def set_owner(self, path: str, node: int) -> None:
        """Note the owner of a file, unless it has one."""
        if path not in self.owners:
            self.owners[path] = node
            self.num_owned[node, _series(path)] += 1


def parse_journal(text: str) -> Journal:
    """Read the lines of a journal; skip damaged ones."""
    journal = Journal({}, Counter(), {}, {})
    # The last line may be incomplete.
    for line in text.split("\n")[:-1]:
        match line.split(" "):
            case [kind, node, path] if kind == OWNED and node.isdecimal() and len(node) < 8:
                # The first one stays: two processes may have written at the same time.
                journal.set_owner(_unquoted(path), int(node))
            case [kind, host, path] if kind == REFUSED:
                name, file = _unquoted(host), _unquoted(path)
                if file not in journal.refused.setdefault(name, set()):
                    journal.refused[name].add(file)
                    journal.untold.setdefault(name, []).append(file)
            case [kind] if kind == TOLD:
                journal.untold.clear()
    return journal


class FileOwners:
    """Decides for every file that a host offers whether it is copied from there."""

    def __init__(self, folder: Path, plan: LaunchPlan) -> None:
        self._file, self._plan = folder / JOURNAL, plan
        self._journal: Journal | None = None
        # Several hosts are copied at the same time.
        self._lock = threading.Lock()

    def may_take(self, node: int, host: str, path: str, is_forged: bool) -> bool:
        """Whether this file is copied from this node; if not, and it is forged, note it down."""
        with self._lock:
            owner = self._owner(node, path)
            if owner != node and is_forged:
                self._refuse(host, path)
            return owner == node

    def _owner(self, node: int, path: str) -> int | None:
        by_name = owner_by_name(path, self._plan)
        if by_name is not None:
            return by_name
        owners = self._known.owners
        if path not in owners and self._may_claim(node, path):
            self._known.set_owner(path, node)
            self._append(f"{OWNED} {node} {_quoted(path)}")
        return owners.get(path)

    def _may_claim(self, node: int, path: str) -> bool:
        """A node has so many ranks and no more: a hostile one must not claim the logs of all."""
        is_of_rank = _OF_RANK.fullmatch(os.path.basename(path))
        return not is_of_rank or self._known.num_owned[node, _series(path)] < self._plan.per_node

    def _refuse(self, host: str, path: str) -> None:
        refused = self._known.refused.setdefault(host, set())
        if path not in refused and len(refused) < MAX_REFUSED:
            refused.add(path)
            self._append(f"{REFUSED} {_quoted(host)} {_quoted(path)}")

    @property
    def _known(self) -> Journal:
        if self._journal is None:
            self._journal = parse_journal(read_text(self._file, MAX_JOURNAL))
        return self._journal

    def _append(self, line: str) -> None:
        append_line(self._file, line)


def newly_refused(folder: Path) -> list[str]:
    """Describe the forged files that the user has not been told of yet."""
    file = folder / JOURNAL
    untold = parse_journal(read_text(file, MAX_JOURNAL)).untold
    # On a full disk the user is told again.
    with suppress(OSError):
        if untold:
            append_line(file, TOLD)
    return [_refusal(host, paths) for host, paths in untold.items()]


def _refusal(host: str, paths: list[str]) -> str:
    named = some_of(paths, MAX_NAMED)
    return clean(
        f"warning: {host} has files that belong to other hosts: {named}; they are not copied from "
        "there. Check who can write to the job's folder on that host"
    )


def _series(path: str) -> str:
    return path.rstrip("0123456789")


def _quoted(text: str) -> str:
    # A name may contain spaces, newlines and bytes that are not UTF-8.
    return quote_from_bytes(os.fsencode(text))


def _unquoted(text: str) -> str:
    return os.fsdecode(unquote_to_bytes(text))
