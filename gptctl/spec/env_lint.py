"""Check the environment variables of a job before it is submitted.

It finds misspelt names, invalid values, conflicting settings and settings left over from debugging.
Pure: it sees the variables and the size of the job, but neither hardware, nor files, nor its own
environment.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping

from gptctl.engine.contract import CHECKPOINT_KEY_VARIABLE
from gptctl.spec.env_names import (
    BESIDE_NCCL,
    BOOLEANS,
    CASE_SENSITIVE,
    DEAD_NAMES,
    FILTERS,
    FOR_DEBUGGING,
    FOR_USERS,
    FUNCTIONS,
    GPU_ONLY,
    HANG_FINDERS,
    IFNAMES,
    INT_MAX,
    INTEGERS,
    LINTED,
    LINTED_IF_SIMILAR,
    NCCL,
    NO,
    ONE_OF,
    ONLY_THIS_HOST,
    PLUGIN_PREFIXES,
    READONLY_IN_BASH,
    RENAMED,
    SET_FOR_EACH_PROCESS,
    SEVERAL_OF,
    TORCH,
    YES,
)
from trainer.errors import Finding, Rule, closest
from trainer.named_tuple import NamedTuple
from trainer.secret_names import looks_secret

# Names.
UNSETTABLE = Rule("E001", "a variable must have a name that a shell can export")
COMPUTED = Rule(
    "E002", "variables that the launcher, torchrun or Slurm sets for each process must not be set"
)
SCHEDULER = Rule("E003", "`SLURM_*` and `SBATCH_*` should be left to Slurm", "warning")
MISSPELT = Rule("E004", "the name of a variable should be spelt correctly", "warning")
UNKNOWN = Rule(
    "E005",
    "a variable with a prefix of NCCL or torch should be one that NCCL or torch reads",
    "warning",
)
DEAD = Rule("E006", "a variable should be one that current releases read", "warning")
OLD_NAME = Rule("E007", "a renamed variable should be set under its new name", "warning")
TWO_NAMES = Rule(
    "E008", "the old and the new name of one variable should not have different values", "warning"
)
# Values.
NOT_INTEGER = Rule("E009", "the value of an integer variable must be an integer")
OUT_OF_RANGE = Rule("E010", "an integer must be in the range of its variable")
NOT_BOOLEAN = Rule("E011", "the value of a boolean variable must be 1 or 0")
NOT_CHOICE = Rule("E012", "the value must be one of those that the variable supports")
BAD_FILTER = Rule(
    "E013",
    "`NCCL_ALGO` and `NCCL_PROTO` must be `names` or `function:names`, separated by `;`",
)
# Networks.
NO_NAME = Rule(
    "E014", "a list of interfaces or adapters should not contain an empty name", "warning"
)
ONE_HOST = Rule("E015", "on several nodes, the interface should reach the other nodes", "warning")
LOOPBACK = Rule("E016", "a list of excluded interfaces should include `lo`", "warning")
NCCL_SYNTAX = Rule("E017", "Gloo and TensorPipe must get plain interface names")
TWO_NETWORKS = Rule("E018", "Gloo and NCCL should use the same interface", "warning")
# Debugging, resources, failures.
BLOCKING = Rule(
    "E019", "blocking waits should not be combined with asynchronous error handling", "warning"
)
LEFT_ON = Rule("E020", "a debugging setting should not be left on", "warning")
LOG_FLOOD = Rule("E021", "the detailed log of many ranks should go to files", "warning")
SHARED_LOG = Rule("E022", "each process should write its own log file", "warning")
THREADS = Rule("E023", "a process should not start more threads than the task has CPUs", "warning")
HIDDEN_GPUS = Rule("E024", "the launcher should choose the GPUs", "warning")
ONE_QUEUE = Rule("E025", "sharded parameters must have more than one CUDA connection")
MANY_QUEUES = Rule(
    "E026", "tensor parallelism should use one CUDA connection on Hopper and older", "warning"
)
HANDLING = Rule("E027", "a failed collective should stop the process at once", "warning")
SWITCHED_OFF = Rule("E028", "hang detection should stay on", "warning")
NO_EFFECT = Rule("E029", "a setting should not be cancelled by another one", "warning")
LOCAL_DUMP = Rule("E030", "dumps of several nodes should go to a shared file system", "notice")
NO_GPU = Rule("E031", "variables for GPUs should be set for GPU jobs only", "notice")
PLAIN_SECRET = Rule("E032", "a secret should be named in secrets, not written in env", "warning")


class Job(NamedTuple):
    """The size of the job; `mp` and `sharding` are degrees, `device` is "gpu" or "cpu"."""

    nodes: int
    world: int
    device: str
    mp: int
    sharding: int
    cpus_per_task: int | None
    gpus_per_node: int


class Setting(NamedTuple):
    """One variable, with all other variables and the job it is for."""

    name: str
    value: str
    env: Mapping[str, str]
    job: Job

    @property
    def new_name(self) -> str:
        return RENAMED.get(self.name, self.name)

    @property
    def same_as_unset(self) -> bool:
        # NCCL ignores an empty value; torch raises an error.
        return not self.value.strip() and self.name.startswith("NCCL_")

    def found(self, rule: Rule, message: str, hint: str = "") -> Finding:
        return rule.found(self.name, self.value, message, hint)


def lint(env: Mapping[str, str], job: Job) -> list[Finding]:
    """Check all variables of `env`; return the findings in its order."""
    # On CPUs the variables for GPUs have no effect: one notice for all, and no further checks.
    idle = () if job.device == "gpu" else tuple(name for name in env if name.startswith(GPU_ONLY))
    # CUDA_… alone is not worth a notice: CUDA_VISIBLE_DEVICES is often set to hide GPUs.
    told = [name for name in idle if "NCCL_" in name]
    active = {name: value for name, value in env.items() if name not in idle}
    findings: list[Finding] = []
    for name, value in env.items():
        if name in active:
            setting = Setting(name, value, active, job)
            findings += (found for check in CHECKS for found in check(setting))
        elif told and name == told[0]:
            verb = "has" if len(told) == 1 else "have"
            message = f"{_quoted(told)} {verb} no effect on device `{job.device}`"
            findings.append(NO_GPU.found(name, value, message))
    return findings


def _quoted(names: list[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def _number(name: str, value: str) -> int | None:
    """Parse a value as its reader does: NCCL accepts hexadecimal and octal, torch only decimal."""
    # OpenMP takes a list with one number per nesting level; the first is the one that matters.
    text = value.split(",")[0].strip() if name == "OMP_NUM_THREADS" else value.strip()
    if name.startswith("NCCL_") and re.fullmatch(r"[-+]?0([xX][0-9a-fA-F]+|[0-7]+)", text):
        return int(text, 16 if "x" in text.lower() else 8)
    return int(text) if re.fullmatch(r"[-+]?[0-9]+", text) else None


def _on(name: str, value: str | None) -> bool:
    if name in INTEGERS:
        return _number(name, value or "") not in (None, 0)  # NCCL reads a word as 0
    return value is not None and value.strip().lower() not in ("", "off", *NO)


def _name(s: Setting) -> Iterator[Finding]:
    if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", s.name):
        yield s.found(
            UNSETTABLE,
            f"invalid variable name: `{s.name}`",
            "use letters, digits and `_` only",
        )
    elif s.name in READONLY_IN_BASH:
        yield s.found(UNSETTABLE, f"`{s.name}` is read-only in bash", "choose another name")
    elif s.name == CHECKPOINT_KEY_VARIABLE:
        # Without the value: findings are printed and logged.
        message = "the key of checkpoints must not be stored with the job as plain text"
        hint = f"remove it, and set Launch.secrets.{s.name} to {{file: PATH}}"
        yield COMPUTED.found(s.name, None, message, hint)
    # GPTCTL_… are the variables by which gptctl's own parts talk.
    elif s.name in SET_FOR_EACH_PROCESS or (
        s.name.startswith("GPTCTL_") and s.name not in FOR_USERS
    ):
        yield s.found(
            COMPUTED,
            f"`{s.value}` would be overwritten, or would break the rendezvous",
            "remove it",
        )
    # sbatch has already read its options when the job's environment is set.
    elif s.name.startswith("SBATCH_"):
        yield s.found(
            SCHEDULER,
            "sbatch reads it before the job exists",
            "remove it, and set the option in the cluster profile",
        )
    elif s.name.startswith("SLURM_"):
        yield s.found(
            SCHEDULER,
            f"`{s.value}` would reach every srun of the job",
            "remove it, unless every srun needs it",
        )
    elif s.name in DEAD_NAMES:
        yield s.found(DEAD, "no current release of NCCL or torch reads it", DEAD_NAMES[s.name])
    else:
        yield from _spelling(s)


def _secret(s: Setting) -> Iterator[Finding]:
    if s.value and looks_secret(s.name):
        message = "it looks like a secret, and env is stored with the job as plain text"
        hint = f"remove it, and set Launch.secrets.{s.name} to {{env: {s.name}}} or {{file: PATH}}"
        # Without the value: findings are printed and logged.
        yield PLAIN_SECRET.found(s.name, None, message, hint)


def _spelling(s: Setting) -> Iterator[Finding]:
    known = {*NCCL, *TORCH, *RENAMED}
    # Plugins define variables of their own: they cannot all be listed.
    if s.name in known or s.name in BESIDE_NCCL or s.name.startswith(PLUGIN_PREFIXES):
        return
    linted = s.name.upper().startswith(LINTED)
    if not linted and not s.name.upper().startswith(LINTED_IF_SIMILAR):
        return
    # Other prefixes are common in other programs: there only a very similar name is a typing error.
    least = 0.8 if linted else 0.9
    near = [name for name in closest(s.name, known) if _similarity(s.name, name) >= least]
    if near:
        hint = f"did you mean `{RENAMED.get(near[0], near[0])}`?"
        yield s.found(MISSPELT, "neither NCCL nor torch reads it", hint)
    elif linted:
        message = "neither NCCL nor torch is known to read it"
        yield s.found(UNKNOWN, message, "remove it, or check its spelling")


def _similarity(name: str, other: str) -> float:
    # Slow to import, and needed only for unknown names.
    from difflib import SequenceMatcher

    return SequenceMatcher(None, name.upper(), other).ratio()


def _renamed(s: Setting) -> Iterator[Finding]:
    new = {**RENAMED, "PYTORCH_CUDA_ALLOC_CONF": "PYTORCH_ALLOC_CONF"}.get(s.name)
    if new and s.env.get(new, s.value) != s.value:
        yield s.found(
            TWO_NAMES, f"it is `{s.value}`, but `{new}` is `{s.env[new]}`", f"set only `{new}`"
        )
    # PYTORCH_CUDA_ALLOC_CONF alone is fine: torch still reads the old name.
    elif s.name in RENAMED:
        yield s.found(OLD_NAME, f"its new name is `{new}`", f"rename it to `{new}`")


def _integer(s: Setting) -> Iterator[Finding]:
    if s.new_name not in INTEGERS or s.same_as_unset:
        return
    low, high = INTEGERS[s.new_name]
    number = _number(s.name, s.value)
    if number is None:
        # A word such as `yes` shows what the user wants: suggest the number for it.
        word = s.value.strip().lower()
        use = "1" if word in ("on", *YES) else "0" if word in ("off", *NO) else "an integer"
        read_as = (
            "; NCCL reads it as 0" if s.new_name.startswith("NCCL_") and word[:1].isalpha() else ""
        )
        yield s.found(NOT_INTEGER, f"`{s.value}` is not an integer{read_as}", f"use {use}")
    elif not low <= number <= high:
        # A range up to the largest int has no upper limit worth printing.
        limits = f"at least {low}" if high == INT_MAX else f"between {low} and {high}"
        yield s.found(
            OUT_OF_RANGE, f"{number} is not {limits}", f"use a value {limits}, or remove it"
        )


def _boolean(s: Setting) -> Iterator[Finding]:
    if s.new_name in BOOLEANS and s.value.lower() not in (*YES, *NO):
        yield s.found(
            NOT_BOOLEAN,
            f"`{s.value}` is not a boolean: torch would raise an error",
            "use 1 or 0",
        )


def _choice(s: Setting) -> Iterator[Finding]:
    """Check a variable that takes one word, or several, of a fixed set."""
    several = SEVERAL_OF.get(s.name)
    known = (several or ONE_OF.get(s.name, "")).split()
    if not known or s.same_as_unset:
        return
    # `^` in front of a list excludes what it lists.
    words = (
        [word.strip() for word in s.value.removeprefix("^").split(",")]
        if several
        else [s.value.strip()]
    )
    for word in words:
        if word not in known and (s.name in CASE_SENSITIVE or word.upper() not in known):
            near = closest(word, known)
            hint = f"did you mean `{near[0]}`?" if near else f"use one of {', '.join(known)}"
            yield s.found(NOT_CHOICE, f"invalid value of {s.name}: `{word}`", hint)


def _filter(s: Setting) -> Iterator[Finding]:
    known = FILTERS.get(s.name, "").split()
    parts = [part for part in s.value.split(";") if part] if known else []
    for position, part in enumerate(parts):
        function, colon, names = part.rpartition(":")
        wrong = [name for name in names.removeprefix("^").split(",") if name.lower() not in known]
        if position and not colon:
            # A list without a function is the default for all, and NCCL takes it only in front.
            message = f"`{part}` names no function: only the first list may omit it"
            options = FUNCTIONS.split()
        elif colon and function.lower() not in FUNCTIONS.split():
            message, options = f"unknown function: `{function}`", FUNCTIONS.split()
        elif wrong:
            message, options = f"invalid value of {s.name}: `{wrong[0]}`", known
        else:
            continue
        yield s.found(BAD_FILTER, message, f"use one of {', '.join(options)}")


class Interfaces(NamedTuple):
    """A list of interfaces in NCCL's syntax.

    `^` excludes the listed ones, `=` compares whole names; without it a name is a prefix.
    """

    excluded: bool
    exact: bool
    names: tuple[str, ...]

    @staticmethod
    def of(value: str) -> Interfaces:
        # An adapter may have a port: `mlx5_0:1`.
        rest = value.strip().removeprefix("^")
        names = tuple(part.split(":")[0].strip() for part in rest.removeprefix("=").split(","))
        return Interfaces(value.strip().startswith("^"), rest.startswith("="), names)

    def admit(self, interface: str) -> bool:
        listed = any(
            interface == name if self.exact else interface.startswith(name) for name in self.names
        )
        return listed != self.excluded


def _interfaces(s: Setting) -> Iterator[Finding]:
    if s.name not in (*IFNAMES, "NCCL_OOB_NET_IFNAME", "NCCL_IB_HCA"):
        return
    listed = Interfaces.of(s.value)
    # Loopback and the bridges of containers and virtual machines do not leave the host.
    local = [name for name in listed.names if name == "lo" or name.startswith(ONLY_THIS_HOST)]
    if not all(listed.names):
        yield s.found(
            NO_NAME, f"`{s.value}` contains an empty name", "name the interface, or remove it"
        )
    elif s.name in IFNAMES and s.job.nodes > 1 and local and not listed.excluded:
        yield s.found(
            ONE_HOST,
            f"`{local[0]}` does not reach the other nodes",
            "use an interface that reaches all nodes",
        )
    elif (
        s.name == "NCCL_SOCKET_IFNAME"
        and s.job.nodes > 1
        and listed.excluded
        and listed.admit("lo")
    ):
        message = f"`{s.value}` replaces NCCL's default exclusions, so NCCL may choose `lo`"
        hint = f"use `{s.value.strip()},lo`, or name the interface, such as `=eth0`"
        yield s.found(LOOPBACK, message, hint)


def _plain_names(s: Setting) -> Iterator[Finding]:
    if s.name not in IFNAMES[1:]:
        return
    # NCCL and Gloo parse interface names differently: a value cannot be copied from one to another.
    nccl = s.env.get("NCCL_SOCKET_IFNAME", "").strip()
    other = [name for name in Interfaces.of(s.value).names if not Interfaces.of(nccl).admit(name)]
    if re.search(r"(^|,)\s*[\^=]", s.value):
        yield s.found(
            NCCL_SYNTAX, f"`{s.value}` is in NCCL's syntax", "use a plain name, such as `eth0`"
        )
    elif s.name == "TP_SOCKET_IFNAME" and "," in s.value:
        yield s.found(NCCL_SYNTAX, f"`{s.value}` is a list", "use one interface")
    elif s.job.nodes > 1 and nccl and other:
        message = f"`{other[0]}` does not match NCCL_SOCKET_IFNAME, which is `{nccl}`"
        yield s.found(TWO_NETWORKS, message, "use the same interface for both")


def _debugging(s: Setting) -> Iterator[Finding]:
    # DETAIL adds a check to every collective; INFO only logs more.
    harmless = s.name == "TORCH_DISTRIBUTED_DEBUG" and s.value.strip().upper() != "DETAIL"
    if s.new_name in FOR_DEBUGGING and _on(s.name, s.value) and not harmless:
        yield s.found(
            LEFT_ON,
            f"`{s.value}` is for debugging: {FOR_DEBUGGING[s.new_name]}",
            "remove it for production runs",
        )


def _logs(s: Setting) -> Iterator[Finding]:
    if s.name == "NCCL_DEBUG" and s.value.strip().upper() in ("INFO", "TRACE"):
        # With few ranks the log is still readable, and often wanted.
        if s.job.world > 64 and not s.env.get("NCCL_DEBUG_FILE"):
            hint = "set NCCL_DEBUG_FILE to a path with `%h` and `%p`, or use WARN"
            yield s.found(
                LOG_FLOOD, f"`{s.value}`: {s.job.world} ranks would write to one log", hint
            )
    elif (
        s.name == "NCCL_DEBUG_FILE"
        and s.value
        and not s.value.startswith("/dev/")
        and s.job.world > 1
    ):
        # NCCL replaces %h by the host name and %p by the process id.
        marks = ("%h", "%p") if s.job.nodes > 1 else ("%p",)
        lacking = [mark for mark in marks if mark not in s.value]
        if lacking:
            message = f"several of the {s.job.world} processes would write to `{s.value}`"
            yield s.found(SHARED_LOG, message, f"use `{'.'.join([s.value, *lacking])}`")
    elif (
        s.new_name == "TORCH_FR_DUMP_TEMP_FILE"
        and s.value.startswith(("/tmp/", "/dev/shm/"))  # nosec B108  # a warning
        and s.job.nodes > 1
    ):
        yield s.found(
            LOCAL_DUMP,
            f"`{s.value}` is a local folder of each node",
            "use a path on a shared file system, such as the run folder",
        )


def _resources(s: Setting) -> Iterator[Finding]:
    cpus, ranks = s.job.cpus_per_task, max(1, s.job.gpus_per_node)
    if s.name == "OMP_NUM_THREADS" and cpus:
        # More threads than CPUs make every rank slower. One task runs all ranks of a node.
        number = _number(s.name, s.value) or 0
        if number > cpus:
            hint = f"use {max(1, cpus // ranks)} or less: the ranks of a node share the CPUs"
            yield s.found(THREADS, f"{number} threads, but the task has {cpus} CPUs", hint)
    elif s.name == "CUDA_VISIBLE_DEVICES":
        count = len([device for device in s.value.split(",") if device.strip()])
        yield s.found(
            HIDDEN_GPUS,
            f"`{s.value}` shows {count} GPUs to {ranks} ranks on every node",
            "remove it, and set Launch.devices if you need to choose GPUs",
        )


def _connections(s: Setting) -> Iterator[Finding]:
    if s.name != "CUDA_DEVICE_MAX_CONNECTIONS":
        return
    number = _number(s.name, s.value) or 0
    # Sharding needs parallel queues for its all-gathers. Tensor parallelism needs one queue: it
    # keeps communication kernels in front of the computation they should overlap with.
    if number == 1 and s.job.sharding > 1:
        message = (
            f"with 1, the all-gathers of sharding {s.job.sharding} cannot overlap with computation"
        )
        yield s.found(ONE_QUEUE, message, "remove it, or use 8 or more")
    elif number > 1 and s.job.mp > 1 and s.job.sharding == 1:
        message = (
            f"with {number}, communication of mp {s.job.mp} may start too late to overlap with "
            "computation"
        )
        yield s.found(MANY_QUEUES, message, "use 1; on Blackwell and newer any value is fine")


def _failures(s: Setting) -> Iterator[Finding]:
    # torchrun sets 1 if the variable is not set.
    handling = s.env.get("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1").strip()
    if s.name == "TORCH_NCCL_ASYNC_ERROR_HANDLING" and handling in ("0", "1"):
        effect = (
            "leaves the other ranks hanging"
            if handling == "0"
            else "aborts the communicators first, which can hang"
        )
        yield s.found(HANDLING, f"{handling} {effect}", "use 3")
    elif s.new_name == "TORCH_NCCL_BLOCKING_WAIT" and _on(s.name, s.value) and handling != "0":
        message = f"it overrides TORCH_NCCL_ASYNC_ERROR_HANDLING, which is {handling}"
        hint = "remove it: a timeout stops the process even without it"
        yield s.found(BLOCKING, message, hint)
    elif s.name in HANG_FINDERS and s.value.strip() and not _on(s.name, s.value):
        yield s.found(SWITCHED_OFF, f"`{s.value}`: {HANG_FINDERS[s.name]}", "remove it")


def _cancelled(s: Setting) -> Iterator[Finding]:
    if s.name == "NCCL_IB_DISABLE" and _on(s.name, s.value):
        others = [name for name in s.env if name.startswith("NCCL_IB_") and name != s.name]
        if others:
            verb = "has" if len(others) == 1 else "have"
            message = f"with `{s.value}`, {_quoted(others)} {verb} no effect"
            yield s.found(NO_EFFECT, message, f"remove {s.name}, or {_quoted(others)}")
    # Each of these needs another setting, which is off here.
    elif s.name == "NCCL_OOB_NET_IFNAME" and not _on(
        "NCCL_OOB_NET_ENABLE", s.env.get("NCCL_OOB_NET_ENABLE")
    ):
        yield s.found(
            NO_EFFECT,
            "it has no effect unless NCCL_OOB_NET_ENABLE is 1",
            "set NCCL_OOB_NET_ENABLE to 1",
        )
    elif s.name == "TORCH_NCCL_DUMP_ON_TIMEOUT" and _on(s.name, s.value):
        needed = ("TORCH_NCCL_ENABLE_MONITORING", "TORCH_FR_BUFFER_SIZE")
        for off in (name for name in needed if name in s.env and not _on(name, s.env[name])):
            yield s.found(
                NO_EFFECT, f"torch dumps nothing while {off} is `{s.env[off]}`", f"remove {off}"
            )
    elif s.name.startswith("FI_EFA_") and "efa" not in s.env.get("FI_PROVIDER", "efa"):
        yield s.found(
            NO_EFFECT,
            f"it has no effect: FI_PROVIDER is `{s.env['FI_PROVIDER']}`, not efa",
            f"remove {s.name} or FI_PROVIDER",
        )


# Each variable passes through all of them, in this order.
Check = Callable[[Setting], Iterator[Finding]]
CHECKS: tuple[Check, ...] = (
    *(_name, _renamed, _integer, _boolean, _choice, _filter, _interfaces, _plain_names),
    *(_debugging, _logs, _resources, _connections, _failures, _cancelled, _secret),
)
