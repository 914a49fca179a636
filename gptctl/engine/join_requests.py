"""Connections to the first host's agent whose peer has not proved yet that it has the key.

Anybody on the network can connect. Whatever a stranger sends, and however many there are, only its
own connection ends: the agents of the job's hosts still join, and those that have joined stay.
"""

from __future__ import annotations

import socket
import time
from collections import Counter
from contextlib import suppress

from gptctl.engine.handshake import MAX_HELLO, Handshake, answer, handshake_with
from gptctl.engine.messages import HANDSHAKE_TIMEOUT, ConnectionLost, MessageStream, socket_stream
from gptctl.engine.remote_node import HEARTBEAT_TIMEOUT

# Strangers that may wait at a time. A peer sends its proof with its first packet and rarely waits,
# so the number need not grow with that of the hosts; a process may often open only 1,024 files.
MAX_STRANGERS = 256


class JoinRequest:
    """One connection."""

    def __init__(self, stream: MessageStream, source: str) -> None:
        self.stream, self.source = stream, source
        self.deadline = time.monotonic() + HANDSHAKE_TIMEOUT
        self.shake: Handshake | None = None  # set once its first message has proved the key


class JoinRequests:
    def __init__(self, job_key: bytes, nodes: int, most: int = MAX_STRANGERS) -> None:
        self.peers: dict[int, MessageStream] = {}  # that have joined, by node
        self._key, self._nodes, self._most = job_key, nodes, most
        self._open: dict[int, JoinRequest] = {}  # by file descriptor
        self._nonces: set[str] = set()  # only from peers with the key, so there are few

    def __contains__(self, descriptor: int) -> bool:
        return descriptor in self._open

    def descriptors(self) -> list[int]:
        return list(self._open)

    def add(self, connection: socket.socket, address: str) -> None:
        """Take a new connection from anywhere."""
        try:
            stream = socket_stream(connection, HEARTBEAT_TIMEOUT, MAX_HELLO)
        # It is broken already.
        except OSError:
            connection.close()
            return
        self._open[stream.reading] = JoinRequest(stream, source_of(address))
        # At once: a peer that has sent its proof need not wait among strangers.
        self.handle(stream.reading)
        if sum(request.shake is None for request in self._open.values()) > self._most:
            self.drop_stranger()

    def handle(self, descriptor: int) -> None:
        """Read what has arrived on this connection; close it unless that is valid."""
        request = self._open.pop(descriptor)
        with suppress(ConnectionLost):
            message = request.stream.receive()
            # An incomplete line: the rest may follow.
            if message is None:
                self._open[descriptor] = request
                return
            if request.shake:
                self._finish(request.stream, request.shake, message.get("proof"))
            elif shake := handshake_with(message, self._key, self._nodes):
                self._answer(request, shake)
        if descriptor not in self._open and request.stream not in self.peers.values():
            request.stream.close()

    def _answer(self, request: JoinRequest, shake: Handshake) -> None:
        # Somebody repeats what a peer has sent. The peer itself never sends the same nonce twice.
        if shake.peer_nonce in self._nonces:
            return
        self._nonces.add(shake.peer_nonce)
        request.stream.send(**answer(shake))
        request.shake, request.deadline = shake, time.monotonic() + HANDSHAKE_TIMEOUT
        self._open[request.stream.reading] = request

    def _finish(self, stream: MessageStream, shake: Handshake, proof: object) -> None:
        if not shake.is_proof(proof, "peer"):
            return
        shake.secure(stream, is_head=True)
        # A peer joins once: nobody may take the place of one that this agent relies on.
        if shake.node in self.peers:
            stream.send(refused=f"node {shake.node} has joined already")
            return
        stream.send(joined=True)
        self.peers[shake.node] = stream

    def drop_stranger(self) -> bool:
        """Close the connection of a stranger, if there is any.

        One of those that come from the same place as most others, so that a crowd from one host
        drops only its own; and not the oldest of them: a crowd that is fast enough would drop
        every peer before its proof has arrived.
        """
        import random

        strangers = [request for request in self._open.values() if not request.shake]
        if not strangers:
            return False
        counts = Counter(request.source for request in strangers)
        most = max(counts.values())
        candidates = [each for each in strangers if counts[each.source] == most]
        chosen = random.SystemRandom().choice(candidates)
        del self._open[chosen.stream.reading]
        chosen.stream.close()
        return True

    def expire(self) -> None:
        """Close connections that have not proved the key in time."""
        now = time.monotonic()
        for descriptor, request in list(self._open.items()):
            if now > request.deadline:
                del self._open[descriptor]
                request.stream.close()

    def close(self) -> None:
        for request in self._open.values():
            request.stream.close()
        self._open.clear()


def source_of(address: str) -> str:
    """Name the place that a connection comes from."""
    address = address.partition("%")[0]
    if ":" not in address or address.startswith("::ffff:"):
        return address
    # One host can use all IPv6 addresses of its network.
    return socket.inet_pton(socket.AF_INET6, address)[:8].hex()
