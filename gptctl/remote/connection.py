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
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from functools import cache
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from gptctl.deadline import Deadline
from gptctl.remote.archive import MIN_SPEED
from gptctl.remote.host_error import HostError, all_or_none, shell_error, silent_host
from gptctl.remote.known_hosts import key_name, pinned_keys, pinning_file
from gptctl.remote.parallel import bounded, in_parallel
from gptctl.remote.route import ConfigLookup, Route, route_to
from gptctl.remote.scripts import command_line, output_of
from gptctl.remote.sftp import (
    InvalidReply,
    ReadFailed,
    SftpReader,
    TooManyEntries,
)
from gptctl.remote.silence import MeteredSocket, SilenceWatch
from gptctl.spec.cluster import Cluster
from trainer.errors import OUT_OF_REACH, UserError

if TYPE_CHECKING:
    import paramiko

Channel = Any  # of paramiko: input and output of a command on a host
MAX_OUTPUT = 16 << 20  # bytes that a command may print
MAX_ERRORS = 1 << 20  # bytes of its stderr that are read
MAX_GREETING = 1 << 16  # bytes before the version of an ssh server; a legal notice has a few lines
MAX_SSH_PACKET = 1 << 18  # bytes; paramiko tells every server to send at most 32 KB
MAX_SESSIONS = 6  # commands at the same time: sshd allows 10 sessions, and files need one
JUMP_PAUSE = 10.0  # seconds for which a jump host that failed is not tried again
# Any other error of the operating system concerns a file, here or there, and not the connection.
NETWORK_ERRORS = (
    *(errno.ECONNRESET, errno.ECONNABORTED, errno.ECONNREFUSED, errno.EPIPE, errno.ETIMEDOUT),
    *(errno.ENOTCONN, errno.EHOSTUNREACH, errno.EHOSTDOWN),
    *(errno.ENETUNREACH, errno.ENETDOWN, errno.ENETRESET),
)
_SSHD_HINT = "check that sshd is running there"
_REACHABLE_HINT = "check that the host is up and reachable from here"
_SFTP_HINT = "check the sftp subsystem of sshd there"
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

    def __init__(self, route: Route, jump_hosts: JumpHosts, limit: Deadline | None = None) -> None:
        """`limit`: when the command that uses it must end, if it has to."""
        self.route, self._limit = route, limit or Deadline()
        deadline = self._limit.within(route.patience)
        self._client, self._watch = _connected(route, jump_hosts, deadline)
        self._files: SftpReader | None = None
        self._sftp_channel: Channel = None
        self._sessions = threading.BoundedSemaphore(MAX_SESSIONS)

    @property
    def _transport(self) -> paramiko.Transport:
        return _transport_of(self._client, self.route)

    @property
    def patience(self) -> float:
        """The seconds for which the host may be silent."""
        return min(self.route.patience, self._limit.left)

    @contextmanager
    def in_time(self, seconds: float) -> Iterator[None]:
        """Close the connection after so many seconds: some calls of paramiko have no timeout."""
        with closing_at(Deadline(seconds), self._transport.close) as is_late:
            try:
                with host_errors(self.route):
                    yield
            except HostError as error:
                # It was gptctl that closed the connection: say why.
                raise self._late(seconds, is_late()) or error from None
        # A closed connection looks like the end of the output.
        if late := self._late(seconds, is_late()):
            raise late

    def _late(self, seconds: float, is_late: bool) -> HostError | None:
        if is_late:
            return silent_host(self.route.name, seconds)
        return silent_host(self.route.name, self.route.patience) if self.is_silent else None

    @property
    def is_silent(self) -> bool:
        """Whether the connection was closed because the host sent nothing for too long."""
        return self._watch.has_given_up

    def start(self, command: Sequence[str]) -> paramiko.Channel:
        """Start a command; the caller reads from and writes to the channel."""
        with self.in_time(self.patience):
            channel = self._transport.open_session(timeout=self.patience)
            channel.settimeout(self.patience)
            line = os.fsencode(command_line(command))  # quoted, word by word
            channel.exec_command(line)  # nosec B601
        return channel

    def run(
        self, command: Sequence[str], stdin: bytes = b"", timeout: float | None = None
    ) -> CommandResult:
        """Run a command until it exits.

        Without a timeout it is a question: all of the answer must be here in time. With one it is
        work, which may take that long. It must begin in time, and the host must stay alive.
        """
        # The answer comes after what is sent.
        timeout = min(timeout or self.patience + len(stdin) / MIN_SPEED, self._limit.left)
        with self._session(timeout), self.in_time(timeout):
            channel = self.start(command)
            # The login shell prints the marker before the command does anything.
            first = channel.recv(1 << 16)
            channel.settimeout(timeout)
            # The command may exit before it has read everything: its exit code says why.
            with suppress(OSError):
                channel.sendall(stdin)
            # The command may read its stdin to the end.
            channel.shutdown_write()
            out = output_of(first + self._output(channel))
            err = remaining_stderr(channel)
            if out is None:
                raise shell_error(self.route.name, err)
            return CommandResult(channel.recv_exit_status(), out, err.strip())

    @contextmanager
    def _session(self, timeout: float) -> Iterator[None]:
        """Wait until fewer commands run there than sshd allows on one connection."""
        left = min(timeout, self._limit.left, threading.TIMEOUT_MAX)
        if not self._sessions.acquire(timeout=left):
            problem = f"{MAX_SESSIONS} other commands of gptctl did not end in {left:.0f} s"
            raise HostError(self.route.name, problem, "try again later")
        try:
            yield
        finally:
            self._sessions.release()

    def _output(self, channel: Channel) -> bytes:
        output = bytearray()
        while data := channel.recv(1 << 16):
            output += data
            # A host that never stops printing must not use up the memory here.
            if len(output) > MAX_OUTPUT:
                channel.close()
                raise HostError(self.route.name, f"it printed more than {MAX_OUTPUT:,} bytes")
        return bytes(output)

    def files(self, deadline: Deadline) -> SftpReader:
        """Return the SFTP session. Raise TimeoutError if the host opens none in time."""
        # Opened when it is first needed: most commands need no files.
        if self._files is None:
            limit = deadline.within(self.patience)
            channel = self._transport.open_session(timeout=limit.left)
            # Only this session: commands on the same connection may be answered.
            with closing_at(limit, channel.close) as is_late:
                try:
                    channel.invoke_subsystem("sftp")
                    self._files = SftpReader(channel, self.patience, deadline)
                except BaseException:  # every try would leave one more session open
                    channel.close()
                    if is_late():
                        raise TimeoutError from None
                    raise
            self._sftp_channel = channel
        return self._files

    def close_files(self) -> None:
        """Close the SFTP session; the next use opens another one."""
        if self._files is not None:
            self._sftp_channel.close()
            self._files = None

    @property
    def is_quiet(self) -> bool:
        """Whether the host has not even answered keepalive requests for a while."""
        return self._watch.is_quiet

    def close(self) -> None:
        self._watch.stop()
        self._client.close()


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
    except InvalidReply as error:
        raise HostError(route.name, f"invalid SFTP reply: {error}", _SFTP_HINT) from None
    except ReadFailed as error:
        raise HostError(route.name, f"its SFTP server failed: {error}", _SFTP_HINT) from None
    except TooManyEntries as error:
        raise HostError(route.name, str(error), "check what is in that folder") from None
    except (EOFError, OSError, paramiko.SSHException) as error:
        if isinstance(error, OSError) and error.errno and error.errno not in NETWORK_ERRORS:
            raise
        if isinstance(error, TimeoutError):
            raise silent_host(route.name, route.patience) from None
        message = f"lost the connection: {_describe(error)}"
        raise HostError(route.name, message, is_lost=True) from None


@contextmanager
def closing_at(deadline: Deadline, close: Callable[[], object]) -> Iterator[Callable[[], bool]]:
    """Close something at the deadline, unless the block ends before; yields if that happened."""
    is_late = threading.Event()

    def expire() -> None:
        is_late.set()
        close()

    timer = threading.Timer(min(deadline.left, threading.TIMEOUT_MAX), expire)
    timer.daemon = True
    timer.start()
    try:
        yield is_late.is_set
    finally:
        timer.cancel()


class JumpHosts:
    """Open connections to jump hosts, shared by all hosts behind them.

    One connection per host would fail: sshd limits how many clients may log in at the same time.
    """

    def __init__(self) -> None:
        self._open: dict[tuple[Route, ...], paramiko.SSHClient] = {}
        self._opening: dict[tuple[Route, ...], threading.Lock] = {}
        self._failed: dict[tuple[Route, ...], tuple[HostError, float]] = {}  # and until when
        self._lock = threading.Lock()

    def client(self, hops: tuple[Route, ...], deadline: Deadline) -> paramiko.SSHClient:
        """Return a connection to the last of these hosts, through the ones before it."""
        # A lock for each jump host: several can be opened at the same time, each only once.
        with self._lock:
            opening = self._opening.setdefault(hops, threading.Lock())
        if not opening.acquire(timeout=min(deadline.left, threading.TIMEOUT_MAX)):
            raise silent_host(hops[-1].name, hops[-1].patience)
        try:
            return self._opened(hops, deadline)
        finally:
            opening.release()

    def _opened(self, hops: tuple[Route, ...], deadline: Deadline) -> paramiko.SSHClient:
        client = self._open.get(hops)
        if client is not None and _is_active(client):
            return client
        # All hosts behind it wait for the same jump host: one of them finds out for all.
        error, until = self._failed.get(hops, (None, 0.0))
        if error and time.monotonic() < until:
            raise error
        try:
            last = hops[-1]._replace(jumps=hops[:-1])
            self._open[hops], _ = _connected(last, self, deadline)
        except HostError as error:
            self._failed[hops] = error, time.monotonic() + JUMP_PAUSE
            raise
        return self._open[hops]


def _transport_over(sock: Any, **options: Any) -> paramiko.Transport:
    """Speak ssh over a socket, with limits for what a host sends."""
    packetizer, transport = _strict_classes()
    return transport(sock, packetizer_class=packetizer, **options)


@cache
def _strict_classes() -> tuple[Any, Any]:
    """Complete paramiko's classes, which trust a host more than we do."""
    import paramiko
    from paramiko.common import MSG_CHANNEL_DATA, MSG_CHANNEL_EXTENDED_DATA
    from paramiko.packet import Packetizer

    class LimitedPackets(Packetizer):  # type: ignore[misc]
        """paramiko would collect a first line or a packet without end."""

        greeting = 0  # bytes of it so far

        def _read_timeout(self, timeout: float) -> bytes:
            data: bytes = super()._read_timeout(timeout)
            self.greeting += len(data)
            if self.greeting > MAX_GREETING:
                raise paramiko.SSHException(f": more than {MAX_GREETING:,} bytes")
            return data

        def read_all(self, n: int, check_rekey: bool = False) -> bytes:
            if n > MAX_SSH_PACKET:
                raise paramiko.SSHException(f"it sent an ssh packet of {n:,} bytes")
            return super().read_all(n, check_rekey)  # type: ignore[no-any-return]

    def within_window(feed: Callable[[Any, Any], None]) -> Callable[[Any, Any], None]:
        def checked(channel: Any, message: Any) -> None:
            feed(channel, message)
            if len(channel.in_buffer) + len(channel.in_stderr_buffer) > channel.in_window_size:
                raise paramiko.SSHException("it sent more data than it was asked for")

        return checked

    class StrictTransport(paramiko.Transport):  # type: ignore[misc]
        """paramiko would keep any amount of data, and raise anything about invalid messages."""

        _channel_handler_table: ClassVar = {
            **paramiko.Transport._channel_handler_table,
            MSG_CHANNEL_DATA: within_window(paramiko.Channel._feed),
            MSG_CHANNEL_EXTENDED_DATA: within_window(paramiko.Channel._feed_extended),
        }

        def get_exception(self) -> Exception | None:
            error: Exception | None = super().get_exception()
            if error is None or isinstance(error, (OSError, EOFError, paramiko.SSHException)):
                return error
            invalid: Exception = paramiko.SSHException(f"it sent an invalid message: {error}")
            return invalid

    return LimitedPackets, StrictTransport


def _is_active(client: paramiko.SSHClient) -> bool:
    transport = client.get_transport()
    return transport is not None and transport.is_active()


def _transport_of(client: paramiko.SSHClient, route: Route) -> paramiko.Transport:
    transport = client.get_transport()
    if transport is None or not transport.is_active():
        raise HostError(route.name, "lost the connection", is_lost=True)
    return transport


def _socket_to(route: Route, jump_hosts: JumpHosts, deadline: Deadline) -> MeteredSocket:
    """Connect directly, through jump hosts, or by the user's ProxyCommand."""
    import paramiko

    timeout = min(route.timeout, deadline.left)
    if route.jumps:
        bastion = _transport_of(jump_hosts.client(route.jumps, deadline), route)
        timeout = min(route.timeout, deadline.left)
        there, here = (route.host, route.port), ("127.0.0.1", 0)
        try:
            with host_errors(route):
                return MeteredSocket(
                    bastion.open_channel("direct-tcpip", there, here, timeout=timeout)
                )
        except HostError:
            _close_if_dead(bastion, deadline)
            raise
    if route.command:
        return MeteredSocket(paramiko.ProxyCommand(route.command))
    # Looking up a name has no timeout of its own.
    place = (route.host, route.port)
    return MeteredSocket(bounded(lambda: socket.create_connection(place, timeout), deadline))


def _close_if_dead(bastion: paramiko.Transport, deadline: Deadline) -> None:
    """Close the connection to a jump host that does not answer: the next try opens a new one."""
    import paramiko

    # If it answers, only the host behind it is unreachable.
    try:
        bastion.open_session(timeout=max(1.0, deadline.left)).close()
    except (OSError, EOFError, paramiko.SSHException):
        bastion.close()


def _connected(
    hop: Route, jump_hosts: JumpHosts, deadline: Deadline
) -> tuple[paramiko.SSHClient, SilenceWatch]:
    """Connect and log in before the deadline, whatever the host sends."""
    import paramiko

    client = paramiko.SSHClient()
    # An unknown key is never accepted here: `gptctl hosts trust` pins it after asking the user.
    client.set_missing_host_key_policy(paramiko.RejectPolicy())
    _load(client.get_host_keys(), hop)
    try:
        sock = _socket_to(hop, jump_hosts, deadline)
        # Each step has a timeout, but a host that sends a byte a second exceeds none of them.
        with closing_at(deadline, sock.close) as is_late:
            try:
                _log_in(client, hop, sock, min(hop.timeout, deadline.left))
            except (OSError, EOFError, paramiko.SSHException) as error:
                raise TimeoutError if is_late() else error from None
    except (OSError, EOFError, paramiko.SSHException, ValueError) as error:
        client.close()
        raise _connect_error(hop, error) from None
    transport = _transport_of(client, hop)
    # sshd refuses this request, and refusing it is an answer.
    watch = SilenceWatch(
        sock,
        hop.patience,
        lambda: transport.global_request("keepalive@openssh.com"),
        transport.close,
    )
    return client, watch


def _log_in(client: paramiko.SSHClient, hop: Route, sock: MeteredSocket, timeout: float) -> None:
    client.connect(
        hop.host,
        hop.port,
        hop.user,
        key_filename=[key for key in hop.keys if os.path.exists(key)],
        allow_agent=True,  # for authentication; it is never forwarded
        look_for_keys=not hop.keys,
        sock=sock,
        timeout=timeout,
        banner_timeout=timeout,
        auth_timeout=timeout,
        channel_timeout=timeout,
        transport_factory=_transport_over,
    )


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
        return HostError(hop.name, problem, _SSHD_HINT, is_lost=True, is_silent=True)
    # "No existing session": the host sent nothing, and paramiko tried to authenticate nevertheless.
    silences = ("timeout", "No existing session")
    if isinstance(error, TimeoutError) or any(words in str(error) for words in silences):
        problem = f"{place} does not answer"
        return HostError(hop.name, problem, _REACHABLE_HINT, is_lost=True, is_silent=True)
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
    deadline = Deadline(route.patience)
    try:
        sock = _socket_to(route, jump_hosts, deadline)
        with (
            closing(_transport_over(sock)) as transport,
            closing_at(deadline, sock.close),
        ):
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
