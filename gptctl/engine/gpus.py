"""The GPUs of this machine and who uses them, by nvidia-smi. Without it there are none."""

from __future__ import annotations

import os

from gptctl.engine.queue_rules import GpuUse

TIMEOUT = 20.0  # seconds; a broken driver can hang nvidia-smi
# A process in another container is not listed, but its memory is: from this part on, a GPU is used.
BUSY_MEMORY = 0.25


def visible_gpus() -> tuple[str, ...]:
    """The numbers of the GPUs that jobs of this process may use."""
    return _visible(_gpus())


def gpu_use() -> GpuUse:
    """The GPUs, and those that processes of any user occupy."""
    gpus = _gpus()
    occupied = {row[0] for row in _query("--query-compute-apps=gpu_uuid,pid")} if gpus else set()
    return GpuUse(_visible(gpus), busy_gpus(gpus, occupied))


def numbered(devices: tuple[str, ...]) -> tuple[str, ...]:
    """Replace UUIDs by numbers: two jobs may name the same GPU in different ways."""
    if all(device.isdecimal() for device in devices):
        return devices
    numbers = {row[1]: row[0] for row in _gpus()}
    return tuple(_number(device, numbers) for device in devices)


def _number(device: str, numbers: dict[str, str]) -> str:
    # As in CUDA, the start of a UUID is enough if no other GPU has it.
    found = [number for uuid, number in numbers.items() if uuid.startswith(device)]
    return found[0] if len(found) == 1 else device


def busy_gpus(gpus: list[list[str]], occupied: set[str]) -> frozenset[str]:
    """Find the GPUs in use: rows of number, UUID, memory used and total memory; UUIDs."""
    busy = set()
    for number, uuid, used, total in gpus:
        # Some GPUs report [N/A] instead of numbers: then only processes count.
        is_full = used.isdecimal() and total.isdecimal() and int(used) > BUSY_MEMORY * int(total)
        if uuid in occupied or is_full:
            busy.add(number)
    return frozenset(busy)


def _visible(gpus: list[list[str]]) -> tuple[str, ...]:
    every = tuple(row[0] for row in gpus)
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    if chosen is None or not every:
        return every
    numbers = {row[1]: row[0] for row in gpus}
    names = [name.strip() for name in chosen.split(",")]
    # An empty value and -1 hide all GPUs, as in CUDA itself.
    return tuple(numbers.get(name, name) for name in names if name not in ("", "-1"))


def _gpus() -> list[list[str]]:
    rows = _query("--query-gpu=index,uuid,memory.used,memory.total")
    return [row for row in rows if len(row) == 4]


def _query(what: str) -> list[list[str]]:
    """Ask nvidia-smi for rows of values; none if it is missing, fails or hangs."""
    # Imported late: an agent is ready sooner.
    import subprocess

    try:
        answer = subprocess.run(
            ["nvidia-smi", what, "--format=csv,noheader,nounits"],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=TIMEOUT,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return []
    return [[cell.strip() for cell in line.split(",")] for line in answer.stdout.splitlines()]
