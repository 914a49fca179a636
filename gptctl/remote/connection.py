"""Connections to the hosts of an ssh cluster. The only module that knows paramiko, and so a long one.

A host key that is not pinned is never accepted. The user's ssh config is honoured field by field; the profile wins.
"""

from __future__ import annotations

import base64
import errno
import getpass
import logging
import os
import re
import shlex
import socket
import stat
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from gptctl.spec.cluster import Cluster, Host
from gptctl.spec.summary import count
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
BEGINS = "gptctl begins"  # a line before what a command says: login shells may say something of their own first
BASH = (
    "bash",
    "--norc",
    "-c",
)  # without it, bash reads what is meant for people when sshd starts it
SYSTEM_KNOWN_HOSTS = "/etc/ssh/ssh_known_hosts"
# Whatever else the kernel says is a file's fault, here or there, and not the way's.
_OF_WAYS = (
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


class HostError(UserError):
    """A host that cannot be used, and what can be done about it; `is_lost`: it may be back in a moment."""

    def __init__(self, host: str, what: str, hint: str = "", is_lost: bool = False) -> None:
        super().__init__(f"{host}: {what}", hint, OUT_OF_REACH)
        self.host, self.what, self.is_lost = host, what, is_lost


class Done(NamedTuple):
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


class Way(NamedTuple):
    """How a host is reached: profile and ssh config together."""

    name: str  # as the profile calls it
    host: str
    port: int
    user: str
    keys: tuple[str, ...]
    known_hosts: tuple[str, ...]
    jumps: tuple[Way, ...] = ()
    command: str = ""  # ProxyCommand
    timeout: float = CONNECT


def ways(cluster: Cluster) -> list[Way]:
    """In the order of the profile, which is that of the nodes."""
    logging.getLogger("paramiko").setLevel(
        logging.CRITICAL + 1
    )  # what it has to say comes as an exception, too
    config = _read_config()
    found = at_once(lambda host: _way(host, cluster, config), cluster.hosts)
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


def _way(host: Host, cluster: Cluster, config: paramiko.SSHConfig) -> Way:
    said = _said(config, host.host)
    jump = host.proxy_jump or said.get("proxyjump", "none")
    command = said.get("proxycommand", "none") if not host.proxy_jump and jump == "none" else "none"
    if command != "none" and not cluster.allow_proxy_command:
        hint = "set allow_proxy_command: true in the profile if you trust it, or use ProxyJump"
        raise HostError(host.host, f"the ssh config runs a ProxyCommand for it: {command}", hint)
    jumps = _hops(host.host, jump, cluster, config)
    return _plain_way(host, cluster, said, jumps, "" if command == "none" else command)


def _plain_way(
    host: Host,
    cluster: Cluster,
    said: dict[str, Any],
    jumps: tuple[Way, ...] = (),
    command: str = "",
) -> Way:
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
    return Way(
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


def _hops(host: str, jump: str, cluster: Cluster, config: paramiko.SSHConfig) -> tuple[Way, ...]:
    """`user@bastion:2222,second`; the first may have jump hosts of its own in the ssh config."""
    hops: list[Way] = []
    while jump != "none" and len(hops) <= MOST_JUMPS:
        names = [_hop(text) for text in jump.split(",")]
        said = [_said(config, name.host) for name in names]
        hops = [*(_plain_way(name, cluster, words) for name, words in zip(names, said)), *hops]
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
    """An open way to a host. What fails raises HostError, and says whether the host was lost."""

    def __init__(self, way: Way) -> None:
        self.way = way
        self._client = _connected(way, _socket_to(way))
        self._files: Files | None = None

    @property
    def _transport(self) -> paramiko.Transport:
        return _transport_of(self._client, self.way)

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
        with told(self.way), self._in_time(ANSWER):
            channel = self._transport.open_session(timeout=self.way.timeout)
            channel.settimeout(ANSWER)
            channel.exec_command(f"echo {shlex.quote(BEGINS)}; {shlex.join(command)}")
        return channel

    def run(self, command: Sequence[str], stdin: bytes = b"", patience: float = ANSWER) -> Done:
        with told(self.way), self._in_time(patience):
            channel = self.start(command)
            channel.settimeout(patience)
            if stdin:
                channel.sendall(stdin)
            channel.shutdown_write()
            out = channel.makefile("rb").read().partition(f"{BEGINS}\n".encode())[2]
            err = last_words(channel)
            return Done(channel.recv_exit_status(), out, err.strip())

    @property
    def files(self) -> paramiko.SFTPClient:
        if self._files is None:
            with told(self.way), self._in_time(ANSWER):
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
def told(way: Way) -> Iterator[None]:
    """Whatever goes wrong on the way is said in our words."""
    import paramiko

    try:
        yield
    except HostError:
        raise
    except (EOFError, OSError, paramiko.SSHException, paramiko.SFTPError) as error:
        if isinstance(error, OSError) and error.errno and error.errno not in _OF_WAYS:
            raise
        raise HostError(
            way.name, f"the connection is lost: {_words(error)}", is_lost=True
        ) from None


class Bastions:
    """Jump hosts with an open connection, which all hosts behind them share until this process ends: sshd lets only few
    come in at the same time."""

    def __init__(self) -> None:
        self._open: dict[tuple[Way, ...], paramiko.SSHClient] = {}
        self._opening: dict[tuple[Way, ...], threading.Lock] = {}
        self._lock = threading.Lock()

    def client(self, hops: tuple[Way, ...]) -> paramiko.SSHClient:
        """Of the last of these, through those before it."""
        with self._lock:
            opening = self._opening.setdefault(hops, threading.Lock())
        with opening:
            client = self._open.get(hops)
            if client is None or not _is_active(client):
                client = _connected(hops[-1], _socket_to(hops[-1]._replace(jumps=hops[:-1])))
                self._open[hops] = client
            return client


BASTIONS = Bastions()


def _is_active(client: paramiko.SSHClient) -> bool:
    transport = client.get_transport()
    return transport is not None and transport.is_active()


def _transport_of(client: paramiko.SSHClient, way: Way) -> paramiko.Transport:
    transport = client.get_transport()
    if transport is None or not transport.is_active():
        raise HostError(way.name, "the connection is lost", is_lost=True)
    return transport


def _socket_to(way: Way) -> Any:
    """Through its jump hosts, or through the user's command; None: straight."""
    import paramiko

    if way.jumps:
        bastion = _transport_of(BASTIONS.client(way.jumps), way)
        there, here = (way.host, way.port), ("127.0.0.1", 0)
        try:
            with told(way):
                return bastion.open_channel("direct-tcpip", there, here, timeout=way.timeout)
        except HostError:
            _close_if_dead(bastion, way)
            raise
    return paramiko.ProxyCommand(way.command) if way.command else None


def _close_if_dead(bastion: paramiko.Transport, way: Way) -> None:
    """A host behind it may not answer, or the bastion itself: then the next one gets a new connection."""
    import paramiko

    try:
        bastion.open_session(timeout=way.timeout).close()
    except (OSError, EOFError, paramiko.SSHException):
        bastion.close()


def _connected(hop: Way, sock: Any) -> paramiko.SSHClient:
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


_HASHED = re.compile(r"\|1\|[A-Za-z0-9+/]{27}=\|[A-Za-z0-9+/]{27}=")


def _load(keys: paramiko.HostKeys, hop: Way) -> None:
    """The pinned keys but those that are revoked; lines that cannot be understood pin nothing."""
    lines: list[str] = []
    for file in (*hop.known_hosts, SYSTEM_KNOWN_HOSTS):
        try:
            if os.path.isfile(file):
                lines += Path(file).read_text(encoding="utf-8", errors="replace").splitlines()
        except OSError as error:
            hint = "mend it, or see known_hosts in the profile"
            raise HostError(hop.name, f"{file} cannot be read: {error.strerror}", hint) from None
    revoked = {
        line.split()[3] for line in lines if line.startswith("@revoked ") and len(line.split()) > 3
    }
    for line in lines:
        words = line.split()
        if len(words) > 2 and not line.startswith(("#", "@")) and words[2] not in revoked:
            _add(keys, *words[:3])


def _add(keys: paramiko.HostKeys, names: str, kind: str, text: str) -> None:
    import paramiko

    try:
        key = paramiko.PKey.from_type_string(kind, base64.b64decode(text))
    except (ValueError, paramiko.SSHException, paramiko.UnknownKeyType):
        return
    for name in names.split(","):
        if not name.startswith("|") or _HASHED.fullmatch(name):
            keys.add(name, kind, key)


def _refusal(hop: Way, error: Exception) -> HostError:
    """Why a host was not reached, and what helps."""
    import paramiko

    place = f"{hop.user}@{hop.host}:{hop.port}"
    if isinstance(error, paramiko.BadHostKeyException):
        what = f"its host key has CHANGED: it shows {fingerprint(error.key)}, pinned is {fingerprint(error.expected_key)}"
        hint = f"somebody may be listening; only if you know why, delete its line from {_pinned_in(hop)}"
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
        return HostError(hop.name, f"its host key is not known in {_pinned_in(hop)}", hint)
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


def _pinned_in(hop: Way) -> str:
    return hop.known_hosts[0] if hop.known_hosts else SYSTEM_KNOWN_HOSTS


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
    """What went wrong is told of all hosts at once."""
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


def at_once(
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

    way: Way
    key: Any
    state: str


def shown_key(way: Way) -> ShownKey:
    """Asked without telling the host who asks. Its jump hosts must be trusted already."""
    import paramiko

    pinned = paramiko.HostKeys()
    _load(pinned, way)
    known = pinned.lookup(_key_name(way)) or {}
    try:
        sock = _socket_to(way) or socket.create_connection((way.host, way.port), way.timeout)
        with closing(paramiko.Transport(sock)) as transport:
            transport.banner_timeout = way.timeout
            options = transport.get_security_options()
            options.key_types = sorted(
                options.key_types, key=lambda kind: _key_kind(kind) not in known
            )  # pinned first
            transport.start_client(timeout=way.timeout)
            key = transport.get_remote_server_key()
    except (OSError, EOFError, paramiko.SSHException) as error:
        raise _refusal(way, error) from None
    same = known.get(key.get_name()) == key
    return ShownKey(way, key, "known" if same else "changed" if known else "new")


def _key_kind(algorithm: str) -> str:
    """As known_hosts calls it: an RSA key has one name there, and several ways to sign."""
    return "ssh-rsa" if algorithm.startswith("rsa-sha2-") else algorithm


def _key_name(way: Way) -> str:
    return way.host if way.port == SSH_PORT else f"[{way.host}]:{way.port}"


def pin(shown: ShownKey) -> None:
    """From now on this key, and no other one, is this host's."""
    file = Path(_pinned_in(shown.way))
    if file.exists() and not file.is_file():
        raise UserError(
            f"{file} keeps nothing", "name a file as known_hosts in the profile", OUT_OF_REACH
        )
    line = f"{_key_name(shown.way)} {shown.key.get_name()} {shown.key.get_base64()}\n"
    try:
        file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        before = file.read_text(encoding="utf-8") if file.exists() else ""
        with open(
            os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), "a", encoding="utf-8"
        ) as stream:
            stream.write(line if not before or before.endswith("\n") else f"\n{line}")
    except OSError as error:
        raise UserError(
            f"{file} cannot be written: {error.strerror}", "see known_hosts", OUT_OF_REACH
        ) from None
