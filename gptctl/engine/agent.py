"""One host of an ssh job, detached from everything: engine.pyz agent RUN_DIR NODE

Armed first: the agents of the other hosts join that of the first one, and nothing runs. gptctl commits the job with one
word to the first host; from then on the agent there keeps all hosts in step (`supervisor.py`), and nobody needs gptctl.
An agent that nobody commits within its lease takes everything back, as if it had never been there.
"""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from gptctl.engine.atomic_files import replacing
from gptctl.engine.contract import CANNOT_CREATE, ROLL_BACK_VARIABLE
from gptctl.engine.launch_plan import LaunchPlan
from gptctl.engine.messages import (
    HANDSHAKE,
    ConnectionLost,
    MessageStream,
    admit,
    challenge,
    join,
    socket_stream,
)
from gptctl.engine.node import Node, NodeExit
from gptctl.engine.ports import fault_of_port, free_port
from gptctl.engine.processes import adopt_orphans, clean_environment, kill_all, this_process
from gptctl.engine.run_folder import RunFolder, read_plan
from gptctl.engine.supervisor import TICK, Supervisor

PULSE = 2.0  # seconds between two signs of life of an agent that has nothing else to say
SILENCE = 90.0  # seconds without one after which a host is given up
KILL_PATIENCE = 5.0  # seconds that another host has to end its ranks
MOST_STRANGERS = 64


class Refused(Exception):
    """The job cannot run on this host, for this reason."""


class HostAgent:
    """What the agents of all hosts have in common."""

    def __init__(self, plan: LaunchPlan, number: int, gptctl: MessageStream) -> None:
        self.plan, self.number, self.gptctl = plan, number, gptctl
        self.folder = RunFolder(plan.remote_dir)
        hello = gptctl.receive(HANDSHAKE)
        if not hello:
            raise Refused("gptctl says nothing")
        self.key = bytes.fromhex(hello["key"])
        self.lease = float(hello["lease"])
        self.address = str(hello["address"] or address_here())
        self.node = Node(plan, number, {**clean_environment(), **hello["secrets"]})
        self._check_inputs()

    def _check_inputs(self) -> None:
        """What a container sees is not known here."""
        secrets = [source["file"] for source in self.plan.secrets.values() if "file" in source]
        needed = [*secrets, *(() if self.plan.container else self.plan.inputs)]
        if missing := [path for path in needed if not os.access(path, os.R_OK)]:
            raise Refused(
                f"{', '.join(missing)} cannot be read there: data and secrets have to be on every host"
            )


def roll_back(run_dir: str) -> None:
    """As if nothing had ever been here; a folder that several hosts share is taken away by the first one."""
    kill_all(run_dir, os.getpid())
    if os.environ.get(ROLL_BACK_VARIABLE):
        import shutil

        shutil.rmtree(run_dir, ignore_errors=True)


def address_here() -> str:
    """The address of this host at which ssh was reached: where one machine found it, others will."""
    return [*os.environ.get("SSH_CONNECTION", "").split(), "", "", ""][2]


class HeadAgent(HostAgent):
    """The first host: the others join it, and it decides for all."""

    def prepare(self) -> None:
        """Returns when gptctl has committed the job; all hosts have joined by then."""
        if ":" not in self.address:  # a name would not lead others to the interface
            self.address = socket.gethostbyname(self.address)
        port = self.plan.master_port
        if port and (fault := fault_of_port("", port)):
            raise Refused(f"ranks cannot meet at port {port}, as Launch.rdzv says: {fault}")
        if self.plan.nodes > 1 and self.address.startswith("127."):
            raise Refused(
                f"its address is {self.address}, where no other host finds it: set `address` in the profile"
            )
        both = socket.has_dualstack_ipv6()
        family = socket.AF_INET6 if both else socket.AF_INET
        place = ("", free_port(""))
        with socket.create_server(
            place, family=family, backlog=MOST_STRANGERS, dualstack_ipv6=both
        ) as listener:
            self.gptctl.send(control=[self.address, listener.getsockname()[1]])
            peers = PeerAdmission(self, listener).until_committed()
        if not self.folder.take(this_process()):
            raise Refused("the job was given up meanwhile")
        self.peers = [RemoteNode(number, peers[number]) for number in sorted(peers)]

    @property
    def log(self) -> str:
        return f"{self.plan.remote_dir}/agent.0.log on the first host"

    def run(self) -> None:
        supervisor = Supervisor(self.plan, [self.node, *self.peers], self.address, log=self.log)
        supervisor.run(on_ready=lambda: self._tell_gptctl(supervisor))
        for peer in self.peers:
            peer.dismiss()

    def _tell_gptctl(self, supervisor: Supervisor) -> None:
        with suppress(ConnectionLost):  # it may be gone; the job exists all the same
            self.gptctl.send(committed=this_process(), endpoint=[supervisor.host, supervisor.port])


class PeerAdmission:
    """The hosts that have joined the first one so far, and whoever else knocks."""

    def __init__(self, head: HeadAgent, listener: socket.socket) -> None:
        self.head, self.listener = head, listener
        self.peers: dict[int, MessageStream] = {}
        self.strangers: dict[int, tuple[MessageStream, str]] = {}  # and what each was asked

    def until_committed(self) -> dict[int, MessageStream]:
        while True:
            self._wait()
            for number, peer in self.peers.items():
                self._check(number, peer)
            while message := self.head.gptctl.receive():
                if "commit" in message and len(self.peers) == self.head.plan.nodes - 1:
                    self._make_ready()
                    return self.peers
            if time.monotonic() - self.head.gptctl.heard > self.head.lease:
                raise Refused("nobody committed the job in time")

    def _make_ready(self) -> None:
        """The others are there at this moment; from now on they wait for the word longer than any lease."""
        deadline = time.monotonic() + self.head.lease
        for number, peer in self.peers.items():
            self._check(number, peer, ready=True)
        for number, peer in self.peers.items():
            try:
                message = peer.receive(max(0.0, deadline - time.monotonic()))
                while message and "ready" not in message:
                    message = peer.receive(max(0.0, deadline - time.monotonic()))
            except ConnectionLost as closed:
                raise Refused(f"node {number} has left: {closed}") from None
            if not message:
                raise Refused(f"node {number} does not answer any more")

    def _wait(self) -> None:
        """Until somebody has something to say, or it is time for a sign of life."""
        listening, gptctl = self.listener.fileno(), self.head.gptctl.reading
        known = [peer.reading for peer in self.peers.values()]
        for ready in select.select([listening, gptctl, *known, *self.strangers], [], [], PULSE)[0]:
            if ready == listening:
                self._greet()
            elif ready in self.strangers:
                self._admit(ready)

    def _greet(self) -> None:
        connection, _ = self.listener.accept()
        stream, asked = socket_stream(connection, SILENCE), challenge()
        with suppress(ConnectionLost):
            stream.send(challenge=asked)
            self.strangers[stream.reading] = stream, asked
        while len(self.strangers) > MOST_STRANGERS:
            del self.strangers[next(iter(self.strangers))]

    def _admit(self, ready: int) -> None:
        stream, asked = self.strangers.pop(ready)
        with suppress(ConnectionLost):
            message = stream.receive()
            if message is None:  # half a line: the rest may come
                self.strangers[ready] = stream, asked
                return
            number = admit(stream, asked, message, self.head.key)
            if number is not None and 1 <= number < self.head.plan.nodes:
                self.peers[number] = stream

    def _check(self, number: int, peer: MessageStream, **word: bool) -> None:
        """Whether it is still there, with a word or a sign of life for it."""
        try:
            while peer.receive():
                pass
            if word or time.monotonic() - peer.said > PULSE:
                peer.send(**(word or {"pulse": True}))
        except ConnectionLost as closed:
            raise Refused(f"node {number} has left: {closed}") from None


class RemoteNode:
    """A node on another host, as the first one sees it. What each of these means stands in `node.py`."""

    def __init__(self, number: int, stream: MessageStream) -> None:
        self.number = number
        self._stream = stream
        self._start = (
            0  # counted, so that word of an earlier start is not taken for that of this one
        )
        self._end: NodeExit | None = NodeExit(0)
        self._has_ranks = self._is_asked = self._is_killed = False
        self._kill_patience = KILL_PATIENCE
        self._lost = ""

    def start(self, attempt: int, host: str, port: int) -> None:
        self._start += 1
        self._end, self._has_ranks, self._is_asked = None, False, False
        self._tell(start=self._start, attempt=attempt, host=host, port=port)

    def exited(self) -> NodeExit | None:
        self._listen()
        return self._end

    def has_ranks(self) -> bool:
        self._listen()
        return self._has_ranks

    def can_be_asked(self) -> bool:
        return self.has_ranks()

    def output(self) -> str:
        return ""  # its log is on its host

    def ask_to_stop(self) -> None:
        if not self._is_asked:
            self._is_asked = True
            self._tell(ask=True)

    def kill(self) -> None:
        self._is_killed = False
        self._tell(kill=True)
        deadline = time.monotonic() + self._kill_patience
        while not self._is_killed and not self._lost and time.monotonic() < deadline:
            self._listen(TICK)
        self._kill_patience = (
            KILL_PATIENCE if self._is_killed else 0.0
        )  # one that is mute is not waited for again

    def dismiss(self) -> None:
        self._tell(bye=True)

    def _tell(self, **message: Any) -> None:
        if not self._lost:
            try:
                self._stream.send(**message)
            except ConnectionLost as closed:
                self._lose(str(closed))
        elif "start" in message:
            self._lose(self._lost)

    def _listen(self, patience: float = 0.0) -> None:
        if time.monotonic() - self._stream.said > PULSE:
            self._tell(pulse=True)
        try:
            while not self._lost and (message := self._stream.receive(patience)):
                self._hear(message)
        except ConnectionLost as closed:
            self._lose(str(closed))
        if time.monotonic() - self._stream.heard > SILENCE:
            self._lose(f"nothing was heard of it for {SILENCE:.0f} s")

    def _hear(self, message: dict[str, Any]) -> None:
        self._is_killed |= "killed" in message
        if message.get("start") == self._start:
            self._has_ranks |= "ranks" in message
            if "end" in message:
                self._end = NodeExit(*message["end"])

    def _lose(self, why: str) -> None:
        self._lost = why
        self._end = self._end or NodeExit(255, f"its host is lost: {why}")


class PeerAgent(HostAgent):
    """Any other host: it does what the first one says, and nothing without it."""

    def prepare(self) -> None:
        message = self.gptctl.receive(self.lease)
        while message and "join" not in message:
            message = self.gptctl.receive(self.lease)
        if not message:
            raise Refused("nobody said in time where the first host is")
        try:
            address, port = message["join"]
            self.head = join(address, port, self.number, self.key, SILENCE)
        except ConnectionLost as closed:
            raise Refused(f"the first host cannot be reached from here: {closed}") from None
        self.gptctl.send(armed=this_process())

    def run(self) -> None:
        """Until the first host says so, or is gone: for a lease, and once it has told this one to be ready for long."""
        self.patience, self.start, self.is_open = self.lease, 0, False
        self.is_stopped = False
        signal.signal(signal.SIGTERM, self._on_signal)
        try:
            while not self.is_stopped and time.monotonic() - self.head.heard < self.patience:
                self._obey(self.head.receive(TICK) or {})
                self._report()
        except ConnectionLost as closed:
            print(f"the first host is gone: {closed}", flush=True)
        finally:
            self.node.kill()
        if not self.start:
            roll_back(self.plan.remote_dir)

    def _on_signal(self, number: int, frame: object) -> None:
        self.is_stopped = True

    def _obey(self, message: dict[str, Any]) -> None:
        if "ready" in message:
            self.patience = SILENCE
            self.head.send(ready=True)
        if "start" in message:
            self.start = message["start"]
            self.is_open, self.has_ranks = True, False
            self._begin(message["attempt"], message["host"], message["port"])
        if "ask" in message:
            self.node.ask_to_stop()
        if "kill" in message:
            self.node.kill()
            self.head.send(killed=True)
        self.is_stopped |= "bye" in message

    def _begin(self, attempt: int, host: str, port: int) -> None:
        try:
            self.folder.attempt(attempt).mkdir(exist_ok=True)
            self.node.start(attempt, host, port)
        except OSError as error:  # a full disk, or a folder that may not be written to
            self.is_open = False
            self.head.send(
                start=self.start, end=NodeExit(CANNOT_CREATE, f"{error.filename}: {error.strerror}")
            )

    def _report(self) -> None:
        if self.is_open and not self.has_ranks and self.node.has_ranks():
            self.has_ranks = True
            self.head.send(start=self.start, ranks=True)
        if self.is_open and (end := self.node.exited()):
            self.is_open = False
            self.head.send(start=self.start, end=end)
        if time.monotonic() - self.head.said > PULSE:
            self.head.send(pulse=True)


def detach(log_file: str) -> None:
    for name in (
        signal.SIGHUP,
        signal.SIGINT,
        signal.SIGPIPE,
    ):  # ignored, they would be for the ranks too
        signal.signal(name, lambda number, frame: None)
    adopt_orphans()
    log = os.open(log_file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    nothing = os.open(os.devnull, os.O_RDONLY)
    for descriptor, target in ((nothing, 0), (log, 1), (log, 2)):  # the ranks inherit neither pipe
        os.dup2(descriptor, target)


def main() -> None:
    run_dir, number = sys.argv[1], int(sys.argv[2])
    os.umask(0o077)
    gptctl = MessageStream(os.dup(0), os.dup(1))
    try:
        detach(os.path.join(run_dir, f"agent.{number}.log"))
        plan = read_plan(Path(run_dir))
        with replacing(Path(run_dir) / f"agent.{number}.json") as stream:
            stream.write(json.dumps(this_process()).encode())
        host = (PeerAgent if number else HeadAgent)(plan, number, gptctl)
        host.prepare()
    except Exception as why:  # whatever it was, nothing may be left
        is_told = isinstance(why, (Refused, ConnectionLost, OSError))
        with suppress(ConnectionLost):
            gptctl.send(refused=str(why) if is_told else f"its agent failed: {why!r}")
        roll_back(run_dir)
        return
    host.run()


if __name__ == "__main__":
    main()
