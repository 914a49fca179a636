"""Addresses of this machine, and how its agent listens on one of them only."""

from __future__ import annotations

import errno
import socket

from gptctl.engine.ports import free_port

BACKLOG = 4096  # connections that the kernel keeps until they are accepted; it may allow fewer
ATTEMPTS = 10  # another program may take a port that was free a moment ago


def resolved(name: str) -> str:
    """Return the address of a host name, IPv4 if it has one; raise OSError if it has none."""
    if not name:
        problem = "the address of this host is unknown: set its `address` in the profile"
        raise OSError(errno.EADDRNOTAVAIL, problem)
    try:
        found = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    except OSError as error:
        raise OSError(error.errno, f"cannot resolve host name {name}: {error.strerror}") from None
    first = next((each for each in found if each[0] == socket.AF_INET), found[0])
    return str(first[4][0])


def is_loopback(address: str) -> bool:
    return address.startswith("127.") or address == "::1"


def is_own_address(address: str) -> bool:
    """Whether a program can listen on this address here."""
    try:
        with socket.socket(family_of(address)) as probe:
            probe.bind((address, 0))
    except OSError:
        return False
    return bool(address)


def own_address(*addresses: str) -> str:
    """Return the first of these that belongs to this machine, or an empty text."""
    return next(filter(is_own_address, addresses), "")


def listener_on(address: str) -> socket.socket:
    """Listen on a free port of this address, or of all addresses if it is empty."""
    both = not address and socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if both else family_of(address)
    for _ in range(ATTEMPTS):
        place = (address, free_port(address))
        try:
            listener = socket.create_server(
                place, family=family, backlog=BACKLOG, dualstack_ipv6=both
            )
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
            continue
        # A connection that breaks before it is accepted must not block.
        listener.setblocking(False)
        return listener
    raise OSError(errno.EADDRINUSE, "no free port", address)


def family_of(address: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in address else socket.AF_INET
