"""The command line of the user's `ssh` program for a host. Pure.

For terminals, which paramiko cannot connect: everything is as in the profile, and the rest of the
user's ssh config still applies, such as a ControlMaster.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence

from gptctl.remote.route import Route

# The user's config may add these for an interactive login; they would disturb our commands.
NEUTRAL = {
    "StrictHostKeyChecking": "yes",
    "ForwardAgent": "no",
    "ClearAllForwardings": "yes",
    "RemoteCommand": "none",
    "PermitLocalCommand": "no",
}


def ssh_words(route: Route, command: Sequence[str], has_terminal: bool) -> list[str]:
    """The words that run a command on a host, with a terminal there if there is one here."""
    kind = ["-t"] if has_terminal else ["-T", *_option("BatchMode", "yes")]
    return ["ssh", *kind, *_options(route), "--", route.name, shlex.join(command)]


def _options(route: Route) -> list[str]:
    files = " ".join(f'"{_literal(file)}"' for file in route.known_hosts)
    options = {
        "HostName": _literal(route.host),
        "Port": str(route.port),
        "User": route.user,
        "UserKnownHostsFile": files or "/dev/null",
        "ConnectTimeout": str(max(1, int(route.timeout))),
        "ProxyCommand": _proxy(route),
        **NEUTRAL,
    }
    words = [word for name, value in options.items() for word in _option(name, value)]
    keys = [word for key in route.keys for word in _option("IdentityFile", f'"{_literal(key)}"')]
    return [*words, *keys]


def _proxy(route: Route) -> str:
    """How ssh reaches the host: a command that connects its stdin and stdout to it."""
    if not route.jumps:
        return _literal(route.command) or "none"
    # Not -J: ssh would use the keys and known hosts of the user's config for the jump hosts.
    last = route.jumps[-1]._replace(jumps=route.jumps[:-1])
    host = f"[{route.host}]" if ":" in route.host else route.host
    words = ["ssh", "-T", *_options(last), "-W", f"{host}:{route.port}", "--", last.name]
    return _literal(shlex.join(words))


def _option(name: str, value: str) -> list[str]:
    return ["-o", f"{name}={value}"]


def _literal(text: str) -> str:
    """Protect % from ssh, which expands %h and the like."""
    return text.replace("%", "%%")
