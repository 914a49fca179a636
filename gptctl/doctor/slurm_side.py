"""What the clients of Slurm say on this machine, before any node is asked for."""

from __future__ import annotations

import os
import pwd
import re
import shutil
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from gptctl.backends.slurm import client
from gptctl.backends.slurm.client import SlurmError
from gptctl.doctor.rows import Row, ok, warning, wrong
from gptctl.spec.cluster import Cluster
from gptctl.text import count
from trainer.errors import closest

NEEDED = ("sbatch", "srun", "squeue", "scontrol", "scancel", "sinfo")
CLIENTS = (*NEEDED, "sacct")
# Partition (the default one with *), availability, nodes, time limit, gres, state, nodes of one job.
SINFO = "%P|%a|%D|%l|%G|%t|%s"
ABLE = re.compile(
    r"(idle|mix|mixed|alloc|allocated|comp|completing|plnd|planned|resv|reserved)[~#!%$@^-]*"
)
WITHOUT_ACCOUNTING = (
    "without it gptctl forgets the states of jobs that ended long ago; jobs run all the same"
)
MAX_LISTED = 8


class Group(NamedTuple):
    """Nodes of one partition that are alike."""

    partition: str
    is_default: bool
    is_up: bool
    nodes: int
    limit: str
    gpus: int
    state: str
    most: int | None  # nodes of one job; None: any number

    @property
    def is_able(self) -> bool:
        """A * marks nodes that do not answer."""
        return ABLE.fullmatch(self.state) is not None


def parse_sinfo(text: str) -> list[Group]:
    found = []
    for line in text.splitlines():
        fields = line.strip().split("|")
        if len(fields) == 7:
            name, up, nodes, limit, gres, state, size = fields
            number = int(nodes) if nodes.isdecimal() else 0
            most = size.rpartition("-")[2]
            found.append(
                Group(
                    partition=name.rstrip("*"),
                    is_default=name.endswith("*"),
                    is_up=up == "up",
                    nodes=number,
                    limit=limit,
                    gpus=gpus_of(gres),
                    state=state,
                    most=int(most) if most.isdecimal() else None,
                )
            )
    return found


def gpus_of(gres: str) -> int:
    """`gpu:a100:4(S:0-1),gpu:2,nvme:1` has 6."""
    return sum(int(number) for number in re.findall(r"(?:^|,)gpu(?::[^:,()]+)?:(\d+)", gres))


class Sight(NamedTuple):
    """What was found here."""

    rows: tuple[Row, ...]
    groups: tuple[Group, ...] = ()  # of the partition that jobs go to
    answers: bool = True  # the controller

    @property
    def able(self) -> int:
        return sum(group.nodes for group in self.groups if group.is_able)

    @property
    def most(self) -> int:
        """Nodes that one job can have."""
        limits = [group.most for group in self.groups if group.most is not None]
        return min([self.able, *limits])

    def gpus(self, nodes: int) -> int:
        """What a job of so many nodes can ask for on each of them."""
        left = nodes
        for group in sorted(self.groups, key=lambda group: -group.gpus):
            left -= group.nodes if group.is_able else 0
            if left <= 0:
                return group.gpus
        return 0


def look(cluster: Cluster) -> Sight:
    rows = [*_clients()]
    controller = _controller()
    rows.append(controller)
    if controller.state == "wrong":
        return Sight(tuple(rows), answers=False)
    groups = parse_sinfo(client.run("sinfo", "--noheader", f"--format={SINFO}"))
    rows.append(ok("partitions", listed(groups)))
    own, row = choose_partition(groups, cluster.partition)
    rows.append(row)
    if own:
        rows.append(judge_gpus(own, cluster))
    accounting = _accounting()
    rows += [accounting, *(_account(cluster) if accounting.state == "ok" else ())]
    return Sight(tuple(rows), tuple(own))


def _clients() -> Iterator[Row]:
    versions: dict[str, list[str]] = {}
    missing, broken = [], []
    for name in CLIENTS:
        if not shutil.which(name):
            missing += [name] if name in NEEDED else []
            continue
        try:
            versions.setdefault(client.run(name, "--version").split()[-1], []).append(name)
        except (SlurmError, IndexError) as error:
            broken.append(f"{name}: {getattr(error, 'said', 'no version')}")
    if missing:
        fix = "load Slurm's module, or put its commands on PATH; gptctl belongs on a login node"
        yield wrong("commands", f"not found: {', '.join(missing)}", fix)
    if broken:
        yield wrong("commands", "; ".join(broken), "do these commands work in a shell?")
    found = "; ".join(f"{', '.join(names)}: {version}" for version, names in versions.items())
    if len(versions) > 1:
        yield warning("commands", found, "PATH leads to two versions of Slurm: use one")
    elif versions and not missing and not broken:
        yield ok("commands", found)


def _controller() -> Row:
    fix = "scontrol ping; if it stays so, ask those who run the cluster"
    try:
        answer = client.run("scontrol", "ping")
    except SlurmError as error:
        return wrong("controller", error.said.partition(";")[0], fix)
    lines = [line for line in answer.splitlines() if " is " in line]
    if not any(line.strip().endswith(" UP") for line in lines):
        return wrong("controller", "; ".join(lines) or "it does not answer", fix)
    return ok("controller", "; ".join(lines))


def listed(groups: Iterable[Group]) -> str:
    """`main* (2 nodes, 1-00:00:00), …`"""
    by_name: dict[str, list[Group]] = {}
    for group in groups:
        by_name.setdefault(group.partition, []).append(group)
    words = [
        f"{name}{'*' * those[0].is_default} ({count(sum(group.nodes for group in those), 'node')}, {those[0].limit})"
        for name, those in by_name.items()
    ]
    more = f", … ({len(words)} in all)" if len(words) > MAX_LISTED else ""
    return ", ".join(words[:MAX_LISTED]) + more


def choose_partition(groups: Sequence[Group], name: str | None) -> tuple[list[Group], Row]:
    """The nodes that jobs of the profile go to."""
    known = [*dict.fromkeys(group.partition for group in groups)]
    own = [group for group in groups if (group.partition == name if name else group.is_default)]
    if not own and not name:
        return [], wrong(
            "partition",
            "Slurm has no default one",
            f"set partition in the profile: {', '.join(known)}",
        )
    if not own:
        near = closest(str(name), known)
        hint = f"did you mean {near[0]}? " if near else ""
        return [], wrong("partition", f"there is no {name}", f"{hint}known: {', '.join(known)}")
    states: dict[str, int] = {}
    for group in own:
        states[group.state] = states.get(group.state, 0) + group.nodes
    counted = ", ".join(f"{number} {state}" for state, number in states.items())
    found = f"{own[0].partition}: {'up' if own[0].is_up else 'not up'}, nodes: {counted}, time limit {own[0].limit}"
    if not own[0].is_up:
        return own, wrong(
            "partition", found, "choose another one, or ask those who run the cluster"
        )
    if not any(group.is_able for group in own):
        return own, wrong("partition", found, "no node can run a job: sinfo -R says why")
    if not all(group.is_able for group in own):
        return own, warning("partition", found, "sinfo -R says what is with the others")
    return own, ok("partition", found)


def judge_gpus(own: Sequence[Group], cluster: Cluster) -> Row:
    """What Slurm gives against what the profile asks for."""
    numbers = sorted({group.gpus for group in own})
    has = " or ".join(map(str, numbers))
    wanted = cluster.gpus_per_node
    if cluster.gpu_request == "none":
        return ok("GPUs in Slurm", f"{has} per node; the profile asks for none")
    if wanted is None:
        fix = f"set gpus_per_node: {numbers[-1]} in the profile"
        return warning("GPUs in Slurm", f"{has} per node; the profile does not say how many", fix)
    found = f"{has} per node, the profile has gpus_per_node: {wanted}"
    if numbers[-1] == 0:
        fix = "set gpu_request: none in the profile, or choose a partition with GPUs"
        return wrong("GPUs in Slurm", found, fix)
    if numbers[-1] < wanted:
        return wrong("GPUs in Slurm", found, f"set gpus_per_node: {numbers[-1]} in the profile")
    if numbers[0] < wanted:
        return warning("GPUs in Slurm", found, "jobs wait for the nodes that have enough")
    if numbers[0] > wanted:
        return warning("GPUs in Slurm", found, f"to use all: gpus_per_node: {numbers[0]}")
    return ok("GPUs in Slurm", found)


def _accounting() -> Row:
    if not shutil.which("sacct"):
        return Row("accounting", "", "notice", "there is no sacct here", WITHOUT_ACCOUNTING)
    try:
        client.run("sacct", "-X", "-n", "-P", "-S", "now", "-o", "JobID")
    except SlurmError as error:
        if "disabled" in error.said:
            return Row("accounting", "", "notice", error.said, WITHOUT_ACCOUNTING)
        return warning("accounting", error.said, WITHOUT_ACCOUNTING)
    return ok("accounting", "sacct answers")


def _account(cluster: Cluster) -> Iterator[Row]:
    """Only where the accounting knows accounts of this user."""
    if not cluster.account:
        return
    user = pwd.getpwuid(os.getuid()).pw_name
    try:
        text = client.run("sacctmgr", "-n", "-P", "show", "assoc", f"user={user}", "format=account")
    except SlurmError:
        return
    known = sorted(set(text.split()))
    if known and cluster.account not in known:
        fix = f"set account in the profile: {', '.join(known)}"
        yield warning(
            "account", f"{user} has no account {cluster.account}", fix
        )  # where it matters sbatch refuses it
    elif known:
        yield ok("account", cluster.account)
