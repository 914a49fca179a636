"""Render shell scripts from a launch plan and a template. The only module that uses jinja2.

The jinja2 environment quotes every `{{ value }}` for the shell, so that no value can become code;
only what a template marks with `| shell` is code on purpose. An unknown variable is an error, never
an empty word.
"""

from __future__ import annotations

import os
import shlex
import signal
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from gptctl.engine.contract import BATCH_SCRIPT, ENGINE_FILE
from gptctl.engine.launch_plan import LaunchPlan
from gptctl.planning import compiled_templates
from gptctl.planning.container import setup_inside
from gptctl.planning.user_templates import FOLDERS, UserTemplate, effective, known_templates
from gptctl.spec.launch import is_variable
from gptctl.spec.resources import folder, home
from trainer.errors import WRONG_USAGE, UserError, closest

if TYPE_CHECKING:
    from jinja2 import BytecodeCache, Environment

# USR1 asks the ranks to save. If torchrun did not handle it, USR1 would kill torchrun, but not its
# ranks.
SIGNALS = "SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1"
SCRIPTS = {"srun-script": "srun-script.sh", "sbatch": "sbatch.sh", "loop": "loop.sh"}
COMMAND = "command.sh"
# Variables that scripts set for the ranks, besides those of the plan.
OWN_VARIABLES = ("OMP_NUM_THREADS", "GPTCTL_LOG_DIR")
# Variables that a template sets for one that it includes.
BETWEEN_TEMPLATES = ("node", "address", "port", "c10d_host", "local_addr", "on_head", "number")


# A template of somebody else may be rendered before anybody trusts it, by a dry run.
MAX_SECONDS = 5  # for rendering; ours take milliseconds
MAX_PRODUCT = 1 << 20  # characters or items of a repeated text or list, and bits of a number


class Shell(str):
    """Text that is shell code already, and must not be quoted again."""


def render(
    plan: LaunchPlan,
    script: str,
    templates: Sequence[UserTemplate] = (),
    node: int | None = None,
) -> str:
    """Render a script from the first of the user's templates of that name, or from ours."""
    from jinja2 import TemplateError

    known = _context(plan, node)
    environment = _environment(templates)
    try:
        with _limited_time(is_needed=bool(templates)):
            template = environment.get_template(f"{script}.j2")
            # jinja2 itself stops at the first unknown variable: report all of them at once.
            if templates:
                _check_names(environment, f"{script}.j2", known)
            return template.render(known)
    except TemplateError as error:
        raise _explained(error) from None
    # Errors of expressions in a template, such as {{ 1 / 0 }}, or of one that includes itself.
    except (ArithmeticError, LookupError, TypeError, ValueError) as error:
        raise _explained(error) from None
    except (RecursionError, MemoryError, TimeoutError) as error:
        raise _explained(error) from None


@contextmanager
def _limited_time(is_needed: bool) -> Iterator[None]:
    """Stop a user's template that never ends. Only the main thread can be interrupted."""
    if not is_needed or threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(number: int, frame: object) -> None:
        raise TimeoutError(f"a template took longer than {MAX_SECONDS} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, MAX_SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def check_syntax(name: str, text: str) -> None:
    """Check a script of a user's template; raise UserError if bash cannot parse it."""
    import subprocess

    read = subprocess.run(["bash", "-n"], input=text.encode(), capture_output=True)
    if read.returncode:
        errors = read.stderr.decode(errors="replace").strip().splitlines()
        message = f"bash cannot parse {name}: {errors[0] if errors else ''}"
        raise UserError(message, "fix the template", WRONG_USAGE)
    # A template of an older version would run without restarts and never report a result.
    if name == BATCH_SCRIPT and ENGINE_FILE not in text:
        hint = (
            "since 0.1.0, job.sbatch only starts gptctl's engine, which calls srun and handles "
            "restarts and requeues: start from a new copy of templates/jobs/job.sbatch.j2, and "
            "keep its last lines"
        )
        raise UserError(f"your {name}.j2 does not start gptctl's engine", hint, WRONG_USAGE)


def script_of(style: str) -> str:
    """The script that `gptctl render --style` prints, to be pasted or submitted by hand."""
    return SCRIPTS.get(style, COMMAND)


def _environment(templates: Sequence[UserTemplate]) -> Environment:
    from jinja2 import ChoiceLoader, FileSystemLoader, FunctionLoader, StrictUndefined
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    own = effective(templates)

    def load_own(name: str) -> tuple[str, str, None] | None:
        # With its path, which error messages name.
        return (own[name].text, own[name].file.path, None) if name in own else None

    ours = FileSystemLoader([str(folder("templates") / name) for name in FOLDERS])
    # First, so that users cannot replace what runs on remote hosts.
    remote = FileSystemLoader(str(folder("templates") / "remote"))

    class LimitedEnvironment(ImmutableSandboxedEnvironment):
        """One operation in C, such as 9**9**9, cannot be interrupted: refuse it beforehand."""

        intercepted_binops = frozenset(["*", "**"])

        def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
            if _is_too_large(operator, left, right):
                raise ValueError(f"the result of {operator} is too large")
            return super().call_binop(context, operator, left, right)

    environment = LimitedEnvironment(
        bytecode_cache=_compiled_templates(),
        loader=ChoiceLoader([remote, FunctionLoader(load_own), ours]),
        undefined=StrictUndefined,
        finalize=quoted,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        comment_start_string="{%#",  # bash uses {# in ${#array[@]}
        comment_end_string="#%}",
        optimized=False,  # each template is rendered once
        autoescape=False,  # that is for HTML; `finalize` quotes for the shell
    )
    environment.filters["shell"] = Shell
    return environment


def _is_too_large(operator: str, left: Any, right: Any) -> bool:
    sizes = [
        each.bit_length() if isinstance(each, int) else len(each) if hasattr(each, "__len__") else 0
        for each in (left, right)
    ]
    if operator == "**":
        return isinstance(right, int) and sizes[0] * abs(right) > MAX_PRODUCT
    times = [each for each in (left, right) if isinstance(each, int)]
    is_repeated = any(hasattr(each, "__len__") for each in (left, right))
    return max(sizes) * max([1, *times]) > MAX_PRODUCT if is_repeated else sum(sizes) > MAX_PRODUCT


def _compiled_templates() -> BytecodeCache | None:
    """A cache of compiled templates: compiling takes a tenth of the time of a dry run."""
    from jinja2 import BytecodeCache
    from jinja2.bccache import Bucket

    place = home() / "compiled-templates-2"  # 1: of environments without limits
    if not compiled_templates.is_private(place):
        return None

    class CompiledTemplates(BytecodeCache):
        def load_bytecode(self, bucket: Bucket) -> None:
            if code := compiled_templates.load(place / bucket.key):
                bucket.bytecode_from_string(code)

        def dump_bytecode(self, bucket: Bucket) -> None:
            compiled_templates.save(place / bucket.key, bucket.bytecode_to_string())

    return CompiledTemplates()


def quoted(value: Any) -> Any:
    """Quote a value for the shell: a list becomes several words, anything else one word."""
    from jinja2 import Undefined

    if isinstance(value, (Shell, Undefined)):
        return value
    if isinstance(value, (list, tuple)):
        return Shell(" ".join(shlex.quote(str(word)) for word in value))
    return Shell(shlex.quote(str(value)))


def _context(plan: LaunchPlan, node: int | None) -> dict[str, Any]:
    """All variables that templates may use."""
    # Scripts without logs start the trainer directly, all others through rank_log.py.
    is_rank_log = os.path.basename(plan.program[0]) == "rank_log.py"
    inner = plan.program[1:] if is_rank_log else plan.program
    is_trainer = inner[:2] == ("-m", "trainer")
    # A variable is left to the shell that runs the script; in double quotes it stays one word.
    address = plan.master_addr
    return {
        **plan.as_json(),
        "master_addr": Shell(f'"{address}"') if is_variable(address) else address,
        "launcher": launcher(plan, is_trainer),
        "interpreter": [*plan.container, plan.python],
        "torchrun_restarts": plan.torchrun_restarts,
        "attempts": plan.attempts,
        "is_trainer": is_trainer,
        "signals": SIGNALS,
        "ranks_here": plan.per_node * (plan.nodes if plan.is_one_machine else 1),
        "numbers": [node]
        if node is not None
        else list(range(1 if plan.form == "c10d" else plan.nodes)),
        "on_head": False,
        # Inside a container that srun starts. Its image would override variables not named.
        "setup_inside": setup_inside(plan.setup if plan.srun_container else ()),
        "container_env": ",".join([*plan.env, *plan.secrets, *OWN_VARIABLES]),
    }


def launcher(plan: LaunchPlan, is_trainer: bool) -> list[str]:
    """The words before torchrun's options: container, interpreter, launcher."""
    # torch.distributed.launch passes --local-rank to old scripts; the trainer reads LOCAL_RANK.
    if plan.form == "launch":
        return [
            *plan.container,
            plan.python,
            "-m",
            "torch.distributed.launch",
            *(["--use-env"] if is_trainer else []),
        ]
    # In a prepared environment torchrun is on the PATH.
    if plan.python == "python":
        return [*plan.container, "torchrun"]
    return [*plan.container, plan.python, "-m", "torch.distributed.run"]


def _check_names(environment: Environment, name: str, known: Mapping[str, Any]) -> None:
    """Report all unknown variables of a template and of those that it includes."""
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
    return f"unknown variable {name}" + (f"; did you mean {near[0]}?" if near else "")


def _explained(error: Exception) -> UserError:
    """Turn an error of jinja2 into a message with file and line."""
    from traceback import walk_tb

    if isinstance(error, RecursionError):
        hint = "copy the bundled template and change the copy"
        message = "a template includes itself, or is nested too deep"
        return UserError(message, hint, WRONG_USAGE)
    if isinstance(error, MemoryError):
        message = "a template needs more memory than there is"
        return UserError(message, "copy the bundled template and change the copy", WRONG_USAGE)

    line = getattr(error, "lineno", None)
    file = getattr(error, "filename", None) or getattr(error, "name", None)
    # Syntax errors know their place; errors while rendering have it in the traceback only.
    for frame, number in walk_tb(error.__traceback__):
        if frame.f_code.co_filename.endswith(".j2"):
            line, file = number, frame.f_code.co_filename
    where = f"{file or 'template'}{f':{line}' if line else ''}"
    if type(error).__name__ == "TemplateNotFound":
        return UserError(
            f"unknown template: {error}", f"known: {', '.join(known_templates())}", WRONG_USAGE
        )
    return UserError(
        f"{where}: {getattr(error, 'message', None) or error}",
        "fix the template; see templates/ for the bundled ones",
        WRONG_USAGE,
    )
