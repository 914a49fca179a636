"""How each host is reached: the profile and the user's ssh config, combined field by field.

The profile takes precedence. Knows nothing of connections: the ssh config is passed in.
"""

from __future__ import annotations

import getpass
import os
import shlex
from collections.abc import Callable
from typing import Any, NamedTuple

from gptctl.remote.host_error import HostError
from gptctl.remote.known_hosts import SSH_PORT
from gptctl.spec.cluster import Cluster, Host

CONNECT_TIMEOUT = 10.0  # seconds at most for each of: connection, banner, authentication
PATIENCE = 30.0  # seconds; as `start_timeout` of a profile
MAX_JUMPS = 8

# Returns the options of the ssh config for a host; names are in lower case.
ConfigLookup = Callable[[str], dict[str, Any]]


class Route(NamedTuple):
    """How to reach a host."""

    name: str  # as in the profile
    host: str
    port: int
    user: str
    keys: tuple[str, ...]
    known_hosts: tuple[str, ...]
    jumps: tuple[Route, ...] = ()
    command: str = ""  # ProxyCommand
    timeout: float = CONNECT_TIMEOUT
    patience: float = PATIENCE  # seconds for which the host may be silent


def route_to(host: Host, cluster: Cluster, lookup: ConfigLookup) -> Route:
    """Combine profile and ssh config; raise HostError if the host cannot be reached that way."""
    options = lookup(host.host)
    jump = host.proxy_jump or options.get("proxyjump", "none")
    uses_command = not host.proxy_jump and jump == "none"
    command = options.get("proxycommand", "none") if uses_command else "none"
    # The ssh config may come from somebody else, and the command runs on this machine.
    if command != "none" and not cluster.allow_proxy_command:
        hint = "set allow_proxy_command: true in the profile if you trust it, or use ProxyJump"
        raise HostError(host.host, f"the ssh config runs a ProxyCommand for it: {command}", hint)
    jumps = _jump_routes(host.host, jump, cluster, lookup)
    return _direct_route(host, cluster, options, jumps, "" if command == "none" else command)


def _direct_route(
    host: Host,
    cluster: Cluster,
    options: dict[str, Any],
    jumps: tuple[Route, ...] = (),
    command: str = "",
) -> Route:
    own_key = host.identity_file or cluster.identity_file
    # A missing key of the ssh config is skipped, as ssh does; one of the profile is an error.
    if own_key and not _is_readable(os.path.expanduser(own_key)):
        hint = "check identity_file in the profile"
        raise HostError(host.host, f"the key {own_key} cannot be read", hint)
    port = str(options.get("port", SSH_PORT))
    if not port.isdecimal():
        raise HostError(host.host, f"invalid port: {port}", "check Port in ~/.ssh/config")
    keys = [own_key] if own_key else options.get("identityfile", [])
    pinned = options.get("userknownhostsfile", "~/.ssh/known_hosts")
    files = [cluster.known_hosts] if cluster.known_hosts else _words_of(host.host, pinned)
    return Route(
        name=host.host,
        host=options.get("hostname", host.host),
        port=host.port or int(port),
        user=host.user or options.get("user") or getpass.getuser(),
        keys=tuple(os.path.expanduser(key) for key in keys),
        known_hosts=tuple(os.path.expanduser(file) for file in files),
        jumps=jumps,
        command=command,
        timeout=min(CONNECT_TIMEOUT, cluster.start_timeout),
        patience=cluster.start_timeout,
    )


def _is_readable(file: str) -> bool:
    return os.path.isfile(file) and os.access(file, os.R_OK)


def _jump_routes(host: str, jump: str, cluster: Cluster, lookup: ConfigLookup) -> tuple[Route, ...]:
    """Parse a ProxyJump such as `user@bastion:2222,second`.

    The first one may have jump hosts of its own in the ssh config.
    """
    routes: list[Route] = []
    while jump != "none" and len(routes) <= MAX_JUMPS:
        hops = [_parse_jump(text) for text in jump.split(",")]
        options = [lookup(hop.host) for hop in hops]
        direct = [_direct_route(hop, cluster, found) for hop, found in zip(hops, options)]
        routes = [*direct, *routes]
        before = options[0].get("proxyjump", "none")
        # A ProxyJump under `Host *` applies to the bastion itself, too: that is not another jump.
        is_itself = _parse_jump(before.split(",")[-1]).host == hops[0].host
        jump = "none" if is_itself else before
    # Jump hosts of the ssh config may refer to each other in a circle.
    if len(routes) > MAX_JUMPS:
        hint = "check proxy_jump in the profile, and ProxyJump in the ssh config"
        raise HostError(host, f"more than {MAX_JUMPS} jump hosts", hint)
    return tuple(routes)


def _parse_jump(text: str) -> Host:
    user, _, place = text.strip().rpartition("@")
    name, _, port = place.partition(":")
    return Host(host=name, user=user or None, port=int(port) if port.isdecimal() else None)


def _words_of(host: str, text: str) -> list[str]:
    try:
        return [word for word in shlex.split(text) if word != "none"]
    except ValueError as error:
        hint = "check ~/.ssh/config"
        raise HostError(host, f"UserKnownHostsFile {text}: {error}", hint) from None
