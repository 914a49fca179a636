"""The `Launch` section: what other launchers take on command lines. The trainer accepts it unread."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

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
from trainer.config.tree import Map, Node, is_null

STYLES = ("standalone", "c10d", "static", "srun-script", "sbatch", "loop", "launch")
MAX_NODES = 1 << 16
MAX_PER_NODE = 1 << 10
JOB_NAME = r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}"
SLURM_WORD = r"[A-Za-z0-9._,+@:/-]{1,256}"

_SET_BY_GPTCTL = (
    "account array chdir cpus-per-task error help hold input job-name no-requeue nodes ntasks ntasks-per-node "
    "open-mode output parsable partition quiet requeue signal test-only time usage version wait wrap"
).split()
OWN_KEY = "use the key or flag for it (--name, --time, --partition, …): `gptctl keys Launch.slurm`"


def is_set_by_gptctl(option: str) -> bool:
    """Whether an option of sbatch is not the user's to set; sbatch takes any beginning of a name for the whole."""
    return any(name.startswith(option) for name in _SET_BY_GPTCTL)


_ENDPOINT = re.compile(
    r"(?P<host>[A-Za-z0-9._-]{1,253}|\[[0-9A-Fa-f:.]{2,45}\])(?::(?P<port>[0-9]{1,5}))?"
)
_TIME = re.compile(r"(?:(?P<days>[0-9]{1,5})-)?(?P<clock>[0-9]{1,6}(?::[0-9]{1,2}){0,2})")


class NodeCount:
    """`2`, or `2:4` for an elastic job."""

    def read(self, node: Node) -> int | str:
        text = scalar_text(node, "a number of nodes")
        parts = text.split(":")
        bounds = [read_integer(part) for part in parts] if len(parts) <= 2 else [0]
        if not 1 <= bounds[0] <= bounds[-1] <= MAX_NODES:
            raise BadValue(
                OUT_OF_RANGE,
                f"{shown(text)} is not a number of nodes",
                "write 1 or more, or MIN:MAX such as 2:4",
            )
        return bounds[0] if bounds[0] == bounds[-1] else f"{bounds[0]}:{bounds[1]}"

    def schema(self) -> dict[str, Any]:
        return {
            "type": ["integer", "string", "null"],
            "minimum": 1,
            "pattern": "^[0-9]+(:[0-9]+)?$",
        }


class Devices:
    """`"0,1,2,3"`: the cards to use, each once."""

    def read(self, node: Node) -> tuple[str, ...]:
        devices = tuple(scalar_text(item, "a device") for item in list_items(node))
        for device in devices:
            if not re.fullmatch(r"[0-9]{1,4}|(GPU|MIG)-[A-Za-z0-9/-]{1,80}", device):
                raise BadValue(
                    NOT_A_NAME,
                    f"{shown(device)} is not a device",
                    'write numbers, such as "0,1,2,3"',
                )
        if len(set(devices)) < len(devices):
            raise BadValue(OUT_OF_RANGE, "a device is listed twice", "list each device once")
        return devices

    def schema(self) -> dict[str, Any]:
        return {"type": ["string", "array", "integer", "null"]}


class Duration:
    """Slurm's spellings of a time: `90` (minutes), `90:00`, `12:00:00`, `1-12`, `1-12:30`, `1-12:30:00`."""

    def read(self, node: Node) -> str:
        text = scalar_text(node, "a time")
        match = _TIME.fullmatch(text)
        if not match:
            raise BadValue(
                WRONG_TYPE,
                f"{shown(text)} is not a time",
                "write 12:00:00, or 1-12:00:00 for a day and a half",
            )
        clock = [int(part) for part in match["clock"].split(":")]
        seconds = _seconds(match["days"], clock)
        if any(part > 59 for part in clock[1:]) or (match["days"] is not None and clock[0] > 23):
            raise BadValue(
                OUT_OF_RANGE,
                f"{shown(text)} is no time",
                "use at most 59 minutes or seconds, 23 hours of a day",
            )
        if not 0 < seconds < 10 * 366 * 86400:
            raise BadValue(
                OUT_OF_RANGE,
                f"{shown(text)} is no time for a job",
                "use more than nothing, less than ten years",
            )
        days, rest = divmod(seconds, 86400)
        time = f"{rest // 3600:02}:{rest // 60 % 60:02}:{rest % 60:02}"
        return f"{days}-{time}" if days else time

    def schema(self) -> dict[str, Any]:
        return {"type": ["string", "integer", "null"]}


def _seconds(days: str | None, clock: list[int]) -> int:
    if days is not None:  # D-HH[:MM[:SS]]
        hours, minutes, seconds = (*clock, 0, 0)[:3]
        return ((int(days) * 24 + hours) * 60 + minutes) * 60 + seconds
    if len(clock) == 3:
        return (clock[0] * 60 + clock[1]) * 60 + clock[2]
    minutes, seconds = (*clock, 0)[:2]
    return minutes * 60 + seconds


class Endpoint:
    """`HOST` or `HOST:PORT`; an IPv6 address in brackets."""

    def read(self, node: Node) -> str:
        text = scalar_text(node, "a host")
        match = _ENDPOINT.fullmatch(text)
        if not match or not 1 <= int(match["port"] or 1) <= 65535:
            raise BadValue(
                NOT_A_NAME, f"{shown(text)} is not HOST or HOST:PORT", "write it as node-1:29500"
            )
        return text

    def schema(self) -> dict[str, Any]:
        return {"type": ["string", "null"]}


def split_endpoint(endpoint: str) -> tuple[str, int | None]:
    match = _ENDPOINT.fullmatch(endpoint)
    assert match
    return match["host"].strip("[]"), int(match["port"]) if match["port"] else None


class SecretSource:
    """`{file: path}` or `{env: NAME}`: where a secret is read on the node, never the secret itself."""

    def read(self, node: Node) -> dict[str, str]:
        if (
            isinstance(node, Map)
            and len(node.items) == 1
            and next(iter(node.items)) in ("file", "env")
        ):
            (kind, value) = next(iter(node.items.items()))
            if not is_null(value):
                pattern = r"[A-Za-z_][A-Za-z0-9_]*" if kind == "env" else ""
                return {kind: Text(pattern, "a variable name").read(value)}
        raise BadValue(
            WRONG_TYPE, "a secret is given by reference", "write {file: path} or {env: NAME}"
        )

    def schema(self) -> dict[str, Any]:
        reference = {"type": "string"}
        return {
            "type": "object",
            "properties": {"file": reference, "env": reference},
            "maxProperties": 1,
        }


@record(frozen=True)
class Rendezvous:
    backend: str | None = choice(
        None, ["static", "c10d"], "empty: static for a fixed number of nodes, c10d for MIN:MAX"
    )
    id: str | None = text(None, "empty: the job id", JOB_NAME, "a name of letters, digits and ._-")
    endpoint: str | None = key(
        Endpoint(), None, "HOST:PORT; empty: the first host of the allocation"
    )
    port: int | None = integer(None, "empty: probed on the head node", low=1, high=65535)


@record(frozen=True)
class Slurm:
    partition: str | None = text(None, "", SLURM_WORD, "a partition name")
    account: str | None = text(None, "", SLURM_WORD, "an account name")
    time: str | None = key(Duration(), None, "time limit, such as 12:00:00")
    cpus_per_task: int | None = integer(None, "empty: the profile's", low=1, high=1 << 16)
    requeue: bool | None = key(
        Boolean(),
        None,
        "go on after preemption, a time limit or a node's failure; empty: yes, but for a script",
    )
    save_before: int | None = integer(
        None,
        "seconds before the time limit at which the job saves; empty: 120, or a quarter of it",
        low=1,
        high=86400,
    )
    extra: Mapping[str, str] = key(
        Names(pattern=r"[a-z][a-z0-9-]*", form="an sbatch option"),
        {},
        "further sbatch options, such as {qos: high}",
    )


@record(frozen=True)
class Launch:
    cluster: str = text("local", "name of a profile in clusters/, or a path")
    nodes: int | str = key(NodeCount(), 1, "a number, or MIN:MAX for an elastic job")
    gpus_per_node: int | None = integer(
        None, "ranks per node; empty: the profile's", low=1, high=MAX_PER_NODE
    )
    devices: tuple[str, ...] | None = key(Devices(), None, '"0,1,2,3": also sets gpus_per_node')
    style: str | None = choice(None, STYLES, f"{' | '.join(STYLES)}; empty: by cluster")
    rdzv: Rendezvous = section(Rendezvous)
    max_restarts: int = integer(0, "how often a failed job is started again", low=0, high=1000)
    job_name: str = text("gpt", "", JOB_NAME, "a name of 1 to 64 letters, digits and ._-")
    log_dir: str | None = file_path(None, "empty: <run_dir>/logs, else <log_dir>/<job id>")
    entrypoint: str = text("trainer", "trainer, or a script; its arguments in args")
    files: tuple[str, ...] = key(Words(), (), "further files and folders to ship with a script")
    args: tuple[str, ...] = key(Words(), (), "arguments of the script")
    env: Mapping[str, str] = key(Names(), {}, "environment of every rank")
    secrets: Mapping[str, Mapping[str, str]] = key(
        Names(SecretSource(), is_secret=True), {}, "NAME: {file: path} or {env: NAME}"
    )
    slurm: Slurm = section(Slurm)

    @property
    def node_range(self) -> tuple[int, int]:
        """Fewest and most nodes; equal unless the job is elastic."""
        fewest, _, most = str(self.nodes).partition(":")
        return int(fewest), int(most or fewest)
