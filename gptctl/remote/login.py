"""The login host of a cluster: one connection, over the user's own ssh if that is running."""

from __future__ import annotations

from gptctl.remote.connection import Connection, JumpHosts, routes
from gptctl.remote.host_error import HostError
from gptctl.remote.link import HostLink, LinkConnection
from gptctl.remote.master_connection import MasterConnection, has_master
from gptctl.remote.route import Route
from gptctl.spec.cluster import Cluster


def login_link(cluster: Cluster) -> HostLink:
    """The link to the login host; raise UserError if profile or ssh config have no way to it."""
    (route,) = routes(cluster)
    jump_hosts = JumpHosts()
    return HostLink(route, lambda: connect(route, jump_hosts))


def connect(route: Route, jump_hosts: JumpHosts) -> LinkConnection:
    # First: where a password or a code is needed, nothing else can work.
    if has_master(route):
        return MasterConnection(route)
    try:
        return Connection(route, jump_hosts)
    except HostError as error:
        if error.is_lost:
            raise
        hint = (
            f"{error.hint}; if it asks for a password or a code, log in with ssh first, and let "
            "that connection be a master: see docs/slurm.md"
        )
        raise HostError(error.host, error.detail, hint) from None
