"""Which host each file of a job is copied from. A host may be hostile: it must not be able to write
into the copies of another host's files.

The name of a file tells its owner. Where it does not, the first host that offers a file owns it for
ever: the journal `file-owners` in the job's folder here remembers that for later commands, by a
hash of its path: names are chosen by hosts, and may be long and many.
"""

from __future__ import annotations

import hashlib
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
from trainer.checkpoint_names import ENVIRONMENT
from trainer.trace_files import parse_trace_name

JOURNAL = "file-owners"
BATCH_LOG = "batch.log"  # of Slurm
MAX_JOURNAL = 256 << 20  # bytes; the limits below leave it half empty
MAX_OWNED = 100_000  # files that one host can own by offering them first
MAX_LINES = 1_000_000  # of all hosts together: each has a share
MAX_REFUSED = 100  # files of one host that the journal names; a hostile one may offer millions
LONGEST_NAMED = 200  # characters of each of them
MAX_NAMED = 5  # files that one message names
OWNED, REFUSED, TOLD = "owned", "refused", "told"
NO_SERIES = "-"
_NODE = re.compile(r"\d{1,7}", re.ASCII)
_OF_NODE = re.compile(r"node\.(\d{1,7})\..+|ranks\.(\d{1,7})\.jsonl", re.ASCII)
_OF_RANK = re.compile(r"(?:workerlog\.|stacks\.|nccl_trace_rank_)(\d{1,7})", re.ASCII)
# `rank_3.safetensors` of a checkpoint, or `__3_0.distcp` of a sharded one.
_SAVED_BY_RANK = re.compile(r"rank_(\d{1,7})\.safetensors|__(\d{1,7})_\d{1,7}\.distcp", re.ASCII)
_OF_CHECKPOINT = re.compile(r"output/step_\d+(\.aside\d+)?/.+", re.DOTALL)
FIRST = 0  # the node that runs the supervisor: it alone knows how the job ends


def owner_by_name(path: str, plan: LaunchPlan) -> int | None:
    """Return the node that a file belongs to by its name; None: the first that offers it.

    `path` is relative to the job's folder on this machine.
    """
    folder, _, _ = path.partition("/")
    name = os.path.basename(path)
    # Traces of the profiler, which are below the output folder or in one of their own.
    if folder in ("output", "profiler_log") and (traced := parse_trace_name(name)):
        return node_of_rank(traced.rank, plan)
    if folder == "output":
        # The ranks of any host save, and a job that continues in another layout has others.
        if _OF_CHECKPOINT.fullmatch(path):
            return None
        # With c10d, torchrun itself numbers the nodes: rank 0 may be on any host.
        return None if plan.form == "c10d" else FIRST
    if folder != "work" and (found := _OF_NODE.fullmatch(name)):
        return int(found[1] or found[2])
    if folder != "work" and (found := _OF_RANK.fullmatch(name)):
        return node_of_rank(int(found[1]), plan)
    # The first rank writes it: see above.
    if name == ENVIRONMENT and plan.form == "c10d":
        return None
    # A script may write anything to its own folder, and to that of the logs.
    is_free = folder == "work" or (folder == "logs" and name != BATCH_LOG)
    return None if is_free else FIRST


def saver_by_name(name: str, plan: LaunchPlan) -> int | None:
    """Return the node whose rank saves this file of a checkpoint in the layout of the job."""
    found = _SAVED_BY_RANK.fullmatch(name)
    return node_of_rank(int(found[1] or found[2]), plan) if found else None


class Journal(NamedTuple):
    """What is remembered about the files of a job."""

    owners: dict[str, int]  # node by hash of the path
    num_owned: Counter[int]  # files by node
    num_in_series: Counter[tuple[int, str]]  # by node and series, such as all `workerlog.N`
    refused: dict[str, set[str]]  # paths that a host offered, by its name
    untold: dict[str, list[str]]  # those of them that the user has not been told yet

    def set_owner(self, key: str, series: str, node: int) -> None:
        """Note the owner of a file, unless it has one."""
        if key not in self.owners:
            self.owners[key] = node
            self.num_owned[node] += 1
            if series != NO_SERIES:
                self.num_in_series[node, series] += 1


def parse_journal(text: str) -> Journal:
    """Read the lines of a journal; skip damaged ones."""
    journal = Journal({}, Counter(), Counter(), {}, {})
    # The last line may be incomplete.
    for line in text.split("\n")[:-1]:
        match line.split(" "):
            case [kind, node, key, series] if kind == OWNED and _NODE.fullmatch(node):
                # The first one stays: two processes may have written at the same time.
                journal.set_owner(key, series, int(node))
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
            # Nobody owns a file that was offered after a host had reached its limit.
            if owner != node and is_forged and not (owner is None and self._is_full(node)):
                self._refuse(host, path)
            return owner == node

    def _owner(self, node: int, path: str) -> int | None:
        by_name = owner_by_name(path, self._plan)
        if by_name is not None:
            return by_name
        owners, key, series = self._known.owners, _hash(path), _series(path)
        if key not in owners and self._may_claim(node, series):
            self._known.set_owner(key, series, node)
            self._append(f"{OWNED} {node} {key} {series}")
        return owners.get(key)

    def _may_claim(self, node: int, series: str) -> bool:
        """A node has so many ranks and no more: a hostile one must not claim the logs of all."""
        is_of_rank = series != NO_SERIES
        num_ranks = self._known.num_in_series[node, series]
        return not self._is_full(node) and (not is_of_rank or num_ranks < self._plan.per_node)

    def _is_full(self, node: int) -> bool:
        return self._known.num_owned[node] >= min(MAX_OWNED, MAX_LINES // self._plan.nodes)

    def _refuse(self, host: str, path: str) -> None:
        refused, name = self._known.refused.setdefault(host, set()), path[:LONGEST_NAMED]
        if name not in refused and len(refused) < MAX_REFUSED:
            refused.add(name)
            self._append(f"{REFUSED} {_quoted(host)} {_quoted(name)}")

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


def _hash(path: str) -> str:
    # Half of it: nobody can find another path with the same 128 bits.
    return hashlib.sha256(os.fsencode(path)).hexdigest()[:32]


def _series(path: str) -> str:
    """A word for all files of ranks that differ in the rank only."""
    name = os.path.basename(path)
    if traced := parse_trace_name(name):
        return _hash(os.path.join(os.path.dirname(path), str(traced._replace(rank=0))))
    return _hash(path.rstrip("0123456789")) if _OF_RANK.fullmatch(name) else NO_SERIES


def _quoted(text: str) -> str:
    # A name may contain spaces, newlines and bytes that are not UTF-8.
    return quote_from_bytes(os.fsencode(text))


def _unquoted(text: str) -> str:
    return os.fsdecode(unquote_to_bytes(text))
