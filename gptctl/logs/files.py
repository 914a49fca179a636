"""What a log file is, where its bytes come from, and which files a reader wants. Knows neither paths nor protocols.

`LogFiles` is all that a transport has to offer; `local.py` has the one for local paths.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol

from gptctl.engine.run_folder import json_lines
from trainer.errors import WRONG_USAGE, UserError

Kind = Literal["rank", "node", "batch", "file"]
ORDER: tuple[Kind, ...] = ("rank", "node", "batch", "file")
HIGHEST_RANK = 9_999_999
_NAME = re.compile(r"workerlog\.(\d{1,7})|node\.(\d{1,7})\.log|(batch)\.log")


class LogFile(NamedTuple):
    attempt: int
    kind: Kind
    number: int  # the rank or the node, otherwise 0
    name: str
    size: int
    changed: float
    identity: tuple[int, ...] = ()  # device and inode; empty where a transport knows none

    def grown(self, size: int, changed: float) -> LogFile:
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
    """The files of one job. Whatever is missing or out of reach is left out or empty; nothing raises."""

    def attempts(self) -> list[int]: ...

    def scan(self, first: int = 0) -> list[LogFile]:
        """The log files of the attempts from `first` on, as they are now; called once per tick."""

    def read(self, file: LogFile, offset: int, size: int) -> bytes:
        """At most `size` bytes; of exactly this file, even if it has lost its name since the scan."""

    def release(self, file: LogFile) -> None:
        """The file is not needed for now; a later read opens it afresh."""

    def records(self, attempt: int) -> dict[str, bytes]:
        """The `ranks.<n>.jsonl` and `node.<n>.exit` of an attempt."""


def kind_of(name: str) -> tuple[Kind, int] | None:
    """What a file of an attempt's folder holds, by its name."""
    found = _NAME.fullmatch(name)
    if not found:
        return None
    rank, node, _ = found.groups()
    return ("rank", int(rank)) if rank else ("node", int(node)) if node else ("batch", 0)


def parse_ranks(text: str) -> tuple[range, ...]:
    """`0,3,8-11`, kept as ranges: how far they reach costs nothing."""
    chosen = []
    for part in text.split(","):
        found = re.fullmatch(r"\s*(\d{1,7})(?:\s*-\s*(\d{1,7}))?\s*", part, re.ASCII)
        if not found or int(found[2] or found[1]) < int(found[1]):
            raise UserError(
                f"--rank {text[:100]}: {part.strip()[:40]!r} is neither a rank nor a range up to {HIGHEST_RANK}",
                "write ranks and ranges with commas, such as 0,3,8-11",
                WRONG_USAGE,
            )
        chosen.append(range(int(found[1]), int(found[2] or found[1]) + 1))
    return tuple(chosen)


@dataclass(frozen=True)
class Wanted:
    """Which files: all, or some ranks, or one node; of the latest attempt, or one, or all."""

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
        """The wanted files that are there now."""
        listed = files.scan()
        newest = max((file.attempt for file in listed), default=0)
        one = None if self.all_attempts else newest if self.attempt is None else self.attempt
        return self.choose(files, (file for file in listed if one in (None, file.attempt)))

    def choose(self, files: LogFiles, listed: Iterable[LogFile]) -> list[LogFile]:
        """The wanted ones, in their order: by attempt, ranks first."""
        chosen, nodes = [], {}
        for file in listed:
            if self.attempt not in (None, file.attempt):
                continue
            if self.node is not None and file.attempt not in nodes:
                nodes[file.attempt] = node_of_ranks(files.records(file.attempt))
            if self._has(file, nodes.get(file.attempt, {})):
                chosen.append(file)
        return sorted(chosen, key=lambda file: file.place)

    def is_sure(self, files: LogFiles, file: LogFile) -> bool:
        """Whether it is known on which node a rank is; a log file is there before the record that tells."""
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
            guess = file.number // self.per_node if self.per_node else None
            return nodes.get(file.number, guess) == self.node
        return file.kind == "node" and file.number == self.node


def node_of_ranks(records: Mapping[str, bytes]) -> dict[int, int]:
    events = [
        event
        for name in records
        if name.startswith("ranks.")
        for event in json_lines(records[name])
    ]
    pairs = [(event.get("rank"), event.get("node")) for event in events]
    return {rank: node for rank, node in pairs if isinstance(rank, int) and isinstance(node, int)}
