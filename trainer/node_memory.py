"""Exchanges tensors between ranks of one node in memory that they share, on CPUs.

gloo sends them over TCP, even within a node: between two ranks that copies each byte four times,
on the cores that train. Here a rank writes its message into memory that the others have mapped.
Over sockets they send only signals, and the files of that memory. A rank that exits closes its
sockets, so the others fail at once, as with gloo.
"""

from __future__ import annotations

import mmap
import os
import resource
import select
import shutil
import socket
import sys
import tempfile
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from datetime import timedelta
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.profiler import record_function

SWITCH = "GPTCTL_SHARED_MEMORY"  # 0: exchange everything with gloo
MOST_RANKS = 16  # of a group: each rank has a socket to every other
CONNECTING = 10.0  # seconds
SPIN = 50e-6  # seconds before a waiting rank sleeps: as long as it takes to be woken up
PIECE = 1 << 18  # elements that are summed at once, and so stay in the processor's cache
READY, DONE, MEMORY = b"r", b"d", b"m"
FILE_BYTES = 4  # of the number of an open file, one of which may come with a signal


class Peers:
    """The sockets to the other ranks of a group, by their rank in it."""

    def __init__(self, sockets: Mapping[int, socket.socket], timeout: timedelta) -> None:
        self.sockets, self.timeout = sockets, timeout
        self.received = {rank: Counter[int]() for rank in sockets}
        self.files: dict[int, deque[int]] = {rank: deque() for rank in sockets}
        for each in sockets.values():
            each.setblocking(False)

    def send(self, signal: bytes, file: int | None = None) -> None:
        for rank in self.sockets:
            with suppress(BrokenPipeError, ConnectionResetError):  # the next wait tells
                while not self._sent(rank, signal, file):
                    self._receive(rank)  # it may be unable to send, too
                    self._poll(rank, select.POLLIN | select.POLLOUT, self.timeout.total_seconds())

    def _sent(self, rank: int, signal: bytes, file: int | None) -> bool:
        more = [] if file is None else [(socket.SOL_SOCKET, socket.SCM_RIGHTS, _bytes(file))]
        try:
            self.sockets[rank].sendmsg([signal], more)
        except BlockingIOError:
            return False
        return True

    def wait(self, signal: bytes, count: int) -> None:
        """Wait until every other rank has sent a signal `count` times since the start."""
        for rank in self.sockets:
            self.wait_for(rank, signal, count)

    def wait_for(self, rank: int, signal: bytes, count: int) -> None:
        received, (kind,) = self.received[rank], signal
        if received[kind] >= count:
            return
        began = time.monotonic()
        while received[kind] < count:
            if not self._receive(rank):
                self._sleep(rank, began)

    def _receive(self, rank: int) -> bool:
        """Take what has arrived from a rank; False if that is nothing."""
        try:
            signals, more, *_ = self.sockets[rank].recvmsg(
                64, socket.CMSG_SPACE(FILE_BYTES), socket.MSG_CMSG_CLOEXEC
            )
        except BlockingIOError:
            return False
        except OSError as error:
            raise _lost(rank, error.strerror) from error
        if not signals:
            raise _lost(rank, "Connection closed by peer")
        self.received[rank].update(signals)
        self.files[rank].extend(_number(file) for *_, file in more)
        return True

    def _sleep(self, rank: int, began: float) -> None:
        waited = time.monotonic() - began
        if waited > SPIN:
            self._poll(rank, select.POLLIN, self.timeout.total_seconds() - waited)

    def _poll(self, rank: int, events: int, seconds: float) -> None:
        poll = select.poll()
        poll.register(self.sockets[rank], events)
        if not poll.poll(max(0.0, seconds) * 1000):
            raise RuntimeError(f"Timed out waiting for rank {rank} of the group")

    def close(self) -> None:
        for each in self.sockets.values():
            each.close()
        for files in self.files.values():
            while files:
                os.close(files.popleft())


def _bytes(file: int) -> bytes:
    return file.to_bytes(FILE_BYTES, sys.byteorder)


def _number(file: bytes) -> int:
    return int.from_bytes(file[:FILE_BYTES], sys.byteorder)


def _lost(rank: int, reason: str | None) -> RuntimeError:
    return RuntimeError(f"rank {rank} of the group: {reason}")


class Slot:
    """Memory for one message of every rank, and the last exchange that used it."""

    def __init__(self) -> None:
        self.parts: list[Tensor] = []  # bytes, by rank in the group
        self.last_use = 0

    def views(self, dtype: torch.dtype, numel: int) -> list[Tensor]:
        return [part[: numel * dtype.itemsize].view(dtype) for part in self.parts]


class Exchange(NamedTuple):
    """An exchange that has begun: this rank's message is in memory that the others can read."""

    name: str  # in traces
    group: NodeGroup
    number: int
    read: Callable[[], object]  # when all messages are there
    settle: Callable[[], object] | None  # when all ranks have read

    def wait(self) -> None:
        self.group.finish(self.number)


class NodeGroup:
    """The exchanges of a group whose ranks are all on this node. All ranks call them in the same
    order.

    Rings: memory is used again when all ranks have read the message before. Of two slots, one can
    be written while slower ranks still read the other.
    """

    def __init__(self, rank: int, peers: Peers) -> None:
        self.rank, self.size, self.peers = rank, len(peers.sockets) + 1, peers
        self.slots = [Slot(), Slot()]
        self.num_begun = self.num_slots_used = 0
        self.num_shared: Counter[int] = Counter()  # files received, by rank
        self.begun: deque[Exchange] = deque()

    # Memory

    def shared(self, nbytes: int) -> list[Tensor]:
        """New memory of every rank, as bytes; all ranks can write all of it."""
        own = _new_memory(nbytes)
        self.peers.send(MEMORY, own)
        files = [own if rank == self.rank else self._file(rank) for rank in range(self.size)]
        return [_mapped(file, nbytes) for file in files]

    def common(self, nbytes: int) -> Tensor:
        """New memory, the same on all ranks."""
        if self.rank == 0:
            file = _new_memory(nbytes)
            self.peers.send(MEMORY, file)
        else:
            file = self._file(0)
        return _mapped(file, nbytes)

    def _file(self, rank: int) -> int:
        self.num_shared[rank] += 1
        self.peers.wait_for(rank, MEMORY, self.num_shared[rank])
        return self.peers.files[rank].popleft()

    def slot(self, nbytes: int) -> Slot:
        """A slot that no other rank reads any more, to write the next message to."""
        slot = self.slots[self.num_slots_used % len(self.slots)]
        self.num_slots_used += 1
        self.finish(slot.last_use)
        self.peers.wait(DONE, slot.last_use)
        if not slot.parts or len(slot.parts[0]) < nbytes:
            slot.parts = []  # before there is more: the old memory is free by then
            slot.parts = self.shared(nbytes)
        return slot

    # Exchanges

    def begin(
        self,
        name: str,
        read: Callable[[], object],
        slot: Slot | None = None,
        settle: Callable[[], object] | None = None,
    ) -> Exchange:
        self.num_begun += 1
        if slot:
            slot.last_use = self.num_begun
        exchange = Exchange(name, self, self.num_begun, read, settle)
        self.begun.append(exchange)
        self.peers.send(READY)
        return exchange

    def finish(self, number: int) -> None:
        """Complete all exchanges up to this one."""
        while self.begun and self.begun[0].number <= number:
            exchange = self.begun.popleft()
            with record_function(f"shared:{exchange.name}"):
                self._complete(exchange)

    def _complete(self, exchange: Exchange) -> None:
        self.peers.wait(READY, exchange.number)
        exchange.read()
        self.peers.send(DONE)
        if exchange.settle:
            self.peers.wait(DONE, exchange.number)
            exchange.settle()

    def sum(self, x: Tensor) -> Exchange:
        """Sum a contiguous tensor in place."""
        flat = x.view(-1)
        slot = self.slot(x.nbytes)
        parts = slot.views(x.dtype, len(flat))
        parts[self.rank].copy_(flat)
        if self.size == 2:
            return self.begin("all_reduce", lambda: torch.add(*parts, out=flat), slot)
        return self._sum_parts(parts, False, slot, lambda: flat.copy_(parts[self.rank]))

    def mean_of_parts(self, parts: Sequence[Tensor]) -> Exchange:
        """Average shared memory in place."""
        return self._sum_parts(parts, True, None, lambda: None)

    def _sum_parts(
        self,
        parts: Sequence[Tensor],
        is_mean: bool,
        slot: Slot | None,
        settle: Callable[[], object],
    ) -> Exchange:
        """Each rank computes an equal share of the sum, for all ranks."""
        begin, end = (len(parts[0]) * (self.rank + i) // self.size for i in (0, 1))

        def read() -> None:
            for start in range(begin, end, PIECE):
                own, *others = (part[start : min(start + PIECE, end)] for part in parts)
                for other in others:
                    own += other
                if is_mean:
                    own /= self.size
                for other in others:
                    other.copy_(own)

        return self.begin("all_reduce", read, slot, settle)

    def gather(self, whole: Tensor, own: Tensor) -> Exchange:
        """The tensors of all ranks, one after the other."""
        slot = self.slot(own.nbytes)
        parts = slot.views(own.dtype, own.numel())
        parts[self.rank].copy_(own.view(-1))
        return self.begin("all_gather", lambda: torch.cat(parts, out=whole.view(-1)), slot)

    def reduce_scatter(self, own: Tensor, slot: Slot, is_mean: bool) -> Exchange:
        """This rank's part of the sum of the messages that all ranks have written to a slot."""
        flat = own.view(-1)
        first = self.rank * len(flat)
        parts = [
            part[first : first + len(flat)] for part in slot.views(own.dtype, len(flat) * self.size)
        ]

        def read() -> None:
            for start in range(0, len(flat), PIECE):
                piece = slice(start, start + PIECE)
                total = torch.add(parts[0][piece], parts[1][piece], out=flat[piece])
                for part in parts[2:]:
                    total += part[piece]
                if is_mean:
                    total /= self.size

        return self.begin("reduce_scatter", read, slot)

    def close(self) -> None:
        self.peers.close()


def _new_memory(nbytes: int) -> int:
    file = os.memfd_create("gptctl-messages")
    os.posix_fallocate(file, 0, nbytes)  # an error now, not a signal at the first access
    return file


def _is_limited() -> bool:
    """Whether the size of files is limited (`ulimit -f`): it holds for this memory, too."""
    return resource.getrlimit(resource.RLIMIT_FSIZE)[0] != resource.RLIM_INFINITY


def _mapped(file: int, nbytes: int) -> Tensor:
    """The memory of a file as bytes; closes the file."""
    try:
        return torch.frombuffer(mmap.mmap(file, nbytes), dtype=torch.uint8)
    finally:
        os.close(file)


def _here() -> str:
    """Only processes for which this is the same can share memory, and only some of them may."""
    with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
        boot = file.read().strip()
    return f"{boot} {os.readlink('/proc/self/ns/mnt')} {os.geteuid()}"


def join_node_group(
    rank: int, size: int, gather: Callable[[Any], list[Any]], timeout: timedelta
) -> NodeGroup | None:
    """Connect the ranks of a group, or None on all of them if gloo has to do it.

    `gather` collects a value from all of them.
    """
    if size > MOST_RANKS:
        return None
    with ExitStack() as stack:
        listener, address = None, None
        if os.environ.get(SWITCH) != "0" and not _is_limited():
            with suppress(OSError):
                folder = tempfile.mkdtemp(prefix="gptctl-")  # only its owner can connect
                stack.callback(shutil.rmtree, folder, ignore_errors=True)
                listener = stack.enter_context(socket.socket(socket.AF_UNIX))
                listener.bind(f"{folder}/{rank}")
                listener.listen(size)
                address = [_here(), listener.getsockname()]
        addresses = gather(address)
        if None in addresses or len({place for place, _ in addresses}) > 1:
            return None
        assert listener is not None
        sockets: dict[int, socket.socket] = {}
        with suppress(OSError):
            _connect(rank, [path for _, path in addresses], listener, sockets)
        is_complete = all(gather(len(sockets) == size - 1))
        peers = Peers(sockets, timeout)
        if is_complete:
            return NodeGroup(rank, peers)
        peers.close()
        return None


def _connect(
    rank: int, paths: Sequence[str], listener: socket.socket, sockets: dict[int, socket.socket]
) -> None:
    """Connect to the ranks before this one, and wait for those after it."""
    for other in range(rank):
        new = socket.socket(socket.AF_UNIX)
        new.settimeout(CONNECTING)
        new.connect(paths[other])
        new.sendall(bytes([rank]))
        sockets[other] = new
    listener.settimeout(CONNECTING)
    for _ in range(rank + 1, len(paths)):
        new, _ = listener.accept()
        new.settimeout(CONNECTING)
        sockets[new.recv(1)[0]] = new
