"""Collectives between ranks of one node in shared memory, on CPUs. Knows nothing of layouts.

gloo sends over TCP, even within a node: between two ranks that copies each byte four times, on the
cores that train. Here a rank writes its message to memory that the others have mapped; sockets
carry only notices, and the descriptors of that memory. If a rank exits, its sockets close, and the
others fail at once, as with gloo.
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

SWITCH = "GPTCTL_SHARED_MEMORY"  # 0: use gloo for everything
MOST_RANKS = 16  # of a group: each rank has a socket to every other
CONNECT_SECONDS = 10.0
LONGEST_PLACE = 80  # characters: names of sockets have 107 at most
SPIN = 50e-6  # seconds before a waiting rank sleeps: as long as it takes to be woken up
PIECE = 1 << 18  # elements that are summed at once, and so stay in the processor's cache
READY, DONE, MEMORY = b"r", b"d", b"m"
FILE_BYTES = 4  # of the number of an open file, one of which may come with a notice


class ConnectionLost(RuntimeError):
    """Another rank has closed its socket; a RuntimeError, as gloo raises it."""


class PeerSockets:
    """The sockets to the other ranks of a group, by their rank in it."""

    def __init__(self, sockets: Mapping[int, socket.socket], timeout: timedelta) -> None:
        self.sockets, self.timeout = sockets, timeout
        self.received = {rank: Counter[int]() for rank in sockets}
        self.files: dict[int, deque[int]] = {rank: deque() for rank in sockets}
        self.closed: set[int] = set()  # by ranks that nobody waits for: they may be done
        for each in sockets.values():
            each.setblocking(False)

    def send(self, notice: bytes, file: int | None = None) -> None:
        for rank in self.sockets:
            with suppress(BrokenPipeError, ConnectionResetError):  # the next wait tells
                while not self._sent(rank, notice, file):
                    self._poll(rank, select.POLLOUT, self.timeout.total_seconds())

    def _sent(self, rank: int, notice: bytes, file: int | None) -> bool:
        more = [] if file is None else [(socket.SOL_SOCKET, socket.SCM_RIGHTS, _bytes(file))]
        try:
            self.sockets[rank].sendmsg([notice], more)
        except BlockingIOError:
            return False
        return True

    def wait(self, notice: bytes, count: int) -> None:
        """Wait until every other rank has sent a notice `count` times since the start."""
        for rank in self.sockets:
            self.wait_for(rank, notice, count)

    def wait_for(self, rank: int, notice: bytes, count: int) -> None:
        received, (kind,) = self.received[rank], notice
        if received[kind] >= count:
            return
        began = time.monotonic()
        while received[kind] < count:
            if not self._receive(rank):
                self._sleep(rank, began)

    def _receive(self, rank: int) -> bool:
        """Take what has arrived from a rank; False if that is nothing."""
        try:
            notices, more, flags, _ = self.sockets[rank].recvmsg(
                64, socket.CMSG_SPACE(FILE_BYTES), socket.MSG_CMSG_CLOEXEC
            )
        except BlockingIOError:
            return False
        except OSError as error:
            raise _lost(rank, error.strerror) from error
        if not notices:
            raise _lost(rank, "Connection closed by peer")
        if flags & socket.MSG_CTRUNC:
            raise RuntimeError("too many open files to share memory: raise `ulimit -n`")
        self.received[rank].update(notices)
        self.files[rank].extend(_number(file) for *_, file in more)
        return True

    def _sleep(self, rank: int, began: float) -> None:
        waited = time.monotonic() - began
        if waited > SPIN:
            self._poll(rank, select.POLLIN, self.timeout.total_seconds() - waited)

    def _poll(self, rank: int, events: int, seconds: float) -> None:
        """Wait for a rank, and take what arrives from all: their buffers may be full, too.

        Otherwise three ranks could wait for each other: each to send to the next one.
        """
        poll, others = select.poll(), self.sockets.keys() - self.closed
        ranks = {self.sockets[other].fileno(): other for other in {rank, *others}}
        for descriptor, other in ranks.items():
            poll.register(descriptor, events | select.POLLIN if other == rank else select.POLLIN)
        ready = poll.poll(max(0.0, seconds) * 1000)
        if not ready:
            raise RuntimeError(f"Timed out waiting for rank {rank} of the group")
        for other in {ranks[descriptor] for descriptor, _ in ready}:
            try:
                self._receive(other)
            except ConnectionLost:
                if other == rank:
                    raise
                self.closed.add(other)

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


def _lost(rank: int, reason: str | None) -> ConnectionLost:
    return ConnectionLost(f"rank {rank} of the group: {reason}")


class MessageMemory:
    """Memory for one message of every rank, and the last collective that used it."""

    def __init__(self) -> None:
        self.parts: list[Tensor] = []  # bytes, by rank in the group
        self.last_use = 0

    def views(self, dtype: torch.dtype, numel: int) -> list[Tensor]:
        return [part[: numel * dtype.itemsize].view(dtype) for part in self.parts]


class SharedCollective(NamedTuple):
    """A collective that has begun: this rank's message is in memory that the others can read."""

    name: str  # in traces
    group: SharedMemoryGroup
    number: int
    read: Callable[[], object]  # when all messages are there
    after_all_read: Callable[[], object] | None  # when all ranks have read

    def wait(self) -> None:
        self.group.finish(self.number)


class SharedMemoryGroup:
    """The collectives of a group whose ranks are all on this node, and call them in the same order.

    Each message goes to one of two memories. A memory is written again only when all ranks have
    read its last message, so slower ranks can still read the other one.
    """

    def __init__(self, rank: int, peers: PeerSockets) -> None:
        self.rank, self.size, self.peers = rank, len(peers.sockets) + 1, peers
        self.memories = [MessageMemory(), MessageMemory()]
        self.num_begun = self.num_memories_used = 0
        self.num_shared: Counter[int] = Counter()  # files received, by rank
        self.begun: deque[SharedCollective] = deque()

    # Memory

    def memory_of_each(self, nbytes: int) -> list[Tensor]:
        """New memory of every rank, as bytes; all ranks can write all of it."""
        own = _new_memory(nbytes)
        self.peers.send(MEMORY, own)
        files = [own if rank == self.rank else self._file(rank) for rank in range(self.size)]
        return [_mapped(file, nbytes) for file in files]

    def memory_of_all(self, nbytes: int) -> Tensor:
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

    def next_memory(self, nbytes: int) -> MessageMemory:
        """The memory for the next message: no other rank reads its last one any more."""
        memory = self.memories[self.num_memories_used % len(self.memories)]
        self.num_memories_used += 1
        self.finish(memory.last_use)
        self.peers.wait(DONE, memory.last_use)
        if not memory.parts or len(memory.parts[0]) < nbytes:
            memory.parts = []  # free the old memory first
            memory.parts = self.memory_of_each(nbytes)
        return memory

    # Collectives

    def begin(
        self,
        name: str,
        read: Callable[[], object],
        memory: MessageMemory | None = None,
        after_all_read: Callable[[], object] | None = None,
    ) -> SharedCollective:
        self.num_begun += 1
        if memory:
            memory.last_use = self.num_begun
        collective = SharedCollective(name, self, self.num_begun, read, after_all_read)
        self.begun.append(collective)
        self.peers.send(READY)
        return collective

    def finish(self, number: int) -> None:
        """Complete all collectives up to this one."""
        while self.begun and self.begun[0].number <= number:
            collective = self.begun.popleft()
            with record_function(f"shared:{collective.name}"):
                self._complete(collective)

    def _complete(self, collective: SharedCollective) -> None:
        self.peers.wait(READY, collective.number)
        collective.read()
        self.peers.send(DONE)
        if collective.after_all_read:
            self.peers.wait(DONE, collective.number)
            collective.after_all_read()

    def sum(self, x: Tensor) -> SharedCollective:
        """Sum a contiguous tensor in place."""
        flat = x.view(-1)
        memory = self.next_memory(x.nbytes)
        parts = memory.views(x.dtype, len(flat))
        parts[self.rank].copy_(flat)
        if self.size == 2:
            return self.begin("all_reduce", lambda: torch.add(*parts, out=flat), memory)
        return self._sum_parts(parts, False, memory, lambda: flat.copy_(parts[self.rank]))

    def mean_of_parts(self, parts: Sequence[Tensor]) -> SharedCollective:
        """Average shared memory in place."""
        return self._sum_parts(parts, True, None, lambda: None)

    def _sum_parts(
        self,
        parts: Sequence[Tensor],
        is_mean: bool,
        memory: MessageMemory | None,
        after_all_read: Callable[[], object],
    ) -> SharedCollective:
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

        return self.begin("all_reduce", read, memory, after_all_read)

    def gather(self, whole: Tensor, own: Tensor) -> SharedCollective:
        """The tensors of all ranks, one after the other."""
        memory = self.next_memory(own.nbytes)
        parts = memory.views(own.dtype, own.numel())
        parts[self.rank].copy_(own.view(-1))
        return self.begin("all_gather", lambda: torch.cat(parts, out=whole.view(-1)), memory)

    def reduce_scatter(self, own: Tensor, memory: MessageMemory, is_mean: bool) -> SharedCollective:
        """This rank's part of the sum of the messages that all ranks have written to a memory."""
        flat = own.view(-1)
        first = self.rank * len(flat)
        parts = [
            part[first : first + len(flat)]
            for part in memory.views(own.dtype, len(flat) * self.size)
        ]

        def read() -> None:
            for start in range(0, len(flat), PIECE):
                piece = slice(start, start + PIECE)
                total = torch.add(parts[0][piece], parts[1][piece], out=flat[piece])
                for part in parts[2:]:
                    total += part[piece]
                if is_mean:
                    total /= self.size

        return self.begin("reduce_scatter", read, memory)

    def close(self) -> None:
        self.peers.close()


def _new_memory(nbytes: int) -> int:
    file = os.memfd_create("gptctl-messages")
    os.posix_fallocate(file, 0, max(1, nbytes))  # an error now, not a SIGBUS at the first access
    return file


def _is_limited() -> bool:
    """Whether the size of files is limited (`ulimit -f`): it holds for this memory, too."""
    return resource.getrlimit(resource.RLIMIT_FSIZE)[0] != resource.RLIM_INFINITY


def _mapped(file: int, nbytes: int) -> Tensor:
    """The memory of a file as bytes; closes the file."""
    try:
        return torch.frombuffer(mmap.mmap(file, max(1, nbytes)), dtype=torch.uint8)[:nbytes]
    finally:
        os.close(file)


def _sharing_scope() -> str:
    """The machine, mount namespace and user: ranks that differ in them cannot share memory."""
    with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
        boot = file.read().strip()
    return f"{boot} {os.readlink('/proc/self/ns/mnt')} {os.geteuid()}"


def join_shared_memory(
    rank: int, size: int, gather: Callable[[Any], list[Any]], timeout: timedelta
) -> SharedMemoryGroup | None:
    """Connect the ranks of a group, or None on all of them if gloo has to do it.

    `gather` collects a value from all of them.
    """
    if size > MOST_RANKS:
        return None
    with ExitStack() as stack:
        listener, address = None, None
        if os.environ.get(SWITCH) != "0" and not _is_limited():
            with suppress(OSError):
                folder = _private_folder()
                stack.callback(shutil.rmtree, folder, ignore_errors=True)
                listener = stack.enter_context(socket.socket(socket.AF_UNIX))
                listener.bind(f"{folder}/{rank}")
                listener.listen(size)
                address = [_sharing_scope(), listener.getsockname()]
        addresses = gather(address)
        if None in addresses or len({place for place, _ in addresses}) > 1:
            return None
        assert listener is not None
        sockets: dict[int, socket.socket] = {}
        with suppress(OSError):
            _connect(rank, [path for _, path in addresses], listener, sockets)
        is_complete = all(gather(len(sockets) == size - 1))
        peers = PeerSockets(sockets, timeout)
        if is_complete:
            return SharedMemoryGroup(rank, peers)
        peers.close()
        return None


def _private_folder() -> str:
    """A folder in which only this user can connect to sockets, with a name short enough for one."""
    place = tempfile.gettempdir()
    if len(place) >= LONGEST_PLACE:
        place = "/tmp"  # nosec B108  # the folder in it is new and private
    return tempfile.mkdtemp(prefix="gptctl-", dir=place)


def _connect(
    rank: int, paths: Sequence[str], listener: socket.socket, sockets: dict[int, socket.socket]
) -> None:
    """Connect to the ranks before this one, and wait for those after it."""
    for other in range(rank):
        new = socket.socket(socket.AF_UNIX)
        new.settimeout(CONNECT_SECONDS)
        new.connect(paths[other])
        new.sendall(bytes([rank]))
        sockets[other] = new
    listener.settimeout(CONNECT_SECONDS)
    for _ in range(rank + 1, len(paths)):
        new, _ = listener.accept()
        new.settimeout(CONNECT_SECONDS)
        if not (number := new.recv(1)):
            raise ConnectionError("closed before it told its rank")
        sockets[number[0]] = new
