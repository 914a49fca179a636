"""A launch plan and a template in, shell text out. The only user of jinja2.

Every `{{ value }}` is quoted for the shell by the environment itself, so that no value can become code; only what a
template marks with `| shell` is code on purpose. A name that no template knows is an error, never an empty word.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gptctl.engine.atomic_files import private_files
from gptctl.engine.contract import BATCH_SCRIPT, ENGINE_FILE
from gptctl.engine.launch_plan import LaunchPlan
from gptctl.spec.resources import folder, home
from trainer.errors import WRONG_USAGE, UserError, closest

if TYPE_CHECKING:
    from jinja2 import BytecodeCache, Environment

SIGNALS = "SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1"  # without USR1 torchrun would die of it and leave its ranks alone
SCRIPTS = {"srun-script": "srun-script.sh", "sbatch": "sbatch.sh", "loop": "loop.sh"}
COMMAND = "command.sh"
FOLDERS = ("jobs", "styles", "doctor", "parts")  # of templates/; file names are unique over all
# Set by a template for the one that it includes.
BETWEEN_TEMPLATES = ("node", "address", "port", "c10d_host", "local_addr", "on_head", "number")


class Shell(str):
    """Text that is shell code already."""


def render(
    plan: LaunchPlan, script: str, templates: Sequence[Path] = (), node: int | None = None
) -> str:
    """The text of a script, from the first of the folders that has its template, else from ours."""
    from jinja2 import TemplateError

    known = _context(plan, node)
    environment = _environment(templates)
    try:
        template = environment.get_template(f"{script}.j2")
        if templates:
            _check_names(environment, f"{script}.j2", known)
        return template.render(known)
    except TemplateError as error:
        raise _explained(error) from None
    except (ArithmeticError, LookupError, TypeError, ValueError) as error:  # of an expression in it
        raise _explained(error) from None


def check_syntax(name: str, text: str) -> None:
    """Raises UserError where bash cannot read a script that a user's template made."""
    import subprocess

    read = subprocess.run(["bash", "-n"], input=text.encode(), capture_output=True)
    if read.returncode:
        said = read.stderr.decode(errors="replace").strip().splitlines()
        message = f"bash cannot read {name}: {said[0] if said else ''}"
        raise UserError(message, "fix the template", WRONG_USAGE)
    if name == BATCH_SCRIPT and ENGINE_FILE not in text:
        hint = (
            "since 0.1.0 the script only starts gptctl's engine, which runs srun, restarts and "
            "requeues: begin with templates/jobs/job.sbatch.j2, and keep its last lines"
        )
        raise UserError(f"your {name}.j2 does not start gptctl's engine", hint, WRONG_USAGE)


def script_of(style: str) -> str:
    """The script that a style prints for pasting or queueing by hand."""
    return SCRIPTS.get(style, COMMAND)


def _environment(templates: Sequence[Path]) -> Environment:
    from jinja2 import ChoiceLoader, DictLoader, FileSystemLoader, StrictUndefined
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    own = {file.name: file for file in templates if file.is_file()}
    for file in own.values():
        if file.name not in known_templates():
            hint = f"name it after the one it replaces: {', '.join(known_templates())}"
            raise UserError(f"{file} replaces no template", hint, WRONG_USAGE)
    ours = [folder("templates") / name for name in FOLDERS]
    loaders = [FileSystemLoader(str(place)) for place in [*templates, *ours] if place.is_dir()]
    remote = FileSystemLoader(str(folder("templates") / "remote"))  # first: never replaced
    replaced = DictLoader({name: file.read_text(encoding="utf-8") for name, file in own.items()})
    environment = ImmutableSandboxedEnvironment(
        bytecode_cache=_compiled_templates(),
        loader=ChoiceLoader([remote, replaced, *loaders]),
        undefined=StrictUndefined,
        finalize=quoted,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        comment_start_string="{%#",  # {# is a part of ${#array[@]}
        comment_end_string="#%}",
        optimized=False,  # each template is rendered once
        autoescape=False,  # `finalize` does it, for shells
    )
    environment.filters["shell"] = Shell
    return environment


def _compiled_templates() -> BytecodeCache | None:
    """Compiling templates takes a tenth of the time of a dry run. Only a folder that is the user's alone is trusted."""
    from jinja2 import FileSystemBytecodeCache

    cache = home() / "compiled-templates"
    try:
        with private_files():
            cache.mkdir(parents=True, exist_ok=True)
        found = cache.stat()
    except OSError:
        return None
    is_private = found.st_uid == os.getuid() and not found.st_mode & 0o077
    return FileSystemBytecodeCache(str(cache), "%s") if is_private else None


def known_templates() -> list[str]:
    places = [folder("templates") / name for name in FOLDERS]
    return sorted(file.name for place in places for file in place.glob("*.j2"))


def quoted(value: Any) -> Any:
    """A value as shell words: a list as several, anything else as one."""
    from jinja2 import Undefined

    if isinstance(value, (Shell, Undefined)):
        return value
    if isinstance(value, (list, tuple)):
        return Shell(" ".join(shlex.quote(str(word)) for word in value))
    return Shell(shlex.quote(str(value)))


def _context(plan: LaunchPlan, node: int | None) -> dict[str, Any]:
    is_rank_log = os.path.basename(plan.program[0]) == "rank_log.py"
    inner = plan.program[1:] if is_rank_log else plan.program
    is_trainer = inner[:2] == ("-m", "trainer")
    return {
        **plan.as_json(),
        "launcher": launcher(plan, is_trainer),
        "torchrun_restarts": plan.torchrun_restarts,
        "attempts": plan.attempts,
        "is_trainer": is_trainer,
        "signals": SIGNALS,
        "ranks_here": plan.per_node * (plan.nodes if plan.is_one_machine else 1),
        "numbers": [node]
        if node is not None
        else list(range(1 if plan.form == "c10d" else plan.nodes)),
        "on_head": False,
    }


def launcher(plan: LaunchPlan, is_trainer: bool) -> list[str]:
    """The words before the options: container, interpreter, launcher."""
    if plan.form == "launch":  # the trainer reads LOCAL_RANK; a script that old wants it as a flag
        return [
            *plan.container,
            plan.python,
            "-m",
            "torch.distributed.launch",
            *(["--use-env"] if is_trainer else []),
        ]
    if plan.python == "python":
        return [*plan.container, "torchrun"]
    return [*plan.container, plan.python, "-m", "torch.distributed.run"]


def _check_names(environment: Environment, name: str, known: Mapping[str, Any]) -> None:
    """Finds every misspelt variable of a template and of what it includes, before one of them is met."""
    from jinja2 import meta, nodes

    names = {*known, *BETWEEN_TEMPLATES}
    faults: list[str] = []
    pending, seen = [name], set()
    while pending:
        current = pending.pop()
        seen.add(current)
        assert environment.loader is not None
        source, file, _ = environment.loader.get_source(environment, current)
        tree = environment.parse(source)
        for wrong in sorted(meta.find_undeclared_variables(tree) - names):
            lines = [found.lineno for found in tree.find_all(nodes.Name) if found.name == wrong]
            faults.append(f"{file or current}:{min(lines)}: {_unknown(wrong, names)}")
        pending += [
            each for each in meta.find_referenced_templates(tree) if each and each not in seen
        ]
    if faults:
        raise UserError("\n".join(faults), f"known: {', '.join(sorted(known))}", WRONG_USAGE)


def _unknown(name: str, known: Iterable[str]) -> str:
    near = closest(name, known)
    return f"there is no variable {name}" + (f"; did you mean {near[0]}?" if near else "")


def _explained(error: Exception) -> UserError:
    from traceback import walk_tb

    line, file = (
        getattr(error, "lineno", None),
        getattr(error, "filename", None) or getattr(error, "name", None),
    )
    for frame, number in walk_tb(
        error.__traceback__
    ):  # an error of the run itself has its place in the traceback only
        if frame.f_code.co_filename.endswith(".j2"):
            line, file = number, frame.f_code.co_filename
    where = f"{file or 'template'}{f':{line}' if line else ''}"
    if type(error).__name__ == "TemplateNotFound":
        return UserError(
            f"there is no template {error}", f"known: {', '.join(known_templates())}", WRONG_USAGE
        )
    return UserError(
        f"{where}: {getattr(error, 'message', None) or error}",
        "see templates/ for ours",
        WRONG_USAGE,
    )
