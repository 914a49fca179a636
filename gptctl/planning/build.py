"""Build a launch plan from a checked config: all that is needed to start a job, as plain data.

Pure: the same input gives the same plan. It knows neither shells (`render.py`) nor machines
(`backends/`).
"""

from __future__ import annotations

import os.path
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from types import MappingProxyType
from typing import Any

from gptctl.engine.launch_plan import LaunchPlan
from gptctl.planning.container import command_words, srun_options
from gptctl.spec.check import Checked
from gptctl.spec.cluster import Cluster
from gptctl.spec.launch import Launch, split_endpoint
from gptctl.spec.launch_rules import has_private_disks
from trainer.config import Override
from trainer.named_tuple import NamedTuple

TASKS = "trainer.tasks."
# Tasks without a checkpoint, and so without a config.
WITHOUT_CONFIG = tuple(
    f"{TASKS}{name}" for name in ("import_weights", "prepare_data", "train_tokenizer")
)
C10D_PORT, STATIC_PORT = 29400, 29500  # torchrun's own defaults
# NCCL_SOCKET_IFNAME may be a list or a pattern; Gloo reads plain names only.
NCCL_SYNTAX = re.compile(r"[=^:,]")


class Site(NamedTuple):
    """What a plan depends on besides config and flags: where and by what gptctl was started."""

    folder: str  # the current folder, absolute
    python: str  # the interpreter that runs gptctl
    trainer: str  # folder of the trainer package

    def absolute(self, path: str) -> str:
        return os.path.normpath(os.path.join(self.folder, os.path.expanduser(path)))


class JobIdentity(NamedTuple):
    """The id of a job and its folder on the nodes.

    A script that is only printed has neither: it runs the user's files in place.
    """

    job_id: str = ""
    remote_dir: str = ""


IN_PLACE = JobIdentity()


class PlanDefaults(NamedTuple):
    """Values that a backend chooses if config, flags and profile do not set them."""

    style: str = ""  # empty: that of the rendezvous
    host: str = ""  # where ranks meet; empty: the first host
    has_own_port: bool = False  # a printed script chooses its port when it runs
    rdzv_id: str = ""
    python: str = ""  # of the ranks; empty: the interpreter that runs gptctl
    work_dir: str = ""  # empty: the current folder
    env: Mapping[str, str] = MappingProxyType({})
    sbatch: Mapping[str, str] = MappingProxyType({})
    pins_interface: bool = False  # NCCL must use the interface that reaches node 0
    spans_machines: bool = False  # a printed command is for machines that the profile does not know


NO_DEFAULTS = PlanDefaults()


def build_plan(
    checked: Checked,
    site: Site,
    identity: JobIdentity = IN_PLACE,
    overrides: Sequence[Override] = (),
    defaults: PlanDefaults = NO_DEFAULTS,
) -> LaunchPlan:
    """Build the plan of a job, or of a printed script if the identity is empty."""
    launch, cluster, machines = checked.launch, checked.cluster, checked.machines
    form = rendezvous_form(launch)
    hosts = tuple(host.address or host.host for host in cluster.hosts[: machines.nodes])
    # A submitted job chooses a free port when it starts. A printed command cannot.
    needs_port = not identity.remote_dir and not defaults.has_own_port
    address, port = _endpoint(launch, form, defaults.host or next(iter(hosts), ""), needs_port)
    environment = _environment(checked, form, defaults.env)
    fewest, most = launch.node_range
    work_dir = defaults.work_dir or site.folder
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
        container=command_words(cluster.container, identity.remote_dir),
        program=_program(checked, site, identity, overrides),
        work_dir=work_dir,
        remote_dir=identity.remote_dir,
        log_dir=log_dir_of(launch, site, identity),
        output_dir=_output_dir(checked, site, identity),
        setup=cluster.setup,
        env={name: value for name, (value, _) in environment.items()},
        env_origins={name: origin for name, (_, origin) in environment.items()},
        secrets=_absolute_secrets(launch, site),
        sbatch=dict(defaults.sbatch),
        inputs=tuple(site.absolute(path) for path in checked.inputs.values()),
        is_one_machine=cluster.traits.is_one_machine and not defaults.spans_machines,
        pins_interface=defaults.pins_interface,
        engine_python=os.path.expanduser(cluster.engine_python or ""),
        submit_python=site.python,
        srun_container=_srun_container(checked, site, identity, work_dir),
        login=cluster.login.host if cluster.login else "",
        notify=targets_of(launch, site),
    )


def rendezvous_form(launch: Launch) -> str:
    """How torchrun lets the ranks meet: standalone, launch, static or c10d."""
    fewest, most = launch.node_range
    if launch.style in ("standalone", "launch"):
        return launch.style
    # Only c10d lets nodes join and leave. static is simpler, so it is the default.
    is_c10d = launch.style == "c10d" or launch.rdzv.backend == "c10d" or fewest < most
    return "c10d" if is_c10d else "static"


def _endpoint(
    launch: Launch, form: str, default_host: str, needs_port: bool
) -> tuple[str, int | None]:
    """The host and port of the rendezvous, as far as they are known before the job runs."""
    host, port = split_endpoint(launch.rdzv.endpoint) if launch.rdzv.endpoint else ("", None)
    port = port or launch.rdzv.port
    if needs_port:
        port = port or (C10D_PORT if form == "c10d" else STATIC_PORT)
    return host or default_host, port


def python_of(cluster: Cluster, default: str) -> str:
    """The interpreter of the ranks: the profile's, that of its setup, or the default."""
    if cluster.python:
        return cluster.python
    return "python" if cluster.setup or cluster.container.image else default


def _srun_container(
    checked: Checked, site: Site, identity: JobIdentity, work_dir: str
) -> tuple[str, ...]:
    """The options of srun for the container, in which launch.sh or a printed script runs."""
    log_dir = log_dir_of(checked.launch, site, identity)
    # A printed script starts in the current folder, and its ranks through our rank_log.py.
    if not identity.remote_dir:
        program = [os.path.join(site.trainer, "rank_log.py")] if log_dir else []
        return srun_options(checked.cluster.container, [work_dir, log_dir, *program], work_dir)
    is_inside = log_dir.startswith(f"{identity.remote_dir}/")
    folders = [identity.remote_dir, "" if is_inside else log_dir, work_dir]
    return srun_options(checked.cluster.container, folders, "")


def _program(
    checked: Checked, site: Site, identity: JobIdentity, overrides: Sequence[Override]
) -> tuple[str, ...]:
    """The words after torchrun's options: rank_log.py, the program and its arguments."""
    launch = checked.launch
    is_trainer = launch.entrypoint == "trainer"
    # A submitted job runs the copies in its folder.
    if identity.remote_dir:
        code = os.path.join(identity.remote_dir, "code")
        logged = [os.path.join(code, "rank_log.py")]
        # -P: modules come from the copies, not from the folder in which the job runs.
        if launch.module:
            # A task of the bundled trainer reads the frozen config, as the training does.
            is_task = launch.module.startswith(TASKS) and launch.module not in WITHOUT_CONFIG
            config = ["-c", os.path.join(identity.remote_dir, "config.json")] if is_task else []
            return (*logged, "-P", "-m", launch.module, *config, *launch.args)
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
    # A printed script runs the user's own files, and repeats the flags that were typed.
    logged = [os.path.join(site.trainer, "rank_log.py")] if launch.log_dir else []
    if not is_trainer:
        words = ["-m", launch.module] if launch.module else [site.absolute(launch.entrypoint)]
        return (*logged, *words, *launch.args)
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
    """All variables that are exported, each with its value and origin; later ones override."""
    launch, cluster, ours = checked.launch, checked.cluster, "gptctl"
    chosen: dict[str, tuple[str, str]] = {
        # The output goes to a file: buffered, it would arrive late and in blocks.
        "PYTHONUNBUFFERED": ("1", ours),
        # A crash in native code prints the Python stack.
        "PYTHONFAULTHANDLER": ("1", ours),
        # torchrun's default is 1, which can hang if a rank has died.
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": ("3", ours),
    }
    if form in ("c10d", "standalone"):
        # Otherwise the ranks of a restart find the store of the previous attempt.
        chosen["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = ("1", ours)
    if checked.device == "gpu":
        chosen["NCCL_DEBUG"] = ("WARN", ours)
    chosen |= {name: (value, ours) for name, value in defaults.items()}
    if launch.entrypoint == "trainer" and has_private_disks(launch, cluster):
        # The trainer then writes a whole checkpoint on each node.
        chosen["GPTCTL_PRIVATE_DISKS"] = ("1", ours)
    if launch.devices:
        chosen["CUDA_VISIBLE_DEVICES"] = (",".join(launch.devices), ours)
    chosen |= {name: (value, f"profile {cluster.name}") for name, value in cluster.env.items()}
    origins = checked.launch_origins
    for name, value in launch.env.items():
        chosen[name] = (value, origins.get(f"Launch.env.{name}", "config"))
    # Gloo should use the same network as NCCL, unless the user has chosen another one for it.
    interface = chosen.get("NCCL_SOCKET_IFNAME", ("^", ""))[0].removeprefix("=")
    if (
        not NCCL_SYNTAX.search(interface)
        and chosen.get("GLOO_SOCKET_IFNAME", ("", ours))[1] == ours
    ):
        chosen["GLOO_SOCKET_IFNAME"] = (interface, "NCCL_SOCKET_IFNAME")
    return chosen


def _absolute_secrets(launch: Launch, site: Site) -> dict[str, Mapping[str, str]]:
    return {name: _absolute(source, site) for name, source in launch.secrets.items()}


def _absolute(source: Mapping[str, str], site: Site) -> Mapping[str, str]:
    path = source.get("file")
    return {"file": site.absolute(path)} if path else source


def targets_of(launch: Launch, site: Site) -> tuple[Mapping[str, Any], ...]:
    """Who is told about the job."""
    # A task of the bundled trainer is a command of somebody who waits for its answer.
    if launch.module.startswith(TASKS):
        return ()
    return tuple(
        {
            name: _absolute(value, site) if isinstance(value, Mapping) else value
            for name, value in target.items()
        }
        for target in launch.notify or ()
    )


def cluster_as_json(cluster: Cluster) -> dict[str, Any]:
    """The profile as JSON, without defaults; loading it gives the same cluster."""
    defaults = asdict(Cluster())
    changed = {name: value for name, value in asdict(cluster).items() if value != defaults[name]}
    # Key files are read on this machine, from any folder.
    login = [changed["login"]] if changed.get("login") else []
    for keys in (changed, *changed.get("hosts", ()), *login):
        for name in ("identity_file", "known_hosts"):
            if keys.get(name):
                keys[name] = os.path.abspath(os.path.expanduser(keys[name]))
    return changed
