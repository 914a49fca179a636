"""Connections to ssh hosts and login hosts. The only module that imports paramiko.

A host key that is not pinned is never accepted, and the user's ssh agent is never forwarded.
"""

from __future__ import annotations

import base64
import errno
import logging
import os
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from typing import TYPE_CHECKING, Any, NamedTuple

from gptctl.remote.host_error import HostError, all_or_none
from gptctl.remote.known_hosts import key_name, pinned_keys, pinning_file
from gptctl.remote.listing import Entry, listed
from gptctl.remote.parallel import in_parallel
from gptctl.remote.route import ConfigLookup, Route, route_to
from gptctl.remote.scripts import command_line, output_of
from gptctl.spec.cluster import Cluster
from trainer.errors import OUT_OF_REACH, UserError

if TYPE_CHECKING:
    import paramiko

Channel = Any  # of paramiko: input and output of a command on a host
Files = Any  # paramiko's SFTP client
ANSWER_TIMEOUT = 60.0  # seconds that a command may take by default
MAX_OUTPUT = 16 << 20  # bytes that a command may print
MAX_ERRORS = 1 << 20  # bytes of its stderr that are read
KEEPALIVE = 15  # seconds between two keep-alive packets
# Any other error of the operating system concerns a file, here or there, and not the connection.
_NETWORK_ERRORS = (
    *(errno.ECONNRESET, errno.ECONNABORTED, errno.ECONNREFUSED, errno.EPIPE, errno.ETIMEDOUT),
    *(errno.ENOTCONN, errno.EHOSTUNREACH, errno.EHOSTDOWN),
    *(errno.ENETUNREACH, errno.ENETDOWN, errno.ENETRESET),
)
_SSHD_HINT = "check that sshd is running there"
_REACHABLE_HINT = "check that the host is up and reachable from here"
_KEY_HINT = "check identity_file in the profile"


class CommandResult(NamedTuple):
    """How a command on a host exited, and what it printed."""

    code: int
    out: bytes
    err: str

    @property
    def last_error(self) -> str:
        return self.err.splitlines()[-1] if self.err else f"exit code {self.code}"


def routes(cluster: Cluster) -> list[Route]:
    """Return the routes to all hosts in the order of the profile, which is the node order."""
    lookup = config_lookup()
    return all_or_none(in_parallel(lambda host: route_to(host, cluster, lookup), cluster.ssh_hosts))


def config_lookup() -> ConfigLookup:
    """Read the user's ssh config."""
    # Whatever paramiko would log, it raises as an exception, too.
    logging.getLogger("paramiko").setLevel(logging.CRITICAL + 1)
    config = _read_config()
    return lambda name: _options_of(config, name)


def _read_config() -> paramiko.SSHConfig:
    import paramiko

    file = os.path.expanduser("~/.ssh/config")
    try:
        return paramiko.SSHConfig.from_path(file) if os.path.exists(file) else paramiko.SSHConfig()
    except (OSError, UnicodeError, paramiko.ConfigParseError) as error:
        message = f"{file} cannot be read: {error}"
        raise UserError(message, "fix or rename the file", OUT_OF_REACH) from None


def _options_of(config: paramiko.SSHConfig, name: str) -> dict[str, Any]:
    import paramiko

    try:
        return dict(config.lookup(name))
    # ImportError: for `Match exec` paramiko needs another package.
    except (paramiko.SSHException, ImportError, ValueError) as error:
        message = f"the ssh config cannot be applied to it: {error}"
        raise HostError(name, message, "check ~/.ssh/config") from None


class Connection:
    """An open connection to a host. Every failure is a HostError that tells if the host is lost."""

    def __init__(self, route: Route, jump_hosts: JumpHosts) -> None:
        self.route = route
        self._client = _connected(route, _socket_to(route, jump_hosts))
        self._files: Files | None = None

    @property
    def _transport(self) -> paramiko.Transport:
        return _transport_of(self._client, self.route)

    @contextmanager
    def _in_time(self, timeout: float) -> Iterator[None]:
        """Close the connection after `timeout` seconds: some calls of paramiko have no timeout."""
        timer = threading.Timer(timeout, self._transport.close)
        timer.daemon = True
        timer.start()
        try:
            yield
        finally:
            timer.cancel()

    def start(self, command: Sequence[str]) -> paramiko.Channel:
        """Start a command; the caller reads from and writes to the channel."""
        with host_errors(self.route), self._in_time(ANSWER_TIMEOUT):
            channel = self._transport.open_session(timeout=self.route.timeout)
            channel.settimeout(ANSWER_TIMEOUT)
            channel.exec_command(os.fsencode(command_line(command)))
        return channel

    def run(
        self, command: Sequence[str], stdin: bytes = b"", timeout: float = ANSWER_TIMEOUT
    ) -> CommandResult:
        """Run a command until it exits."""
        with host_errors(self.route), self._in_time(timeout):
            channel = self.start(command)
            channel.settimeout(timeout)
            # The command may exit before it has read everything: its exit code says why.
            with suppress(OSError):
                channel.sendall(stdin)
            # The command may read its stdin to the end.
            channel.shutdown_write()
            out = output_of(self._output(channel))
            err = remaining_stderr(channel)
            return CommandResult(channel.recv_exit_status(), out, err.strip())

    def _output(self, channel: Channel) -> bytes:
        output = bytearray()
        while data := channel.recv(1 << 16):
            output += data
            # A host that never stops printing must not use up the memory here.
            if len(output) > MAX_OUTPUT:
                channel.close()
                raise HostError(self.route.name, f"it printed more than {MAX_OUTPUT:,} bytes")
        return bytes(output)

    @property
    def files(self) -> paramiko.SFTPClient:
        # Opened when it is first needed: most commands need no files.
        if self._files is None:
            with host_errors(self.route), self._in_time(ANSWER_TIMEOUT):
                self._files = self._transport.open_sftp_client()
            assert self._files
            channel = self._files.get_channel()
            assert channel
            channel.settimeout(ANSWER_TIMEOUT)
        return self._files

    def listed(self, folder: str) -> list[Entry]:
        """List a folder, including names that are not UTF-8; return nothing if it is missing."""
        return listed(self.files, self.run, folder)

    def close(self) -> None:
        self._client.close()


def files_over(pipe: Any) -> Files:
    """SFTP over an object with `send`, `recv` and `close`."""
    import paramiko

    return paramiko.SFTPClient(pipe)


def remaining_stderr(channel: Channel, timeout: float = 5.0) -> str:
    """Return the stderr of a command whose stdout is closed."""
    # sshd may send a part of stderr only after the end of stdout: wait until it closes the channel.
    deadline = time.monotonic() + timeout
    while not channel.closed and time.monotonic() < deadline:
        time.sleep(0.01)
    data = b""
    while channel.recv_stderr_ready() and len(data) < MAX_ERRORS:
        data += channel.recv_stderr(1 << 16)
    return data.decode(errors="replace")


@contextmanager
def host_errors(route: Route) -> Iterator[None]:
    """Turn every failure of the connection into a HostError; errors about files pass through."""
    import paramiko

    try:
        yield
    except HostError:
        raise
    except (EOFError, OSError, paramiko.SSHException, paramiko.SFTPError) as error:
        if isinstance(error, OSError) and error.errno and error.errno not in _NETWORK_ERRORS:
            raise
        message = f"lost the connection: {_describe(error)}"
        raise HostError(route.name, message, is_lost=True) from None


class JumpHosts:
    """Open connections to jump hosts, shared by all hosts behind them.

    One connection per host would fail: sshd limits how many clients may log in at the same time.
    """

    def __init__(self) -> None:
        self._open: dict[tuple[Route, ...], paramiko.SSHClient] = {}
        self._opening: dict[tuple[Route, ...], threading.Lock] = {}
        self._lock = threading.Lock()

    def client(self, hops: tuple[Route, ...]) -> paramiko.SSHClient:
        """Return a connection to the last of these hosts, through the ones before it."""
        # A lock for each jump host: several can be opened at the same time, each only once.
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
        raise HostError(route.name, "lost the connection", is_lost=True)
    return transport


def _socket_to(route: Route, jump_hosts: JumpHosts) -> Any:
    """Connect through jump hosts or the user's ProxyCommand; None: paramiko connects directly."""
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
    """Close the connection to a jump host that does not answer: the next try opens a new one."""
    import paramiko

    # If it answers, only the host behind it is unreachable.
    try:
        bastion.open_session(timeout=route.timeout).close()
    except (OSError, EOFError, paramiko.SSHException):
        bastion.close()


def _connected(hop: Route, sock: Any) -> paramiko.SSHClient:
    import paramiko

    client = paramiko.SSHClient()
    # An unknown key is never accepted here: `gptctl hosts trust` pins it after asking the user.
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
        raise _connect_error(hop, error) from None
    # Detects a host that disappears while nothing is sent.
    _transport_of(client, hop).set_keepalive(KEEPALIVE)
    return client


def _load(keys: paramiko.HostKeys, hop: Route) -> None:
    for names, kind, text in pinned_keys(hop.name, hop.known_hosts):
        _add(keys, names, kind, text)


def _add(keys: paramiko.HostKeys, names: Sequence[str], kind: str, text: str) -> None:
    import paramiko

    # A line that paramiko cannot read pins nothing, as with ssh.
    try:
        key = paramiko.PKey.from_type_string(kind, base64.b64decode(text))
    except (ValueError, paramiko.SSHException, paramiko.UnknownKeyType):
        return
    for name in names:
        keys.add(name, kind, key)


def _connect_error(hop: Route, error: Exception) -> HostError:
    """Explain why a connection failed, and suggest a fix."""
    place = f"{hop.user}@{hop.host}:{hop.port}"
    found = _key_error(hop, place, error) or _login_error(hop, place, error)
    if found:
        return found
    if isinstance(error, socket.gaierror):
        message = f"cannot resolve host name {hop.host}"
        return HostError(hop.name, message, "check host in the profile")
    # Silence, or the greeting of another program.
    if "banner" in str(error):
        problem = f"{place} does not answer as an ssh server"
        return HostError(hop.name, problem, _SSHD_HINT, is_lost=True)
    # "No existing session": the host sent nothing, and paramiko tried to authenticate nevertheless.
    silences = ("timeout", "No existing session")
    if isinstance(error, TimeoutError) or any(words in str(error) for words in silences):
        return HostError(hop.name, f"{place} does not answer", _REACHABLE_HINT, is_lost=True)
    hint = _SSHD_HINT if isinstance(error, OSError) else "try it with ssh -v"
    return HostError(hop.name, f"{place}: {_describe(error)}", hint, is_lost=True)


def _key_error(hop: Route, place: str, error: Exception) -> HostError | None:
    """Problems with the host's key, or with reading the user's key."""
    import paramiko

    file = pinning_file(hop.known_hosts)
    if isinstance(error, paramiko.BadHostKeyException):
        shown, expected = fingerprint(error.key), fingerprint(error.expected_key)
        message = f"its host key has CHANGED: it sent {shown}, but {expected} is pinned"
        hint = "this may be an attack; if you know why it changed, delete its line from"
        return HostError(hop.name, message, f"{hint} {file}")
    if "not found in known_hosts" in str(error):
        hint = "`gptctl hosts trust CLUSTER` shows its fingerprint and pins it"
        return HostError(hop.name, f"its host key is not in {file}", hint)
    if isinstance(error, paramiko.PasswordRequiredException):
        message = f"the key for {place} has a passphrase"
        return HostError(hop.name, message, "add it to your ssh agent: ssh-add")
    if "not a valid" in str(error) or "key file" in str(error):
        return HostError(hop.name, f"{', '.join(hop.keys)}: {_describe(error)}", _KEY_HINT)
    return None


def _login_error(hop: Route, place: str, error: Exception) -> HostError | None:
    import paramiko

    # paramiko also raises AuthenticationException if the host does not answer.
    is_no_answer = "EOF" in str(error) or "timeout" in str(error)
    if isinstance(error, paramiko.AuthenticationException) and not is_no_answer:
        keys = ", ".join(hop.keys) or "any of your keys"
        hint = "check user and identity_file in the profile"
        return HostError(hop.name, f"{place} does not accept {keys}", hint)
    if "No authentication methods" in str(error):
        return HostError(hop.name, f"no key found for {place}", f"{_KEY_HINT}, or use ssh-add")
    return None


def _describe(error: Exception) -> str:
    import paramiko

    if isinstance(error, paramiko.ssh_exception.NoValidConnectionsError):
        return "; ".join(sorted({str(each.strerror).lower() for each in error.errors.values()}))
    if isinstance(error, OSError) and error.strerror:
        return error.strerror.lower()
    if isinstance(error, TimeoutError):
        return "no answer in time"
    if isinstance(error, (EOFError, paramiko.AuthenticationException)):
        return "it closed the connection"
    return " ".join(str(error).split()) or type(error).__name__


def fingerprint(key: paramiko.PKey) -> str:
    return f"{key.get_name()} {key.fingerprint}"


class ShownKey(NamedTuple):
    """The key that a host sends, and how it compares with the pinned one."""

    route: Route
    key: Any
    state: str  # known | new | changed


def shown_key(route: Route, jump_hosts: JumpHosts) -> ShownKey:
    """Get the key of a host without logging in. Its jump hosts must be trusted already."""
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
            # A host has several keys: ask for the type that is pinned, to compare the two.
            options.key_types = sorted(
                options.key_types, key=lambda kind: _key_kind(kind) not in known
            )
            transport.start_client(timeout=route.timeout)
            key = transport.get_remote_server_key()
    except (OSError, EOFError, paramiko.SSHException) as error:
        raise _connect_error(route, error) from None
    same = known.get(key.get_name()) == key
    return ShownKey(route, key, "known" if same else "changed" if known else "new")


def _key_kind(algorithm: str) -> str:
    """Return the key type as in known_hosts, where all RSA algorithms have the same one."""
    return "ssh-rsa" if algorithm.startswith("rsa-sha2-") else algorithm
