"""The doctor's folder below run_root: the scripts for the nodes, and the facts that they write.

It does not know how a node is reached.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from gptctl.backends import Backends
from gptctl.doctor.node_rows import (
    Arrival,
    EnginePython,
    ExpectedNode,
    NodeFacts,
    failed_reduce_row,
    reduce_rows,
    rows_for_nodes,
)
from gptctl.doctor.rows import Row
from gptctl.doctor.signals import signals_blocked
from gptctl.engine.atomic_files import private_files
from gptctl.engine.error_text import is_consequence, last_line
from gptctl.engine.file_reading import read_json, read_text
from gptctl.engine.launch_plan import LaunchPlan
from gptctl.planning.build import JobIdentity, Site
from gptctl.planning.render import render
from gptctl.spec.check import check_config
from gptctl.spec.cluster import Profile
from trainer.config import Override
from trainer.errors import UserError

NODE_SCRIPT, BATCH_SCRIPT, ENGINE_SCRIPT = "doctor.sh", "doctor.sbatch", "doctor-engine.sh"
MINUTES = 5  # time limit of the Slurm job: two for the facts, two for the all-reduce
_COMPILED = shutil.ignore_patterns("__pycache__", "*.pyc")


@contextmanager
def temporary_folder(root: Path) -> Iterator[Path]:
    """A private folder below `root`; removed at the end, with the parents created for it."""
    # Deepest first, so that each is empty when it is removed.
    created = [place for place in (root, *root.parents) if not place.exists()]
    try:
        with private_files():
            root.mkdir(parents=True, exist_ok=True)
            folder = Path(tempfile.mkdtemp(prefix=".doctor-", dir=root))
        try:
            yield folder
        finally:
            with signals_blocked():
                _remove(folder)
    finally:
        for place in created:
            with suppress(OSError):  # a job may have started to use it
                place.rmdir()


def _remove(folder: Path) -> None:
    # Again and again: a process that is being killed may still write.
    for _ in range(20):
        shutil.rmtree(folder, ignore_errors=True)
        if not folder.exists():
            return
        time.sleep(0.1)


def plan_probe(
    cluster: str,
    profile: Profile | None,
    site: Site,
    folder: Path,
    nodes: int,
    per_node: int,
    device: str,
) -> LaunchPlan:
    """The plan of a job for this cluster, so that ranks are started exactly like a job's."""
    keys = {
        "Launch.cluster": cluster,
        "Launch.nodes": str(nodes),
        "Launch.gpus_per_node": str(per_node),
        "Launch.slurm.time": str(MINUTES),
        "Launch.slurm.requeue": "false",
        "Global.device": device,
    }
    overrides = [
        Override(key, value, "gptctl doctor", verbatim=key == "Launch.cluster")
        for key, value in keys.items()
    ]
    checked = check_config(None, overrides, profile)
    if not checked.is_valid:
        raise UserError(
            "this profile cannot run the check job of gptctl doctor", findings=checked.findings
        )
    # The folder is hidden in run_root, but the id of a job must not begin with a dot.
    identity = JobIdentity(folder.name.strip("."), str(folder))
    plan = Backends(lambda text: None).of(checked.cluster.kind).plan(checked, site, identity)
    program = ("-m", "trainer.node_check", "reduce", str(folder))
    return plan._replace(program=program, sbatch=_sbatch_options(plan))


def _sbatch_options(plan: LaunchPlan) -> dict[str, str]:
    """Those of a job, but no mail, no warning signal, and no files of its own."""
    dropped = ("error", "signal", "open-mode")
    options = {
        name: value
        for name, value in plan.sbatch.items()
        if name not in dropped and not name.startswith("mail")
    }
    # If nodes cannot see the folder, Slurm would kill a job with output there without a message.
    return options | {"time": str(MINUTES), "output": "/dev/null"}


def write_scripts(folder: Path, plan: LaunchPlan, site: Site, *scripts: str) -> None:
    """Copy the trainer to the folder, and render the scripts that run on nodes."""
    with private_files():
        # A copy: gptctl need not be installed on the nodes, nor visible there.
        shutil.copytree(
            site.trainer,
            folder / "code" / "trainer",
            ignore=_COMPILED,
            copy_function=shutil.copyfile,
        )
        for name in (NODE_SCRIPT, *scripts):
            (folder / name).write_text(render(plan, name), encoding="utf-8")


class ArrivalTracker:
    """Records when the facts of each node arrive, as precisely as it is polled."""

    def __init__(self, folder: Path, nodes: int) -> None:
        self.folder, self.nodes = folder, nodes
        self.not_before = self._polled = time.time()
        self.arrivals: dict[int, Arrival] = {}

    def poll(self) -> None:
        # One listing for all nodes: a query per file would load a network file system.
        present = set(os.listdir(self.folder))
        now = time.time()
        for number in range(self.nodes):
            if number not in self.arrivals and f"node.{number}.json" in present:
                self.arrivals[number] = Arrival(self.not_before, self._polled, now)
        self._polled = now


def node_names(folder: Path, nodes: int) -> list[str]:
    """Host names in node order, as far as they are known."""
    hosts = read_text(folder / "hosts").split()
    return [hosts[number] if number < len(hosts) else f"node {number}" for number in range(nodes)]


def read_nodes(
    folder: Path, names: Sequence[str], tracker: ArrivalTracker | None, root: str = ""
) -> list[NodeFacts]:
    no_access = {}
    for line in read_text(folder / "no_access").splitlines():  # `1 node2 does not exist`
        number, _, words = line.partition(" ")
        no_access[number] = f"{root or folder.parent} {words.partition(' ')[2]}"
    return [
        NodeFacts(
            name=name,
            facts=_read_json(folder / f"node.{number}.json"),
            no_access=no_access.get(str(number), ""),
            failed=read_text(folder / f"node.{number}.failed").strip(),
            last_line=last_line(read_text(folder / f"node.{number}.log")),
            arrival=tracker.arrivals.get(number) if tracker else None,
        )
        for number, name in enumerate(names)
    ]


def read_engines(folder: Path, names: Sequence[str]) -> list[EnginePython]:
    """The engine's Python on the nodes that looked for one: on Slurm only the first node."""
    found = []
    for number, name in enumerate(names):
        failed = read_text(folder / f"node.{number}.engine.failed").strip()
        chosen = read_text(folder / f"node.{number}.engine").splitlines()
        if failed:
            found.append(EnginePython(name, failed=failed))
        elif len(chosen) == 2:  # path and version
            found.append(EnginePython(name, *chosen))
    return found


def _read_json(file: Path) -> dict[str, Any] | None:
    # On a network file system, the name of a file may appear before its content.
    for _ in range(20):
        if (value := read_json(file)) or not file.exists():
            return value
        time.sleep(0.1)
    return None


def collect_rows(
    folder: Path,
    names: Sequence[str],
    tracker: ArrivalTracker | None,
    expected: ExpectedNode,
    root: str = "",
    others: Sequence[str] = (),
) -> list[Row]:
    """The rows for everything that the nodes wrote to the folder; `root`: its parent there.

    `others` are hosts of the profile that were not examined.
    """
    nodes = read_nodes(folder, names, tracker, root)
    rows = rows_for_nodes(nodes, read_engines(folder, names), expected, others)
    if measured := _read_json(folder / "reduce.json"):
        return [*rows, *reduce_rows(measured, names)]
    is_possible = all(node.facts and "gpus" in node.facts for node in nodes)
    return [*rows, failed_reduce_row(_reduce_failure(folder), is_possible)]


def _reduce_failure(folder: Path) -> str:
    """The error of the rank that failed first: the others failed because of it."""
    # By what they say, and only then by time: clocks of hosts may differ.
    errors = [
        (is_consequence(text := read_text(file).strip()), file.stat().st_mtime, file.name, text)
        for file in folder.glob("node.*.rank.*.failed")
    ]
    first = [f"rank {name.split('.')[3]}: {text}" for _, _, name, text in sorted(errors)[:1]]
    return "; ".join(filter(None, [*first, read_text(folder / "reduce.failed").strip()]))
