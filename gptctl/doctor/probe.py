"""A folder below run_root: all that runs on nodes, and what they write there. How they are reached it does not know."""

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
from gptctl.doctor.judge import (
    NodeFacts,
    Promised,
    Sighting,
    judge_no_reduce,
    judge_nodes,
    judge_reduce,
)
from gptctl.doctor.rows import Row
from gptctl.doctor.signals import undisturbed
from gptctl.engine.atomic_files import private_files
from gptctl.engine.launch_plan import LaunchPlan
from gptctl.engine.run_folder import read_json, read_text
from gptctl.planning.build import JobIdentity, Site
from gptctl.planning.render import render
from gptctl.spec.check import check_config
from trainer.config import Override
from trainer.errors import UserError

NODE_SCRIPT, BATCH_SCRIPT = "doctor.sh", "doctor.sbatch"
MINUTES = 5  # for facts and the all-reduce, each of which has two
_NO_CODE = shutil.ignore_patterns("__pycache__", "*.pyc")


@contextmanager
def folder_in(root: Path) -> Iterator[Path]:
    """A private folder; in the end it is gone, and what had to be made above it."""
    above = [place for place in (root, *root.parents) if not place.exists()]
    try:
        with private_files():
            root.mkdir(parents=True, exist_ok=True)
            folder = Path(tempfile.mkdtemp(prefix=".doctor-", dir=root))
        try:
            yield folder
        finally:
            with undisturbed():
                _remove(folder)
    finally:
        for place in above:
            with suppress(OSError):  # others have begun to use it
                place.rmdir()


def _remove(folder: Path) -> None:
    """A process that is being killed may still write."""
    for _ in range(20):
        shutil.rmtree(folder, ignore_errors=True)
        if not folder.exists():
            return
        time.sleep(0.1)


def plan_probe(
    cluster: str, site: Site, folder: Path, nodes: int, per_node: int, device: str
) -> LaunchPlan:
    """As for a job of this cluster, so that all on the way to the ranks is the same."""
    asked = {
        "Launch.cluster": cluster,
        "Launch.nodes": str(nodes),
        "Launch.gpus_per_node": str(per_node),
        "Launch.slurm.time": str(MINUTES),
        "Launch.slurm.requeue": "false",
        "Global.device": device,
    }
    overrides = [
        Override(key, value, "gptctl doctor", verbatim=key == "Launch.cluster")
        for key, value in asked.items()
    ]
    checked = check_config(None, overrides)
    if not checked.is_valid:
        raise UserError("this cluster cannot be looked at", findings=checked.findings)
    identity = JobIdentity(folder.name.strip("."), str(folder))
    plan = Backends(lambda text: None).of(checked.cluster.kind).plan(checked, site, identity)
    options = {name: value for name, value in plan.sbatch.items() if not name.startswith("mail")}
    # Where nodes do not see the folder, a job whose output is in it would end without a word.
    options |= {"time": str(MINUTES), "output": "/dev/null"}
    for name in ("error", "signal", "open-mode"):
        options.pop(name, None)
    return plan._replace(
        program=("-m", "trainer.node_check", "reduce", str(folder)), sbatch=options
    )


def fill(folder: Path, plan: LaunchPlan, site: Site) -> None:
    with private_files():
        shutil.copytree(
            site.trainer,
            folder / "code" / "trainer",
            ignore=_NO_CODE,
            copy_function=shutil.copyfile,
        )
        names = [NODE_SCRIPT, BATCH_SCRIPT] if plan.kind == "slurm" else [NODE_SCRIPT]
        for name in names:
            (folder / name).write_text(render(plan, name), encoding="utf-8")


class Sightings:
    """When the facts of each node came, as narrow as it is known."""

    def __init__(self, folder: Path, nodes: int) -> None:
        self.folder, self.nodes = folder, nodes
        self.earliest = self._looked = time.time()
        self.found: dict[int, Sighting] = {}

    def not_yet(self) -> None:
        """No node has begun at this time."""
        self.earliest = time.time()

    def look(self) -> None:
        present = set(os.listdir(self.folder))
        now = time.time()
        for number in range(self.nodes):
            if number not in self.found and f"node.{number}.json" in present:
                self.found[number] = Sighting(self.earliest, self._looked, now)
        self._looked = now


def node_names(folder: Path, nodes: int) -> list[str]:
    """Hosts in node order, as far as they are known."""
    hosts = read_text(folder / "hosts").split()
    return [hosts[number] if number < len(hosts) else f"node {number}" for number in range(nodes)]


def read_nodes(folder: Path, names: Sequence[str], sightings: Sightings | None) -> list[NodeFacts]:
    unseen = {}
    for line in read_text(folder / "unseen").splitlines():
        number, _, words = line.partition(" ")
        unseen[number] = f"{folder.parent} {words.partition(' ')[2]}"
    return [
        NodeFacts(
            name=name,
            facts=_read(folder / f"node.{number}.json"),
            unseen=unseen.get(str(number), ""),
            failed=read_text(folder / f"node.{number}.failed").strip(),
            said=last_line(folder / f"node.{number}.log"),
            sighting=sightings.found.get(number) if sightings else None,
        )
        for number, name in enumerate(names)
    ]


def _read(file: Path) -> dict[str, Any] | None:
    """A file of another machine may be there before what is in it."""
    for _ in range(20):
        if (value := read_json(file)) or not file.exists():
            return value
        time.sleep(0.1)
    return None


def last_line(file: Path) -> str:
    lines = [line.strip() for line in read_text(file).splitlines() if line.strip()]
    return lines[-1][:300] if lines else ""


def rows_of(
    folder: Path, names: Sequence[str], sightings: Sightings | None, wanted: Promised
) -> list[Row]:
    """Everything that the nodes told."""
    nodes = read_nodes(folder, names, sightings)
    rows = judge_nodes(nodes, wanted)
    if measured := _read(folder / "reduce.json"):
        return [*rows, *judge_reduce(measured, names)]
    is_possible = all(node.facts and "gpus" in node.facts for node in nodes)
    return [*rows, judge_no_reduce(_failure(folder), is_possible)]


def _failure(folder: Path) -> str:
    """Of the rank that failed first; the others fell with it."""
    told = sorted(folder.glob("rank.*.failed"), key=lambda file: file.stat().st_mtime)
    words = [f"rank {file.name.split('.')[1]}: {read_text(file).strip()}" for file in told[:1]]
    return "; ".join(filter(None, [*words, read_text(folder / "reduce.failed").strip()]))
