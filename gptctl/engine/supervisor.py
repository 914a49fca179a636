"""Runs a job, detached from everything. With all nodes on this machine: python -m gptctl.engine.supervisor RUN_DIR

Starts all nodes, waits, starts failed attempts again, keeps the time limit, and says in `result.json` how the job
ended. Knows the run folder only; whoever wants to stop the job sends SIGTERM.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import Protocol

from gptctl.engine.files import replacing
from gptctl.engine.launch_plan import LaunchPlan, seconds_of
from gptctl.engine.node import Ended, Node
from gptctl.engine.ports import free_port
from gptctl.engine.processes import adopt_orphans, this_process
from gptctl.engine.run_folder import (
    CANCELLED,
    FAILED,
    STOPPED,
    TIMEOUT,
    RunFolder,
    read_json,
)

TICK = 0.05
LAST_WORDS = 5.0  # seconds that the other nodes get to end by themselves when one has failed
GRACE = 30.0  # seconds between asking a job to stop and ending it; torchrun gives its ranks as many
PORT_TRIES = 3


class Stopped(Exception):
    """The job has to end, for this reason."""

    def __init__(self, state: str, reason: str) -> None:
        super().__init__(reason)
        self.state, self.reason = state, reason


class Supervised(Protocol):
    """A node, here or on another machine; see `node.py` for what each of these does."""

    number: int

    def start(self, attempt: int, host: str, port: int) -> None: ...

    def ended(self) -> Ended | None: ...

    def has_ranks(self) -> bool: ...

    def ask(self) -> None: ...

    def kill(self) -> None: ...


class Supervisor:
    """Keeps the nodes of a job in step: all begin an attempt together, and when one has failed the others end."""

    def __init__(
        self, plan: LaunchPlan, nodes: Sequence[Supervised], head: Node, host: str = ""
    ) -> None:
        self.folder, self.plan = RunFolder(plan.run_dir), plan
        self.nodes, self.head = nodes, head
        self.host = host or plan.master_addr
        self.port: int | None = None  # chosen, not used yet
        self.wanted: Stopped | None = None
        limit = seconds_of(plan.time_limit) if plan.time_limit else None
        self.deadline = time.monotonic() + limit if limit else None

    def choose_port(self, attempt: int) -> int:
        """Where the ranks of an attempt will meet, for all to read."""
        here = (
            "" if self.plan.kind == "ssh" else self.host
        )  # by which name others know this host is not asked
        self.port = self.plan.master_port or free_port(here)
        self.folder.attempt(attempt).mkdir(exist_ok=True)
        with replacing(self.folder.attempt(attempt) / "endpoint.json") as stream:
            stream.write(json.dumps({"host": self.host, "port": self.port}).encode())
        return self.port

    def run(self, on_ready: Callable[[], None] = lambda: None) -> None:
        """To the job's end, of which it leaves word; `on_ready` is called once the job exists."""
        signal.signal(signal.SIGTERM, self._on_signal)
        log = (
            f"{self.plan.run_dir}/agent.0.log on its first host"
            if self.plan.kind == "ssh"
            else "supervisor.log"
        )
        state, reason = FAILED, f"gptctl failed to look after it: see {log}"
        try:
            self.choose_port(
                0
            )  # before gptctl is told that the job exists, and says where it meets
            on_ready()
            state, reason = self._attempts()
        except Stopped as stop:
            state, reason = stop.state, stop.reason
        except OSError as error:
            reason = f"{error.filename}: {error.strerror}"
        finally:
            self._kill()
            self.folder.finish(state, reason)
            on_ready()  # a job that failed at once exists, too

    def _on_signal(self, number: int, frame: object) -> None:
        is_cancelled = self.folder.cancelled.exists()
        what = "cancelled" if is_cancelled else f"the supervisor got {signal.Signals(number).name}"
        self.wanted = Stopped(CANCELLED if is_cancelled else STOPPED, what)

    def _attempts(self) -> tuple[str, str]:
        """Starts the job until it is done, or no further start would help or is allowed."""
        for number in range(self.plan.attempts):
            began = time.time()
            ends = self._attempt(number)
            codes = {node: end.code for node, end in ends.items()}
            ended = self.folder.judge(number, codes, self.plan.nnodes, self.plan.output_dir, began)
            last_words = next(iter(ends.values())).last_words
            reason = f"{ended.reason}: {last_words}" if last_words else ended.reason
            if ended.state != FAILED or self.folder.cannot_be_helped(number):
                break
            print(f"attempt {number}: {reason}", flush=True)
        return ended.state, reason

    def _attempt(self, number: int) -> dict[int, Ended]:
        """How one start of all nodes ended, the first that failed first."""
        for _ in range(PORT_TRIES):
            ends = self._start_and_wait(number)
            if not any(end.code for end in ends.values()) or not self._port_was_taken():
                break
        if any(end.is_hopeless for end in ends.values()):
            self.folder.give_up(number)
        return ends

    def _start_and_wait(self, number: int) -> dict[int, Ended]:
        if self.folder.cancelled.exists():
            raise Stopped(CANCELLED, "cancelled")
        port = self.port or self.choose_port(number)
        self.port = None
        if self.plan.hosts:
            (self.folder.attempt(number) / "hosts").write_text(
                "\n".join(self.plan.hosts) + "\n", encoding="utf-8"
            )
        for node in self.nodes:
            node.start(number, self.host, port)
        try:
            return self._wait()
        except Stopped:
            self._stop()
            raise

    def _wait(self) -> dict[int, Ended]:
        """Until all nodes have ended; once one has failed, the others have little time left."""
        ends: dict[int, Ended] = {}
        for _ in self._ticks():
            for node in self.nodes:
                if node.number not in ends and (end := node.ended()):
                    ends[node.number] = end
            if len(ends) == len(self.nodes):
                break
            if any(end.code for end in ends.values()) and not self.plan.is_elastic:
                self._await_end(LAST_WORDS)
                self._kill()
        return dict(sorted(ends.items(), key=lambda item: item[1].code == 0))

    def _ticks(self) -> Iterator[None]:
        while True:
            yield
            if self.wanted:
                raise self.wanted
            if self.deadline and time.monotonic() > self.deadline:
                raise Stopped(TIMEOUT, f"the time limit of {self.plan.time_limit} is over")
            time.sleep(TICK)

    def _stop(self) -> None:
        """Ranks get time to save. Before ranks run, none is needed."""
        deadline = time.monotonic() + GRACE
        while self._runs() and time.monotonic() < deadline:
            if self.folder.is_hurried() or not any(node.has_ranks() for node in self.nodes):
                break
            for node in self.nodes:
                node.ask()
            time.sleep(TICK)
        self._kill()

    def _runs(self) -> bool:
        return any(not node.ended() for node in self.nodes)

    def _await_end(self, patience: float) -> None:
        deadline = time.monotonic() + patience
        while self._runs() and time.monotonic() < deadline:
            time.sleep(TICK)

    def _kill(self) -> None:
        for node in self.nodes:
            node.kill()

    def _port_was_taken(self) -> bool:
        """Between choosing a port and using it somebody else may take it; no rank has started then."""
        if self.plan.master_port or any(node.has_ranks() for node in self.nodes):
            return False
        log = self.head.said()
        return "EADDRINUSE" in log or "address already in use" in log.lower()


def tell_gptctl(answer: bytes) -> None:
    """Once, whether the job exists."""
    ready = os.environ.pop("GPTCTL_READY", "")
    if ready:
        with suppress(BrokenPipeError):  # gptctl may have been killed; the job exists all the same
            os.write(int(ready), answer)
        os.close(int(ready))


def main() -> None:
    run_dir = sys.argv[1]
    folder = RunFolder(run_dir)
    os.umask(0o077)
    for number in (
        signal.SIGHUP,
        signal.SIGINT,
    ):  # they belong to terminals; ignored, they would be for the ranks too
        signal.signal(number, lambda number, frame: None)
    adopt_orphans()
    plan = LaunchPlan.from_json(read_json(folder.path / "plan.json") or {})
    environment = {name: value for name, value in os.environ.items() if name != "GPTCTL_READY"}
    nodes = [Node(plan, number, environment) for number in range(plan.nodes)]
    if folder.take(this_process()):
        Supervisor(plan, nodes, head=nodes[0]).run(on_ready=lambda: tell_gptctl(b"1"))
    else:
        tell_gptctl(b"0")


if __name__ == "__main__":
    main()
