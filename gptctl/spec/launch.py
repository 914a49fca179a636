"""The `Launch` section of a run config: cluster, nodes, rendezvous, script and Slurm options.

The trainer accepts the section, but does not read it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from gptctl.spec.notify import NotifyTargets
from gptctl.spec.secret_source import SecretSource
from trainer.config.kinds import (
    NOT_A_NAME,
    OUT_OF_RANGE,
    WRONG_TYPE,
    BadValue,
    Boolean,
    Names,
    Text,
    Words,
    choice,
    file_path,
    integer,
    key,
    list_items,
    read_integer,
    scalar_text,
    section,
    shown,
    text,
)
from trainer.config.record import record
from trainer.config.tree import Node

# How the ranks are started: six forms of torchrun, and torch.distributed.launch.
STYLES = ("standalone", "c10d", "static", "srun-script", "sbatch", "loop", "launch")
# Upper bounds that catch typing errors before they become a plan with millions of ranks.
MAX_NODES = 1 << 16
MAX_PER_NODE = 1 << 10
LONGEST_ARGUMENT = 1 << 14  # characters; Linux allows 128 KiB, quotes of a shell included
# Job names become folder names, so no `/` and no leading `.` or `-`.
JOB_NAME = r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}"
# Neither blanks nor quotes: these values become #SBATCH lines of the job script.
SLURM_WORD = r"[A-Za-z0-9._,+@:/-]{1,256}"

# sbatch options that gptctl sets itself, or that would break its job script.
_SET_BY_GPTCTL = (
    "account array chdir cpus-per-task error help hold input job-name no-requeue nodes ntasks "
    "ntasks-per-node open-mode output parsable partition quiet requeue signal test-only time "
    "usage version wait wrap"
).split()
OWN_KEY = "use its key or flag (--name, --time, --partition, …): see `gptctl keys Launch.slurm`"


def is_set_by_gptctl(option: str) -> bool:
    """Whether users must not set this sbatch option."""
    # sbatch accepts abbreviations: `part` is `partition`.
    return any(name.startswith(option) for name in _SET_BY_GPTCTL)


# A shell variable, which a printed script leaves to the shell that runs it.
_VARIABLE = r"\$[A-Za-z_][A-Za-z0-9_]{0,99}|\$\{[A-Za-z_][A-Za-z0-9_]{0,99}\}"
_ENDPOINT = re.compile(
    rf"(?P<host>{_VARIABLE}|[A-Za-z0-9._-]{{1,253}}|\[[0-9A-Fa-f:.]{{2,45}}\])"
    r"(?::(?P<port>[0-9]{1,5}))?"
)
# D-HH[:MM[:SS]], or MM, MM:SS, HH:MM:SS.
_TIME = re.compile(r"(?:(?P<days>[0-9]{1,5})-)?(?P<clock>[0-9]{1,6}(?::[0-9]{1,2}){0,2})")


class NodeCount:
    """A number of nodes such as `2`, or a range such as `2:4` for an elastic job."""

    def read(self, node: Node) -> int | str:
        text = scalar_text(node, "a number of nodes")
        parts = text.split(":")
        # `2:4` is a range; more than two parts become 0, which the next check rejects.
        bounds = [read_integer(part) for part in parts] if len(parts) <= 2 else [0]
        if not 1 <= bounds[0] <= bounds[-1] <= MAX_NODES:
            raise BadValue(
                OUT_OF_RANGE,
                f"invalid number of nodes: {shown(text)}",
                "use 1 or more, or MIN:MAX such as 2:4",
            )
        return bounds[0] if bounds[0] == bounds[-1] else f"{bounds[0]}:{bounds[1]}"

    def schema(self) -> dict[str, Any]:
        return {
            "type": ["integer", "string", "null"],
            "minimum": 1,
            "pattern": "^[0-9]+(:[0-9]+)?$",
        }


class Devices:
    """The GPUs to use, each once, such as `"0,1,2,3"`; numbers or UUIDs."""

    def read(self, node: Node) -> tuple[str, ...]:
        devices = tuple(scalar_text(item, "a device") for item in list_items(node))
        for device in devices:
            if not re.fullmatch(r"[0-9]{1,4}|(GPU|MIG)-[A-Za-z0-9/-]{1,80}", device):
                raise BadValue(
                    NOT_A_NAME,
                    f"invalid device: {shown(device)}",
                    'use numbers such as "0,1,2,3", or UUIDs such as GPU-…',
                )
        # Two ranks on one GPU would fail much later, in NCCL.
        if len(set(devices)) < len(devices):
            raise BadValue(OUT_OF_RANGE, "a device is listed twice", "list each device once")
        return devices

    def schema(self) -> dict[str, Any]:
        return {"type": ["string", "array", "integer", "null"]}


class Duration:
    """A time as Slurm writes it.

    `90` (minutes), `90:00`, `12:00:00`, `1-12`, `1-12:30` or `1-12:30:00`.
    """

    def read(self, node: Node) -> str:
        text = scalar_text(node, "a time")
        match = _TIME.fullmatch(text)
        if not match:
            raise BadValue(
                WRONG_TYPE,
                f"invalid time: {shown(text)}",
                "use minutes, HH:MM:SS or D-HH:MM:SS, such as 90, 12:00:00 or 1-12:00:00",
            )
        clock = [int(part) for part in match["clock"].split(":")]
        seconds = _seconds(match["days"], clock)
        if any(part > 59 for part in clock[1:]) or (match["days"] is not None and clock[0] > 23):
            raise BadValue(
                OUT_OF_RANGE,
                f"invalid time: {shown(text)}",
                "use at most 59 minutes, 59 seconds and, after days, 23 hours",
            )
        # Slurm would read 0 as "no limit".
        if not 0 < seconds < 10 * 366 * 86400:
            raise BadValue(
                OUT_OF_RANGE,
                f"invalid time limit: {shown(text)}",
                "use between 1 second and 10 years",
            )
        # One spelling for all: equal limits give equal job ids.
        days, rest = divmod(seconds, 86400)
        time = f"{rest // 3600:02}:{rest // 60 % 60:02}:{rest % 60:02}"
        return f"{days}-{time}" if days else time

    def schema(self) -> dict[str, Any]:
        return {"type": ["string", "integer", "null"]}


def _seconds(days: str | None, clock: list[int]) -> int:
    if days is not None:  # D-HH[:MM[:SS]]
        hours, minutes, seconds = (*clock, 0, 0)[:3]
        return ((int(days) * 24 + hours) * 60 + minutes) * 60 + seconds
    if len(clock) == 3:  # HH:MM:SS
        return (clock[0] * 60 + clock[1]) * 60 + clock[2]
    minutes, seconds = (*clock, 0)[:2]  # MM[:SS]
    return minutes * 60 + seconds


class Endpoint:
    """An endpoint: `HOST` or `HOST:PORT`; an IPv6 address needs brackets.

    For `gptctl render`, HOST may be a shell variable: `$MASTER_ADDR`.
    """

    def read(self, node: Node) -> str:
        text = scalar_text(node, "a host")
        match = _ENDPOINT.fullmatch(text)
        if not match or not 1 <= int(match["port"] or 1) <= 65535:
            raise BadValue(
                NOT_A_NAME,
                f"invalid endpoint: {shown(text)}",
                "use HOST or HOST:PORT, such as node-1:29500",
            )
        return text

    def schema(self) -> dict[str, Any]:
        return {"type": ["string", "null"]}


def split_endpoint(endpoint: str) -> tuple[str, int | None]:
    match = _ENDPOINT.fullmatch(endpoint)
    assert match  # Endpoint.read has checked it
    return match["host"].strip("[]"), int(match["port"]) if match["port"] else None


class Entrypoint:
    """What the ranks run: `trainer`, a script, or `-m MODULE`."""

    def read(self, node: Node) -> str:
        text = Text().read(node)
        if not text.startswith("-"):
            return text
        match = re.fullmatch(r"-m\s+((?:\w[\w-]*)(?:\.\w[\w-]*)*)", text)
        if not match:
            raise BadValue(
                NOT_A_NAME,
                f"invalid module: {shown(text)}",
                "write -m MODULE, such as -m pkg.train",
            )
        return "trainer" if match[1] == "trainer" else f"-m {match[1]}"

    def schema(self) -> dict[str, Any]:
        return {"type": ["string", "null"]}


def is_variable(host: str) -> bool:
    """Whether the host of an endpoint is a shell variable."""
    return re.fullmatch(_VARIABLE, host) is not None


@record(frozen=True)
class Rendezvous:
    """Where and how the ranks of a job meet (torchrun's --rdzv-… and --master-…)."""

    backend: str | None = choice(
        None,
        ["static", "c10d"],
        "static | c10d; empty: static for a fixed number of nodes, c10d for MIN:MAX",
    )
    id: str | None = text(
        None, "rendezvous id; empty: the job id", JOB_NAME, "a name of letters, digits and ._-"
    )
    endpoint: str | None = key(
        Endpoint(), None, "HOST or HOST:PORT; empty: the first host of the job"
    )
    port: int | None = integer(
        None, "port of the rendezvous; empty: a free port of the first host", low=1, high=65535
    )


@record(frozen=True)
class Slurm:
    """Options of sbatch that have a key of their own, and `extra` for all others."""

    partition: str | None = text(
        None, "partition (sbatch --partition); empty: the profile's", SLURM_WORD, "a partition name"
    )
    account: str | None = text(
        None, "account (sbatch --account); empty: the profile's", SLURM_WORD, "an account name"
    )
    time: str | None = key(
        Duration(), None, "time limit, such as 12:00:00; empty: Slurm's default, or none"
    )
    cpus_per_task: int | None = integer(
        None, "CPUs per node (sbatch --cpus-per-task); empty: the profile's", low=1, high=1 << 16
    )
    requeue: bool | None = key(
        Boolean(),
        None,
        "requeue after preemption, time limit or node failure; empty: for the trainer only",
    )
    save_before: int | None = integer(
        None,
        "save this many seconds before the time limit; empty: 120, or a quarter of a short limit",
        low=1,
        high=86400,
    )
    extra: Mapping[str, str] = key(
        Names(pattern=r"[a-z][a-z0-9-]*", form="an sbatch option"),
        {},
        "more sbatch options, such as {qos: high}",
    )


@record(frozen=True)
class Launch:
    """The keys of the section, in the order in which `gptctl keys` prints them."""

    # Where the job runs, and on how many GPUs.
    cluster: str = text("local", "name or path of a cluster profile")
    nodes: int | str = key(NodeCount(), 1, "number of nodes, or MIN:MAX for an elastic job")
    gpus_per_node: int | None = integer(
        None,
        "ranks per node; empty: from devices, the profile or the layout",
        low=1,
        high=MAX_PER_NODE,
    )
    devices: tuple[str, ...] | None = key(
        Devices(), None, 'GPUs to use on each node, such as "0,1,2,3"; also sets gpus_per_node'
    )
    style: str | None = choice(None, STYLES, f"{' | '.join(STYLES)}; empty: by kind of cluster")
    # How its ranks meet and restart.
    rdzv: Rendezvous = section(Rendezvous, "where and how the ranks meet")
    max_restarts: int = integer(0, "how many times a failed job is restarted", low=0, high=1000)
    job_name: str = text(
        "gpt",
        "start of the job id; Slurm's job name",
        JOB_NAME,
        "a name of 1 to 64 letters, digits and ._-",
    )
    log_dir: str | None = file_path(
        None, "folder of logs: <log_dir>/<job id>; empty: <run_dir>/logs"
    )
    # What runs, and with which files and variables.
    entrypoint: str = key(
        Entrypoint(), "trainer", "trainer, a Python script, or -m MODULE; its arguments are in args"
    )
    files: tuple[str, ...] = key(
        Words(), (), "more files and folders to copy with the script or module"
    )
    args: tuple[str, ...] = key(
        # Quoted in scripts: a prompt may have several lines.
        Words(Text(has_lines=True, longest=LONGEST_ARGUMENT)),
        (),
        "arguments of the script or module",
    )
    env: Mapping[str, str] = key(Names(), {}, "environment of every rank")
    secrets: Mapping[str, Mapping[str, str]] = key(
        Names(SecretSource(), is_secret=True),
        {},
        "secret variables of every rank: NAME: {file: path} or {env: NAME}",
    )
    notify: tuple[Mapping[str, Any], ...] | None = key(
        NotifyTargets(),
        None,
        "who is told about the job: a URL, {env: NAME}, {file: path}, or {url, kind, on, secret}; "
        "or a list of these; off: nobody; empty: GPTCTL_NOTIFY, or the profile's",
    )
    slurm: Slurm = section(Slurm, "options of Slurm; time works on every kind of cluster")

    @property
    def module(self) -> str:
        """The module that the ranks run; empty for a script and for the bundled trainer."""
        return self.entrypoint[3:] if self.entrypoint.startswith("-m ") else ""

    @property
    def node_range(self) -> tuple[int, int]:
        """The fewest and the most nodes; equal unless the job is elastic."""
        fewest, _, most = str(self.nodes).partition(":")
        return int(fewest), int(most or fewest)
