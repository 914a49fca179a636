"""Tasks of the bundled trainer, such as an evaluation: here in the foreground, or as a job.

Both run the same program with the same arguments. A job gets its config from the run folder, and
the foreground the files and overrides that were typed.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from gptctl.backends import Backends
from gptctl.engine.file_reading import read_json
from gptctl.jobs.store import JobRecord
from gptctl.jobs.trained_models import TrainedModel, on_hosts
from gptctl.planning.build import Site
from gptctl.planning.render import render
from gptctl.spec.check import MEMORY, Checked, check_tree, config_sources
from gptctl.spec.resources import home
from trainer.config import Override, load_tree
from trainer.config.task_config import task_tree
from trainer.config.tree import ReadFile
from trainer.errors import WRONG_USAGE, Finding, UserError, errors_in, in_order

PACKAGE = "trainer.tasks"
# These copy and tokenize, which one process does; the others would wait for it.
SINGLE = ("export_weights", "import_weights", "prepare_data", "train_tokenizer")
ALONE = {"Global.device": "cpu", "Launch.nodes": "1", "Launch.gpus_per_node": "1"}
KEY = "GPTCTL_CHECKPOINT_KEY"  # signs checkpoints; the only secret that tasks need
SCRIPT = "task.sh"


class Task(NamedTuple):
    """What the user typed: a program of `trainer.tasks`, its input and its arguments."""

    verb: str  # of gptctl; the start of the job's id
    program: str
    model: TrainedModel | None  # None: an import or data, which have no checkpoint yet
    options: tuple[str, ...]  # besides the config and overrides of keys
    operands: tuple[str, ...] = ()  # after the checkpoint
    config: str | None = None
    overrides: tuple[Override, ...] = ()

    @property
    def module(self) -> str:
        return f"{PACKAGE}.{self.program}"


def check_task(task: Task, launch: Sequence[Override], site: Site, is_job: bool) -> Checked:
    """Check the task's config and layout; `launch` are the flags that set keys of Launch."""
    found: list[Finding] = []
    files: list[ReadFile] = []
    own = [
        Override("Launch.job_name", task.verb, "gptctl"),
        *(_key_of(task.model.record) if task.model and task.model.record else ()),
        *(Override(*each, "gptctl") for each in ALONE.items() if task.program in SINGLE),
    ]
    entry = [
        Override("Launch.entrypoint", f"-m {task.module}", "gptctl", verbatim=True),
        Override("Launch.args", _words(task, site, is_job), "gptctl"),
        # A job runs copies of the program.
        *([Override("Launch.files", (site.trainer,), "gptctl")] if is_job else ()),
    ]
    if task.model:
        model, overrides = task.model, [*own, *task.overrides, *launch, *entry]
        tree = task_tree(model.config, model.origin, task.config, overrides, found, files)
    else:  # what an import overrides is a part of a model that only the import knows
        tree = load_tree(None, [*own, *launch, *entry], found, files)
    if tree is None:
        raise UserError(f"{task.config}: invalid config", findings=found)
    path = Path(task.config) if task.config else None
    checked = check_tree(path, tree, found)
    # The estimate is that of a training.
    kept = in_order(each for each in checked.findings if each.code != MEMORY.code)
    sources = (*config_sources(files), *checked.sources)
    return checked._replace(findings=kept, sources=sources)


def _key_of(record: JobRecord) -> list[Override]:
    """The reference to the key with which a job signed its checkpoints."""
    resolved = (read_json(record.run_folder / "config.json") or {}).get("resolved")
    launch = resolved.get("Launch") if isinstance(resolved, Mapping) else None
    secrets: Any = launch.get("secrets") if isinstance(launch, Mapping) else None
    reference = secrets.get(KEY) if isinstance(secrets, Mapping) else None
    if not isinstance(reference, Mapping):
        return []
    return [Override(f"Launch.secrets.{KEY}", json.dumps(reference), f"job {record.id}")]


def _words(task: Task, site: Site, is_job: bool) -> tuple[str, ...]:
    """The arguments of the program. A job's own config has everything that was typed."""
    words = list(task.options)
    if not is_job or not task.model:
        words += ["-c", site.absolute(task.config)] if task.config else []
        words += [w for each in task.overrides for w in ("-o", f"{each.key}={each.value}")]
    # Last, and after `--`: a prompt may start with a dash.
    return (*words, "--", *([task.model.folder] if task.model else ()), *task.operands)


def seen_by(task: Task, checked: Checked, step: int | None, backends: Backends) -> Task:
    """The task with the path under which its cluster has the checkpoint."""
    model = task.model
    if model is None or model.is_here == checked.cluster.sees_files:
        return task
    record = model.record
    if record and record.cluster == checked.cluster.name and not checked.cluster.sees_files:
        return task._replace(model=on_hosts(record, step, backends))
    if not model.is_here and record:
        hint = (
            f"copy it first: gptctl fetch {record.id} --checkpoints; or run there: "
            f"--cluster {record.cluster}"
        )
        raise UserError(f"the checkpoint of {record.id} is not on this machine", hint, WRONG_USAGE)
    message = f"{checked.cluster.name} does not see {model.folder}"
    hint = "run here: omit --cluster; or name a job of that cluster"
    raise UserError(message, hint, WRONG_USAGE)


def foreground_script(checked: Checked, site: Site, backends: Backends) -> str:
    """The script that runs a task on this machine: what a dry run prints is what runs."""
    if checked.machines.nodes > 1:
        hint = "run it as a job: add --detach; or use one node"
        raise UserError(f"{checked.machines.nodes} nodes in the foreground", hint, WRONG_USAGE)
    if errors_in(checked.findings):
        raise UserError("the task was not started", findings=checked.findings)
    plan = backends.of(checked.cluster.kind).plan(checked, site)
    script = render(plan, SCRIPT)
    # Our own interpreter has the trainer; another one gets this package and no other.
    return script if plan.python == sys.executable else _with_trainer(script, site)


def _with_trainer(script: str, site: Site) -> str:
    from shlex import quote

    link = home() / "programs" / site.trainer.strip("/").replace("/", "-") / "trainer"
    link.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    if not os.path.lexists(link):
        link.symlink_to(site.trainer)
    head, _, rest = script.partition("\n")
    path = f'export PYTHONPATH={quote(str(link.parent))}"${{PYTHONPATH:+:$PYTHONPATH}}"'
    return f"{head}\n{path}\n{rest}"
