"""Encodes blocks in several processes, and returns the results in the order of the blocks.

Not `multiprocessing.Pool`: its processes keep running if the command is killed.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from multiprocessing.connection import Connection, Pipe, wait
from pathlib import Path
from typing import Any

import trainer
from trainer.corpus.blocks import Block
from trainer.corpus.encoding import Encoded, Rules
from trainer.errors import UserError

_AHEAD = 2  # blocks per worker: one that it encodes, one that waits
_LATE = 4  # blocks per worker that may wait for an earlier one, which limits memory


class Workers:
    """Use as a context: the processes exit when it is left."""

    def __init__(self, count: int, source: str, eos: str | None, rules: Rules) -> None:
        self.members = [_Member(source, eos, rules) for _ in range(count)]

    def __enter__(self) -> Workers:
        return self

    def __exit__(self, *_: object) -> None:
        for member in self.members:
            member.stop()

    def encoded(self, blocks: Iterator[Block]) -> Iterator[tuple[Block, Encoded]]:
        pending: deque[Block] = deque()  # sent, but not returned yet
        results: dict[int, Encoded] = {}
        sent = returned = 0
        more = True
        while more or pending:
            while more and len(pending) < _LATE * len(self.members) and (free := self._free()):
                block = next(blocks, None)
                if block is None:
                    more = False
                    break
                free.give(sent, block)
                pending.append(block)
                sent += 1
            if returned not in results and pending:
                results.update(self._finished())
            while returned in results:
                yield pending.popleft(), results.pop(returned)
                returned += 1

    def _free(self) -> _Member | None:
        least = min(self.members, key=lambda member: len(member.given))
        return least if len(least.given) < _AHEAD else None

    def _finished(self) -> dict[int, Encoded]:
        by_link = {member.link: member for member in self.members if member.given}
        ready: list[Any] = wait(list(by_link))
        return dict(by_link[link].take() for link in ready)


class _Member:
    """One worker process."""

    def __init__(self, source: str, eos: str | None, rules: Rules) -> None:
        self.link: Connection
        self.link, theirs = Pipe()
        self.given: deque[int] = deque()  # numbers of the blocks that it has
        # So that it runs the same code, from whatever folder.
        paths = [str(Path(trainer.__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(filter(None, paths)),
            "TOKENIZERS_PARALLELISM": "false",
        }
        self.process = subprocess.Popen(
            [sys.executable, "-m", "trainer.corpus.worker", str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            env=environment,
            stdin=subprocess.DEVNULL,
        )
        theirs.close()  # otherwise the end of the process would not be noticed
        with suppress(OSError):  # it is dead: `take` says so
            self.link.send((source, eos, tuple(rules)))

    def give(self, number: int, block: Block) -> None:
        self.given.append(number)
        with suppress(OSError):
            self.link.send(block)

    def take(self) -> tuple[int, Encoded]:
        try:
            result = self.link.recv()
        except (EOFError, OSError):
            raise self._death() from None
        if isinstance(result, UserError):
            raise result
        return self.given.popleft(), result

    def _death(self) -> UserError:
        code = self.process.wait()
        how = f"signal {-code}" if code < 0 else f"exit code {code}"
        hint = "run the same command again to continue; with less memory, use fewer --workers"
        return UserError(f"a worker process ended unexpectedly ({how})", hint)

    def stop(self) -> None:
        self.link.close()
        # It may be in the middle of a block, whose result nobody wants.
        self.process.terminate()
        self.process.wait()
