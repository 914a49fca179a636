"""Checks the node that it runs on, for `gptctl doctor`: its environment, and the network speed.

    python -m trainer.node_check facts FILE
    torchrun … -m trainer.node_check reduce FOLDER

It starts with the standard library and old syntax only: a missing torch or an old Python must be
reported, not crash the check.
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
SIOCGIFADDR = 0x8915  # Linux: get the IPv4 address of an interface


def main(arguments: list[str]) -> int:
    what, where = arguments
    return reduce(where) if what == "reduce" else facts(where)


def facts(file: str) -> int:
    """Write the facts twice: first without torch, because its import may take minutes or hang."""
    known = of_this_node(os.path.dirname(file))
    write(file + ".json", known)
    known.update(of_libraries())
    write(file + ".json", known)
    if "error" in known:
        return 1
    write(file + ".gpus", len(known["gpus"]))  # a separate file that a shell script can read
    return 0


def write(file: str, value: Any) -> None:
    """Write atomically: the doctor polls for the file."""
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
    known["clock"] = time.time()  # last: name lookups may take seconds
    return known


def free_port() -> int:
    """A free port below the range that the kernel uses for outgoing connections."""
    for port in range(29500, 29000, -1):
        with socket.socket() as probe:
            try:
                probe.bind(("", port))
                return port
            except OSError:
                continue
    return 0  # none is free


def address_of(interface: str) -> str:
    import fcntl

    if not interface:  # the profile sets none: torch chooses an address by itself
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
    """Versions of torch and numpy, and the GPUs; `error` says why they cannot be used."""
    known = {}  # type: dict[str, Any]
    try:
        import torch

        known["torch"] = str(torch.__version__)
        import numpy

        known["numpy"] = str(numpy.__version__)
        known["gpus"] = [
            torch.cuda.get_device_name(number) for number in range(torch.cuda.device_count())
        ]
    except (Exception, SystemExit) as error:  # a broken installation can raise anything
        words = str(error).strip().splitlines()
        known["error"] = f"{type(error).__name__}: {words[0] if words else ''}"
    return known


def reduce(folder: str) -> int:
    """Run one rank of the all-reduce; ranks connect in the same way as in a training job."""
    rank = os.environ.get("RANK", "0")
    try:
        measured = measure(os.environ.get("GPTCTL_DEVICE", "cpu"))
    except Exception as error:
        words = str(error).strip().splitlines()
        # The traceback goes to the log; this is the one line that the doctor shows.
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
        first = mesh.read(mesh.summed(values)[:1])[0]  # also the warm-up
        # The best large run shows the bandwidth; the median small one the latency.
        seconds = min(_seconds(mesh, values.fill_(1)) for _ in range(REPEATS))
        smallest = sorted(_seconds(mesh, values[:1].fill_(1)) for _ in range(SMALL_REPEATS))[
            SMALL_REPEATS // 2
        ]
        mesh.barrier()  # all ranks read their clock at the same moment
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
    """The duration of one all-reduce; reading a value waits for the device."""
    mesh.read(values[:1])
    begin = time.perf_counter()
    mesh.read(mesh.summed(values)[:1])
    return time.perf_counter() - begin


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
