"""Report facts about a node to `gptctl doctor`, and measure an all-reduce between nodes.

    python -m trainer.node_check facts FILE
    torchrun … -m trainer.node_check reduce FOLDER

It must run without torch and on old Pythons far enough to report that; so it imports torch late,
and uses old syntax.
"""

from __future__ import annotations

import json
import os
import platform
import socket
import sys
import time
from typing import Any

MESSAGE_BYTES = 64 << 20
REPEATS, SMALL_REPEATS = 5, 30
TIMEOUT = 0.5  # minutes that ranks wait for each other
STORE_TIMEOUT = 10  # seconds; a store on the same node answers at once
LISTENING = "0A"  # state of a socket in /proc/net/tcp
PORT_RANGE = "/proc/sys/net/ipv4/ip_local_port_range"
SIOCGIFADDR = 0x8915  # ioctl: the IPv4 address of an interface


def main(arguments: list[str]) -> int:
    action, path = arguments
    return reduce(path) if action == "reduce" else facts(path)


def facts(file: str) -> int:
    """Write the facts to FILE.json, and the number of GPUs to FILE.gpus."""
    known = node_facts(os.path.dirname(file))
    # Twice: importing torch may take minutes, or hang, and must not hide the other facts.
    write(file + ".json", known)
    known.update(library_facts())
    write(file + ".json", known)
    if "error" in known:
        return 1
    write(file + ".gpus", len(known["gpus"]))
    return 0


def write(file: str, value: Any) -> None:
    # Renamed when complete: gptctl polls for the file and may read it at any time.
    part = f"{file}.part{os.getpid()}"
    with open(part, "w", encoding="utf-8") as stream:
        stream.write(json.dumps(value) + "\n")
    os.replace(part, file)


def node_facts(folder: str) -> dict[str, Any]:
    space = os.statvfs(folder)
    interface = os.environ.get("GLOO_SOCKET_IFNAME", "")
    known = {
        "host": socket.gethostname(),
        "python": sys.executable,
        "version": platform.python_version(),
        "interface": interface,
        "address": address_of(interface),
        "nccl": os.environ.get("NCCL_SOCKET_IFNAME", ""),
        "interfaces": {name: address_of(name) for _, name in socket.if_nameindex()},
        "addresses6": ipv6_addresses(),
        "ports": port_range(),
        "own_name": resolve(socket.gethostname()),
        "head": os.environ.get("MASTER_ADDR", ""),
        "free": space.f_bavail * space.f_frsize,
        "cores": len(os.sched_getaffinity(0)),
        "port": free_port(),
    }
    known["clock"] = time.time()  # last: resolving names may take seconds
    return known


def free_port() -> int:
    """A port below the range of outgoing connections, where the rendezvous can listen; 0: none."""
    import random

    # From the range that jobs use; as in gptctl/engine/ports.py, which the trainer cannot import.
    for port in random.SystemRandom().sample(range(20000, 32000), 200):
        with socket.socket() as probe:
            try:
                probe.bind(("", port))
                return port
            except OSError:
                continue
    return 0


def address_of(interface: str) -> str:
    """The IPv4 address of an interface, without the command `ip`: not every node has it."""
    import fcntl

    if not interface:
        return ""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        try:
            answer = fcntl.ioctl(any_socket, SIOCGIFADDR, interface.encode()[:15].ljust(256, b"\0"))
        except OSError:
            return ""
    return socket.inet_ntoa(answer[20:24])


def ipv6_addresses() -> list[str]:
    """The IPv6 addresses of this node, as the kernel lists them: 32 hexadecimal digits each."""
    lines = read_lines("/proc/net/if_inet6")
    return [socket.inet_ntop(socket.AF_INET6, bytes.fromhex(line.split()[0])) for line in lines]


def port_range() -> list[int]:
    """The ports that sockets get which ask for none: Gloo and NCCL listen on such ones."""
    return [int(word) for line in read_lines(PORT_RANGE) for word in line.split()]


def read_lines(file: str) -> list[str]:
    try:
        with open(file, encoding="ascii") as stream:
            return stream.read().splitlines()
    except OSError:  # a kernel without IPv6, or no /proc
        return []


def listening_addresses(port: int) -> list[str]:
    """The addresses of this node on which some program listens on that port."""
    found = []  # type: list[str]
    for file, family in (("tcp", socket.AF_INET), ("tcp6", socket.AF_INET6)):
        for line in read_lines(f"/proc/net/{file}")[1:]:
            words = line.split()
            address, _, number = words[1].partition(":")
            if words[3] != LISTENING or int(number, 16) != port:
                continue
            # Written as numbers of 32 bits in the order of this machine's bytes.
            parts = [address[at : at + 8] for at in range(0, len(address), 8)]
            packed = b"".join(int(part, 16).to_bytes(4, sys.byteorder) for part in parts)
            found.append(socket.inet_ntop(family, packed))
    return sorted(set(found))


def store_addresses() -> list[str]:
    """Start a rendezvous store as torchrun does, and look where it listens."""
    from datetime import timedelta

    from torch.distributed import TCPStore  # type: ignore[attr-defined] # torch does not list it

    port, patience = free_port(), timedelta(seconds=STORE_TIMEOUT)
    # Whatever host it is given, it decides itself on which addresses it listens. It also connects
    # to that host, so it must be this node, not the first one.
    store = TCPStore("127.0.0.1", port, None, True, patience, wait_for_workers=False)
    try:
        return listening_addresses(port)
    finally:
        del store


def resolve(name: str) -> list[str]:
    try:
        return sorted({str(found[4][0]) for found in socket.getaddrinfo(name, None)})
    except OSError:
        return []


def library_facts() -> dict[str, Any]:
    """Versions and GPUs, or `error`: why torch or numpy cannot be used."""
    known = {}  # type: dict[str, Any]
    try:
        import torch

        known["torch"] = str(torch.__version__)
        import numpy

        known["numpy"] = str(numpy.__version__)
        known["gpus"] = [
            torch.cuda.get_device_name(number) for number in range(torch.cuda.device_count())
        ]
    except (Exception, SystemExit) as error:  # a broken install may raise anything
        words = str(error).strip().splitlines()
        known["error"] = f"{type(error).__name__}: {words[0] if words else ''}"
        return known
    try:
        known["listens"] = store_addresses()
    except Exception:  # nodes that cannot open a store have a row for the all-reduce
        known["listens"] = []
    return known


def reduce(folder: str) -> int:
    """Run one rank of the all-reduce; it starts like a rank of a training."""
    rank, node = os.environ.get("RANK", "0"), os.environ.get("GPTCTL_NODE", "0")
    try:
        measured = measure(os.environ.get("GPTCTL_DEVICE", "cpu"))
    except Exception as error:
        words = str(error).strip().splitlines()
        # gptctl shows the first line; the traceback goes to the log of the node.
        file = os.path.join(folder, f"node.{node}.rank.{rank}.failed")
        with open(file, "w", encoding="utf-8") as stream:
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
        Distributed=replace(default.Distributed, backend=backend, timeout_minutes=TIMEOUT),
    )
    with join(run, Layout(dp=int(os.environ["WORLD_SIZE"]))) as mesh:
        values = torch.ones(MESSAGE_BYTES // 4, device=mesh.device)
        first = mesh.read(mesh.summed(values)[:1])[0]  # also opens the connections
        seconds = min(_time_sum(mesh, values.fill_(1)) for _ in range(REPEATS))
        small = sorted(_time_sum(mesh, values[:1].fill_(1)) for _ in range(SMALL_REPEATS))
        mesh.barrier()  # all nodes read their clocks at the same time
        clocks = mesh.gather((int(os.environ.get("GPTCTL_NODE", "0")), time.time()))
        return {
            "world": mesh.world,
            "backend": backend,
            "is_right": first == mesh.world,
            "bytes": MESSAGE_BYTES,
            "seconds": seconds,
            "smallest": small[SMALL_REPEATS // 2],
            "clocks": clocks,
        }


def _time_sum(mesh: Any, values: Any) -> float:
    """Seconds of one all-reduce."""
    mesh.read(values[:1])  # waits until the device has finished what came before
    begin = time.perf_counter()
    mesh.read(mesh.summed(values)[:1])
    return time.perf_counter() - begin


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
