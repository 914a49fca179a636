"""Query Slurm, here or on its login host: commands, controller, partitions, GPUs, accounting.

It submits nothing.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from gptctl.backends.slurm.client import SlurmClient, SlurmError
from gptctl.doctor.rows import Row, notice, ok, warning, wrong
from gptctl.spec.cluster import Cluster
from gptctl.spec.container_profile import PYXIS
from gptctl.text import count
from trainer.errors import closest

REQUIRED_COMMANDS = ("sbatch", "srun", "squeue", "scontrol", "scancel", "sinfo")
COMMANDS = (*REQUIRED_COMMANDS, "sacct")
# Partition (* marks the default), availability, nodes, time limit, gres, state, nodes per job.
SINFO_FORMAT = "%P|%a|%D|%l|%G|%t|%s"
# The suffixes of sinfo for nodes that are powered down, booting, reserved and so on; jobs can
# wait for those. `*` marks nodes that do not respond, and is not among them.
USABLE_STATE = re.compile(
    r"(idle|mix|mixed|alloc|allocated|comp|completing|plnd|planned|resv|reserved)[~#!%$@^-]*"
)
WITHOUT_ACCOUNTING = (
    "jobs run without it, but gptctl cannot show the state of jobs that ended long ago"
)
PYXIS_OPTIONS = ("container-image", "container-mounts", "container-workdir")
MAX_LISTED = 8  # partitions in one row


class SinfoLine(NamedTuple):
    """Nodes of one partition with the same state and hardware: one line of sinfo."""

    partition: str
    is_default: bool
    is_up: bool
    nodes: int
    time_limit: str
    gpus: int
    state: str
    max_nodes: int | None  # per job; None: no limit

    @property
    def is_usable(self) -> bool:
        return USABLE_STATE.fullmatch(self.state) is not None


def parse_sinfo(text: str) -> list[SinfoLine]:
    lines = [line.strip().split("|") for line in text.splitlines()]
    return [_parse_group(*fields) for fields in lines if len(fields) == 7]


def _parse_group(
    name: str, up: str, nodes: str, time_limit: str, gres: str, state: str, size: str
) -> SinfoLine:
    max_nodes = size.rpartition("-")[2]  # of `1-4`; `infinite` is no limit
    return SinfoLine(
        partition=name.rstrip("*"),
        is_default=name.endswith("*"),
        is_up=up == "up",
        nodes=int(nodes) if nodes.isdecimal() else 0,
        time_limit=time_limit,
        gpus=count_gpus(gres),
        state=state,
        max_nodes=int(max_nodes) if max_nodes.isdecimal() else None,
    )


def count_gpus(gres: str) -> int:
    """`gpu:a100:4(S:0-1),gpu:2,nvme:1` has 6."""
    return sum(int(number) for number in re.findall(r"(?:^|,)gpu(?::[^:,()]+)?:(\d+)", gres))


class SlurmStatus(NamedTuple):
    """What Slurm says about itself and about the partition of the profile."""

    rows: tuple[Row, ...]
    groups: tuple[SinfoLine, ...] = ()  # of the profile's partition
    answers: bool = True  # the controller

    @property
    def max_nodes(self) -> int:
        """The most nodes that one job can have."""
        usable = sum(group.nodes for group in self.groups if group.is_usable)
        limits = [group.max_nodes for group in self.groups if group.max_nodes is not None]
        return min([usable, *limits])

    def others(self, nodes: int) -> list[str]:
        """The nodes of the partition that a job with so many nodes does not use, in words."""
        more = sum(group.nodes for group in self.groups) - nodes
        return [count(more, "other node") + " of the partition"] if more > 0 else []

    def gpus(self, nodes: int) -> int:
        """The most GPUs that a job with so many nodes can request on each of them."""
        missing = nodes
        # Take the nodes with the most GPUs first; the last one taken sets the limit.
        for group in sorted(self.groups, key=lambda group: -group.gpus):
            missing -= group.nodes if group.is_usable else 0
            if missing <= 0:
                return group.gpus
        return 0


def check_slurm(cluster: Cluster, client: SlurmClient) -> SlurmStatus:
    rows = [*_command_rows(client), *_pyxis_rows(cluster, client)]
    controller = _controller_row(client)
    rows.append(controller)
    if controller.state == "wrong":  # every other command would time out
        return SlurmStatus(tuple(rows), answers=False)
    groups = parse_sinfo(client.run("sinfo", "--noheader", f"--format={SINFO_FORMAT}"))
    rows.append(ok("partitions", describe_partitions(groups)))
    own, row = choose_partition(groups, cluster.partition)
    rows.append(row)
    if own:
        rows.append(gpu_row(own, cluster))
    accounting = _accounting_row(client)
    rows += [accounting, *(_account_rows(cluster, client) if accounting.state == "ok" else ())]
    return SlurmStatus(tuple(rows), tuple(own))


def _command_rows(client: SlurmClient) -> Iterator[Row]:
    versions: dict[str, list[str]] = {}
    broken: dict[str, list[str]] = {}
    missing = []
    for name in COMMANDS:
        if not client.has(name):
            missing += [name] if name in REQUIRED_COMMANDS else []
            continue
        try:
            versions.setdefault(client.run(name, "--version").split()[-1], []).append(name)
        except (SlurmError, IndexError) as error:
            # Such as a library that is missing: sbatch would fail in the same way.
            broken.setdefault(getattr(error, "detail", "no version"), []).append(name)
    if missing:
        fix = "load Slurm's module, or add its commands to PATH; run gptctl on a login node, or "
        fix += "set login in the profile"
        yield wrong("commands", f"not found: {', '.join(missing)}", fix)
    if broken:
        yield wrong("commands", _by_command(broken), "fix what these commands report")
    found = _by_command(versions)
    if len(versions) > 1:
        yield warning("commands", found, "PATH has commands of two Slurm versions: use one")
    elif versions and not missing and not broken:
        yield ok("commands", found)


def _pyxis_rows(cluster: Cluster, client: SlurmClient) -> Iterator[Row]:
    if cluster.container.image and cluster.container.runtime == PYXIS:
        try:
            yield pyxis_row(client.run("srun", "--help"))
        except SlurmError as error:
            yield wrong("pyxis", error.detail, "fix what srun --help reports")


def pyxis_row(srun_help: str) -> Row:
    """pyxis adds its options to those of srun."""
    missing = [option for option in PYXIS_OPTIONS if f"--{option}" not in srun_help]
    if missing:
        fix = "load or install pyxis, or use another container.runtime in the profile"
        return wrong("pyxis", f"srun has no --{', --'.join(missing)}", fix)
    if "--container-env" not in srun_help:
        found = "srun has no --container-env: the image may override variables of printed scripts"
        return notice("pyxis", found, "update pyxis, or start jobs with gptctl submit")
    return ok("pyxis", "srun has the options of pyxis")


def _by_command(texts: Mapping[str, Sequence[str]]) -> str:
    """`sbatch, squeue: 22.05.8`: commands with the same text together."""
    return "; ".join(f"{', '.join(names)}: {text}" for text, names in texts.items())


def _controller_row(client: SlurmClient) -> Row:
    fix = "run scontrol ping; if it keeps failing, ask your cluster administrators"
    try:
        answer = client.run("scontrol", "ping")
    except SlurmError as error:
        return wrong("controller", error.detail.partition(";")[0], fix)
    # One line each for the primary and its backups; one that is up is enough.
    lines = [line for line in answer.splitlines() if " is " in line]
    if not any(line.strip().endswith(" UP") for line in lines):
        return wrong("controller", "; ".join(lines) or "no answer", fix)
    return ok("controller", "; ".join(lines))


def describe_partitions(groups: Iterable[SinfoLine]) -> str:
    """`main* (2 nodes, 1-00:00:00), …`"""
    by_name: dict[str, list[SinfoLine]] = {}
    for group in groups:
        by_name.setdefault(group.partition, []).append(group)
    words = []
    for name, own in by_name.items():
        nodes = count(sum(group.nodes for group in own), "node")
        words.append(f"{name}{'*' * own[0].is_default} ({nodes}, {own[0].time_limit})")
    more = f", … ({len(words)} in all)" if len(words) > MAX_LISTED else ""
    return ", ".join(words[:MAX_LISTED]) + more


def choose_partition(groups: Sequence[SinfoLine], name: str | None) -> tuple[list[SinfoLine], Row]:
    """The nodes of the profile's partition, or of Slurm's default one."""
    known = [*dict.fromkeys(group.partition for group in groups)]
    own = [group for group in groups if (group.partition == name if name else group.is_default)]
    if own:
        return own, _partition_row(own)
    if not name:
        fix = f"set partition in the profile: {', '.join(known)}"
        return [], wrong("partition", "Slurm has no default partition", fix)
    near = closest(name, known)
    hint = f"did you mean {near[0]}? " if near else ""
    fix = f"{hint}known: {', '.join(known)}"
    return [], wrong("partition", f"partition {name} does not exist", fix)


def _partition_row(own: Sequence[SinfoLine]) -> Row:
    states: dict[str, int] = {}
    for group in own:
        states[group.state] = states.get(group.state, 0) + group.nodes
    nodes = ", ".join(f"{number} {state}" for state, number in states.items())
    first = own[0]
    up = "up" if first.is_up else "not up"
    found = f"{first.partition}: {up}, nodes: {nodes}, time limit {first.time_limit}"
    if not first.is_up:
        fix = "choose another partition, or ask your cluster administrators"
        return wrong("partition", found, fix)
    if not any(group.is_usable for group in own):
        return wrong("partition", found, "no node can run a job: sinfo -R shows why")
    if not all(group.is_usable for group in own):
        return warning("partition", found, "sinfo -R shows why some nodes cannot run jobs")
    return ok("partition", found)


def gpu_row(own: Sequence[SinfoLine], cluster: Cluster) -> Row:
    """Compare the GPUs that Slurm has with those that the profile requests."""
    check = "GPUs in Slurm"
    numbers = sorted({group.gpus for group in own})
    has = " or ".join(map(str, numbers))
    wanted = cluster.gpus_per_node
    if cluster.gpu_request == "none":
        return ok(check, f"{has} per node; the profile requests none")
    if wanted is None:
        fix = f"set gpus_per_node: {numbers[-1]} in the profile"
        return warning(check, f"{has} per node; the profile does not set gpus_per_node", fix)
    found = f"{has} per node, the profile has gpus_per_node: {wanted}"
    if numbers[-1] == 0:
        fix = "set gpu_request: none in the profile, or choose a partition with GPUs"
        return wrong(check, found, fix)
    if numbers[-1] < wanted:
        return wrong(check, found, f"set gpus_per_node: {numbers[-1]} in the profile")
    if numbers[0] < wanted:
        return warning(check, found, "jobs wait for the nodes that have enough GPUs")
    if numbers[0] > wanted:
        return warning(check, found, f"to use all of them, set gpus_per_node: {numbers[0]}")
    return ok(check, found)


def _accounting_row(client: SlurmClient) -> Row:
    if not client.has("sacct"):
        return notice("accounting", "sacct is not installed here", WITHOUT_ACCOUNTING)
    try:
        client.run("sacct", "-X", "-n", "-P", "-S", "now", "-o", "JobID")
    except SlurmError as error:
        # A site without accounting is usual; one whose database does not answer is not.
        row = notice if "disabled" in error.detail else warning
        return row("accounting", error.detail, WITHOUT_ACCOUNTING)
    return ok("accounting", "sacct works")


def _account_rows(cluster: Cluster, client: SlurmClient) -> Iterator[Row]:
    """Nothing, if the accounting does not know the accounts of this user."""
    if not cluster.account:
        return
    try:
        user = client.run("id", "-un").strip()  # not $USER: su and sudo may leave another name
        text = client.run("sacctmgr", "-n", "-P", "show", "assoc", f"user={user}", "format=account")
    except SlurmError:
        return
    known = sorted(set(text.split()))
    if known and cluster.account not in known:
        # Only a warning: not every site enforces accounts, and sbatch refuses where one does.
        fix = f"set account in the profile: {', '.join(known)}"
        yield warning("account", f"{user} has no account {cluster.account}", fix)
    elif known:
        yield ok("account", cluster.account)
