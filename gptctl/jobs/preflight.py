"""Check on this machine, before a job is submitted, that it can start.

Looks for scripts, data, secrets, the interpreter and run_root. Changes nothing.
"""

from __future__ import annotations

import errno
import importlib.util
import os
import stat
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from gptctl.backends import Backend
from gptctl.engine.launch_plan import LaunchPlan, has_data
from gptctl.jobs.code_files import KINDS as FILE_KINDS
from gptctl.jobs.code_files import CodeFiles
from gptctl.jobs.module_source import is_installed, is_runnable, module_source
from gptctl.jobs.resume import CKPT_DIR
from gptctl.planning.build import Site, python_of
from gptctl.spec.check import Checked
from gptctl.spec.cluster import Cluster
from gptctl.spec.launch import is_variable
from gptctl.spec.machine_rules import (
    check_addresses_here,
    check_apprise_here,
    check_cache_here,
    check_cores_here,
    check_data_here,
    check_trackers_here,
)
from trainer.config.foreign_weights import foreign_weights, import_hint
from trainer.config.sections import SaveLoad
from trainer.errors import Finding, Rule, install_line

LARGEST_SECRET = 100_000  # bytes; of an environment variable, Linux allows 128 KiB

SCRIPT = Rule("S001", "the script and the files copied with it must exist, and be files")
DATA = Rule("S002", "the data and the checkpoint that a run starts from must exist")
PYTHON = Rule("S003", "the interpreter of the ranks must exist and have torch")
OUTPUT = Rule("S005", "a run must not write into the checkpoints of another run")
WRITABLE = Rule("S006", "run_root must be a writable folder")
SECRET_SOURCE = Rule("S007", "a secret must be readable where the job runs")
ENDPOINT = Rule("S013", "the rendezvous endpoint of a submitted job must not be a shell variable")


def run_preflight(
    checked: Checked, plan: LaunchPlan, site: Site, backend: Backend
) -> list[Finding]:
    """Run all checks that this machine can make for the cluster."""
    traits = checked.cluster.traits
    found = [
        *check_program(checked, plan, site),
        *_check_data(checked, site, bool(plan.continues)),
        # Folders of remote hosts, and interpreters of other machines, cannot be seen from here.
        *(_check_run_root(checked.cluster, site) if checked.cluster.sees_files else ()),
        *(_check_interpreter(plan) if traits.is_one_machine else ()),
        *_check_secrets(plan),
        *_check_endpoint(plan),
        *check_apprise_here(checked),
        *_check_notify(plan),
        *check_cores_here(checked),
        *check_cache_here(checked, site.folder),
        *check_data_here(checked, site.folder),
        *check_trackers_here(checked, site.python),
        *backend.preflight(checked, plan),
    ]
    return [finding.at(checked.place_of(finding.key)) for finding in found]


def check_program(checked: Checked, plan: LaunchPlan, site: Site) -> Iterator[Finding]:
    """Check that the script or module exists, and that its files can be copied."""
    launch = checked.launch
    # The bundled trainer is always there, and needs no other files; `validate` refuses the same.
    if launch.entrypoint == "trainer":
        yield from check_copied_files(launch.files, site, checked.cluster.run_root)
        return
    if launch.module:
        listed = [Path(site.absolute(file)) for file in launch.files]
        program = module_source(launch.module, listed, Path(site.folder))
        yield from _check_module(launch.module, program, plan, site)
    else:
        program = Path(site.absolute(launch.entrypoint))
        yield from _check_script(launch.entrypoint, program)
    if program and program.stem == "rank_log":
        message = "gptctl copies its own rank_log.py into the same folder"
        yield SCRIPT.found("Launch.entrypoint", launch.entrypoint, message, "rename the program")
    yield from _check_files(launch.files, program, site, checked.cluster.run_root)


def _check_script(entrypoint: str, script: Path) -> Iterator[Finding]:
    if not script.is_file():
        what = "is a folder" if script.is_dir() else "does not exist"
        what = "is not a regular file" if script.exists() and not script.is_dir() else what
        hint = "use a Python script; for the bundled trainer: -m trainer"
        yield SCRIPT.found("Launch.entrypoint", entrypoint, f"{script} {what}", hint)


def _check_module(
    module: str, source: Path | None, plan: LaunchPlan, site: Site
) -> Iterator[Finding]:
    if source is None:
        # Another interpreter may have packages that this one has not.
        is_ours = plan.python == sys.executable
        if is_ours and not is_installed(module):
            message = f"there is no module {module} in {site.folder}, and none is installed"
            hint = "check its name and the current folder; Launch.files can list its package"
            yield SCRIPT.found("Launch.entrypoint", f"-m {module}", message, hint)
    elif not is_runnable(module, source):
        message = f"{source} has no module {module} that can be run"
        hint = "name one of its modules, such as -m pkg.train, or add __main__.py to the package"
        yield SCRIPT.found("Launch.entrypoint", f"-m {module}", message, hint)


def _check_files(
    files: Sequence[str], program: Path | None, site: Site, run_root: str
) -> Iterator[Finding]:
    # All files are copied into one folder: two of the same name would overwrite each other.
    taken = {"rank_log.py": "gptctl's own rank_log.py"}
    taken |= {program.name: str(program)} if program else {}
    for file in files:
        path = site.absolute(file)
        name = os.path.basename(path)
        if not os.path.exists(path):
            yield SCRIPT.found(
                "Launch.files", file, f"{file} does not exist in {site.folder}", "check the path"
            )
            continue
        if taken.setdefault(name, path) != path:
            message = f"{path} has the same name as {taken[name]}"
            hint = "rename one of them: all files are copied into one folder"
            yield SCRIPT.found("Launch.files", file, message, hint)
    yield from check_copied_files(files, site, run_root)


def check_copied_files(files: Sequence[str], site: Site, run_root: str) -> Iterator[Finding]:
    """Report what is listed, or is in a listed folder, and is not a file that can be copied."""
    code, key = CodeFiles([site.absolute(run_root)]), "Launch.files"
    for file in files:
        for problem in code.problems(site.absolute(file)):
            yield SCRIPT.found(key, file, problem.message, problem.hint)


def _check_data(checked: Checked, site: Site, continues: bool) -> Iterator[Finding]:
    """Check that what the bundled trainer reads exists, and that it overwrites nothing."""
    # Other machines have other files: the job checks them when it starts.
    if (
        checked.launch.entrypoint != "trainer"
        or checked.resolved is None
        or not checked.cluster.sees_files
    ):
        return
    for name, path in checked.inputs.items():
        if not has_data(site.absolute(path)):
            # Compute nodes may see file systems that this machine does not: only warn.
            rule = DATA if checked.cluster.traits.is_one_machine else DATA._replace(level="warning")
            yield rule.found(
                name, path, f"{path} does not exist in {site.folder}", "check the path"
            )
        elif name == CKPT_DIR and (problem := foreign_weights(site.absolute(path))):
            yield DATA.found(name, path, problem, import_hint(site.absolute(path)))
    # A job of a chain resumes what the jobs before it left there.
    if not continues:
        yield from _check_output(checked.resolved.run.Engine.save_load, site)


def _check_output(save_load: SaveLoad, site: Site) -> Iterator[Finding]:
    # Without ckpt_dir the run starts at step 0 and would overwrite the older checkpoints.
    output = save_load.output_dir
    if output and not save_load.ckpt_dir and any(Path(site.absolute(output)).glob("step_*")):
        message = f"{output} contains checkpoints of an earlier run"
        hint = "set Engine.save_load.ckpt_dir=auto to resume from them, or use another output_dir"
        yield OUTPUT.found("Engine.save_load.output_dir", output, message, hint)


def check_profile(cluster: Cluster, site: Site) -> Iterator[Finding]:
    """Check a profile for `gptctl clusters`, as far as this machine can know."""
    # For other machines `gptctl doctor` looks there.
    if cluster.traits.is_one_machine:
        yield from _check_python(
            python_of(cluster, site.python),
            bool(cluster.container.image or cluster.setup),
            cluster.name,
        )
        yield from _check_run_root(cluster, site)


def _check_run_root(cluster: Cluster, site: Site) -> Iterator[Finding]:
    root = Path(site.absolute(cluster.run_root))
    # run_root may not exist yet: its nearest existing parent decides whether it can be created.
    existing = next(place for place in (root, *root.parents) if os.path.lexists(place))
    if not existing.is_dir() or not os.access(existing, os.W_OK | os.X_OK):
        what = "is not writable" if existing.is_dir() else "is not a folder"
        message = f"{existing} {what}"
        yield WRITABLE.found(
            "run_root", cluster.run_root, message, "set another run_root in the cluster profile"
        )


def _check_secrets(plan: LaunchPlan) -> Iterator[Finding]:
    """Check that secrets can be read, as far as this machine can know."""
    # A job inherits this environment. A file can be checked only if the job runs here.
    for name, source in plan.secrets.items():
        if "file" in source:
            problem = _secret_file_problem(source["file"]) if plan.is_one_machine else ""
        else:
            problem = (
                "" if os.environ.get(source["env"]) else f"{source['env']} is not set, or empty"
            )
        if problem:
            hint = "fix it, or use another {file: path} or {env: NAME}"
            yield SECRET_SOURCE.found(f"Launch.secrets.{name}", None, problem, hint)


def _check_notify(plan: LaunchPlan) -> Iterator[Finding]:
    """Check that addresses can be read; a job starts all the same if they cannot."""

    def is_seen(target: Mapping[str, Any]) -> bool:
        # A file is read on the node.
        sources = [target["url"], target.get("secret")]
        is_file = any(isinstance(source, Mapping) and "file" in source for source in sources)
        return plan.is_one_machine or not is_file

    return check_addresses_here(filter(is_seen, plan.notify))


def _secret_file_problem(file: str) -> str:
    """Why a secret cannot be read from a file, or an empty string."""
    # Not opened: the job's shell would wait forever for the other end of a named pipe.
    try:
        found = os.stat(file)
    except OSError as error:
        return f"cannot read {file}: {error.strerror}"
    if (kind := stat.S_IFMT(found.st_mode)) != stat.S_IFREG:
        return f"{file} is {FILE_KINDS.get(kind, 'a folder')}, not a regular file"
    # It becomes an environment variable, for which Linux has a limit.
    if not 0 < found.st_size <= LARGEST_SECRET:
        return f"{file} has {found.st_size:,} bytes; a secret has 1 to {LARGEST_SECRET:,}"
    return "" if os.access(file, os.R_OK) else f"cannot read {file}: {os.strerror(errno.EACCES)}"


def _check_endpoint(plan: LaunchPlan) -> Iterator[Finding]:
    # Only the shell that runs a printed script knows the variable.
    if is_variable(plan.master_addr):
        message = f"{plan.master_addr} is not known when the job is submitted"
        hint = "leave it empty: gptctl uses the first host"
        yield ENDPOINT.found("Launch.rdzv.endpoint", plan.master_addr, message, hint)


def _check_interpreter(plan: LaunchPlan) -> Iterator[Finding]:
    return _check_python(plan.python, bool(plan.is_in_container or plan.setup), plan.cluster)


def _check_python(python: str, comes_later: bool, cluster: str) -> Iterator[Finding]:
    """Check the interpreter of the ranks, unless a setup or a container provides it."""
    # For our own interpreter finding torch takes milliseconds; importing it would take seconds.
    if python == sys.executable and importlib.util.find_spec("torch") is None:
        hint = f"{install_line('train')}, or set `python` or `setup` in the cluster profile"
        yield PYTHON.found("Launch.cluster", cluster, f"{python} has no torch", hint)
    elif python != sys.executable and not comes_later and not _is_program(python):
        yield PYTHON.found(
            "Launch.cluster",
            cluster,
            f"the interpreter {python} does not exist",
            "set `python` in the cluster profile",
        )


def _is_program(name: str) -> bool:
    # By PATH or by path, as the shell finds it.
    from shutil import which

    return which(name) is not None
