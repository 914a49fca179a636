"""Everything that is needed to start a job, as plain data. Knows nothing of how a plan is built."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from gptctl.engine.file_reading import DamagedFile
from gptctl.engine.typed_fields import typed

MOST_NODES = 1_000_000  # more than any cluster has: counting to a larger number would take forever
_NNODES = re.compile(r"[1-9]\d{0,6}(:[1-9]\d{0,6})?", re.ASCII)


# Endings of files that the prefix of prepared data stands for: see trainer/corpus/token_files.py.
_OF_A_PREFIX = ("", "_meta.json", "_idx.npz", "_ids.npz", ".idx")


def has_data(path: str) -> bool:
    """Whether a path, or the prefix of token files, can be read here."""
    return any(os.access(path + ending, os.R_OK) for ending in _OF_A_PREFIX)


class StartConditions(NamedTuple):
    """What must hold before a job may start, besides what a scheduler decides."""

    queue: bool = False  # wait in the queue of each machine
    # At most `group_limit` jobs of this group run at once on a machine.
    group: str = ""
    group_limit: int = 0
    # Jobs that must end first: `job` (its id), `when` (ok, any or fail) and `run_dir` on its node.
    after: tuple[Mapping[str, str], ...] = ()
    # Of a chain: the folder of the job before this one, and the ids of all jobs before it.
    continues: str = ""
    chain: tuple[str, ...] = ()
    # The first job of the run that this one continues: its id names the run.
    first_job: str = ""


class LaunchPlan(NamedTuple):
    """How a job is started. An empty value means that gptctl chooses when the job starts."""

    job_id: str
    job_name: str
    cluster: str
    kind: str  # local | slurm | ssh
    style: str
    form: str  # of rendezvous: static | c10d | standalone | launch
    nodes: int  # the maximum, if the job is elastic
    nnodes: str  # as torchrun expects it: 2, or 1:2
    per_node: int
    world: int
    device: str
    hosts: tuple[str, ...]  # addresses in node order, if they are known beforehand
    # Of these hosts on the training network; empty: the interface that leads to node 0.
    interfaces: tuple[str, ...]
    rdzv_id: str  # empty: Slurm's job id
    master_addr: str  # empty: the first host of the allocation
    master_port: int | None  # None: a free port of the head node
    master_interface: str
    max_restarts: int
    time_limit: str  # in Slurm's format; empty: none
    python: str
    container: tuple[str, ...]  # words before the command
    program: tuple[str, ...]  # what every rank runs, without the interpreter
    work_dir: str
    remote_dir: str  # the job's folder, as its nodes see it
    log_dir: str
    output_dir: str  # of the bundled trainer; its status.json tells how the training ended
    setup: tuple[str, ...]
    env: Mapping[str, str]
    env_origins: Mapping[str, str]
    secrets: Mapping[str, Mapping[str, str]]
    sbatch: Mapping[str, str]  # options of sbatch from config, flags and profile
    inputs: tuple[str, ...] = ()  # what the trainer reads; every node must see it
    is_one_machine: bool = False  # all nodes are processes of one machine
    pins_interface: bool = False  # NCCL uses the interface that leads to node 0
    engine_python: str = ""  # runs the engine on nodes; empty: see templates/parts/engine.sh.j2
    submit_python: str = ""  # the interpreter that gptctl was submitted with
    srun_container: tuple[str, ...] = ()  # options of srun: a node runs in a container (pyxis)
    login: str = ""  # the host through which gptctl submits; empty: it submits where it runs
    # Who is told about the job: kind, url, secret and events, as in `Launch.notify`.
    notify: tuple[Mapping[str, Any], ...] = ()
    # The fields of StartConditions.
    queue: bool = False
    group: str = ""
    group_limit: int = 0
    after: tuple[Mapping[str, str], ...] = ()
    continues: str = ""
    chain: tuple[str, ...] = ()
    first_job: str = ""

    @property
    def secret_variables(self) -> list[str]:
        """The variables of this environment that other machines need."""
        told = [target.get(name) for target in self.notify for name in ("url", "secret")]
        sources = [*self.secrets.values(), *told]
        named = [source.get("env") for source in sources if isinstance(source, Mapping)]
        return [name for name in named if isinstance(name, str)]

    @property
    def is_in_container(self) -> bool:
        return bool(self.container or self.srun_container)

    @property
    def is_elastic(self) -> bool:
        return ":" in self.nnodes

    @property
    def torchrun_restarts(self) -> int:
        """How often torchrun itself restarts failed ranks.

        With static rendezvous it cannot, so the supervisor starts a new attempt instead.
        """
        return 0 if self.form in ("static", "launch") else self.max_restarts

    @property
    def attempts(self) -> int:
        """How many attempts gptctl may start."""
        return 1 + self.max_restarts - self.torchrun_restarts

    def as_json(self) -> dict[str, Any]:
        """`remote_dir` is called run_dir in plan.json and in templates, as users know it."""
        values = self._asdict()
        values["run_dir"] = values.pop("remote_dir")
        return values

    @staticmethod
    def from_json(values: Mapping[str, Any]) -> LaunchPlan:
        """Ignore fields that a newer gptctl added. Raise DamagedFile if a field is invalid."""
        # Older versions wrote null for some fields that have a default now.
        optional = LaunchPlan._field_defaults
        given = {
            name: value
            for name, value in values.items()
            if value is not None or name not in optional
        }
        plan = typed(LaunchPlan, {**given, "remote_dir": values.get("run_dir")})
        is_valid = 1 <= plan.nodes <= MOST_NODES and _NNODES.fullmatch(plan.nnodes)
        if not is_valid or not plan.remote_dir.startswith("/") or "\0" in plan.remote_dir:
            raise DamagedFile("nodes, nnodes or run_dir is invalid")
        return plan


def seconds_of(time: str) -> int:
    """Convert a time limit in the format of plans, [D-]HH:MM:SS, to seconds."""
    days, _, clock = time.rpartition("-")
    hours, minutes, seconds = map(int, clock.split(":"))
    return ((int(days or 0) * 24 + hours) * 60 + minutes) * 60 + seconds
