"""Cluster profiles: where jobs run. One YAML file per cluster, read with the same care as run configs."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from gptctl.spec.cluster_kinds import KINDS, ClusterKind
from gptctl.spec.launch import MAX_PER_NODE, OWN_KEY, SLURM_WORD, is_set_by_gptctl
from gptctl.spec.resources import choose, named_files
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
from trainer.config.tree import Map, Node, read_file
from trainer.errors import OUT_OF_REACH, Finding, Place, Rule, UserError, errors_in, in_order

HOSTS = Rule("P001", "an ssh cluster lists its hosts, each once", uses=("kind", "hosts"))
RUN_ROOT = Rule(
    "P002",
    "run_root of a cluster of several machines is an absolute path",
    uses=("kind", "run_root"),
)
FOREIGN_KEY = Rule("P003", "a key belongs to the cluster's kind", "warning", uses=("kind",))
SBATCH = Rule("P004", "sbatch repeats no option that gptctl sets itself", uses=("sbatch",))

_JUMPS = r"(?=.{1,255}$)[A-Za-z0-9._@-]+(:\d+)?(,[A-Za-z0-9._@-]+(:\d+)?)*"


@record(frozen=True)
class Host:
    host: str = text(
        None, "name or address to connect to", r"[A-Za-z0-9._:-]{1,255}", "a host name or address"
    )
    user: str | None = text(
        None, "empty: the ssh config's", r"[A-Za-z0-9._@-]{1,64}", "a user name"
    )
    port: int | None = integer(None, "empty: the ssh config's, or 22", low=1, high=65535)
    identity_file: str | None = file_path(None, "private key; empty: the profile's")
    gpus: int | None = integer(None, "its GPUs; empty: gpus_per_node", low=1, high=MAX_PER_NODE)
    proxy_jump: str | None = text(
        None, "bastions on the way, separated by commas", _JUMPS, "a host name"
    )
    address: str | None = text(
        None, "its address on the training network", r"[A-Za-z0-9._:-]{1,255}", "an address"
    )
    interface: str | None = text(
        None, "its interface on the training network", r"[A-Za-z0-9._@-]{1,32}", "an interface name"
    )


class HostEntry:
    """A host: `{host: 10.0.0.46, user: me}`, or its bare name."""

    def read(self, node: Node) -> Host:
        mapping = node if isinstance(node, Map) else Map({"host": node}, node.place)
        reading = read_section(Host, mapping, [])
        if reading.found:
            first = reading.found[0]
            raise BadValue(WRONG_TYPE, f"{first.key}: {first.message}", first.hint)
        if "host" not in reading.values:
            raise BadValue(WRONG_TYPE, "an entry without host", "write {host: NAME}")
        return build(Host, reading.values)

    def schema(self) -> dict[str, Any]:
        return {"anyOf": [{"type": "string"}, section_schema(Host)]}


@record(frozen=True)
class Container:
    runtime: str | None = choice(None, ["singularity", "apptainer"], "singularity | apptainer")
    image: str | None = file_path(None, "image file")
    binds: tuple[str, ...] = key(Words(), (), "HOST:CONTAINER[:rw]")
    pwd: str | None = file_path(None, "working folder inside")
    nv: bool = boolean(True, "pass the GPUs in")


@record(frozen=True)
class Cluster:
    name: str = text(
        None, "empty: the file's name", r"[A-Za-z0-9._-]{1,64}", "a name of letters, digits and ._-"
    )
    kind: str = choice("local", list(KINDS), " | ".join(KINDS))
    gpus_per_node: int | None = integer(
        None, "local, empty: visible GPUs, or as many ranks as asked for", low=1, high=MAX_PER_NODE
    )
    gpu_memory_gb: float | None = number(
        None, "memory of one GPU; validate compares its estimate with it", above=0
    )
    partition: str | None = text(None, "slurm: default partition", SLURM_WORD, "a partition name")
    account: str | None = text(None, "slurm: default account", SLURM_WORD, "an account name")
    gpu_request: str = choice(
        "gres",
        ["gres", "gpus-per-node", "none"],
        "slurm: gres (--gres=gpu:N) | gpus-per-node | none (cpu)",
    )
    cpus_per_task: int | None = integer(
        None, "slurm: cores of one node's task", low=1, high=1 << 16
    )
    sbatch: Mapping[str, str] = key(
        Names(pattern=r"[a-z][a-z0-9-]*", form="an sbatch option"),
        {},
        "slurm: further sbatch options, such as {qos: high}",
    )
    run_root: str = file_path(
        "./runs", "one folder per job; on several machines visible under this path on each"
    )
    setup: tuple[str, ...] = key(Words(), (), "shell lines before the launch, in order")
    container: Container = section(Container)
    master_interface: str | None = text(
        None, "the head node's address is taken from it", r"[A-Za-z0-9._@-]{1,32}", "an interface"
    )
    hosts: tuple[Host, ...] = key(Words(HostEntry()), (), "ssh: machines in node order")
    identity_file: str | None = file_path(None, "ssh: private key")
    known_hosts: str | None = file_path(None, "ssh: pinned host keys")
    shared_fs: bool = boolean(False, "ssh: run_root is one shared folder")
    patience: float = number(
        30.0, "ssh: seconds for which a host may be silent while a job is begun", low=1
    )
    allow_proxy_command: bool = boolean(
        False, "ssh: a ProxyCommand of the ssh config may run on this machine"
    )
    python: str | None = file_path(None, "interpreter of the ranks")
    engine_python: str | None = file_path(
        None,
        "Python >= 3.10 that runs gptctl's engine on nodes; empty: the one that runs gptctl, if "
        "it exists there, else python3 after the setup",
    )
    env: Mapping[str, str] = key(
        Names(), {}, "environment of every rank; a run config's Launch.env wins"
    )

    @property
    def traits(self) -> ClusterKind:
        return KINDS[self.kind]


class Profile(NamedTuple):
    """A cluster with what was found in its file."""

    cluster: Cluster
    findings: tuple[Finding, ...]
    reading: Reading


def profile_folders() -> list[Path]:
    """The user's own folders, nearest first; the bundled ones come after them."""
    config_home = os.environ.get("XDG_CONFIG_HOME") or os.path.expanduser("~/.config")
    return [Path("clusters"), Path(config_home) / "gptctl" / "clusters"]


def known_profiles() -> dict[str, Path]:
    known: dict[str, Path] = {}
    for folder in profile_folders():
        for file in sorted(folder.glob("*.yaml")):
            known.setdefault(file.stem, file)
    return known | {
        name: file for name, file in named_files("clusters").items() if name not in known
    }


def find_profile(name: str) -> Path:
    if "/" in name or name.endswith((".yaml", ".yml")):
        return Path(name)
    return choose("cluster", name, known_profiles())


def load_profile(name: str) -> Profile:
    file = find_profile(name)
    found: list[Finding] = []
    tree = read_file(file, found)
    reading = read_section(Cluster, tree or Map({}, Place(str(file))), found)
    cluster = build(Cluster, {"name": file.stem, **reading.values})
    judged = reading.judge(_check(cluster, reading)) if tree else []
    return Profile(cluster, in_order([*found, *judged]), reading)


def cluster_of_job(folder: Path) -> Cluster:
    """As it was when the job was submitted."""
    profile = load_profile(str(folder / "cluster.json"))
    if errors_in(profile.findings):
        hint = "look at the job on its hosts"
        raise UserError(f"{folder}/cluster.json is damaged", hint, OUT_OF_REACH, profile.findings)
    return profile.cluster


def _check(cluster: Cluster, reading: Reading) -> Iterator[Finding]:
    hosts = [(host.host, host.port or 22) for host in cluster.hosts]
    if cluster.traits.has_hosts and (not hosts or len(set(hosts)) < len(hosts)):
        message = "a host is listed twice" if hosts else "no hosts"
        yield HOSTS.found("hosts", None, message, "list every machine once, in node order")
    if not cluster.traits.is_one_machine and not cluster.run_root.startswith("/"):
        message = f"{cluster.run_root} depends on where gptctl is started"
        yield RUN_ROOT.found(
            "run_root", cluster.run_root, message, "write an absolute path that every node sees"
        )
    if not cluster.run_root.strip("/."):
        yield RUN_ROOT.found(
            "run_root", cluster.run_root, "it is no folder for runs", "write a folder of your own"
        )
    for option in sorted(filter(is_set_by_gptctl, cluster.sbatch)):
        yield SBATCH.found(
            f"sbatch.{option}", None, f"gptctl sets --{option} itself, or cannot use it", OWN_KEY
        )
    for kind, traits in KINDS.items():
        for name in traits.keys if traits is not cluster.traits else ():
            if name in reading.values:
                message = f"only a cluster of kind {kind} has it; this one is {cluster.kind}"
                yield FOREIGN_KEY.found(name, None, message, "delete it, or change the kind")


def visible_gpus() -> int:
    """GPUs of this machine that a job may use, by their device files; no driver is asked."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return len([device for device in visible.split(",") if device.strip() not in ("", "-1")])
    return len(list(Path("/dev").glob("nvidia[0-9]*")))
