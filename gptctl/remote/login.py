"""The login host of a cluster: one connection, over the user's own ssh if that is running."""

from __future__ import annotations

from gptctl.deadline import Deadline
from gptctl.remote.connection import Connection, JumpHosts, config_lookup
from gptctl.remote.host_error import HostError
from gptctl.remote.link import HostLink, LinkConnection
from gptctl.remote.master_connection import MasterConnection, has_master
from gptctl.remote.route import Route, route_to
from gptctl.spec.cluster import Cluster
from trainer.errors import OUT_OF_REACH, UserError

LOGIN_REFUSED = ("does not accept", "no key found", "has a passphrase")


def login_route(cluster: Cluster) -> Route:
    """Raise UserError if profile or ssh config have no usable way to the login host."""
    if cluster.login is None:
        hint = "check the cluster.json of the job"
        raise UserError(f"cluster {cluster.name} has no login host", hint, OUT_OF_REACH)
    return route_to(cluster.login, cluster, config_lookup())


def login_link(cluster: Cluster, limit: Deadline | None = None) -> HostLink:
    """The link to the login host; it connects when it is used."""
    route, jump_hosts, end = login_route(cluster), JumpHosts(), limit or Deadline()
    return HostLink(route, lambda: connect(route, jump_hosts, end), end)


def connect(route: Route, jump_hosts: JumpHosts, limit: Deadline) -> LinkConnection:
    # First: where a password or a code is needed, nothing else can work.
    if has_master(route):
        return MasterConnection(route, limit)
    try:
        return Connection(route, jump_hosts, limit)
    except HostError as error:
        if not any(words in error.detail for words in LOGIN_REFUSED):
            raise
        hint = (
            f"{error.hint}; if it asks for a password or a code, log in with ssh first, and let "
            "that connection be a master: see docs/slurm.md"
        )
        raise HostError(error.host, error.detail, hint) from None
