"""Looks at the node that it runs on, for `gptctl doctor`: what a job would find here, and how fast the nodes talk.

    python -m trainer.node_check facts FILE              torchrun … -m trainer.node_check reduce FOLDER

Standard library first, in old syntax: a node without torch or with an old Python is a finding, not a crash.
"""

from __future__ import annotations

import json
import os
import platform
import socket
import sys
import time
from typing import Any

BYTES = 64 << 20
REPEATS, SMALL_REPEATS = 5, 30
PATIENCE = 0.5  # minutes that ranks wait for each other
SIOCGIFADDR = 0x8915


def main(arguments: list[str]) -> int:
    what, where = arguments
    return reduce(where) if what == "reduce" else facts(where)


def facts(file: str) -> int:
    """Written twice: what needs no torch at once, since importing it may take minutes, or never end."""
    known = of_this_node(os.path.dirname(file))
    write(file + ".json", known)
    known.update(of_libraries())
    write(file + ".json", known)
    if "error" in known:
        return 1
    write(file + ".gpus", len(known["gpus"]))
    return 0


def write(file: str, value: Any) -> None:
    """Whole or not at all: somebody waits for it."""
    part = f"{file}.part{os.getpid()}"
    with open(part, "w", encoding="utf-8") as stream:
        stream.write(json.dumps(value) + "\n")
    os.replace(part, file)


def of_this_node(folder: str) -> dict[str, Any]:
    space = os.statvfs(folder)
    interface = os.environ.get("GLOO_SOCKET_IFNAME", "")
    known = {
        "host": socket.gethostname(),
        "python": sys.executable,
        "version": platform.python_version(),
        "interface": interface,
        "address": address_of(interface),
        "own_name": addresses_of(socket.gethostname()),
        "head": os.environ.get("MASTER_ADDR", ""),
        "free": space.f_bavail * space.f_frsize,
        "cores": len(os.sched_getaffinity(0)),
        "port": free_port(),
    }
    known["clock"] = time.time()  # last: looking names up may take seconds
    return known


def free_port() -> int:
    """Below those that outgoing connections take."""
    for port in range(29500, 29000, -1):
        with socket.socket() as probe:
            try:
                probe.bind(("", port))
                return port
            except OSError:
                continue
    return 0


def address_of(interface: str) -> str:
    import fcntl

    if not interface:
        return ""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        try:
            answer = fcntl.ioctl(any_socket, SIOCGIFADDR, interface.encode()[:15].ljust(256, b"\0"))
        except OSError:
            return ""
    return socket.inet_ntoa(answer[20:24])


def addresses_of(name: str) -> list[str]:
    try:
        return sorted({str(found[4][0]) for found in socket.getaddrinfo(name, None)})
    except OSError:
        return []


def of_libraries() -> dict[str, Any]:
    """`error`: why they cannot be used. Whatever importing them may raise is one."""
    known = {}  # type: dict[str, Any]
    try:
        import torch

        known["torch"] = str(torch.__version__)
        import numpy

        known["numpy"] = str(numpy.__version__)
        known["gpus"] = [
            torch.cuda.get_device_name(number) for number in range(torch.cuda.device_count())
        ]
    except (Exception, SystemExit) as error:
        words = str(error).strip().splitlines()
        known["error"] = f"{type(error).__name__}: {words[0] if words else ''}"
    return known


def reduce(folder: str) -> int:
    """One rank of the all-reduce; it meets the others as the ranks of a training do."""
    rank = os.environ.get("RANK", "0")
    try:
        measured = measure(os.environ.get("GPTCTL_DEVICE", "cpu"))
    except Exception as error:
        words = str(error).strip().splitlines()
        with open(os.path.join(folder, f"rank.{rank}.failed"), "w", encoding="utf-8") as stream:
            stream.write(words[0] if words else type(error).__name__)
        raise
    if rank == "0":
        write(os.path.join(folder, "reduce.json"), measured)
    return 0


def measure(device: str) -> dict[str, Any]:
    from dataclasses import replace

    import torch

    from trainer.config.sections import RunConfig
    from trainer.layout import Layout
    from trainer.mesh import join

    backend = "nccl" if device == "gpu" else "gloo"
    default = RunConfig()
    run = replace(
        default,
        Global=replace(default.Global, device=device),
        Distributed=replace(default.Distributed, backend=backend, timeout_minutes=PATIENCE),
    )
    with join(run, Layout(dp=int(os.environ["WORLD_SIZE"]))) as mesh:
        values = torch.ones(BYTES // 4, device=mesh.device)
        first = mesh.read(mesh.summed(values)[:1])[0]  # also warms up
        seconds = min(_seconds(mesh, values.fill_(1)) for _ in range(REPEATS))
        smallest = sorted(_seconds(mesh, values[:1].fill_(1)) for _ in range(SMALL_REPEATS))[
            SMALL_REPEATS // 2
        ]
        mesh.barrier()
        clocks = mesh.gather((int(os.environ.get("GPTCTL_NODE", "0")), time.time()))
        return {
            "world": mesh.world,
            "backend": backend,
            "is_right": first == mesh.world,
            "bytes": BYTES,
            "seconds": seconds,
            "smallest": smallest,
            "clocks": clocks,
        }


def _seconds(mesh: Any, values: Any) -> float:
    """Of one all-reduce; reading a value waits for the device."""
    mesh.read(values[:1])
    begin = time.perf_counter()
    mesh.read(mesh.summed(values)[:1])
    return time.perf_counter() - begin


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
