"""From a checked config to a launch plan: everything a job needs to be started, as plain data.

Pure: the same input gives the same plan. It knows neither shells (`render.py`) nor machines (`backends/`).
"""

from __future__ import annotations

import os.path
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from types import MappingProxyType
from typing import Any, NamedTuple

from gptctl.engine.launch_plan import LaunchPlan
from gptctl.spec.check import Checked
from gptctl.spec.cluster import Cluster
from gptctl.spec.launch import Launch, split_endpoint
from gptctl.spec.launch_rules import has_private_disks
from trainer.config import Override

C10D_PORT, STATIC_PORT = 29400, 29500  # torchrun's own defaults
NCCL_SYNTAX = re.compile(r"[=^:,]")  # for several interfaces; gloo reads plain names only


class Site(NamedTuple):
    """What a plan depends on besides config and flags: where gptctl was started, and what runs it."""

    folder: str  # the current folder, absolute
    python: str  # the interpreter
    trainer: str  # folder of the trainer package

    def absolute(self, path: str) -> str:
        return os.path.normpath(os.path.join(self.folder, os.path.expanduser(path)))


class JobIdentity(NamedTuple):
    """The id of a job and its folder on the nodes. A job `in place` has neither: it runs the user's
    files where they are."""

    job_id: str = ""
    remote_dir: str = ""


IN_PLACE = JobIdentity()


class PlanDefaults(NamedTuple):
    """What a backend decides where config, flags and profile leave it open."""

    style: str = ""  # empty: the form of the rendezvous
    host: str = ""  # where ranks meet; empty: the first host
    has_own_port: bool = False  # a script for pasting finds a port when it runs
    rdzv_id: str = ""
    python: str = ""  # of the ranks; empty: the interpreter that runs gptctl
    work_dir: str = ""  # empty: the current folder
    env: Mapping[str, str] = MappingProxyType({})
    sbatch: Mapping[str, str] = MappingProxyType({})
    pins_interface: bool = False


NO_DEFAULTS = PlanDefaults()


def build_plan(
    checked: Checked,
    site: Site,
    identity: JobIdentity = IN_PLACE,
    overrides: Sequence[Override] = (),
    defaults: PlanDefaults = NO_DEFAULTS,
) -> LaunchPlan:
    launch, cluster, machines = checked.launch, checked.cluster, checked.machines
    form = rendezvous_form(launch)
    hosts = tuple(host.address or host.host for host in cluster.hosts[: machines.nodes])
    needs_port = not identity.remote_dir and not defaults.has_own_port
    address, port = _endpoint(launch, form, defaults.host or next(iter(hosts), ""), needs_port)
    environment = _environment(checked, form, defaults.env)
    fewest, most = launch.node_range
    return LaunchPlan(
        job_id=identity.job_id,
        job_name=launch.job_name,
        cluster=cluster.name,
        kind=cluster.kind,
        style=launch.style or defaults.style or form,
        form=form,
        nodes=machines.nodes,
        nnodes=str(most) if fewest == most else f"{fewest}:{most}",
        per_node=machines.per_node,
        world=machines.world,
        device=checked.device,
        hosts=hosts,
        interfaces=tuple(host.interface or "" for host in cluster.hosts[: machines.nodes]),
        rdzv_id=launch.rdzv.id or identity.job_id or defaults.rdzv_id,
        master_addr=address,
        master_port=port,
        master_interface=cluster.master_interface or "",
        max_restarts=launch.max_restarts,
        time_limit=launch.slurm.time or "",
        python=python_of(cluster, defaults.python or site.python),
        container=_container(cluster, identity),
        program=_program(checked, site, identity, overrides),
        work_dir=defaults.work_dir or site.folder,
        remote_dir=identity.remote_dir,
        log_dir=log_dir_of(launch, site, identity),
        output_dir=_output_dir(checked, site, identity),
        setup=cluster.setup,
        env={name: value for name, (value, _) in environment.items()},
        env_origins={name: origin for name, (_, origin) in environment.items()},
        secrets=_absolute_secrets(launch, site),
        sbatch=dict(defaults.sbatch),
        inputs=tuple(site.absolute(path) for path in checked.inputs.values()),
        is_one_machine=cluster.traits.is_one_machine,
        pins_interface=defaults.pins_interface,
        engine_python=cluster.engine_python or "",
        submit_python=site.python,
    )


def rendezvous_form(launch: Launch) -> str:
    fewest, most = launch.node_range
    if launch.style in ("standalone", "launch"):
        return launch.style
    is_c10d = launch.style == "c10d" or launch.rdzv.backend == "c10d" or fewest < most
    return "c10d" if is_c10d else "static"


def _endpoint(
    launch: Launch, form: str, default_host: str, needs_port: bool
) -> tuple[str, int | None]:
    """Host and port where ranks meet, as far as they are known before the job runs."""
    host, port = split_endpoint(launch.rdzv.endpoint) if launch.rdzv.endpoint else ("", None)
    port = port or launch.rdzv.port
    if needs_port:
        port = port or (C10D_PORT if form == "c10d" else STATIC_PORT)
    return host or default_host, port


def python_of(cluster: Cluster, default: str) -> str:
    """The profile's; else that of the environment it sets up; else the default."""
    if cluster.python:
        return cluster.python
    return "python" if cluster.setup or cluster.container.image else default


def _container(cluster: Cluster, identity: JobIdentity) -> tuple[str, ...]:
    container = cluster.container
    if not container.image:
        return ()
    binds = [*container.binds, *([identity.remote_dir] if identity.remote_dir else [])]
    words = [container.runtime or "apptainer", "exec", *(["--nv"] if container.nv else [])]
    words += ["--pwd", container.pwd] if container.pwd else []
    words += [word for bind in binds for word in ("-B", bind)]
    return (*words, container.image)


def _program(
    checked: Checked, site: Site, identity: JobIdentity, overrides: Sequence[Override]
) -> tuple[str, ...]:
    launch = checked.launch
    is_trainer = launch.entrypoint == "trainer"
    if identity.remote_dir:
        code = os.path.join(identity.remote_dir, "code")
        logged = [os.path.join(code, "rank_log.py")]
        if not is_trainer:
            return (*logged, os.path.join(code, os.path.basename(launch.entrypoint)), *launch.args)
        own = f"Engine.save_load.output_dir={_output_dir(checked, site, identity)}"
        output = [] if checked.output_dir else ["-o", own]
        return (
            *logged,
            "-m",
            "trainer",
            "-c",
            os.path.join(identity.remote_dir, "config.json"),
            *output,
            *launch.args,
        )
    logged = [os.path.join(site.trainer, "rank_log.py")] if launch.log_dir else []
    if not is_trainer:
        return (*logged, site.absolute(launch.entrypoint), *launch.args)
    config = ["-c", site.absolute(str(checked.path))] if checked.path else []
    trained = [override for override in overrides if not override.key.startswith("Launch.")]
    typed = [word for override in trained for word in ("-o", f"{override.key}={override.value}")]
    return (*logged, "-m", "trainer", *config, *typed, *launch.args)


def _output_dir(checked: Checked, site: Site, identity: JobIdentity) -> str:
    if checked.launch.entrypoint != "trainer":
        return ""
    return site.absolute(checked.output_dir or os.path.join(identity.remote_dir, "output"))


def log_dir_of(launch: Launch, site: Site, identity: JobIdentity) -> str:
    if launch.log_dir:
        return site.absolute(os.path.join(launch.log_dir, identity.job_id))
    return os.path.join(identity.remote_dir, "logs") if identity.remote_dir else ""


def _environment(
    checked: Checked, form: str, defaults: Mapping[str, str]
) -> dict[str, tuple[str, str]]:
    """Every variable that is exported, with its value and where that came from; later ones win."""
    launch, cluster, ours = checked.launch, checked.cluster, "gptctl"
    chosen: dict[str, tuple[str, str]] = {
        "PYTHONUNBUFFERED": ("1", ours),  # torchrun's output is a file, and would come in blocks
        "PYTHONFAULTHANDLER": ("1", ours),
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": (
            "3",
            ours,
        ),  # torchrun says 1, which may hang when a rank is gone
    }
    if form in ("c10d", "standalone"):
        chosen["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = (
            "1",
            ours,
        )  # without it a restart meets the old store
    if checked.device == "gpu":
        chosen["NCCL_DEBUG"] = ("WARN", ours)
    chosen |= {name: (value, ours) for name, value in defaults.items()}
    if launch.entrypoint == "trainer" and has_private_disks(launch, cluster):
        chosen["GPTCTL_PRIVATE_DISKS"] = ("1", ours)  # the trainer keeps a whole checkpoint on each
    if launch.devices:
        chosen["CUDA_VISIBLE_DEVICES"] = (",".join(launch.devices), ours)
    chosen |= {name: (value, f"profile {cluster.name}") for name, value in cluster.env.items()}
    origins = checked.launch_origins
    for name, value in launch.env.items():
        chosen[name] = (value, origins.get(f"Launch.env.{name}", "config"))
    interface = chosen.get("NCCL_SOCKET_IFNAME", ("^", ""))[0].removeprefix("=")
    if (
        not NCCL_SYNTAX.search(interface)
        and chosen.get("GLOO_SOCKET_IFNAME", ("", ours))[1] == ours
    ):
        chosen["GLOO_SOCKET_IFNAME"] = (interface, "NCCL_SOCKET_IFNAME")
    return chosen


def _absolute_secrets(launch: Launch, site: Site) -> dict[str, Mapping[str, str]]:
    def absolute(source: Mapping[str, str]) -> Mapping[str, str]:
        path = source.get("file")
        return {"file": site.absolute(path)} if path else source

    return {name: absolute(source) for name, source in launch.secrets.items()}


def cluster_as_json(cluster: Cluster) -> dict[str, Any]:
    """A profile that loads back to what a job was planned with: what it says besides the defaults."""
    defaults = asdict(Cluster())
    said = {name: value for name, value in asdict(cluster).items() if value != defaults[name]}
    for keys in (said, *said.get("hosts", ())):
        for name in ("identity_file", "known_hosts"):
            if keys.get(name):
                keys[name] = os.path.abspath(os.path.expanduser(keys[name]))
    return said
