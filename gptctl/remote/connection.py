"""Connections to the hosts of an ssh cluster. The only module that knows paramiko, and so a long one.

A host key that is not pinned is never accepted. The user's ssh config is honoured field by field; the profile wins.
"""

from __future__ import annotations

import base64
import errno
import getpass
import logging
import os
import shlex
import socket
import stat
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from gptctl.remote.host_error import HostError
from gptctl.remote.known_hosts import key_name, pinned_keys, pinning_file
from gptctl.spec.cluster import Cluster, Host
from gptctl.text import count
from trainer.errors import OUT_OF_REACH, Rule, UserError

if TYPE_CHECKING:
    import paramiko

Channel = Any  # paramiko's: input and output of a command on a host
Files = Any  # paramiko's SFTP client
CONNECT = 10.0  # seconds at most for each of: connection, banner, authentication
ANSWER = 60.0  # seconds for the answer to a command
ALIVE = 15  # seconds between two signs of life of a connection
MOST_AT_ONCE = 32
MOST_JUMPS = 8
SSH_PORT = 22
START_MARKER = "gptctl begins"  # a line before what a command says: login shells may say something of their own first
# Whatever else the kernel says is a file's fault, here or there, and not the route's.
_NETWORK_ERRORS = (
    *(
        errno.ECONNRESET,
        errno.ECONNABORTED,
        errno.ECONNREFUSED,
        errno.EPIPE,
        errno.ETIMEDOUT,
        errno.ENOTCONN,
    ),
    *(errno.EHOSTUNREACH, errno.EHOSTDOWN, errno.ENETUNREACH, errno.ENETDOWN, errno.ENETRESET),
)

USABLE = Rule("S010", "every host of a job can be reached and used when it starts")

T = TypeVar("T")
R = TypeVar("R")


class CommandResult(NamedTuple):
    """The end of a command on a host."""

    code: int
    out: bytes
    err: str


class Entry(NamedTuple):
    """A file or folder on a host."""

    name: str
    mode: int
    size: int
    changed: int


class Route(NamedTuple):
    """How a host is reached: profile and ssh config together."""

    name: str  # as the profile calls it
    host: str
    port: int
    user: str
    keys: tuple[str, ...]
    known_hosts: tuple[str, ...]
    jumps: tuple[Route, ...] = ()
    command: str = ""  # ProxyCommand
    timeout: float = CONNECT


def routes(cluster: Cluster) -> list[Route]:
    """In the order of the profile, which is that of the nodes."""
    logging.getLogger("paramiko").setLevel(
        logging.CRITICAL + 1
    )  # what it has to say comes as an exception, too
    config = _read_config()
    found = in_parallel(lambda host: _route(host, cluster, config), cluster.hosts)
    return all_or_none(found)


def _read_config() -> paramiko.SSHConfig:
    import paramiko

    file = os.path.expanduser("~/.ssh/config")
    try:
        return paramiko.SSHConfig.from_path(file) if os.path.exists(file) else paramiko.SSHConfig()
    except (OSError, UnicodeError, paramiko.ConfigParseError) as error:
        raise UserError(
            f"{file} cannot be read: {error}", "mend it, or move it away", OUT_OF_REACH
        ) from None


def _route(host: Host, cluster: Cluster, config: paramiko.SSHConfig) -> Route:
    said = _said(config, host.host)
    jump = host.proxy_jump or said.get("proxyjump", "none")
    command = said.get("proxycommand", "none") if not host.proxy_jump and jump == "none" else "none"
    if command != "none" and not cluster.allow_proxy_command:
        hint = "set allow_proxy_command: true in the profile if you trust it, or use ProxyJump"
        raise HostError(host.host, f"the ssh config runs a ProxyCommand for it: {command}", hint)
    jumps = _hops(host.host, jump, cluster, config)
    return _plain_route(host, cluster, said, jumps, "" if command == "none" else command)


def _plain_route(
    host: Host,
    cluster: Cluster,
    said: dict[str, Any],
    jumps: tuple[Route, ...] = (),
    command: str = "",
) -> Route:
    own = host.identity_file or cluster.identity_file
    if own and not (
        os.path.isfile(os.path.expanduser(own)) and os.access(os.path.expanduser(own), os.R_OK)
    ):
        raise HostError(
            host.host, f"the key {own} cannot be read", "see identity_file in the profile"
        )
    if not str(said.get("port", SSH_PORT)).isdecimal():
        raise HostError(host.host, f"{said['port']} is no port", "see ~/.ssh/config")
    keys = [own] if own else said.get("identityfile", [])
    pinned = said.get("userknownhostsfile", "~/.ssh/known_hosts")
    files = [cluster.known_hosts] if cluster.known_hosts else _words_of(host.host, pinned)
    return Route(
        name=host.host,
        host=said.get("hostname", host.host),
        port=host.port or int(said.get("port", SSH_PORT)),
        user=host.user or said.get("user") or getpass.getuser(),
        keys=tuple(os.path.expanduser(key) for key in keys),
        known_hosts=tuple(os.path.expanduser(file) for file in files),
        jumps=jumps,
        command=command,
        timeout=min(CONNECT, cluster.patience),
    )


def _hops(host: str, jump: str, cluster: Cluster, config: paramiko.SSHConfig) -> tuple[Route, ...]:
    """`user@bastion:2222,second`; the first may have jump hosts of its own in the ssh config."""
    hops: list[Route] = []
    while jump != "none" and len(hops) <= MOST_JUMPS:
        names = [_hop(text) for text in jump.split(",")]
        said = [_said(config, name.host) for name in names]
        hops = [*(_plain_route(name, cluster, words) for name, words in zip(names, said)), *hops]
        own = said[0].get("proxyjump", "none")
        jump = (
            "none" if _hop(own.split(",")[-1]).host == names[0].host else own
        )  # `Host *` means the bastion, too
    if len(hops) > MOST_JUMPS:
        raise HostError(
            host,
            f"more than {MOST_JUMPS} jump hosts",
            "see proxy_jump, and ProxyJump in the ssh config",
        )
    return tuple(hops)


def _hop(text: str) -> Host:
    user, _, place = text.strip().rpartition("@")
    name, _, port = place.partition(":")
    return Host(host=name, user=user or None, port=int(port) if port.isdecimal() else None)


def _words_of(host: str, text: str) -> list[str]:
    try:
        return [word for word in shlex.split(text) if word != "none"]
    except ValueError as error:
        raise HostError(host, f"UserKnownHostsFile {text}: {error}", "see ~/.ssh/config") from None


def _said(config: paramiko.SSHConfig, name: str) -> dict[str, Any]:
    import paramiko

    try:
        return dict(config.lookup(name))
    except (
        paramiko.SSHException,
        ImportError,
        ValueError,
    ) as error:  # `Match exec` needs a package of its own
        raise HostError(
            name, f"the ssh config cannot be applied to it: {error}", "see ~/.ssh/config"
        ) from None


class Connection:
    """An open route to a host. What fails raises HostError, and says whether the host was lost."""

    def __init__(self, route: Route, jump_hosts: JumpHosts) -> None:
        self.route = route
        self._client = _connected(route, _socket_to(route, jump_hosts))
        self._files: Files | None = None

    @property
    def _transport(self) -> paramiko.Transport:
        return _transport_of(self._client, self.route)

    @contextmanager
    def _in_time(self, patience: float) -> Iterator[None]:
        """Some waits of paramiko have no end of their own: they end with the connection."""
        timer = threading.Timer(patience, self._transport.close)
        timer.daemon = True
        timer.start()
        try:
            yield
        finally:
            timer.cancel()

    def start(self, command: Sequence[str]) -> paramiko.Channel:
        """Begins a command; whoever began it reads and writes the channel."""
        with host_errors(self.route), self._in_time(ANSWER):
            channel = self._transport.open_session(timeout=self.route.timeout)
            channel.settimeout(ANSWER)
            channel.exec_command(f"echo {shlex.quote(START_MARKER)}; {shlex.join(command)}")
        return channel

    def run(
        self, command: Sequence[str], stdin: bytes = b"", patience: float = ANSWER
    ) -> CommandResult:
        with host_errors(self.route), self._in_time(patience):
            channel = self.start(command)
            channel.settimeout(patience)
            if stdin:
                channel.sendall(stdin)
            channel.shutdown_write()
            out = channel.makefile("rb").read().partition(f"{START_MARKER}\n".encode())[2]
            err = last_words(channel)
            return CommandResult(channel.recv_exit_status(), out, err.strip())

    @property
    def files(self) -> paramiko.SFTPClient:
        if self._files is None:
            with host_errors(self.route), self._in_time(ANSWER):
                self._files = self._transport.open_sftp_client()
            assert self._files
            channel = self._files.get_channel()
            assert channel
            channel.settimeout(ANSWER)
        return self._files

    def listed(self, folder: str) -> list[Entry]:
        """What is in a folder, whatever its names are; nothing if it does not exist."""
        try:
            found = self.files.listdir_attr(folder)
        except FileNotFoundError:
            return []
        except UnicodeDecodeError:  # a name that is no UTF-8, which paramiko cannot read
            return self._found(folder)
        return [
            Entry(each.filename, each.st_mode or 0, each.st_size or 0, each.st_mtime or 0)
            for each in found
        ]

    def _found(self, folder: str) -> list[Entry]:
        words = [
            "find",
            folder,
            "-mindepth",
            "1",
            "-maxdepth",
            "1",
            "-printf",
            r"%f\0%y\0%s\0%Ts\0",
        ]
        fields = os.fsdecode(self.run(words).out).split("\0")
        kinds = {"f": stat.S_IFREG, "d": stat.S_IFDIR}
        each = zip(*(fields[start::4] for start in range(4)))
        return [
            Entry(name, kinds.get(kind, 0), int(size), int(changed))
            for name, kind, size, changed in each
        ]

    def close(self) -> None:
        self._client.close()


def last_words(channel: Channel, patience: float = 5.0) -> str:
    """What an ended command wrote to its stderr, of which sshd may still send some after the end of its stdout."""
    deadline = time.monotonic() + patience
    while not channel.closed and time.monotonic() < deadline:
        time.sleep(0.01)
    said = b""
    while channel.recv_stderr_ready():
        said += channel.recv_stderr(1 << 16)
    return said.decode(errors="replace")


@contextmanager
def host_errors(route: Route) -> Iterator[None]:
    """Whatever goes wrong on the route is said in our words."""
    import paramiko

    try:
        yield
    except HostError:
        raise
    except (EOFError, OSError, paramiko.SSHException, paramiko.SFTPError) as error:
        if isinstance(error, OSError) and error.errno and error.errno not in _NETWORK_ERRORS:
            raise
        raise HostError(
            route.name, f"the connection is lost: {_words(error)}", is_lost=True
        ) from None


class JumpHosts:
    """Jump hosts with an open connection, which all hosts behind them share until this process ends: sshd lets only few
    come in at the same time."""

    def __init__(self) -> None:
        self._open: dict[tuple[Route, ...], paramiko.SSHClient] = {}
        self._opening: dict[tuple[Route, ...], threading.Lock] = {}
        self._lock = threading.Lock()

    def client(self, hops: tuple[Route, ...]) -> paramiko.SSHClient:
        """Of the last of these, through those before it."""
        with self._lock:
            opening = self._opening.setdefault(hops, threading.Lock())
        with opening:
            client = self._open.get(hops)
            if client is None or not _is_active(client):
                client = _connected(hops[-1], _socket_to(hops[-1]._replace(jumps=hops[:-1]), self))
                self._open[hops] = client
            return client


def _is_active(client: paramiko.SSHClient) -> bool:
    transport = client.get_transport()
    return transport is not None and transport.is_active()


def _transport_of(client: paramiko.SSHClient, route: Route) -> paramiko.Transport:
    transport = client.get_transport()
    if transport is None or not transport.is_active():
        raise HostError(route.name, "the connection is lost", is_lost=True)
    return transport


def _socket_to(route: Route, jump_hosts: JumpHosts) -> Any:
    """Through its jump hosts, or through the user's command; None: straight."""
    import paramiko

    if route.jumps:
        bastion = _transport_of(jump_hosts.client(route.jumps), route)
        there, here = (route.host, route.port), ("127.0.0.1", 0)
        try:
            with host_errors(route):
                return bastion.open_channel("direct-tcpip", there, here, timeout=route.timeout)
        except HostError:
            _close_if_dead(bastion, route)
            raise
    return paramiko.ProxyCommand(route.command) if route.command else None


def _close_if_dead(bastion: paramiko.Transport, route: Route) -> None:
    """A host behind it may not answer, or the bastion itself: then the next one gets a new connection."""
    import paramiko

    try:
        bastion.open_session(timeout=route.timeout).close()
    except (OSError, EOFError, paramiko.SSHException):
        bastion.close()


def _connected(hop: Route, sock: Any) -> paramiko.SSHClient:
    import paramiko

    client = paramiko.SSHClient()
    client.set_missing_host_key_policy(paramiko.RejectPolicy())
    _load(client.get_host_keys(), hop)
    try:
        client.connect(
            hop.host,
            hop.port,
            hop.user,
            key_filename=[key for key in hop.keys if os.path.exists(key)],
            allow_agent=True,  # for authentication; it is never forwarded
            look_for_keys=not hop.keys,
            sock=sock,
            timeout=hop.timeout,
            banner_timeout=hop.timeout,
            auth_timeout=hop.timeout,
            channel_timeout=hop.timeout,
        )
    except (OSError, EOFError, paramiko.SSHException, ValueError) as error:
        client.close()
        raise _refusal(hop, error) from None
    _transport_of(client, hop).set_keepalive(ALIVE)
    return client


def _load(keys: paramiko.HostKeys, hop: Route) -> None:
    for names, kind, text in pinned_keys(hop.name, hop.known_hosts):
        _add(keys, names, kind, text)


def _add(keys: paramiko.HostKeys, names: Sequence[str], kind: str, text: str) -> None:
    import paramiko

    try:
        key = paramiko.PKey.from_type_string(kind, base64.b64decode(text))
    except (ValueError, paramiko.SSHException, paramiko.UnknownKeyType):
        return
    for name in names:
        keys.add(name, kind, key)


def _refusal(hop: Route, error: Exception) -> HostError:
    """Why a host was not reached, and what helps."""
    import paramiko

    place = f"{hop.user}@{hop.host}:{hop.port}"
    if isinstance(error, paramiko.BadHostKeyException):
        what = f"its host key has CHANGED: it shows {fingerprint(error.key)}, pinned is {fingerprint(error.expected_key)}"
        hint = f"somebody may be listening; only if you know why, delete its line from {pinning_file(hop.known_hosts)}"
        return HostError(hop.name, what, hint)
    if isinstance(error, paramiko.PasswordRequiredException):
        return HostError(
            hop.name, f"a key for {place} has a passphrase", "let ssh-agent keep it: ssh-add"
        )
    is_no_answer = "EOF" in str(error) or "timeout" in str(error)
    if isinstance(error, paramiko.AuthenticationException) and not is_no_answer:
        keys = ", ".join(hop.keys) or "any of your keys"
        return HostError(
            hop.name, f"{place} does not accept {keys}", "see user and identity_file in the profile"
        )
    if "No authentication methods" in str(error):
        return HostError(
            hop.name, f"there is no key for {place}", "see identity_file in the profile, or ssh-add"
        )
    if "not found in known_hosts" in str(error):
        hint = "`gptctl hosts trust CLUSTER` shows its fingerprint and pins it"
        return HostError(
            hop.name, f"its host key is not known in {pinning_file(hop.known_hosts)}", hint
        )
    if "not a valid" in str(error) or "key file" in str(error):
        return HostError(
            hop.name, f"{', '.join(hop.keys)}: {_words(error)}", "see identity_file in the profile"
        )
    if isinstance(error, socket.gaierror):
        return HostError(
            hop.name, f"{hop.host} is the name of no machine", "see host in the profile"
        )
    # The last: nobody spoke, and paramiko went on to authentication all the same.
    silences = ("timeout", "banner", "No existing session")
    if isinstance(error, TimeoutError) or any(words in str(error) for words in silences):
        return HostError(
            hop.name, f"{place} does not answer", "is it on, and the network?", is_lost=True
        )
    if isinstance(error, OSError):
        return HostError(
            hop.name, f"{place}: {_words(error)}", "is sshd running there?", is_lost=True
        )
    return HostError(hop.name, f"{place}: {_words(error)}", "try it with ssh -v", is_lost=True)


def _words(error: Exception) -> str:
    import paramiko

    if isinstance(error, paramiko.ssh_exception.NoValidConnectionsError):
        return "; ".join(sorted({str(each.strerror).lower() for each in error.errors.values()}))
    if isinstance(error, OSError) and error.strerror:
        return error.strerror.lower()
    if isinstance(error, (EOFError, paramiko.AuthenticationException)):
        return "it closed the connection"
    return " ".join(str(error).split()) or type(error).__name__


def all_or_none(results: Sequence[R | Exception], so: str = "", hint: str = "") -> list[R]:
    """What went wrong is host_errors of all hosts at once."""
    wrong = [result for result in results if isinstance(result, HostError)]
    for result in results:
        if isinstance(result, Exception) and not isinstance(result, HostError):
            raise result
    if wrong:
        found = [USABLE.found(error.host, None, error.what, error.hint) for error in wrong]
        raise UserError(
            f"{so}{count(len(wrong), 'host')} cannot be used", hint, OUT_OF_REACH, found
        )
    return [result for result in results if not isinstance(result, Exception)]


def fingerprint(key: paramiko.PKey) -> str:
    return f"{key.get_name()} {key.fingerprint}"


def in_parallel(
    work: Callable[[T], R], items: Sequence[T], most: int = MOST_AT_ONCE
) -> list[R | Exception]:
    """The results of all, or what each raised, in their order."""

    def guarded(item: T) -> R | Exception:
        try:
            return work(item)
        except Exception as error:
            return error

    with ThreadPoolExecutor(min(most, max(1, len(items)))) as pool:
        return list(pool.map(guarded, items))


class ShownKey(NamedTuple):
    """The key that a host shows, and whether it is the pinned one: `known`, `new` or `changed`."""

    route: Route
    key: Any
    state: str


def shown_key(route: Route, jump_hosts: JumpHosts) -> ShownKey:
    """Asked without telling the host who asks. Its jump hosts must be trusted already."""
    import paramiko

    pinned = paramiko.HostKeys()
    _load(pinned, route)
    known = pinned.lookup(key_name(route.host, route.port)) or {}
    try:
        sock = _socket_to(route, jump_hosts) or socket.create_connection(
            (route.host, route.port), route.timeout
        )
        with closing(paramiko.Transport(sock)) as transport:
            transport.banner_timeout = route.timeout
            options = transport.get_security_options()
            options.key_types = sorted(
                options.key_types, key=lambda kind: _key_kind(kind) not in known
            )  # pinned first
            transport.start_client(timeout=route.timeout)
            key = transport.get_remote_server_key()
    except (OSError, EOFError, paramiko.SSHException) as error:
        raise _refusal(route, error) from None
    same = known.get(key.get_name()) == key
    return ShownKey(route, key, "known" if same else "changed" if known else "new")


def _key_kind(algorithm: str) -> str:
    """As known_hosts calls it: an RSA key has one name there, and several routes to sign."""
    return "ssh-rsa" if algorithm.startswith("rsa-sha2-") else algorithm
