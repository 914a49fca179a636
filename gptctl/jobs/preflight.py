"""What can be found out on this machine before a job is sent: scripts, data, interpreter, ports. Changes nothing."""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Iterator
from pathlib import Path

from gptctl.backends import Backend
from gptctl.engine.launch_plan import LaunchPlan
from gptctl.planning.build import Site, python_of
from gptctl.spec.check import Checked
from gptctl.spec.cluster import Cluster
from trainer.errors import Finding, Rule

SCRIPT = Rule("S001", "the script and the files that are shipped with it exist")
DATA = Rule("S002", "the data and the checkpoint that a run starts from exist")
PYTHON = Rule("S003", "the interpreter of the ranks exists and has torch")
OUTPUT = Rule("S005", "a run does not write into the checkpoints of another one")
WRITABLE = Rule("S006", "the folder of runs can be written to")
SECRET_SOURCE = Rule("S007", "a secret can be read where the job runs")


def check_surroundings(
    checked: Checked, plan: LaunchPlan, site: Site, backend: Backend
) -> list[Finding]:
    places, traits = checked.launch_origins, checked.cluster.traits
    found = [
        *_check_program(checked, site),
        *_check_data(checked, site),
        *(_check_run_root(checked.cluster, site) if traits.shares_files else ()),
        *(_check_interpreter(plan) if traits.is_one_machine else ()),
        *_check_secrets(plan),
        *backend.preflight(checked, plan),
    ]
    return [
        finding._replace(message=_at(finding, places.get(finding.key, ""))) for finding in found
    ]


def _at(finding: Finding, origin: str) -> str:
    return finding.message if origin in ("", "default") else f"{finding.message} ({origin})"


def _check_program(checked: Checked, site: Site) -> Iterator[Finding]:
    launch = checked.launch
    if launch.entrypoint == "trainer":
        return
    script = Path(site.absolute(launch.entrypoint))
    if not script.is_file():
        what = "is a folder" if script.is_dir() else "does not exist"
        yield SCRIPT.found(
            "Launch.entrypoint", launch.entrypoint, f"{script} {what}", "name a Python script"
        )
    taken = {"rank_log.py": "gptctl's own rank_log.py", script.name: str(script)}
    for file in launch.files:
        path = site.absolute(file)
        name = os.path.basename(path)
        if not os.path.exists(path):
            yield SCRIPT.found(
                "Launch.files", file, f"{file} does not exist in {site.folder}", "check the path"
            )
        elif taken.setdefault(name, path) != path:
            message = f"{path} has the name of {taken[name]}"
            yield SCRIPT.found(
                "Launch.files", file, message, "rename one of them: they share a folder"
            )
    if script.name == "rank_log.py":
        message = "gptctl puts a rank_log.py of its own beside it"
        yield SCRIPT.found(
            "Launch.entrypoint", launch.entrypoint, message, "give the script another name"
        )


def _check_data(checked: Checked, site: Site) -> Iterator[Finding]:
    """What the bundled trainer reads. On ssh hosts their agents look: they may have what this machine has not."""
    if (
        checked.launch.entrypoint != "trainer"
        or checked.resolved is None
        or not checked.cluster.traits.shares_files
    ):
        return
    for name, path in checked.inputs.items():
        if not os.path.exists(site.absolute(path)):
            rule = DATA if checked.cluster.traits.is_one_machine else DATA._replace(level="warning")
            yield rule.found(
                name, path, f"{path} does not exist in {site.folder}", "check the path"
            )
    keeping = checked.resolved.run.Engine.save_load
    output = keeping.output_dir
    if output and not keeping.ckpt_dir and any(Path(site.absolute(output)).glob("step_*")):
        hint = "set Engine.save_load.ckpt_dir=auto to go on with them, or another output_dir"
        yield OUTPUT.found(
            "Engine.save_load.output_dir",
            output,
            f"{output} holds checkpoints of an earlier run",
            hint,
        )


def check_profile(cluster: Cluster, site: Site) -> Iterator[Finding]:
    """Whether a cluster can be used from here, as far as this machine can tell."""
    if cluster.traits.is_one_machine:
        yield from _check_python(
            python_of(cluster, site.python),
            bool(cluster.container.image or cluster.setup),
            cluster.name,
        )
        yield from _check_run_root(cluster, site)


def _check_run_root(cluster: Cluster, site: Site) -> Iterator[Finding]:
    root = Path(site.absolute(cluster.run_root))
    existing = next(place for place in (root, *root.parents) if os.path.lexists(place))
    if not existing.is_dir() or not os.access(existing, os.W_OK | os.X_OK):
        what = "cannot be written to" if existing.is_dir() else "is no folder"
        message = f"{existing} {what}"
        yield WRITABLE.found(
            "run_root", cluster.run_root, message, "choose another run_root in the cluster profile"
        )


def _check_secrets(plan: LaunchPlan) -> Iterator[Finding]:
    """A job inherits from this environment; which files its nodes see is known for this machine only."""
    for name, source in plan.secrets.items():
        if "file" in source:
            missing = plan.is_one_machine and not os.access(source["file"], os.R_OK)
        else:
            missing = source["env"] not in os.environ
        if missing:
            what = (
                f"{source['file']} cannot be read"
                if "file" in source
                else f"{source['env']} is not set"
            )
            yield SECRET_SOURCE.found(f"Launch.secrets.{name}", None, what, "name another source")


def _check_interpreter(plan: LaunchPlan) -> Iterator[Finding]:
    return _check_python(plan.python, bool(plan.container or plan.setup), plan.cluster)


def _check_python(python: str, comes_later: bool, cluster: str) -> Iterator[Finding]:
    """An interpreter that a setup or a container provides cannot be looked at from here."""
    if python == sys.executable and importlib.util.find_spec("torch") is None:
        hint = "pip install 'gptctl[train]', or set `python` or `setup` in the cluster profile"
        yield PYTHON.found("Launch.cluster", cluster, f"{python} has no torch", hint)
    elif python != sys.executable and not comes_later and not _is_program(python):
        yield PYTHON.found(
            "Launch.cluster", cluster, f"there is no {python}", "see `python` in the profile"
        )


def _is_program(name: str) -> bool:
    from shutil import which

    return which(name) is not None
