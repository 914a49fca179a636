"""Choose and check TCP ports of this machine for the rendezvous of ranks."""

from __future__ import annotations

import socket
from contextlib import suppress

# Below the range from which Linux takes the ports of outgoing connections.
PORTS = range(20000, 32000)
ATTEMPTS = 200  # ports that are tried before giving up


def free_port(host: str) -> int:
    """Return a port that is free now; another program may take it before it is used."""
    import random

    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # Random, so that jobs that start at the same time rarely choose the same port; and not
    # predictable, since torch's store lets in whoever connects.
    for port in random.SystemRandom().sample(PORTS, min(ATTEMPTS, len(PORTS))):
        with socket.socket(family) as probe, suppress(OSError):
            probe.bind((host, port))
            return port
    raise OSError(98, "no free port", f"{host}:{PORTS.start}-{PORTS.stop - 1}")


def port_error(host: str, port: int) -> str:
    """Return why no program can listen on this port, or an empty text."""
    error = listen_error(host, port)
    return (error.strerror or str(error)) if error else ""


def listen_error(host: str, port: int) -> OSError | None:
    """Return why no program can listen on this port; `socket.gaierror` if the name is unknown."""
    try:
        with socket.socket() as probe:
            # As torch does: a port is free as soon as it is closed.
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((host, port))
    except OSError as error:
        return error
    return None
