"""Runs a job on this machine, detached from everything: python -m gptctl.supervisor RUN_DIR

Starts `launch.sh` once for every node, waits, starts failed attempts again, keeps the time limit, and says in
`result.json` how the job ended. Knows the run folder only; whoever wants to stop the job sends SIGTERM.
"""

from __future__ import annotations

import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path

from gptctl.launch import seconds_of
from gptctl.plan import LaunchPlan
from gptctl.processes import adopt_orphans, kill_all, processes_of, send, this_process
from gptctl.run_folder import (
    CANCELLED,
    FAILED,
    STOPPED,
    TIMEOUT,
    RunFolder,
    read_json,
    read_text,
)
from trainer.durable import replacing

TICK = 0.05
LAST_WORDS = 5.0  # seconds that the other nodes get to end by themselves when one has failed
GRACE = 30.0  # seconds between asking a job to stop and ending it; torchrun gives its ranks as many
PORTS = range(20000, 32000)  # below those that outgoing connections take
PORT_TRIES = 3


class Stopped(Exception):
    """The job has to end, for this reason."""

    def __init__(self, state: str, reason: str) -> None:
        super().__init__(reason)
        self.state, self.reason = state, reason


class Supervisor:
    def __init__(self, plan: LaunchPlan) -> None:
        self.folder, self.plan = RunFolder(plan.run_dir), plan
        self.wanted: Stopped | None = None
        self.port: int | None = None  # chosen, not used yet
        limit = seconds_of(plan.time_limit) if plan.time_limit else None
        self.deadline = time.monotonic() + limit if limit else None
        self.environment = {name: value for name, value in os.environ.items() if name != "GPTCTL_READY"}

    def choose_port(self, attempt: int) -> int:
        """Where the ranks of an attempt will meet, for all to read."""
        host = self.plan.master_addr
        self.port = self.plan.master_port or free_port(host)
        self.folder.attempt(attempt).mkdir(exist_ok=True)
        with replacing(self.folder.attempt(attempt) / "endpoint.json") as stream:
            stream.write(json.dumps({"host": host, "port": self.port}).encode())
        return self.port

    def run(self) -> None:
        signal.signal(signal.SIGTERM, self._on_signal)
        state, reason = FAILED, "the supervisor failed; see supervisor.log"
        try:
            self.choose_port(0)  # before gptctl is told that the job exists, and says where it meets
            tell_gptctl(b"1")
            state, reason = self._attempts()
        except Stopped as stop:
            state, reason = stop.state, stop.reason
        except OSError as error:
            reason = f"{error.filename}: {error.strerror}"
        finally:
            kill_all(self.plan.run_dir, os.getpid())
            self.folder.finish(state, reason)
            tell_gptctl(b"1")  # a job that failed at once exists, too

    def _on_signal(self, number: int, frame: object) -> None:
        is_cancelled = self.folder.cancelled.exists()
        what = "cancelled" if is_cancelled else f"the supervisor got {signal.Signals(number).name}"
        self.wanted = Stopped(CANCELLED if is_cancelled else STOPPED, what)

    def _attempts(self) -> tuple[str, str]:
        """Starts the job until it is done, or no further start would help or is allowed."""
        for number in range(self.plan.attempts):
            began = time.time()
            codes = self._attempt(number)
            ended = self.folder.judge(number, codes, self.plan.nnodes, self.plan.output_dir, began)
            reason = f"{ended.reason}{self._last_words(number, next(iter(codes)))}"
            if ended.state != FAILED or self.folder.cannot_be_helped(number):
                break
            print(f"attempt {number}: {reason}", flush=True)
        return ended.state, reason

    def _attempt(self, number: int) -> dict[int, int]:
        """The exit codes of one start of all nodes, the first that failed first."""
        for _ in range(PORT_TRIES):
            already_said = len(self._said(number, 0))
            codes = self._start_and_wait(number)
            if not any(codes.values()) or not self._port_was_taken(number, already_said):
                break
        return codes

    def _start_and_wait(self, number: int) -> dict[int, int]:
        if self.folder.cancelled.exists():
            raise Stopped(CANCELLED, "cancelled")
        port = self.port or self.choose_port(number)
        self.port = None
        logs = self._logs(number)
        logs.mkdir(parents=True, exist_ok=True)
        for stale in self.folder.attempt(number).glob("node.*"):  # of a try whose port was taken
            stale.unlink()
        meeting = {"MASTER_ADDR": self.plan.master_addr, "MASTER_PORT": str(port)}
        nodes = [self._start_node(node, number, logs, meeting) for node in range(self.plan.nodes)]
        try:
            return self._wait(nodes)
        except Stopped:
            self._stop(nodes, number)
            raise

    def _start_node(self, node: int, attempt: int, logs: Path, meeting: Mapping[str, str]) -> subprocess.Popen[bytes]:
        number = {"GPTCTL_NODE": str(node), "GPTCTL_ATTEMPT": str(attempt), "GPTCTL_RUN_DIR": self.plan.run_dir}
        with open(logs / f"node.{node}.log", "ab") as log:
            return subprocess.Popen(
                ["bash", os.path.join(self.plan.run_dir, "launch.sh")],
                env={**self.environment, **meeting, **number},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def _wait(self, nodes: list[subprocess.Popen[bytes]]) -> dict[int, int]:
        """Until all nodes have ended; once one has failed, the others have little time left."""
        codes: dict[int, int] = {}
        for _ in self._ticks():
            for node, process in enumerate(nodes):
                code = process.poll()
                if code is not None and node not in codes:
                    codes[node] = code if code >= 0 else 128 - code
            if len(codes) == len(nodes):
                break
            if any(codes.values()) and not self.plan.is_elastic:
                self._end(nodes, LAST_WORDS)
        return dict(sorted(codes.items(), key=lambda item: item[1] == 0))

    def _ticks(self) -> Iterator[None]:
        while True:
            yield
            if self.wanted:
                raise self.wanted
            if self.deadline and time.monotonic() > self.deadline:
                raise Stopped(TIMEOUT, f"the time limit of {self.plan.time_limit} is over")
            time.sleep(TICK)

    def _stop(self, nodes: list[subprocess.Popen[bytes]], attempt: int) -> None:
        """Asks torchrun to end; ranks get the signal from it, and time to save. Before ranks run, none is needed."""
        asked: set[int] = set()
        deadline = time.monotonic() + GRACE
        while any(process.poll() is None for process in nodes) and time.monotonic() < deadline:
            if self.folder.is_hurried() or not self.folder.rank_events(attempt):
                break
            for node, pid in self.folder.torchruns(attempt).items():
                if node not in asked and nodes[node].poll() is None:
                    asked.add(node)
                    self._wake_and_ask(pid)
            time.sleep(TICK)
        self._end(nodes, 0.0)

    def _wake_and_ask(self, torchrun: int) -> None:
        for pid in processes_of(self.plan.run_dir):  # one that is stopped could not answer
            send(pid, signal.SIGCONT)
        send(torchrun, signal.SIGTERM)

    def _end(self, nodes: list[subprocess.Popen[bytes]], patience: float) -> None:
        deadline = time.monotonic() + patience
        while any(process.poll() is None for process in nodes) and time.monotonic() < deadline:
            time.sleep(TICK)
        kill_all(self.plan.run_dir, os.getpid())
        for process in nodes:
            process.wait()

    def _last_words(self, attempt: int, node: int) -> str:
        """What a node said that failed before it had a rank."""
        if self.folder.rank_events(attempt) or self.folder.exit_codes(attempt, self.plan.nodes).get(node) == 0:
            return ""
        lines = self._said(attempt, node).split("\n")
        return next((f": {line.strip()[:200]}" for line in reversed(lines) if line.strip()), "")

    def _said(self, attempt: int, node: int) -> str:
        return read_text(self._logs(attempt) / f"node.{node}.log")

    def _logs(self, attempt: int) -> Path:
        return Path(self.plan.log_dir) / f"attempt-{attempt}"

    def _port_was_taken(self, attempt: int, already_said: int) -> bool:
        """Between choosing a port and using it somebody else may take it; no rank has started then."""
        if self.plan.master_port or self.folder.rank_events(attempt):
            return False
        log = self._said(attempt, 0)[already_said:]
        return "EADDRINUSE" in log or "address already in use" in log.lower()


def free_port(host: str) -> int:
    """A port that nobody listens on now."""
    for port in random.sample(PORTS, 200):
        with socket.socket() as probe, suppress(OSError):
            probe.bind((host, port))
            return port
    raise OSError(98, "no free port", f"{host}:{PORTS.start}-{PORTS.stop}")


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
    for number in (signal.SIGHUP, signal.SIGINT):  # they belong to terminals; ignored, they would be for the ranks too
        signal.signal(number, lambda number, frame: None)
    adopt_orphans()
    plan = LaunchPlan.from_json(read_json(folder.path / "plan.json") or {})
    supervisor = Supervisor(plan)
    if folder.take(this_process()):
        supervisor.run()
    else:
        tell_gptctl(b"0")


if __name__ == "__main__":
    main()
