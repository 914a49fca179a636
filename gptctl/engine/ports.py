"""Ports of this machine on which ranks can meet."""

from __future__ import annotations

import socket
from contextlib import suppress

PORTS = range(20000, 32000)  # below those that outgoing connections take


def free_port(host: str) -> int:
    """A port that nobody listens on now."""
    import random

    for port in random.sample(PORTS, 200):
        with socket.socket() as probe, suppress(OSError):
            probe.bind((host, port))
            return port
    raise OSError(98, "no free port", f"{host}:{PORTS.start}-{PORTS.stop}")


def fault_of_port(host: str, port: int) -> str:
    """Why nobody can listen there, if so."""
    try:
        with socket.socket() as probe:
            probe.setsockopt(
                socket.SOL_SOCKET, socket.SO_REUSEADDR, 1
            )  # as torch does: a closed one is free at once
            probe.bind((host, port))
    except OSError as error:
        return error.strerror or str(error)
    return ""
