"""How the agents of the other hosts join that of the first host, until gptctl commits the job."""

from __future__ import annotations

import errno
import resource
import select
import socket
import time

from gptctl.engine.host_agent import HostAgent, HostRefused
from gptctl.engine.join_requests import MAX_STRANGERS, JoinRequests
from gptctl.engine.messages import INVALID_MESSAGE, MAX_BURST, ConnectionLost, MessageStream
from gptctl.engine.node import TICK
from gptctl.engine.remote_node import HEARTBEAT

ACCEPT_BURST = 128  # connections accepted before gptctl and the peers are served again


class PeerAdmission:
    """Admits the agents of the other hosts at the first host, until gptctl commits the job."""

    def __init__(self, head: HostAgent, listener: socket.socket | None) -> None:
        self.head, self.listener = head, listener
        files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        # A process without a limit has -1.
        most = MAX_STRANGERS if files < 0 else min(MAX_STRANGERS, files // 4)
        self.requests = JoinRequests(head.key, head.plan.nodes, most)
        self.peers = self.requests.peers
        self._is_committed = False

    def until_committed(self) -> dict[int, tuple[MessageStream, str]]:
        """Return, for each node, the connection to its agent and the name of its machine."""
        while True:
            ready = self._wait()
            # Notice a lost host before the commit: afterwards the job would have to fail. Not all
            # of them each time: with a thousand hosts, a system call for each would take seconds.
            for number, peer in self.peers.items():
                if peer.reading in ready or _is_heartbeat_due(peer):
                    self._check(number, peer)
            while message := self.head.gptctl.receive():
                self._is_committed |= "commit" in message
            if self._is_committed and len(self.peers) == self.head.plan.nodes - 1:
                self.requests.close()
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
            machines[number] = self._machine_of(number, peer, deadline)
        return machines

    def _machine_of(self, number: int, peer: MessageStream, deadline: float) -> str:
        while (left := deadline - time.monotonic()) > 0:
            try:
                message = peer.receive(left) or {}
            except ConnectionLost as lost:
                raise HostRefused(f"lost the connection to node {number}: {lost}") from None
            if "ready" in message:
                if isinstance(machine := message.get("machine"), str):
                    return machine
                raise HostRefused(f"node {number}: {INVALID_MESSAGE}")
        raise HostRefused(f"node {number} does not answer")

    def _wait(self) -> set[int]:
        """Wait for a message or a connection, at most until the next heartbeat is due.

        Return the file descriptors that have something to read, or are broken.
        """
        poll = select.poll()
        known = [peer.reading for peer in self.peers.values()]
        listening = [self.listener.fileno()] if self.listener else []
        sources = [*listening, self.head.gptctl.reading, *known, *self.requests.descriptors()]
        for descriptor in sources:
            poll.register(descriptor, select.POLLIN)
        ready = {descriptor for descriptor, _ in poll.poll(int(HEARTBEAT * 1000))}
        for descriptor in ready:
            if descriptor in self.requests:
                self.requests.handle(descriptor)
        self._accept()
        self.requests.expire()
        return ready

    def _accept(self) -> None:
        """Accept connections from anywhere; they are not trusted until they prove the key."""
        # Several at a time: a peer may be behind many strangers. Not all, which may never end.
        for _ in range(ACCEPT_BURST if self.listener else 0):
            try:
                connection, address = self.listener.accept()  # type: ignore[union-attr]
            except BlockingIOError:
                return
            except OSError as error:
                if not self._make_room(error):
                    return
                continue
            connection.setblocking(True)
            self.requests.add(connection, address[0])

    def _make_room(self, error: OSError) -> bool:
        """Survive an error of accept(); return whether another call may succeed at once."""
        is_full = error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
        # Else a connection broke before it was accepted.
        if not is_full or self.requests.drop_stranger():
            return True
        time.sleep(TICK)
        return False

    def _check(self, number: int, peer: MessageStream, **message: bool) -> None:
        """Check that the peer is connected; send the message, or a heartbeat if one is due."""
        try:
            # Heartbeats, which need no answer.
            for _ in range(MAX_BURST):
                if not peer.receive():
                    break
            if message or _is_heartbeat_due(peer):
                peer.send(**(message or {"heartbeat": True}))
        except ConnectionLost as lost:
            raise HostRefused(f"lost the connection to node {number}: {lost}") from None


def _is_heartbeat_due(peer: MessageStream) -> bool:
    return time.monotonic() - peer.last_sent > HEARTBEAT
