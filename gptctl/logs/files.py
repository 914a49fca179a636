"""What a log file is, and which files a reader wants. Knows neither paths nor protocols.

`LogFiles` is what a transport must offer; `local_files.py` implements it for local paths.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol

from gptctl.engine.rank_runs import rank_runs
from trainer.errors import WRONG_USAGE, UserError

Kind = Literal["rank", "node", "batch", "file"]
# Lines of the same time are shown in this order.
ORDER: tuple[Kind, ...] = ("rank", "node", "batch", "file")
HIGHEST_RANK = 9_999_999  # the seven digits of _NAME
_NAME = re.compile(r"workerlog\.(\d{1,7})|node\.(\d{1,7})\.log|(batch)\.log")


class LogFile(NamedTuple):
    attempt: int
    kind: Kind
    number: int  # the rank or the node, otherwise 0
    name: str
    size: int
    changed: float
    identity: tuple[int, ...] = ()  # device and inode; empty if a transport has none

    def grown(self, size: int, changed: float) -> LogFile:
        # Not _replace, which is slower: this runs for every file that grew, on every scan.
        return LogFile(
            self.attempt, self.kind, self.number, self.name, size, changed, self.identity
        )

    @property
    def label(self) -> str:
        return f"{self.kind} {self.number}" if self.kind in ("rank", "node") else self.kind

    @property
    def place(self) -> tuple[int, int, int]:
        return (self.attempt, ORDER.index(self.kind), self.number)


class LogFiles(Protocol):
    """The log files of a job. Missing or unreachable files are omitted or empty; nothing raises."""

    def attempts(self) -> list[int]: ...

    def scan(self, first: int = 0) -> list[LogFile]:
        """List the log files of the attempts from `first` on."""

    def written(self) -> list[LogFile] | None:
        """List the files written since they were listed last; None if only `scan` can tell."""

    def wait(self, seconds: float) -> None:
        """Return after this time, or as soon as a file was written, if that is reported."""

    def read(self, file: LogFile, offset: int, size: int) -> bytes:
        """Read at most `size` bytes of this very file, even if it was renamed since the scan."""

    def next_data(self, file: LogFile, offset: int) -> int:
        """Where the gap that begins here ends; `offset` if there is no gap."""

    def release(self, file: LogFile) -> None:
        """Close the file; a later read opens it again."""

    def records(self, attempt: int) -> dict[str, bytes]:
        """Read the files `ranks.<n>.jsonl` and `node.<n>.exit` of an attempt.

        Lines of a node about ranks that it does not have are left out.
        """


def kind_of(name: str) -> tuple[Kind, int] | None:
    """Tell from its name what a file in an attempt's folder contains; None if it is not a log."""
    found = _NAME.fullmatch(name)
    if not found:
        return None
    rank, node, _ = found.groups()
    return ("rank", int(rank)) if rank else ("node", int(node)) if node else ("batch", 0)


def parse_ranks(text: str) -> tuple[range, ...]:
    """Parse ranks and ranges such as `0,3,8-11`."""
    # Kept as ranges: 0-9999999 must not become a list.
    chosen = []
    for part in text.split(","):
        found = re.fullmatch(r"\s*(\d{1,7})(?:\s*-\s*(\d{1,7}))?\s*", part, re.ASCII)
        if not found or int(found[2] or found[1]) < int(found[1]):
            raise UserError(
                f"--rank {text[:100]}: {part.strip()[:40]!r} is not a rank or range "
                f"from 0 to {HIGHEST_RANK}",
                "separate ranks and ranges with commas, such as 0,3,8-11",
                WRONG_USAGE,
            )
        chosen.append(range(int(found[1]), int(found[2] or found[1]) + 1))
    return tuple(chosen)


@dataclass(frozen=True)
class FileFilter:
    """Which files to read: all, some ranks or one node; of the latest, one or all attempts."""

    ranks: tuple[range, ...] | None = None
    node: int | None = None
    per_node: int | None = None  # ranks per node, for ranks that no record mentions
    attempt: int | None = None
    all_attempts: bool = False

    def first_attempt(self, attempts: Iterable[int]) -> int:
        if self.attempt is not None:
            return self.attempt
        return 0 if self.all_attempts else max(attempts, default=0)

    def now(self, files: LogFiles) -> list[LogFile]:
        """List the wanted files that exist now."""
        listed = files.scan()
        # The newest attempt that has logs: a new attempt without any would show nothing.
        newest = max((file.attempt for file in listed), default=0)
        one = None if self.all_attempts else newest if self.attempt is None else self.attempt
        return self.choose(files, (file for file in listed if one in (None, file.attempt)))

    def choose(self, files: LogFiles, listed: Iterable[LogFile]) -> list[LogFile]:
        """Choose the wanted files, sorted by attempt, ranks first."""
        chosen, nodes = [], {}
        for file in listed:
            if self.attempt not in (None, file.attempt):
                continue
            # Read the records once per attempt, and only if a node was asked for.
            if self.node is not None and file.attempt not in nodes:
                nodes[file.attempt] = node_of_ranks(files.records(file.attempt))
            if self._has(file, nodes.get(file.attempt, {})):
                chosen.append(file)
        return sorted(chosen, key=lambda file: file.place)

    def is_placed(self, files: LogFiles, file: LogFile) -> bool:
        """Whether the records say on which node a rank runs."""
        # A log file appears before its record: a file that is not wanted now may be wanted later.
        return (
            self.node is None
            or file.kind != "rank"
            or file.number in node_of_ranks(files.records(file.attempt))
        )

    def _has(self, file: LogFile, nodes: Mapping[int, int]) -> bool:
        if self.ranks is not None and not (
            file.kind == "rank" and any(file.number in several for several in self.ranks)
        ):
            return False
        if self.node is None:
            return True
        if file.kind == "rank":
            # Ranks are numbered node by node. The record wins, since elastic jobs may differ.
            guess = file.number // self.per_node if self.per_node else None
            return nodes.get(file.number, guess) == self.node
        return file.kind == "node" and file.number == self.node


def node_of_ranks(records: Mapping[str, bytes]) -> dict[int, int]:
    return {run.rank: run.node for run in rank_runs(records) if run.node is not None}
