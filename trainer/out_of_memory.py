"""Explains a rank that has run out of memory: what it had, what was estimated, what would fit.

Started again, it would fail in the same way: the error is a `UserError`, after which nobody
restarts the job.
"""

from __future__ import annotations

import errno
import os
import re
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch

from trainer.config.sections import RunConfig
from trainer.errors import UserError, causes
from trainer.estimate import GIB, estimate
from trainer.mesh import Mesh
from trainer.savings import advice

# Not every allocation goes through torch's allocators: libraries report it in their own words.
_TEXT = re.compile(
    r"\bout of memory\b|can't allocate memory|Cannot allocate memory|STATUS_ALLOC_FAILED"
    r"|Unable to allocate",
    re.IGNORECASE,
)
_WANTED = re.compile(r"[Tt]ried to allocate (\d+(?:\.\d+)?) (bytes|KiB|MiB|GiB)")
_UNITS = {"bytes": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": GIB}
_MARGIN = 0.9  # of an estimate that was too low: changes must save at least the rest


class Found(NamedTuple):
    """What is known about the memory of a rank in bytes; None where it is not known."""

    where: str
    wanted: int | None = None
    allocated: int | None = None
    capacity: int | None = None


@contextmanager
def explained(run: RunConfig, mesh: Mesh) -> Iterator[None]:
    """Explain it in a training, whose memory was estimated."""
    try:
        yield
    except Exception as error:
        found = _found(error, mesh)
        if found is None:
            raise
        # The traceback is left out, like that of every user mistake: the config is to be changed.
        raise _explanation(run, mesh, found) from None


@contextmanager
def explained_task(mesh: Mesh, hint: str) -> Iterator[None]:
    """Explain it in a task, of which nothing was estimated."""
    try:
        yield
    except Exception as error:
        found = _found(error, mesh)
        if found is None:
            raise
        raise UserError(_message(mesh, found), hint) from None


def _found(error: Exception, mesh: Mesh) -> Found | None:
    memory_error = find(error)
    return facts(memory_error, mesh.device) if memory_error else None


def find(error: BaseException | None) -> BaseException | None:
    """The error itself, or one that it wraps as the pipeline does, if memory was the reason."""
    return next(filter(_is_of_memory, causes(error)), None)


def _is_of_memory(error: BaseException) -> bool:
    if isinstance(error, OSError):  # of a system call, such as mmap
        return error.errno == errno.ENOMEM
    is_known = isinstance(error, (torch.OutOfMemoryError, MemoryError))
    return is_known or (isinstance(error, RuntimeError) and bool(_TEXT.search(str(error))))


def facts(error: BaseException, device: torch.device) -> Found:
    found = _WANTED.search(str(error))
    wanted = int(float(found[1]) * _UNITS[found[2]]) if found else None
    if device.type != "cuda":
        where, capacity = _host_memory()
        return Found(where, wanted, None, capacity)
    allocated = torch.cuda.memory_stats(device).get("allocated_bytes.all.peak")
    capacity = torch.cuda.get_device_properties(device).total_memory
    return Found(f"GPU {device.index}", wanted, allocated, capacity)


def _host_memory() -> tuple[str, int]:
    """What this process may use: all of the host's, or less."""
    found = [("the host", os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))]
    for limit, option in ((resource.RLIMIT_AS, "-v"), (resource.RLIMIT_DATA, "-d")):
        size = resource.getrlimit(limit)[0]
        if size != resource.RLIM_INFINITY:
            found.append((f"the process, by `ulimit {option}`,", size))
    return min(found, key=lambda each: each[1])


def _explanation(run: RunConfig, mesh: Mesh, found: Found) -> UserError:
    memory = estimate(run, mesh.layout).memory
    message = f"{_message(mesh, found)}, the estimate was {_gib(memory.total)}"
    limit = _limit(memory.total, found)
    return UserError(message, advice(run, mesh.layout, limit))


def _message(mesh: Mesh, found: Found) -> str:
    parts = [f"{found.where} has {_gib(found.capacity)}" if found.capacity else found.where]
    if found.allocated:
        parts.append(f"torch had allocated {_gib(found.allocated)}")
    if found.wanted:
        parts.append(f"tried to allocate {_gib(found.wanted)} more")
    return f"out of memory {mesh.heartbeat.where}: {', '.join(parts)}"


def _limit(estimated: float, found: Found) -> float:
    """The estimate that a change must reach.

    If the estimate was below the capacity, it was too low: then a change has to save what was
    missing in reality.
    """
    capacity = found.capacity or estimated
    needed = (found.allocated or 0) + (found.wanted or 0)
    excess = capacity / needed if needed > capacity else _MARGIN
    return min(capacity, estimated * excess)


def _gib(size: float) -> str:
    return f"{size / GIB:.1f} GiB" if size >= GIB / 10 else f"{size / (1 << 20):.1f} MiB"
