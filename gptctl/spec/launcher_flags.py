"""Flags of torchrun, paddle.distributed.launch and Slurm, as keys of `Launch`. Pure."""

from __future__ import annotations

import re
from collections.abc import Sequence

from gptctl.spec.foreign_flags import NO_COUNTERPART, NOT_KNOWN, Flag, Mapped, Unmapped, set_key
from gptctl.spec.launch import JOB_NAME, is_set_by_gptctl

# Flags without a value; any other takes the next word.
SWITCHES = frozenset("standalone m module no-python run-path use-env".split())
_COMPUTED = "not needed: gptctl computes it"
_OWN_LOGS = "not needed: each rank writes its own file"

LAUNCHER_KEYS = {
    "nnodes": "Launch.nodes",
    "nnode": "Launch.nodes",
    "nproc-per-node": "Launch.gpus_per_node",
    "devices": "Launch.devices",
    "gpus": "Launch.devices",
    "rdzv-backend": "Launch.rdzv.backend",
    "rdzv-id": "Launch.rdzv.id",
    "master-port": "Launch.rdzv.port",
    "max-restarts": "Launch.max_restarts",
    "max-restart": "Launch.max_restarts",
    "job-id": "Launch.job_name",
    "log-dir": "Launch.log_dir",
}
ENDPOINTS = ("rdzv-endpoint", "master-addr", "master")
LAUNCHER_REASONS = {
    "node-rank": _COMPUTED,
    "rank": _COMPUTED,
    "local-addr": _COMPUTED,
    "rdzv-conf": _COMPUTED,
    "signals-to-handle": _COMPUTED,
    "tee": _OWN_LOGS,
    "t": _OWN_LOGS,
    "redirects": _OWN_LOGS,
    "r": _OWN_LOGS,
    "log-level": "use --env LOGLEVEL=INFO",
    "run-mode": "not needed: collective is the only mode",
    "use-env": "not needed: the trainer reads LOCAL_RANK",
    "ips": "list the hosts in a cluster profile",
}

SBATCH_SHORT = dict(
    pair.split("=")
    for pair in (
        "N=nodes n=ntasks p=partition A=account t=time J=job-name c=cpus-per-task q=qos "
        "C=constraint w=nodelist x=exclude G=gpus o=output e=error D=chdir d=dependency"
    ).split()
)
SBATCH_SWITCHES = frozenset(
    "exclusive requeue no-requeue hold overcommit wait verbose quiet parsable label l u".split()
)
SBATCH_KEYS = {
    "nodes": "Launch.nodes",
    "job-name": "Launch.job_name",
    "partition": "Launch.slurm.partition",
    "account": "Launch.slurm.account",
    "time": "Launch.slurm.time",
    "cpus-per-task": "Launch.slurm.cpus_per_task",
}
SBATCH_REASONS = {
    "output": "not needed: gptctl logs shows the output",
    "error": "not needed: gptctl logs shows the output",
    "wrap": "not needed: gptctl writes the job script",
    "ntasks": "not needed: one task per node starts all ranks",
    "ntasks-per-node": "not needed: one task per node starts all ranks",
    "gpus-per-task": "use gpus_per_node",
    "gpus": "use gpus_per_node",
    "dependency": "use gptctl submit --after JOB",
    "signal": "not needed: gptctl asks the ranks to save before the time limit",
    **dict.fromkeys(
        ("container-image", "container-mounts", "container-workdir"),
        "set `container` in the cluster profile",
    ),
}


def map_launcher(flags: Sequence[Flag]) -> Mapped:
    mapped = Mapped([], [])
    for flag in flags:
        if flag.name in LAUNCHER_REASONS:
            mapped.unmapped.append(Unmapped(flag.source, LAUNCHER_REASONS[flag.name]))
        elif flag.name == "standalone":
            mapped.overrides.append(set_key("Launch.style", "standalone", flag.source))
        elif flag.name in ENDPOINTS:
            _endpoint(flag, mapped)
        elif flag.name in LAUNCHER_KEYS:
            _launcher_key(flag, mapped)
        else:
            mapped.unmapped.append(Unmapped(flag.source, NO_COUNTERPART))
    return _checked_rendezvous(mapped)


def _launcher_key(flag: Flag, mapped: Mapped) -> None:
    key = LAUNCHER_KEYS[flag.name]
    is_name = key in ("Launch.rdzv.id", "Launch.job_name")
    if is_name and not re.fullmatch(JOB_NAME, flag.value):
        mapped.unmapped.append(Unmapped(flag.source, "not needed: the job has its own id"))
    elif not flag.is_known or not flag.value:
        mapped.unmapped.append(Unmapped(flag.source, f"{NOT_KNOWN}: set {key}"))
    elif flag.name == "nproc-per-node" and flag.value in ("gpu", "auto", "cpu"):
        reason = "set Launch.gpus_per_node, or gpus_per_node in the cluster profile"
        mapped.unmapped.append(Unmapped(flag.source, reason))
    elif flag.name == "rdzv-backend" and flag.value not in ("c10d", "static"):
        mapped.unmapped.append(Unmapped(flag.source, f"{NO_COUNTERPART}: static or c10d is used"))
    else:
        mapped.overrides.append(set_key(key, flag.value, flag.source))


def _endpoint(flag: Flag, mapped: Mapped) -> None:
    """A host, with or without a port; one that is not known is found by gptctl itself."""
    host, _, port = (
        flag.value.rpartition(":") if flag.name != "master-addr" else (flag.value, "", "")
    )
    # Port 0 asks torchrun for a free one, as gptctl does by itself.
    if flag.is_known and host and port != "0":
        mapped.overrides.append(set_key("Launch.rdzv.endpoint", flag.value, flag.source))
        return
    reason = "not needed: gptctl uses the first host of the job"
    if re.fullmatch(r"0*[1-9][0-9]{0,9}", port):
        mapped.overrides.append(set_key("Launch.rdzv.port", port, flag.source))
        reason = f"set as port {port}; the host is {reason}"
    mapped.unmapped.append(Unmapped(flag.source, reason))


def _checked_rendezvous(mapped: Mapped) -> Mapped:
    """Without a loopback endpoint, which cannot be the one of several machines."""
    nodes = next((each.value for each in mapped.overrides if each.key == "Launch.nodes"), "1")
    kept, dropped = [], list(mapped.unmapped)
    for override in mapped.overrides:
        is_endpoint = override.key == "Launch.rdzv.endpoint"
        if is_endpoint and nodes != "1" and re.match(r"localhost\b|127\.", str(override.value)):
            reason = "a loopback address cannot be reached by other machines: gptctl finds one"
            dropped.append(Unmapped(override.source, reason))
        else:
            kept.append(override)
    return Mapped(kept, dropped)


def map_slurm(flags: Sequence[Flag]) -> Mapped:
    """Map options of sbatch and srun."""
    mapped = Mapped([], [])
    for flag in flags:
        name = SBATCH_SHORT.get(flag.name, flag.name)
        if not flag.is_known:
            mapped.unmapped.append(Unmapped(flag.source, NOT_KNOWN))
        elif count := gpus_of(name, flag.value):
            mapped.overrides.append(set_key("Launch.gpus_per_node", count, flag.source))
            if re.search(r"[A-Za-z]", flag.value.removeprefix("gpu:")):
                reason = "set as gpus_per_node; the type of GPU belongs in the cluster profile"
                mapped.unmapped.append(Unmapped(flag.source, reason))
        elif name == "job-name" and not re.fullmatch(JOB_NAME, flag.value):
            reason = "a job's name has letters, digits and ._- only: use --name"
            mapped.unmapped.append(Unmapped(flag.source, reason))
        elif name in SBATCH_KEYS:
            # `-N 2-4` is a range, as in `--nodes 2:4`.
            value = flag.value.replace("-", ":") if name == "nodes" else flag.value
            mapped.overrides.append(set_key(SBATCH_KEYS[name], value, flag.source))
        elif name in ("requeue", "no-requeue"):
            mapped.overrides.append(
                set_key("Launch.slurm.requeue", str(name == "requeue"), flag.source)
            )
        else:
            _slurm_extra(name, flag, mapped)
    return mapped


def _slurm_extra(name: str, flag: Flag, mapped: Mapped) -> None:
    is_long = flag.typed.startswith("--") or flag.name in SBATCH_SHORT
    if name in SBATCH_REASONS or not is_long or is_set_by_gptctl(name):
        reason = SBATCH_REASONS.get(name, NO_COUNTERPART)
        mapped.unmapped.append(Unmapped(flag.source, reason))
    else:
        key = f"Launch.slurm.extra.{name}"
        mapped.overrides.append(set_key(key, flag.value or "True", flag.source))


def gpus_of(name: str, value: str) -> str:
    """The GPUs per node that an option of Slurm asks for; empty for any other option."""
    if name == "gpus-per-node" or (name == "gres" and value.startswith("gpu")):
        match = re.fullmatch(r"(?:gpu:)?(?:[A-Za-z][\w.-]*:)?([0-9]+)", value)
        return match[1] if match else ""
    return ""


def split_short(words: Sequence[str]) -> list[str]:
    """Split `-N2` into `-N` and `2`, as sbatch does."""
    split = []
    for word in words:
        is_joined = word[:1] == "-" and word[1:2] in SBATCH_SHORT and len(word) > 2
        split += [word[:2], word[2:].removeprefix("=")] if is_joined else [word]
    return split
