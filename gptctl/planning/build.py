"""From a checked config to a launch plan: everything a job needs to be started, as plain data.

Pure: the same input gives the same plan. It knows neither shells (`render.py`) nor machines (`backends/`).
"""

from __future__ import annotations

import os.path
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any, NamedTuple

from gptctl.engine.launch_plan import LaunchPlan, seconds_of
from gptctl.spec.check import Checked
from gptctl.spec.cluster import Cluster
from gptctl.spec.launch import Launch, Slurm, split_endpoint
from gptctl.spec.launch_rules import has_private_disks
from trainer.config import Override

LOOPBACK = "127.0.0.1"
WARNING = 120  # seconds before the time limit
C10D_PORT, STATIC_PORT = 29400, 29500  # torchrun's own defaults
NCCL_SYNTAX = re.compile(r"[=^:,]")  # for several interfaces; gloo reads plain names only


class Site(NamedTuple):
    """What a plan depends on besides config and flags: where gptctl was started, and what runs it."""

    folder: str  # the current folder, absolute
    python: str  # the interpreter
    trainer: str  # folder of the trainer package

    def absolute(self, path: str) -> str:
        return os.path.normpath(os.path.join(self.folder, os.path.expanduser(path)))


class Ground(NamedTuple):
    """Where a job lives: its id and its own folder. A job `in place` has neither and runs the user's own files."""

    job_id: str = ""
    run_dir: str = ""


IN_PLACE = Ground()


def build_plan(
    checked: Checked, site: Site, ground: Ground = IN_PLACE, overrides: Sequence[Override] = ()
) -> LaunchPlan:
    launch, cluster, machines = checked.launch, checked.cluster, checked.machines
    form = rendezvous_form(launch)
    hosts = tuple(host.address or host.host for host in cluster.hosts[: machines.nodes])
    address, port = _endpoint(launch, cluster, form, hosts, is_in_place=not ground.run_dir)
    environment = _environment(checked, form)
    fewest, most = launch.node_range
    return LaunchPlan(
        job_id=ground.job_id,
        job_name=launch.job_name,
        cluster=cluster.name,
        kind=cluster.kind,
        style=launch.style or ("sbatch" if cluster.kind == "slurm" else form),
        form=form,
        nodes=machines.nodes,
        nnodes=str(most) if fewest == most else f"{fewest}:{most}",
        per_node=machines.per_node,
        world=machines.world,
        device=checked.device,
        hosts=hosts,
        interfaces=tuple(host.interface or "" for host in cluster.hosts[: machines.nodes]),
        rdzv_id=launch.rdzv.id
        or ground.job_id
        or ("" if cluster.kind == "slurm" else launch.job_name),
        master_addr=address,
        master_port=port,
        master_interface=cluster.master_interface or "",
        max_restarts=launch.max_restarts,
        time_limit=launch.slurm.time or "",
        python=python_of(cluster, site),
        container=_container(cluster, ground),
        program=_program(checked, site, ground, overrides),
        work_dir=_work_dir(cluster, site, ground),
        run_dir=ground.run_dir,
        log_dir=_log_dir(launch, site, ground),
        output_dir=_output_dir(checked, site, ground),
        setup=cluster.setup,
        env={name: value for name, (value, _) in environment.items()},
        env_origins={name: origin for name, (_, origin) in environment.items()},
        secrets=_absolute_secrets(launch, site),
        sbatch=_sbatch_options(checked, ground.run_dir, _log_dir(launch, site, ground)),
        inputs=tuple(site.absolute(path) for path in checked.inputs.values()),
        is_one_machine=cluster.kind == "local",
        pins_interface=cluster.kind == "ssh",
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
    launch: Launch, cluster: Cluster, form: str, hosts: Sequence[str], is_in_place: bool
) -> tuple[str, int | None]:
    """Host and port where ranks meet, as far as they are known before the job runs."""
    host, port = split_endpoint(launch.rdzv.endpoint) if launch.rdzv.endpoint else ("", None)
    port = port or launch.rdzv.port
    if is_in_place and cluster.kind != "slurm":
        port = port or (C10D_PORT if form == "c10d" else STATIC_PORT)
    if not host and cluster.kind == "local":
        host = LOOPBACK
    return host or (hosts[0] if hosts else ""), port


def python_of(cluster: Cluster, site: Site) -> str:
    """The profile's; else that of the environment it sets up; else the one that runs gptctl."""
    if cluster.python:
        return cluster.python
    return (
        "python"
        if cluster.setup or cluster.container.image or cluster.kind == "ssh"
        else site.python
    )


def _container(cluster: Cluster, ground: Ground) -> tuple[str, ...]:
    container = cluster.container
    if not container.image:
        return ()
    binds = [*container.binds, *([ground.run_dir] if ground.run_dir else [])]
    words = [container.runtime or "apptainer", "exec", *(["--nv"] if container.nv else [])]
    words += ["--pwd", container.pwd] if container.pwd else []
    words += [word for bind in binds for word in ("-B", bind)]
    return (*words, container.image)


def _program(
    checked: Checked, site: Site, ground: Ground, overrides: Sequence[Override]
) -> tuple[str, ...]:
    launch = checked.launch
    is_trainer = launch.entrypoint == "trainer"
    if ground.run_dir:
        code = os.path.join(ground.run_dir, "code")
        logged = [os.path.join(code, "rank_log.py")]
        if not is_trainer:
            return (*logged, os.path.join(code, os.path.basename(launch.entrypoint)), *launch.args)
        own = f"Engine.save_load.output_dir={_output_dir(checked, site, ground)}"
        output = [] if checked.output_dir else ["-o", own]
        return (
            *logged,
            "-m",
            "trainer",
            "-c",
            os.path.join(ground.run_dir, "config.json"),
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


def _output_dir(checked: Checked, site: Site, ground: Ground) -> str:
    if checked.launch.entrypoint != "trainer":
        return ""
    return site.absolute(checked.output_dir or os.path.join(ground.run_dir, "output"))


def _work_dir(cluster: Cluster, site: Site, ground: Ground) -> str:
    """The current folder; ssh hosts do not have it, but the files that are sent with the job."""
    return (
        os.path.join(ground.run_dir, "code")
        if cluster.kind == "ssh" and ground.run_dir
        else site.folder
    )


def _log_dir(launch: Launch, site: Site, ground: Ground) -> str:
    if launch.log_dir:
        return site.absolute(os.path.join(launch.log_dir, ground.job_id))
    return os.path.join(ground.run_dir, "logs") if ground.run_dir else ""


def _environment(checked: Checked, form: str) -> dict[str, tuple[str, str]]:
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
    if cluster.kind == "local":
        chosen["GLOO_SOCKET_IFNAME"] = ("lo", ours)
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


def _sbatch_options(checked: Checked, run_dir: str, log_dir: str) -> dict[str, str]:
    """Options of sbatch by name, in the order they are written; flags and config win over the profile."""
    slurm, cluster, machines = checked.launch.slurm, checked.cluster, checked.machines
    if cluster.kind != "slurm":
        return {}
    cpus = slurm.cpus_per_task or cluster.cpus_per_task
    options: dict[str, Any] = {
        "job-name": checked.launch.job_name,
        "partition": slurm.partition or cluster.partition,
        "account": slurm.account or cluster.account,
        "nodes": "-".join(map(str, dict.fromkeys(checked.launch.node_range))),
        "ntasks-per-node": 1,
        "cpus-per-task": cpus,
        "time": slurm.time,
    }
    if checked.device == "gpu" and cluster.gpu_request != "none":
        is_gres = cluster.gpu_request == "gres"
        options["gres" if is_gres else "gpus-per-node"] = (
            f"{'gpu:' if is_gres else ''}{machines.per_node}"
        )
    options |= {**cluster.sbatch, **slurm.extra}
    if run_dir:
        options |= {
            "chdir": run_dir,
            "output": os.path.join(
                log_dir.replace("%", "%%"), "batch.log"
            ),  # % begins a pattern of Slurm's
            "open-mode": "append",
            "signal": f"B:USR1@{_warning(slurm)}",
            "requeue" if is_requeued(checked.launch) else "no-requeue": "",
        }
    written = {name: str(value) for name, value in options.items() if value is not None}
    flags = {
        name for name, value in written.items() if value in ("True", "true") and name != "comment"
    }
    return {
        name: "" if name in flags else value for name, value in written.items()
    }  # `exclusive: true`


def is_requeued(launch: Launch) -> bool:
    """The trainer goes on where it was; what a script does when it is started again, only its author knows."""
    return launch.entrypoint == "trainer" if launch.slurm.requeue is None else launch.slurm.requeue


def _warning(slurm: Slurm) -> int:
    """How many seconds before its time limit a job saves: a quarter of a short one."""
    limit = seconds_of(slurm.time) if slurm.time else 4 * WARNING
    return slurm.save_before or min(WARNING, max(1, limit // 4))


def cluster_as_json(cluster: Cluster) -> dict[str, Any]:
    """A profile that loads back to what a job was planned with: what it says besides the defaults."""
    defaults = asdict(Cluster())
    said = {name: value for name, value in asdict(cluster).items() if value != defaults[name]}
    for keys in (said, *said.get("hosts", ())):
        for name in ("identity_file", "known_hosts"):
            if keys.get(name):
                keys[name] = os.path.abspath(os.path.expanduser(keys[name]))
    return said
