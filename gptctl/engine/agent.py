"""The agent of one host of an ssh job; it runs detached from ssh: engine.pyz agent RUN_DIR NODE

Prepare: the agents of the other hosts join the agent of the first host; nothing of the job runs.
Commit:  gptctl sends one message to the first host. From then on the agent there controls all
         hosts (`supervisor.py`), and gptctl is no longer needed.
Lease:   an agent that gptctl does not commit in time removes everything it has created.
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

from gptctl.engine.admission import Admission
from gptctl.engine.atomic_files import replacing
from gptctl.engine.cause import Cause
from gptctl.engine.contract import CANNOT_CREATE, ROLL_BACK_VARIABLE
from gptctl.engine.launch_plan import LaunchPlan
from gptctl.engine.log import os_error_text
from gptctl.engine.machine_queue import MachinePlace, machine_name
from gptctl.engine.messages import (
    HANDSHAKE,
    ConnectionLost,
    MessageStream,
    admit,
    challenge,
    join,
    socket_stream,
)
from gptctl.engine.node import TICK, Node, NodeExit
from gptctl.engine.ports import free_port, port_error
from gptctl.engine.processes import (
    adopt_orphans,
    clean_environment,
    disregard,
    kill_all,
    this_process,
)
from gptctl.engine.remote_node import HEARTBEAT, HEARTBEAT_TIMEOUT, RemoteNode
from gptctl.engine.run_folder import RunFolder, read_plan
from gptctl.engine.supervisor import STOP_SIGNALS, Supervisor

MAX_UNAUTHENTICATED = 64  # connections whose peer has not proved yet that it has the key


class HostRefused(Exception):
    """The job cannot run on this host, for this reason."""


class HostAgent:
    """What the agents of all hosts have in common."""

    def __init__(self, plan: LaunchPlan, number: int, gptctl: MessageStream) -> None:
        self.plan, self.number, self.gptctl = plan, number, gptctl
        self.folder = RunFolder(plan.remote_dir)
        # Key and secrets come through the connection: they must not be in a file or in `ps`.
        hello = gptctl.receive(HANDSHAKE)
        if not hello:
            raise HostRefused("gptctl sent no start message")
        self.key = bytes.fromhex(hello["key"])
        self.lease = float(hello["lease"])
        self.address = str(hello["address"] or address_here())
        self.node = Node(plan, number, {**clean_environment(), **hello["secrets"]})
        self.place = MachinePlace(plan, [self.node])
        self._check_inputs()

    def _check_inputs(self) -> None:
        """Refuse the job now, instead of after it has started on all hosts."""
        secrets = [source["file"] for source in self.plan.secrets.values() if "file" in source]
        # Which files a container sees is not known here.
        needed = [*secrets, *(() if self.plan.container else self.plan.inputs)]
        if missing := [path for path in needed if not os.access(path, os.R_OK)]:
            names = ", ".join(missing)
            raise HostRefused(f"cannot read {names}: data and secrets must be on every host")


def roll_back(run_dir: str) -> None:
    """Kill all processes of the job here, and remove its folder.

    If hosts share the folder, only the first host removes it.
    """
    kill_all(run_dir, os.getpid())
    if os.environ.get(ROLL_BACK_VARIABLE):
        import shutil

        shutil.rmtree(run_dir, ignore_errors=True)


def address_here() -> str:
    """Return the address at which ssh reached this host: other hosts should reach it there, too."""
    return [*os.environ.get("SSH_CONNECTION", "").split(), "", "", ""][2]


class HeadAgent(HostAgent):
    """The agent of the first host: the others join it, and it controls all of them."""

    def prepare(self) -> None:
        """Wait until all hosts have joined and gptctl has committed the job."""
        # Resolve it here: on another host the same name may lead to another interface.
        if ":" not in self.address:
            self.address = socket.gethostbyname(self.address)
        port = self.plan.master_port
        if port and (fault := port_error("", port)):
            raise HostRefused(f"port {port}, set by Launch.rdzv, cannot be used: {fault}")
        if self.plan.nodes > 1 and self.address.startswith("127."):
            raise HostRefused(
                f"other hosts cannot reach its address {self.address}: set `address` in the profile"
            )
        peers = self._wait_for_peers()
        # The claim decides once and for all: a gptctl that lost the connection may take it first,
        # to abandon the job.
        if not self.folder.try_claim(this_process()):
            raise HostRefused("gptctl has abandoned the job")
        queues = bool(self.plan.queue or self.plan.group)
        self.peers = [
            RemoteNode(number, stream, machine, queues)
            for number, (stream, machine) in sorted(peers.items())
        ]

    def _wait_for_peers(self) -> dict[int, tuple[MessageStream, str]]:
        both = socket.has_dualstack_ipv6()
        family = socket.AF_INET6 if both else socket.AF_INET
        place = ("", free_port(""))
        with socket.create_server(
            place, family=family, backlog=MAX_UNAUTHENTICATED, dualstack_ipv6=both
        ) as listener:
            # gptctl passes this address on to the other hosts, which join here.
            self.gptctl.send(control=[self.address, listener.getsockname()[1]])
            return PeerAdmission(self, listener).until_committed()

    @property
    def log(self) -> str:
        return f"{self.plan.remote_dir}/agent.0.log on the first host"

    def run(self) -> None:
        admission = Admission(self.plan, [self.place, *self.peers])
        supervisor = Supervisor(
            self.plan, [self.node, *self.peers], self.address, log=self.log, admission=admission
        )
        supervisor.run(on_ready=lambda: self._tell_gptctl(supervisor))
        for peer in self.peers:
            peer.shut_down()

    def _tell_gptctl(self, supervisor: Supervisor) -> None:
        for peer in self.peers:
            peer.announce()
        endpoint, waiting = [supervisor.host, supervisor.port], self.folder.waiting_for()
        # gptctl may have exited or lost the connection; the job exists nevertheless.
        with suppress(ConnectionLost):
            self.gptctl.send(committed=this_process(), endpoint=endpoint, waiting=waiting)


class PeerAdmission:
    """Admits the agents of the other hosts at the first host, until gptctl commits the job."""

    def __init__(self, head: HeadAgent, listener: socket.socket) -> None:
        self.head, self.listener = head, listener
        self.peers: dict[int, MessageStream] = {}
        # By file descriptor: each with the challenge that it was sent.
        self.unauthenticated: dict[int, tuple[MessageStream, str]] = {}

    def until_committed(self) -> dict[int, tuple[MessageStream, str]]:
        """Return, for each node, the connection to its agent and the name of its machine."""
        while True:
            self._wait()
            # Notice a lost host before the commit: afterwards the job would have to fail.
            for number, peer in self.peers.items():
                self._check(number, peer)
            while message := self.head.gptctl.receive():
                if "commit" in message and len(self.peers) == self.head.plan.nodes - 1:
                    machines = self._confirm_peers()
                    return {number: (self.peers[number], machines[number]) for number in machines}
            # Every message of gptctl renews the lease. Without it nobody would remove this job.
            if time.monotonic() - self.head.gptctl.last_received > self.head.lease:
                raise HostRefused("gptctl did not commit the job in time")

    def _confirm_peers(self) -> dict[int, str]:
        """Make every peer confirm that it is ready, and name its machine.

        From then on a peer waits for the first attempt longer than any lease, so that none rolls
        back while the others start.
        """
        deadline = time.monotonic() + self.head.lease
        machines = {}
        # Ask all of them first, so that they answer at the same time.
        for number, peer in self.peers.items():
            self._check(number, peer, ready=True)
        for number, peer in self.peers.items():
            try:
                message = peer.receive(max(0.0, deadline - time.monotonic()))
                while message and "ready" not in message:
                    message = peer.receive(max(0.0, deadline - time.monotonic()))
            except ConnectionLost as lost:
                raise HostRefused(f"lost the connection to node {number}: {lost}") from None
            if not message:
                raise HostRefused(f"node {number} does not answer")
            machines[number] = str(message.get("machine"))
        return machines

    def _wait(self) -> None:
        """Wait for a message or a connection, at most until the next heartbeat is due."""
        listening, gptctl = self.listener.fileno(), self.head.gptctl.reading
        known = [peer.reading for peer in self.peers.values()]
        sources = [listening, gptctl, *known, *self.unauthenticated]
        for ready in select.select(sources, [], [], HEARTBEAT)[0]:
            if ready == listening:
                self._accept()
            elif ready in self.unauthenticated:
                self._admit(ready)

    def _accept(self) -> None:
        """Accept a connection from anywhere; it is not trusted until it answers a challenge."""
        connection, _ = self.listener.accept()
        stream, sent = socket_stream(connection, HEARTBEAT_TIMEOUT), challenge()
        with suppress(ConnectionLost):
            stream.send(challenge=sent)
            self.unauthenticated[stream.reading] = stream, sent
        # Drop the oldest ones: a port scanner must not use up the file descriptors.
        while len(self.unauthenticated) > MAX_UNAUTHENTICATED:
            del self.unauthenticated[next(iter(self.unauthenticated))]

    def _admit(self, ready: int) -> None:
        stream, sent = self.unauthenticated.pop(ready)
        with suppress(ConnectionLost):
            message = stream.receive()
            # An incomplete line: the rest may follow.
            if message is None:
                self.unauthenticated[ready] = stream, sent
                return
            number = admit(stream, sent, message, self.head.key)
            if number is not None and 1 <= number < self.head.plan.nodes:
                self.peers[number] = stream

    def _check(self, number: int, peer: MessageStream, **message: bool) -> None:
        """Check that the peer is connected; send the message, or a heartbeat if one is due."""
        try:
            while peer.receive():
                pass
            if message or time.monotonic() - peer.last_sent > HEARTBEAT:
                peer.send(**(message or {"heartbeat": True}))
        except ConnectionLost as lost:
            raise HostRefused(f"lost the connection to node {number}: {lost}") from None


class PeerAgent(HostAgent):
    """The agent of any other host: it only does what the first host tells it."""

    def __init__(self, plan: LaunchPlan, number: int, gptctl: MessageStream) -> None:
        super().__init__(plan, number, gptctl)
        self.timeout = self.lease  # seconds without any message from the first host
        self.start_number = 0  # see RemoteNode
        self.is_running = self.has_ranks = self.is_stopped = False
        self.is_queued = self.job_exists = False
        self.waits_for: str | None = None  # what the first host knows of it

    def prepare(self) -> None:
        # gptctl knows the address of the first host only after the agent there has started.
        message = self.gptctl.receive(self.lease)
        while message and "join" not in message:
            message = self.gptctl.receive(self.lease)
        if not message:
            raise HostRefused("gptctl did not send the address of the first host in time")
        try:
            address, port = message["join"]
            self.head = join(address, port, self.number, self.key, HEARTBEAT_TIMEOUT)
        except ConnectionLost as lost:
            raise HostRefused(f"the first host cannot be reached from here: {lost}") from None
        self.gptctl.send(prepared=this_process())

    def run(self) -> None:
        """Obey the first host until it shuts this agent down or sends nothing for too long.

        That is a lease before the first host has confirmed the commit, and longer afterwards.
        """
        for number in STOP_SIGNALS:
            signal.signal(number, self._on_signal)
        try:
            while not self.is_stopped and self._head_is_alive():
                self._handle(self.head.receive(TICK) or {})
                self._report()
        except ConnectionLost as lost:
            print(f"lost the connection to the first host: {lost}", flush=True)
        finally:
            # Whatever the reason: without the first host no rank may run here.
            self.node.kill()
            self.place.release()
        # The job was never started: remove what gptctl sent here.
        if not self.start_number and not self.job_exists:
            roll_back(self.plan.remote_dir)

    def _head_is_alive(self) -> bool:
        return time.monotonic() - self.head.last_received < self.timeout

    def _on_signal(self, number: int, frame: object) -> None:
        self.is_stopped = True

    def _handle(self, message: dict[str, Any]) -> None:
        # The commit: from now on wait longer than a lease, since the first host will start the job.
        if "ready" in message:
            self.timeout = HEARTBEAT_TIMEOUT
            self.head.send(ready=True, machine=machine_name())
        self.job_exists |= "exists" in message
        self.is_queued |= "queue" in message
        if "start" in message:
            self.start_number = message["start"]
            self.is_running, self.has_ranks = True, False
            self._begin(message["attempt"], message["host"], message["port"])
        if "request_stop" in message:
            self.node.request_stop()
        if "kill" in message:
            self.node.kill()
            self.head.send(killed=True)
        self.is_stopped |= "shut_down" in message

    def _begin(self, attempt: int, host: str, port: int) -> None:
        try:
            # A job that did not queue counts, too: those that do wait for it.
            if not self.is_queued:
                self.place.poll()
            self.folder.attempt(attempt).mkdir(exist_ok=True)
            self.node.start(attempt, host, port)
        # A full disk, or a folder without write permission: only this node fails, not its agent.
        except OSError as error:
            self.is_running = False
            cause = Cause(os_error_text(error), self.number, exit=CANNOT_CREATE)
            exit_ = NodeExit(CANNOT_CREATE, cause)
            self.head.send(start=self.start_number, exit=exit_)

    def _report(self) -> None:
        """Tell the first host what is new; each message names the start that it is about."""
        if self.is_queued and self.waits_for != "":
            self._report_place()
        if self.is_running and not self.has_ranks and self.node.has_ranks():
            self.has_ranks = True
            self.head.send(start=self.start_number, ranks=True)
        if self.is_running and (exit_ := self.node.exited()):
            self.is_running = False
            self.head.send(start=self.start_number, exit=exit_)
        if time.monotonic() - self.head.last_sent > HEARTBEAT:
            self.head.send(heartbeat=True)

    def _report_place(self) -> None:
        """Tell the first host what the job waits for here; an empty text: the place is free."""
        try:
            waits_for = self.place.poll()
        except OSError as error:
            self.is_queued = False
            self.head.send(cannot_queue=f"cannot queue: {os_error_text(error)}")
            return
        if waits_for != self.waits_for:
            self.waits_for = waits_for
            self.head.send(waits_for=waits_for)


def detach(log_file: str) -> None:
    """Survive the end of the ssh connection, and keep its pipes from the ranks."""
    disregard(signal.SIGHUP, signal.SIGINT, signal.SIGPIPE)
    adopt_orphans()
    log = os.open(log_file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    nothing = os.open(os.devnull, os.O_RDONLY)
    # sshd keeps the connection open as long as any process has one of its pipes.
    for descriptor, target in ((nothing, 0), (log, 1), (log, 2)):
        os.dup2(descriptor, target)


def main() -> None:
    run_dir, number = sys.argv[1], int(sys.argv[2])
    os.umask(0o077)
    gptctl = MessageStream(os.dup(0), os.dup(1))
    try:
        detach(os.path.join(run_dir, f"agent.{number}.log"))
        plan = read_plan(Path(run_dir))
        # By this file gptctl finds the agent again, to stop it.
        with replacing(Path(run_dir) / f"agent.{number}.json") as stream:
            stream.write(json.dumps(this_process()).encode())
        host = (PeerAgent if number else HeadAgent)(plan, number, gptctl)
        host.prepare()
    # Whatever fails before the commit, nothing may be left on this host.
    except Exception as error:
        is_expected = isinstance(error, (HostRefused, ConnectionLost, OSError))
        with suppress(ConnectionLost):
            gptctl.send(refused=str(error) if is_expected else f"its agent failed: {error!r}")
        roll_back(run_dir)
        return
    host.run()


if __name__ == "__main__":
    main()
