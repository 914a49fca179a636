"""All nodes of an attempt: start them, wait for them, stop them together.

Knows neither where nodes run (each is a `NodeHandle`) nor why a job must stop.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Protocol

from gptctl.engine.node import TICK, NodeExit

EXIT_TIMEOUT = 5.0  # seconds in which the other nodes may exit by themselves after one failed


class NodeHandle(Protocol):
    """A node of the job, wherever it runs. `node.py` describes what each method does."""

    number: int

    def start(self, attempt: int, host: str, port: int) -> None: ...

    def exited(self) -> NodeExit | None: ...

    def has_ranks(self) -> bool: ...

    def can_stop_gracefully(self) -> bool: ...

    def request_stop(self) -> None: ...

    def begin_kill(self) -> None: ...

    def kill(self) -> bool: ...

    def is_lost(self) -> bool: ...

    def output(self) -> str: ...


class NodeGroup:
    def __init__(self, nodes: Sequence[NodeHandle]) -> None:
        self._nodes = nodes

    def start(self, attempt: int, host: str, port: int) -> None:
        for node in self._nodes:
            node.start(attempt, host, port)

    def wait(self, check: Callable[[], None], needs_all: bool) -> dict[int, NodeExit]:
        """Wait until all nodes have exited; call `check` meanwhile, which may raise.

        If the job needs all nodes and one fails, the others are stopped soon. The node that
        failed first comes first in the result.
        """
        exits: dict[int, NodeExit] = {}
        stopped: set[int] = set()
        while True:
            for node in self._nodes:
                if node.number not in exits and (end := node.exited()):
                    exits[node.number] = end._replace(was_stopped=node.number in stopped)
            if len(exits) == len(self._nodes):
                return _failures_first(exits)
            if needs_all and any(end.code for end in exits.values()):
                # The others usually fail because of it: let them write their own errors first.
                self._await_exit(EXIT_TIMEOUT, check)
                stopped |= {node.number for node in self._nodes if not node.exited()}
                self.kill()
            check()
            time.sleep(TICK)

    def exits(self) -> dict[int, NodeExit]:
        """Return the nodes that have exited; the one that failed first comes first."""
        found = {node.number: node.exited() for node in self._nodes}
        return _failures_first({number: end for number, end in found.items() if end})

    def stop(self, timeout: float, is_urgent: Callable[[], bool]) -> None:
        """Ask the nodes to stop, so that ranks can save; then kill what is left."""
        deadline = time.monotonic() + timeout
        while self._are_running() and time.monotonic() < deadline and not is_urgent():
            if not any(node.can_stop_gracefully() for node in self._nodes):
                break
            for node in self._nodes:
                node.request_stop()
            time.sleep(TICK)
        self.kill()

    def kill(self) -> list[int]:
        """Kill all nodes; return those that did not confirm that nothing is left there."""
        # Ask all of them first: otherwise hosts would kill their ranks one after the other, and
        # each that does not answer would delay the rest.
        for node in self._nodes:
            node.begin_kill()
        return [node.number for node in self._nodes if not node.kill()]

    def lost(self) -> list[int]:
        """Return the nodes that cannot take part in another attempt."""
        return [node.number for node in self._nodes if node.is_lost()]

    def have_ranks(self) -> bool:
        """Whether any rank of the attempt has started."""
        return any(node.has_ranks() for node in self._nodes)

    def output(self) -> str:
        """Return what node 0 has printed since its start."""
        return self._nodes[0].output()

    def _are_running(self) -> bool:
        return any(not node.exited() for node in self._nodes)

    def _await_exit(self, timeout: float, check: Callable[[], None]) -> None:
        deadline = time.monotonic() + timeout
        while self._are_running() and time.monotonic() < deadline:
            check()
            time.sleep(TICK)


def _failures_first(exits: dict[int, NodeExit]) -> dict[int, NodeExit]:
    return dict(sorted(exits.items(), key=lambda item: (item[1].code == 0, item[1].time)))
