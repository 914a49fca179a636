"""Cluster profiles: one YAML file per cluster says where and how its jobs run.

Profiles are read and checked like run configs.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from gptctl.engine.file_reading import read_bytes
from gptctl.spec.cluster_kinds import CONNECTION_KEYS, KINDS, ClusterKind
from gptctl.spec.container_profile import Container, check_container
from gptctl.spec.launch import MAX_PER_NODE, OWN_KEY, SLURM_WORD, is_set_by_gptctl
from gptctl.spec.notify import PLAIN_URL, NotifyTargets, check_notify
from gptctl.spec.resources import choose, named_files
from gptctl.spec.trust import PROFILE, Source
from trainer.config.kinds import (
    WRONG_TYPE,
    BadValue,
    Names,
    Words,
    boolean,
    choice,
    file_path,
    integer,
    key,
    number,
    section,
    section_schema,
    text,
)
from trainer.config.read import Reading, build, read_section
from trainer.config.record import record
from trainer.config.tree import Map, Node, ReadFile, Scalar, read_file
from trainer.errors import OUT_OF_REACH, Finding, Place, Rule, UserError, errors_in, in_order
from trainer.named_tuple import NamedTuple

HOSTS = Rule("P001", "an ssh cluster must list its hosts, each once", uses=("kind", "hosts"))
RUN_ROOT = Rule(
    "P002",
    "run_root must be an absolute path, except on a local cluster",
    uses=("kind", "run_root"),
)
FOREIGN_KEY = Rule(
    "P003",
    "a key of one kind of cluster should not be in a profile of another",
    "warning",
    uses=("kind",),
)
SBATCH = Rule("P004", "sbatch must not contain an option that gptctl sets itself", uses=("sbatch",))
LOGIN = Rule(
    "P005", "only a cluster with a scheduler may have a login host", uses=("kind", "login", "hosts")
)
NAME = Rule("P008", "the name of a profile should be that of its file", "warning", uses=("name",))

# [user@]host[:port], one or several with commas, as ssh -J takes them.
_JUMPS = r"(?=.{1,255}$)[A-Za-z0-9._@-]+(:\d+)?(,[A-Za-z0-9._@-]+(:\d+)?)*"


@record(frozen=True)
class Host:
    """One machine of an ssh cluster."""

    host: str = text(
        None,
        "host name or address to connect to",
        r"[A-Za-z0-9._:-]{1,255}",
        "a host name or address",
    )
    user: str | None = text(
        None, "login name; empty: the ssh config's", r"[A-Za-z0-9._@-]{1,64}", "a user name"
    )
    port: int | None = integer(
        None, "port of sshd; empty: the ssh config's, or 22", low=1, high=65535
    )
    identity_file: str | None = file_path(None, "private key; empty: the profile's")
    gpus: int | None = integer(
        None, "number of GPUs; empty: gpus_per_node", low=1, high=MAX_PER_NODE
    )
    proxy_jump: str | None = text(None, "jump hosts, separated by commas", _JUMPS, "a host name")
    address: str | None = text(
        None,
        "address in the training network; empty: host",
        r"[A-Za-z0-9._:-]{1,255}",
        "an address",
    )
    interface: str | None = text(
        None,
        "network interface of the training network; empty: the one that reaches the first node",
        r"[A-Za-z0-9._@-]{1,32}",
        "an interface name",
    )


class HostEntry:
    """A host of the profile: `{host: 10.0.0.46, user: me}`, or only its name."""

    def read(self, node: Node) -> Host:
        # A bare name is short for {host: NAME}.
        mapping = node if isinstance(node, Map) else Map({"host": node}, node.place)
        reading = read_section(Host, mapping, [])
        if reading.found:
            # An item of a list can report one fault: the first, with its key.
            first = reading.found[0]
            raise BadValue(WRONG_TYPE, f"{first.key}: {first.message}", first.hint)
        if "host" not in reading.values:
            raise BadValue(WRONG_TYPE, "the key host is missing", "use {host: NAME}")
        return build(Host, reading.values)

    def schema(self) -> dict[str, Any]:
        return {"anyOf": [{"type": "string"}, section_schema(Host)]}


class LoginEntry:
    """The login host of the profile: like an entry of `hosts`, or `USER@HOST`."""

    def read(self, node: Node) -> Host:
        user, at, name = node.text.rpartition("@") if isinstance(node, Scalar) else ("", "", "")
        if not at:
            return HostEntry().read(node)
        words = {"host": name, "user": user}
        items: dict[str, Node] = {
            key: Scalar(word, node.place, True) for key, word in words.items()
        }
        return HostEntry().read(Map(items, node.place))

    def schema(self) -> dict[str, Any]:
        return HostEntry().schema()


@record(frozen=True)
class Cluster:
    """A cluster profile. Keys that start with `slurm:` or `ssh:` are for that kind only."""

    # All kinds of clusters.
    name: str = text(
        None,
        "name of the cluster; must be the name of the file",
        r"[A-Za-z0-9._-]{1,64}",
        "a name of letters, digits and ._-",
    )
    kind: str = choice("local", list(KINDS), " | ".join(KINDS))
    gpus_per_node: int | None = integer(
        None,
        "GPUs of a node; empty: visible GPUs (local), or ranks by the layout",
        low=1,
        high=MAX_PER_NODE,
    )
    gpu_memory_gb: float | None = number(
        None,
        "memory of one GPU in GB (10^9 bytes); gptctl validate compares its estimate with it",
        above=0,
    )
    # Slurm clusters.
    partition: str | None = text(None, "slurm: default partition", SLURM_WORD, "a partition name")
    account: str | None = text(None, "slurm: default account", SLURM_WORD, "an account name")
    gpu_request: str = choice(
        "gres",
        ["gres", "gpus-per-node", "none"],
        "slurm: gres (--gres=gpu:N) | gpus-per-node (--gpus-per-node=N) | none",
    )
    cpus_per_task: int | None = integer(
        None, "slurm: CPUs per node (--cpus-per-task)", low=1, high=1 << 16
    )
    sbatch: Mapping[str, str] = key(
        Names(pattern=r"[a-z][a-z0-9-]*", form="an sbatch option"),
        {},
        "slurm: more sbatch options, such as {qos: high}",
    )
    master_interface: str | None = text(
        None,
        "slurm: interface of the first node whose address is the rendezvous endpoint",
        r"[A-Za-z0-9._@-]{1,32}",
        "an interface",
    )
    login: Host | None = key(
        LoginEntry(),
        None,
        "slurm: the login host, if gptctl runs on a machine without Slurm: [USER@]HOST, or a "
        "mapping as in hosts",
    )
    # All kinds: where files are, and what runs before the ranks.
    run_root: str = file_path(
        "./runs", "folder of all runs, one subfolder per job; the same path on every machine"
    )
    setup: tuple[str, ...] = key(Words(), (), "shell lines to run before the ranks start, in order")
    container: Container = section(Container, "run the ranks in a container")
    # ssh clusters.
    hosts: tuple[Host, ...] = key(Words(HostEntry()), (), "ssh: the hosts, in node order")
    identity_file: str | None = file_path(None, "ssh, login: private key; empty: the ssh config's")
    known_hosts: str | None = file_path(
        None, "ssh, login: file of known host keys; empty: the ssh config's"
    )
    shared_fs: bool = boolean(False, "ssh: run_root is a folder that all hosts share")
    start_timeout: float = number(
        30.0,
        "ssh, login: seconds for which a host may be silent before gptctl gives up on it",
        low=1,
    )
    allow_proxy_command: bool = boolean(
        False, "ssh, login: allow ProxyCommand of the ssh config, which runs on this machine"
    )
    # All kinds: interpreters and environment.
    python: str | None = file_path(
        None,
        "interpreter of the ranks; empty: python (ssh, setup or container), else gptctl's own",
    )
    engine_python: str | None = file_path(
        None,
        "Python >= 3.10 that runs gptctl's engine on the nodes; empty: the one that runs gptctl, "
        "if it exists there, else python3 after the setup",
    )
    env: Mapping[str, str] = key(
        Names(), {}, "environment of every rank; Launch.env of a run config overrides it"
    )
    notify: tuple[Mapping[str, Any], ...] | None = key(
        NotifyTargets(),
        None,
        "who is told about jobs here, as Launch.notify of a run config, which overrides it",
    )

    @property
    def traits(self) -> ClusterKind:
        return KINDS[self.kind]

    @property
    def ssh_hosts(self) -> tuple[Host, ...]:
        """The machines that gptctl itself connects to."""
        return (self.login,) if self.login else self.hosts

    @property
    def sees_files(self) -> bool:
        """Whether this machine sees the files of the nodes."""
        return self.traits.shares_files and not self.login


class Profile(NamedTuple):
    """A cluster and the findings of its file."""

    cluster: Cluster
    findings: tuple[Finding, ...]
    reading: Reading
    file: ReadFile


def profile_folders() -> list[Path]:
    """The folders of the user's own profiles, in the order in which they are searched."""
    # ./clusters belongs to the project, the other folder to the user.
    return [Path("clusters"), own_folder()]


def own_folder() -> Path:
    # The XDG standard ignores a relative path: it would make a folder of the project your own.
    chosen = os.environ.get("XDG_CONFIG_HOME", "")
    config_home = chosen if os.path.isabs(chosen) else os.path.expanduser("~/.config")
    return Path(config_home) / "gptctl" / "clusters"


def known_profiles() -> dict[str, Path]:
    """All profiles by name: the first folder wins, and the bundled ones come last."""
    known: dict[str, Path] = {}
    for folder in profile_folders():
        for file in sorted(folder.glob("*.yaml")):
            known.setdefault(file.stem, file)
    return known | {
        name: file for name, file in named_files("clusters").items() if name not in known
    }


def find_profile(name: str) -> Path:
    # A path is taken as it is, so that a profile need not be in a folder of profiles.
    return Path(name) if _is_path(name) else choose("cluster", name, known_profiles())


def _is_path(name: str) -> bool:
    return "/" in name or name.endswith((".yaml", ".yml"))


def profile_source(profile: Profile, name: str, is_typed: bool) -> Source:
    """The file of a profile that was asked for by this name; `is_typed`: on the command line."""
    file = Path(profile.file.path)
    is_own = file.parent.absolute() == own_folder().absolute()
    # Whoever types a name may not know of a file in this folder; whoever types a path does.
    is_chosen = is_own or (is_typed and _is_path(name))
    replaced = "" if is_chosen else _replaced_by(profile.file)
    return Source(PROFILE, profile.file, replaced, is_announced=not is_own)


def _replaced_by(file: ReadFile) -> str:
    """The profile of the same name that gptctl would take without this file; empty if none."""
    name = Path(file.path).stem
    own = own_folder() / f"{name}.yaml"
    # The user's own first: without this file, gptctl would take that one.
    if os.path.lexists(own) and read_bytes(own) != file.data:
        return f"your own profile {name} ({own})"
    return f"the bundled profile {name}" if name in named_files("clusters") else ""


def load_profile(name: str) -> Profile:
    """Read and check a profile; collect its findings instead of stopping at the first."""
    file = find_profile(name)
    found: list[Finding] = []
    files: list[ReadFile] = []
    tree = read_file(file, found, files, PROFILE)
    # An unreadable file is checked as an empty one, so that there is always a cluster to return.
    reading = read_section(Cluster, tree or Map({}, Place(str(file))), found)
    # The frozen profile of a job is called cluster.json: only there the name is in the file.
    own = {} if file.suffix == ".json" else {"name": file.stem}
    cluster = build(Cluster, {"name": file.stem, **reading.values, **own})
    # A file that could not be parsed has its own finding: rules would only add false ones.
    judged = reading.valid_findings(_check(cluster, reading)) if tree else []
    return Profile(cluster, in_order([*found, *judged]), reading, files[0])


def cluster_of_job(folder: Path) -> Cluster:
    """The cluster as it was when the job was submitted."""
    # The profile may have been edited since: the job runs with the frozen copy.
    profile = load_profile(str(folder / "cluster.json"))
    if errors_in(profile.findings):
        hint = "check and stop the job on its hosts by hand"
        raise UserError(f"{folder}/cluster.json is damaged", hint, OUT_OF_REACH, profile.findings)
    return profile.cluster


def _check(cluster: Cluster, reading: Reading) -> Iterator[Finding]:
    written = reading.values.get("name", cluster.name)
    if written != cluster.name:
        message = f"the name is {written}, but gptctl uses the name of the file: {cluster.name}"
        yield NAME.found("name", written, message, "delete the key, or rename the file")
    yield from _check_hosts(cluster)
    yield from _check_run_root(cluster)
    yield from _check_login(cluster)
    yield from _check_keys(cluster, reading)
    yield from check_container(cluster.container, cluster.kind)
    plain_url = PLAIN_URL.using("notify")
    yield from check_notify(cluster.notify, "notify", plain_url)


def _check_hosts(cluster: Cluster) -> Iterator[Finding]:
    # Host and port identify a host: one address may have several sshd, as with containers.
    hosts = [(host.host, host.port or 22) for host in cluster.hosts]
    if cluster.traits.has_hosts and (not hosts or len(set(hosts)) < len(hosts)):
        twice = next((name for name, port in hosts if hosts.count((name, port)) > 1), "")
        message = f"{twice} is listed twice" if hosts else "no hosts are listed"
        yield HOSTS.found("hosts", None, message, "list every host once, in node order")


def _check_login(cluster: Cluster) -> Iterator[Finding]:
    # An error: without it gptctl would run the job somewhere else than on that cluster.
    if cluster.login and not cluster.traits.has_queue:
        queued = ", ".join(kind for kind, traits in KINDS.items() if traits.has_queue)
        message = f"a cluster of kind {cluster.kind} has no login host"
        hint = "list the host in hosts" if cluster.traits.has_hosts else f"set kind: {queued}"
        yield LOGIN.found("login", cluster.login.host, message, f"delete it, or {hint}")


def _check_run_root(cluster: Cluster) -> Iterator[Finding]:
    # A relative path would mean another folder on every node, and wherever gptctl starts.
    if not cluster.traits.is_one_machine and not cluster.run_root.startswith("/"):
        message = f"{cluster.run_root} is a relative path"
        hint = "use an absolute path that exists on every node"
        yield RUN_ROOT.found("run_root", cluster.run_root, message, hint)
    # `/`, `.` and `..`: the folders of jobs would be mixed with other files.
    if not cluster.run_root.strip("/."):
        message = f"run_root must not be {cluster.run_root}"
        yield RUN_ROOT.found("run_root", cluster.run_root, message, "use a folder of its own")


def _check_keys(cluster: Cluster, reading: Reading) -> Iterator[Finding]:
    for option in sorted(filter(is_set_by_gptctl, cluster.sbatch)):
        message = f"gptctl sets --{option} itself, or does not support it"
        yield SBATCH.found(f"sbatch.{option}", None, message, OWN_KEY)
    # A key of another kind is often a copy and paste error: the profile still works without it.
    for kind, traits in KINDS.items():
        for name in traits.keys if traits is not cluster.traits else ():
            if name in reading.values and name != "login":
                message = f"it is for clusters of kind {kind}, but this one is {cluster.kind}"
                yield FOREIGN_KEY.found(name, None, message, "delete it, or change kind")
    for name in CONNECTION_KEYS if cluster.traits.is_one_machine else ():
        if name in reading.values:
            message = f"it is for clusters that are reached by ssh, but this one is {cluster.kind}"
            yield FOREIGN_KEY.found(name, None, message, "delete it, or change kind")
