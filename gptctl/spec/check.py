"""Check a run config: flags, cluster profile, layout, memory and environment variables.

Reports all findings at once. Reads files and changes nothing; knows neither terminals nor
schedulers.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from gptctl.engine.contract import NOTIFY_VARIABLE
from gptctl.spec.cluster import Cluster, Profile, load_profile, profile_source
from gptctl.spec.env_lint import PLAIN_SECRET, Job, lint
from gptctl.spec.launch import Launch
from gptctl.spec.launch_rules import check_disks, check_elastic, check_launch, check_spread
from gptctl.spec.notify import NotifyTargets, check_notify, notify_of_environment
from gptctl.spec.trust import CONFIG, Source
from gptctl.spec.visible_gpus import count_visible_gpus
from trainer.config import Override, Resolved, load_tree, read_run, resolve
from trainer.config.corpora import weights_of
from trainer.config.kinds import BadItems, BadValue
from trainer.config.read import Reading, build, paths_of
from trainer.config.tree import Map, ReadFile, Scalar
from trainer.errors import WRONG_USAGE, Finding, Place, Rule, UserError, errors_in, in_order
from trainer.estimate import GB, Estimate, estimate
from trainer.layout import DEGREE_KEYS, Machines
from trainer.named_tuple import NamedTuple
from trainer.savings import advice

CLUSTER = Rule("A001", "Launch.cluster must name a valid cluster profile")
MEMORY = Rule("M001", "the estimated memory of a rank should not exceed gpu_memory_gb", "warning")

# Origin of the ranks per node where neither config, profile nor visible GPUs give a number.
AS_ASKED = "derived: as many ranks as the degrees need"
# Where a config is looked for if it is given without a suffix or not at all.
CONFIG_NAMES = ("{}.yaml", "{}.yml", "{}s.yaml", "configs/{}.yaml")
# Values of path keys that are not paths.
NO_PATH = ("auto", "builtin")


class Checked(NamedTuple):
    """The result of a check; `resolved` is None when the config file could not be parsed."""

    path: Path | None  # None: the config was given by flags only
    findings: tuple[Finding, ...]
    launch: Launch
    cluster: Cluster
    machines: Machines
    resolved: Resolved | None = None
    estimate: Estimate | None = None
    launch_origins: Mapping[str, str] = MappingProxyType({})
    tree: Map | None = None  # what was written, before anything was derived
    sources: tuple[Source, ...] = ()  # the files that decide what runs

    @property
    def name(self) -> str:
        return str(self.path or "the command line")

    @property
    def device(self) -> str:
        return self.resolved.run.Global.device if self.resolved else "gpu"

    @property
    def output_dir(self) -> str | None:
        return self.resolved.run.Engine.save_load.output_dir if self.resolved else None

    @property
    def inputs(self) -> dict[str, str]:
        """The paths that the bundled trainer reads, as written in the config, by key."""
        if self.launch.entrypoint != "trainer" or self.resolved is None:
            return {}
        run = self.resolved.run
        dataset = run.Data.Train.dataset
        # The two kinds of datasets keep their path under different keys.
        prefix = "Data.Train.dataset"
        data: dict[str, str | None] = {f"{prefix}.path": dataset.path}
        if dataset.name != "CharDataset":
            is_one = isinstance(dataset.input_dir, str)
            data = {
                f"{prefix}.input_dir" if is_one else f"{prefix}.input_dir.{path}": path
                for path in weights_of(dataset.input_dir)
            }
        paths = {**data, "Engine.save_load.ckpt_dir": run.Engine.save_load.ckpt_dir}
        return {name: path for name, path in paths.items() if path and path not in NO_PATH}

    def place_of(self, key: str) -> Place | None:
        """Where a key was written, or the mapping that it is in; None for a default."""
        origins = {**(self.resolved.origins if self.resolved else {}), **self.launch_origins}
        while key and key not in origins:
            key = key.rpartition(".")[0]
        origin = origins.get(key, "")
        if not origin or origin == "default" or origin.startswith("derived: "):
            return None
        line = re.fullmatch(r"(.+):([0-9]{1,9})", origin, re.DOTALL)
        return Place(line[1], int(line[2])) if line else Place(origin)

    @property
    def is_valid(self) -> bool:
        return not errors_in(self.findings)

    @property
    def is_elastic(self) -> bool:
        fewest, most = self.launch.node_range
        return fewest < most


def find_config(name: str | None) -> Path:
    """Find a config by path or by bare name.

    `config` finds config.yaml, config.yml, configs.yaml or configs/config.yaml.
    """
    if name is not None and os.path.isfile(name):
        return Path(name)
    bare = name or "config"
    tried = [pattern.format(bare) for pattern in CONFIG_NAMES]
    if not bare.endswith((".yaml", ".yml", ".json")):
        for candidate in tried:
            if os.path.isfile(candidate):
                return Path(candidate)
    if name is not None and (os.path.exists(name) or "/" in name or "." in name):
        # Clearly meant as a path: reading the file reports why it cannot be used.
        return Path(name)
    raise UserError(
        f"no config found: tried {', '.join(tried)}", "create one with `gptctl init`", WRONG_USAGE
    )


def check_config(
    path: Path | None, overrides: Iterable[Override], profile: Profile | None = None
) -> Checked:
    """Read and check a config; collect all findings instead of stopping at the first.

    `profile` is one that was read before: what was trusted must be what is used.
    """
    found: list[Finding] = []
    files: list[ReadFile] = []
    # Flags and files are merged first, so that a flag can fix a mistake in the file.
    tree = load_tree(path, overrides, found, files)
    if tree is None:
        return Checked(path, in_order(found), Launch(), Cluster(), Machines(1, 1))
    checked = check_tree(path, tree, found, profile=profile)
    return checked._replace(sources=(*config_sources(files), *checked.sources))


def config_sources(files: Iterable[ReadFile]) -> list[Source]:
    return [Source(CONFIG, file) for file in files]


def check_tree(
    path: Path | None,
    tree: Map,
    found: list[Finding],
    profile_file: Path | None = None,
    profile: Profile | None = None,
) -> Checked:
    """Check a merged config. `profile_file` is used in place of the profile that it names."""
    reading = read_run(tree, found, others={"Launch": Launch})
    launch = build(Launch, reading.values, "Launch")
    name = str(profile_file or launch.cluster)
    profile = profile or _profile(name, reading)
    cluster = profile.cluster if profile else Cluster()
    notify, notify_origin = _notify(launch, cluster, reading)
    launch = replace(launch, notify=notify)
    machines, origin = _machines(launch, cluster, reading)
    # A wrong number of nodes would make every rule about the world size fail: report it alone.
    spread = [] if origin != AS_ASKED else [*check_spread(machines, _ranks_asked(reading), reading)]
    resolved = resolve(reading, None if spread else machines)
    judged = [*spread, *check_launch(launch, cluster, machines)]
    # That of a profile is checked with the profile.
    if launch.notify is not cluster.notify:
        judged += check_notify(launch.notify, "Launch.notify")
    judged += check_elastic(launch, resolved, machines, reading)
    # The estimate and the check of disks need a layout that fits the model and the world.
    estimated = None
    if not errors_in(resolved.findings):
        estimated = estimate(resolved.run, resolved.layout)
        judged += _check_memory(resolved, estimated, cluster)
        judged += check_disks(launch, cluster, machines, resolved)
    linted = _lint(launch, profile, machines, resolved, reading)
    findings = [
        *resolved.findings,
        *(profile.findings if profile else ()),
        *reading.valid_findings(judged),
        *linted,
    ]
    # `gptctl validate --resolved` and `gptctl show` print where each value came from.
    written = reading.values
    origins = {
        key: str(reading.places[key]) if key in written else "default"
        for key in paths_of(Launch, "Launch")
    }
    origins |= {
        key: str(place) for key, place in reading.places.items() if key.startswith("Launch.env.")
    }
    # From here on nobody has to derive the ranks per node again.
    launch = replace(launch, gpus_per_node=machines.per_node)
    origins |= {"Launch.gpus_per_node": origin, "Launch.notify": notify_origin}
    sources = (profile_source(profile, name, _is_typed(reading)),) if profile else ()
    return Checked(
        path,
        in_order(findings),
        launch,
        cluster,
        machines,
        resolved,
        estimated,
        origins,
        tree,
        sources,
    )


def _is_typed(reading: Reading) -> bool:
    """Whether the cluster was chosen on the command line: only a file has line numbers."""
    place = reading.places.get("Launch.cluster")
    return place is not None and not place.line


def _profile(name: str, reading: Reading) -> Profile | None:
    try:
        profile = load_profile(name)
    except UserError as error:
        # A missing profile is a finding like any other: the rest of the config is still checked.
        place = reading.places.get("Launch.cluster")
        reading.found.append(
            CLUSTER.found("Launch.cluster", name, error.message, error.hint, place)
        )
        reading.bad.add("Launch.cluster")
        return None
    if errors_in(profile.findings):
        # Rules must not check against a profile that was only partly read.
        reading.bad.add("Launch.cluster")
    return profile


def _machines(launch: Launch, cluster: Cluster, reading: Reading) -> tuple[Machines, str]:
    """Return nodes and ranks per node, and the origin of the ranks per node."""
    nodes = launch.node_range[1]
    if launch.gpus_per_node:
        return Machines(nodes, launch.gpus_per_node), str(reading.places["Launch.gpus_per_node"])
    if launch.devices:
        return Machines(nodes, len(launch.devices)), "derived: devices"
    if cluster.gpus_per_node:
        return Machines(nodes, cluster.gpus_per_node), f"profile {cluster.name}"
    # Only a local job can count GPUs here: other clusters run on other machines.
    on_gpus = reading.values.get("Global.device", "gpu") == "gpu"
    if cluster.traits.is_one_machine and on_gpus and (visible := count_visible_gpus()):
        return Machines(nodes, visible), "derived: visible GPUs"
    return Machines(nodes, _ranks_per_node(reading, nodes)), AS_ASKED


def _notify(launch: Launch, cluster: Cluster, reading: Reading) -> tuple[Any, str]:
    """Return who is told about the job, and where that was chosen."""
    key = "Launch.notify"
    if launch.notify is not None or reading.is_bad(key):
        return launch.notify, str(reading.places.get(key, "default"))
    # The user's own choice for all jobs beats that of a cluster.
    place = Place(NOTIFY_VARIABLE)
    try:
        found = notify_of_environment(os.environ, reading.found)
    except (BadValue, BadItems) as bad:
        faults = bad.faults if isinstance(bad, BadItems) else [bad]
        reading.refuse(key, Scalar("", place), NotifyTargets(), faults)
        return None, NOTIFY_VARIABLE
    if found is not None:
        reading.places[key] = place
        return found, NOTIFY_VARIABLE
    return cluster.notify, f"profile {cluster.name}" if cluster.notify else "default"


def _ranks_per_node(reading: Reading, nodes: int) -> int:
    """Choose the fewest ranks per node that the degrees allow.

    If dp_degree is not set, mp groups stay inside a node.
    """
    asked, mp = _ranks_asked(reading), reading.values.get(DEGREE_KEYS["mp"], 1)
    if DEGREE_KEYS["dp"] in reading.values:
        return -(-asked // nodes)  # rounded up; check_spread reports a remainder
    return math.lcm(mp, asked // math.gcd(asked, nodes))


def _ranks_asked(reading: Reading) -> int:
    return math.prod(reading.values.get(key, 1) for key in DEGREE_KEYS.values())


def _check_memory(resolved: Resolved, estimated: Estimate, cluster: Cluster) -> Iterator[Finding]:
    if not cluster.gpu_memory_gb or estimated.memory.total <= cluster.gpu_memory_gb * GB:
        return
    need = estimated.memory.total / GB
    message = (
        f"needs about {need:.1f} GB per GPU, but GPUs of {cluster.name} have "
        f"{cluster.gpu_memory_gb:g} GB"
    )
    hint = advice(resolved.run, resolved.layout, cluster.gpu_memory_gb * GB)
    yield MEMORY.found("Distributed", round(need, 1), message, hint)


def _lint(
    launch: Launch,
    profile: Profile | None,
    machines: Machines,
    resolved: Resolved,
    reading: Reading,
) -> list[Finding]:
    """Check the environment variables; each finding names the line that sets the variable."""
    # The same precedence as in the job: Launch.env overrides env of the profile.
    environment = {**(profile.cluster.env if profile else {}), **launch.env}
    cpus = launch.slurm.cpus_per_task or (profile.cluster.cpus_per_task if profile else None)
    layout = resolved.layout
    job = Job(
        nodes=machines.nodes,
        world=machines.world,
        device=resolved.run.Global.device,
        mp=layout.mp,
        sharding=layout.sharding,
        cpus_per_task=cpus,
        gpus_per_node=machines.per_node,
    )
    # The place is the run config's line if it sets the variable, else the profile's.
    findings = []
    for finding in lint(environment, job):
        # A variable in both env and secrets is an error of its own.
        if finding.code == PLAIN_SECRET.code and finding.key in launch.secrets:
            continue
        in_profile = profile.reading.places.get(f"env.{finding.key}") if profile else None
        findings.append(finding.at(reading.places.get(f"Launch.env.{finding.key}", in_profile)))
    return findings
