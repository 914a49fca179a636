"""The agent of the first host of an ssh job: it controls all hosts after the commit."""

from __future__ import annotations

import socket
from contextlib import suppress

from gptctl.engine.admission import Admission
from gptctl.engine.host_agent import HostAgent, HostRefused, address_here
from gptctl.engine.listening import is_loopback, listener_on, own_address, resolved
from gptctl.engine.messages import ConnectionLost, MessageStream
from gptctl.engine.peer_admission import PeerAdmission
from gptctl.engine.ports import port_error
from gptctl.engine.processes import this_process
from gptctl.engine.remote_node import RemoteNode
from gptctl.engine.supervisor import Supervisor


class HeadAgent(HostAgent):
    """The agent of the first host: the others join it, and it controls all of them."""

    def prepare(self) -> None:
        """Wait until all hosts have joined and gptctl has committed the job."""
        # Resolve it here: on another host the same name may lead to another interface.
        self.address = resolved(self.address)
        port = self.plan.master_port
        if port and (fault := port_error("", port)):
            raise HostRefused(f"port {port}, set by Launch.rdzv, cannot be used: {fault}")
        if self.plan.nodes > 1 and is_loopback(self.address):
            raise HostRefused(
                f"other hosts cannot reach its address {self.address}: set `address` in the profile"
            )
        peers = self._wait_for_peers()
        self.hold_signals()
        # The claim decides once and for all: a gptctl that lost the connection may take it first,
        # to abandon the job.
        if not self.folder.try_claim(this_process()):
            raise HostRefused("gptctl has abandoned the job")
        self.keep_folder()
        queues = bool(self.plan.queue or self.plan.group)
        self.peers = [
            RemoteNode(number, stream, machine, queues)
            for number, (stream, machine) in sorted(peers.items())
        ]

    def _wait_for_peers(self) -> dict[int, tuple[MessageStream, str]]:
        # A job on one host waits for nobody: then no port is open.
        if self.plan.nodes == 1:
            self.gptctl.send(control=[self.address, 0])
            return PeerAdmission(self, None).until_committed()
        with self._listen() as listener:
            # gptctl passes this address on to the other hosts, which join here.
            self.gptctl.send(control=[self.address, listener.getsockname()[1]])
            return PeerAdmission(self, listener).until_committed()

    def _listen(self) -> socket.socket:
        """Listen where the other hosts connect, and nowhere else if that is possible."""
        # Behind NAT the address of a host is not one of its own; the one that ssh uses is.
        own = own_address(self.address, address_here())
        if own != self.address:
            where = own or "all its addresses"
            problem = f"{self.address} is not an address of this host"
            print(f"{problem}: listening on {where}", flush=True)
        return listener_on(own)

    @property
    def log(self) -> str:
        return f"{self.plan.remote_dir}/agent.0.log on the first host"

    def run(self) -> None:
        admission = Admission(self.plan, [self.place, *self.peers])
        supervisor = Supervisor(
            self.plan,
            [self.node, *self.peers],
            self.address,
            log=self.log,
            admission=admission,
            environment=self.environment,
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
