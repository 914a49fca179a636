"""Everything a job needs to be started, as plain data. Whoever starts it imports this, and not how it was made."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple


class LaunchPlan(NamedTuple):
    job_id: str
    job_name: str
    cluster: str
    kind: str  # local | slurm | ssh
    style: str
    form: str  # how ranks meet: static | c10d | standalone | launch
    nodes: int  # the most, if the job is elastic
    nnodes: str  # what torchrun is told: 2, or 1:2
    per_node: int
    world: int
    device: str
    hosts: tuple[str, ...]  # addresses in node order, where they are known beforehand
    interfaces: tuple[str, ...]  # of these hosts on the training network; empty: the way to node 0
    rdzv_id: str  # empty: Slurm's job id
    master_addr: str  # empty: the first host of the allocation
    master_port: int | None  # None: probed on the head node
    master_interface: str
    max_restarts: int
    time_limit: str  # as Slurm writes it; empty: none
    python: str
    container: tuple[str, ...]  # words before the command
    program: tuple[str, ...]  # what every rank runs, without the interpreter
    work_dir: str
    remote_dir: str  # the job's folder, as its nodes see it
    log_dir: str
    output_dir: str  # of the bundled trainer, in whose status.json it says how it ended
    setup: tuple[str, ...]
    env: Mapping[str, str]
    env_origins: Mapping[str, str]
    secrets: Mapping[str, Mapping[str, str]]
    sbatch: Mapping[str, str]  # options of sbatch that come from config, flags and profile
    inputs: tuple[str, ...] = ()  # what the trainer reads, which every node has to see
    is_one_machine: bool = False  # all nodes are processes of one machine
    pins_interface: bool = False  # NCCL uses the interface that leads to node 0
    engine_python: str = (
        ""  # interpreter of the engine on nodes; empty: see templates/parts/engine.sh.j2
    )
    submit_python: str = ""  # the interpreter that gptctl was submitted with

    @property
    def is_elastic(self) -> bool:
        return ":" in self.nnodes

    @property
    def torchrun_restarts(self) -> int:
        """How often torchrun itself starts failed ranks again: with static rendezvous it cannot, so gptctl does."""
        return 0 if self.form in ("static", "launch") else self.max_restarts

    @property
    def attempts(self) -> int:
        """How often gptctl starts the job at most."""
        return 1 + self.max_restarts - self.torchrun_restarts

    def as_json(self) -> dict[str, Any]:
        """`remote_dir` is called run_dir there and in templates, as users know it."""
        values = self._asdict()
        values["run_dir"] = values.pop("remote_dir")
        return values

    @staticmethod
    def from_json(values: Mapping[str, Any]) -> LaunchPlan:
        """Ignores what a newer gptctl added; KeyError: it is no plan."""
        complete = {**LaunchPlan._field_defaults, **values, "remote_dir": values["run_dir"]}
        known = [complete[name] for name in LaunchPlan._fields]
        return LaunchPlan._make(
            tuple(value) if isinstance(value, list) else value for value in known
        )


def seconds_of(time: str) -> int:
    """Of a time limit, as plans have it: [D-]HH:MM:SS."""
    days, _, clock = time.rpartition("-")
    hours, minutes, seconds = map(int, clock.split(":"))
    return ((int(days or 0) * 24 + hours) * 60 + minutes) * 60 + seconds
