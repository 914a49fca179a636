"""Judge the environment variables of a job before it is sent: names, values, pairs, settings left over from debugging.

Pure: it sees the variables and the job's shape; neither hardware, nor files, nor the variables of its own process.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

from gptctl.spec.env_names import (
    BESIDE_NCCL,
    BOOLEANS,
    CASE_COUNTS,
    DEAD_NAMES,
    FILTERS,
    FOR_DEBUGGING,
    FUNCTIONS,
    GPU_ONLY,
    HANG_FINDERS,
    IFNAMES,
    INTEGERS,
    LINTED,
    LINTED_WHEN_NEAR,
    MOST,
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

UNSETTABLE = Rule("E001", "a variable's name must be one that a shell can export")
COMPUTED = Rule(
    "E002", "variables that the launcher, torchrun or Slurm sets for each process must not be set"
)
SCHEDULER = Rule("E003", "`SLURM_*` and `SBATCH_*` belong to the batch system", "warning")
MISSPELT = Rule("E004", "a variable's name should be one that NCCL or torch reads", "warning")
UNKNOWN = Rule(
    "E005", "a variable with a prefix of NCCL or torch should be one that they read", "warning"
)
DEAD = Rule("E006", "a variable should be read by some current release", "warning")
OLD_NAME = Rule("E007", "a renamed variable should be set by its new name", "warning")
TWO_NAMES = Rule(
    "E008", "the old and the new name of one variable should not have different values", "warning"
)
NOT_INTEGER = Rule("E009", "the variable takes an integer")
OUT_OF_RANGE = Rule("E010", "an integer must lie in the variable's range")
NOT_BOOLEAN = Rule("E011", "the variable takes a truth value")
NOT_CHOICE = Rule("E012", "the value must be one that the reader knows")
BAD_FILTER = Rule(
    "E013", "`NCCL_ALGO` and `NCCL_PROTO` take `names` or `function:names`, joined by `;`"
)
NO_NAME = Rule("E014", "a list of interfaces or adapters should name them", "warning")
ONE_HOST = Rule("E015", "several nodes need an interface that reaches the others", "warning")
LOOPBACK = Rule("E016", "a list of excluded interfaces should hold `lo`", "warning")
NCCL_SYNTAX = Rule("E017", "Gloo and TensorPipe take plain interface names")
TWO_NETWORKS = Rule("E018", "Gloo and NCCL should use the same interface", "warning")
BLOCKING = Rule(
    "E019", "blocking waits should not be combined with asynchronous error handling", "warning"
)
LEFT_ON = Rule("E020", "a setting for debugging should not stay on", "warning")
LOG_FLOOD = Rule("E021", "the detailed log of many ranks should go to files", "warning")
SHARED_LOG = Rule("E022", "each process should write its own log file", "warning")
THREADS = Rule("E023", "a process should not start more threads than the task has CPUs", "warning")
HIDDEN_GPUS = Rule("E024", "the choice of GPUs should be left to the launcher", "warning")
ONE_QUEUE = Rule("E025", "sharded parameters need more than one CUDA connection")
MANY_QUEUES = Rule(
    "E026", "tensor parallelism should use one CUDA connection on Hopper and older", "warning"
)
HANDLING = Rule("E027", "a failed collective should end the process at once", "warning")
SWITCHED_OFF = Rule("E028", "what finds hangs should stay on", "warning")
NO_EFFECT = Rule("E029", "a setting should not be cancelled by another one", "warning")
LOCAL_DUMP = Rule("E030", "dumps of several nodes are best kept on a shared file system", "notice")
NO_GPU = Rule("E031", "variables for GPUs do nothing on CPUs", "notice")


class Job(NamedTuple):
    """The job's shape; `mp` and `sharding` are degrees, `device` is "gpu" or "cpu"."""

    nodes: int
    world: int
    device: str
    mp: int
    sharding: int
    cpus_per_task: int | None
    gpus_per_node: int


class Setting(NamedTuple):
    """One variable, among the others and for a job."""

    name: str
    value: str
    env: Mapping[str, str]
    job: Job

    @property
    def new_name(self) -> str:
        return RENAMED.get(self.name, self.name)

    @property
    def same_as_unset(self) -> bool:
        return not self.value.strip() and self.name.startswith(
            "NCCL_"
        )  # torch raises on an empty value

    def found(self, rule: Rule, message: str, hint: str = "") -> Finding:
        return rule.found(self.name, self.value, message, hint)


def lint(env: Mapping[str, str], job: Job) -> list[Finding]:
    """Findings for the variables of `env`, in its order."""
    idle = () if job.device == "gpu" else tuple(name for name in env if name.startswith(GPU_ONLY))
    told = [name for name in idle if "NCCL_" in name]
    active = {name: value for name, value in env.items() if name not in idle}
    findings: list[Finding] = []
    for name, value in env.items():
        if name in active:
            findings += (
                found for check in CHECKS for found in check(Setting(name, value, active, job))
            )
        elif told and name == told[0]:
            verb = "has" if len(told) == 1 else "have"
            findings.append(
                NO_GPU.found(
                    name, value, f"{_quoted(told)} {verb} no effect on device `{job.device}`"
                )
            )
    return findings


def _quoted(names: list[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def _number(name: str, value: str) -> int | None:
    """What the reader takes the value for: NCCL knows hexadecimal and octal, torch decimal numbers only."""
    text = (
        value.split(",")[0].strip() if name == "OMP_NUM_THREADS" else value.strip()
    )  # OpenMP: one per nesting level
    if name.startswith("NCCL_") and re.fullmatch(r"[-+]?0([xX][0-9a-fA-F]+|[0-7]+)", text):
        return int(text, 16 if "x" in text.lower() else 8)
    return int(text) if re.fullmatch(r"[-+]?[0-9]+", text) else None


def _on(name: str, value: str | None) -> bool:
    if name in INTEGERS:
        return _number(name, value or "") not in (None, 0)  # a word counts as 0
    return value is not None and value.strip().lower() not in ("", "off", *NO)


def _name(s: Setting) -> Iterator[Finding]:
    if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", s.name):
        yield s.found(
            UNSETTABLE,
            f"`{s.name}` is not a name for a variable",
            "use letters, digits and `_` only",
        )
    elif s.name in READONLY_IN_BASH:
        yield s.found(UNSETTABLE, f"bash does not let `{s.name}` be set", "choose another name")
    elif s.name in SET_FOR_EACH_PROCESS or (
        s.name.startswith("GPTCTL_") and s.name != "GPTCTL_HOME"
    ):
        yield s.found(
            COMPUTED,
            f"`{s.value}` would be overwritten, or would break the rendezvous",
            "remove it",
        )
    elif s.name.startswith("SBATCH_"):
        yield s.found(
            SCHEDULER,
            "sbatch reads it before the job exists",
            "remove it; set the option for the cluster",
        )
    elif s.name.startswith("SLURM_"):
        yield s.found(
            SCHEDULER,
            f"`{s.value}` would reach every srun of the job",
            "remove it, unless it is for srun",
        )
    elif s.name in DEAD_NAMES:
        yield s.found(DEAD, "no current NCCL or torch reads it", DEAD_NAMES[s.name])
    else:
        yield from _spelling(s)


def _spelling(s: Setting) -> Iterator[Finding]:
    known = {*NCCL, *TORCH, *RENAMED}
    if s.name in known or s.name in BESIDE_NCCL or s.name.startswith(PLUGIN_PREFIXES):
        return
    linted = s.name.upper().startswith(LINTED)
    if not linted and not s.name.upper().startswith(LINTED_WHEN_NEAR):
        return
    least = 0.8 if linted else 0.9  # a shared prefix alone makes short names alike
    near = [name for name in closest(s.name, known) if _likeness(s.name, name) >= least]
    if near:
        yield s.found(
            MISSPELT,
            "neither NCCL nor torch reads it",
            f"did you mean `{RENAMED.get(near[0], near[0])}`?",
        )
    elif linted:
        yield s.found(
            UNKNOWN,
            "neither NCCL nor torch is known to read it",
            "remove it, or check its spelling",
        )


def _likeness(name: str, other: str) -> float:
    from difflib import SequenceMatcher  # slow to import, needed only for mistakes

    return SequenceMatcher(None, name.upper(), other).ratio()


def _renamed(s: Setting) -> Iterator[Finding]:
    new = {**RENAMED, "PYTORCH_CUDA_ALLOC_CONF": "PYTORCH_ALLOC_CONF"}.get(s.name)
    if new and s.env.get(new, s.value) != s.value:
        yield s.found(
            TWO_NAMES, f"`{s.value}` here, but `{new}` is `{s.env[new]}`", f"set `{new}` only"
        )
    elif s.name in RENAMED:
        yield s.found(OLD_NAME, f"it is now called `{new}`", f"rename it to `{new}`")


def _integer(s: Setting) -> Iterator[Finding]:
    if s.new_name not in INTEGERS or s.same_as_unset:
        return
    low, high = INTEGERS[s.new_name]
    number = _number(s.name, s.value)
    if number is None:
        word = s.value.strip().lower()
        use = "1" if word in ("on", *YES) else "0" if word in ("off", *NO) else "an integer"
        read_as = (
            ", and NCCL would read it as 0"
            if s.new_name.startswith("NCCL_") and word[:1].isalpha()
            else ""
        )
        yield s.found(NOT_INTEGER, f"`{s.value}` is not an integer{read_as}", f"use {use}")
    elif not low <= number <= high:
        limits = f"at least {low}" if high == MOST else f"between {low} and {high}"
        yield s.found(
            OUT_OF_RANGE, f"{number} is not {limits}", f"use a value {limits}, or remove it"
        )


def _boolean(s: Setting) -> Iterator[Finding]:
    if s.new_name in BOOLEANS and s.value.lower() not in (*YES, *NO):
        yield s.found(
            NOT_BOOLEAN,
            f"`{s.value}` is neither true nor false, and torch would stop",
            "use 1 or 0",
        )


def _choice(s: Setting) -> Iterator[Finding]:
    several = SEVERAL_OF.get(s.name)
    known = (several or ONE_OF.get(s.name, "")).split()
    if not known or s.same_as_unset:
        return
    words = (
        [word.strip() for word in s.value.removeprefix("^").split(",")]
        if several
        else [s.value.strip()]
    )
    for word in words:
        if word not in known and (s.name in CASE_COUNTS or word.upper() not in known):
            near = closest(word, known)
            hint = f"did you mean `{near[0]}`?" if near else f"use one of {', '.join(known)}"
            yield s.found(NOT_CHOICE, f"`{word}` is not a value of {s.name}", hint)


def _filter(s: Setting) -> Iterator[Finding]:
    known = FILTERS.get(s.name, "").split()
    parts = [part for part in s.value.split(";") if part] if known else []
    for position, part in enumerate(parts):
        function, colon, names = part.rpartition(":")
        wrong = [name for name in names.removeprefix("^").split(",") if name.lower() not in known]
        if position and not colon:
            message, options = (
                f"only the first list may lack a function, but `{part}` lacks one",
                FUNCTIONS.split(),
            )
        elif colon and function.lower() not in FUNCTIONS.split():
            message, options = f"`{function}` is not a function", FUNCTIONS.split()
        elif wrong:
            message, options = f"`{wrong[0]}` is not known to {s.name}", known
        else:
            continue
        yield s.found(BAD_FILTER, message, f"use one of {', '.join(options)}")


class Interfaces(NamedTuple):
    """NCCL's way to name interfaces: `^` excludes, `=` compares whole names; else a name is a prefix."""

    excluded: bool
    exact: bool
    names: tuple[str, ...]

    @staticmethod
    def of(value: str) -> Interfaces:
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
    local = [name for name in listed.names if name == "lo" or name.startswith(ONLY_THIS_HOST)]
    if not all(listed.names):
        yield s.found(
            NO_NAME, f"`{s.value}` has an empty name", "name the interface, or remove the variable"
        )
    elif s.name in IFNAMES and s.job.nodes > 1 and local and not listed.excluded:
        yield s.found(
            ONE_HOST, f"`{local[0]}` does not reach the other nodes", "name an interface that does"
        )
    elif (
        s.name == "NCCL_SOCKET_IFNAME"
        and s.job.nodes > 1
        and listed.excluded
        and listed.admit("lo")
    ):
        hint = f"use `{s.value.strip()},lo`, or name the interface, e.g. `=eth0`"
        yield s.found(
            LOOPBACK, f"`{s.value}` replaces NCCL's own exclusions, so `lo` can be chosen", hint
        )


def _plain_names(s: Setting) -> Iterator[Finding]:
    if s.name not in IFNAMES[1:]:
        return
    nccl = s.env.get("NCCL_SOCKET_IFNAME", "").strip()
    other = [name for name in Interfaces.of(s.value).names if not Interfaces.of(nccl).admit(name)]
    if re.search(r"(^|,)\s*[\^=]", s.value):
        yield s.found(
            NCCL_SYNTAX, f"`{s.value}` is NCCL's syntax", "give the interface's name, e.g. `eth0`"
        )
    elif s.name == "TP_SOCKET_IFNAME" and "," in s.value:
        yield s.found(NCCL_SYNTAX, f"`{s.value}` is a list", "give one interface")
    elif s.job.nodes > 1 and nccl and other:
        message = f"`{other[0]}` is not among NCCL_SOCKET_IFNAME's `{nccl}`"
        yield s.found(TWO_NETWORKS, message, "use one interface for both")


def _debugging(s: Setting) -> Iterator[Finding]:
    harmless = s.name == "TORCH_DISTRIBUTED_DEBUG" and s.value.strip().upper() != "DETAIL"
    if s.new_name in FOR_DEBUGGING and _on(s.name, s.value) and not harmless:
        yield s.found(
            LEFT_ON,
            f"`{s.value}` is for debugging: {FOR_DEBUGGING[s.new_name]}",
            "remove it for a real run",
        )


def _logs(s: Setting) -> Iterator[Finding]:
    if s.name == "NCCL_DEBUG" and s.value.strip().upper() in ("INFO", "TRACE"):
        if s.job.world > 64 and not s.env.get("NCCL_DEBUG_FILE"):
            hint = "set NCCL_DEBUG_FILE to a path with `%h` and `%p`, or use WARN"
            yield s.found(
                LOG_FLOOD, f"`{s.value}` makes {s.job.world} ranks write to one log", hint
            )
    elif (
        s.name == "NCCL_DEBUG_FILE"
        and s.value
        and not s.value.startswith("/dev/")
        and s.job.world > 1
    ):
        marks = ("%h", "%p") if s.job.nodes > 1 else ("%p",)
        lacking = [mark for mark in marks if mark not in s.value]
        if lacking:
            message = f"`{s.value}` is one file for several of the {s.job.world} processes"
            yield s.found(SHARED_LOG, message, f"use `{'.'.join([s.value, *lacking])}`")
    elif (
        s.new_name == "TORCH_FR_DUMP_TEMP_FILE"
        and s.value.startswith(("/tmp/", "/dev/shm/"))
        and s.job.nodes > 1
    ):
        yield s.found(
            LOCAL_DUMP,
            f"`{s.value}` stays behind on each node",
            "use a path under the run's folder",
        )


def _resources(s: Setting) -> Iterator[Finding]:
    cpus, ranks = s.job.cpus_per_task, max(1, s.job.gpus_per_node)
    if s.name == "OMP_NUM_THREADS" and cpus:
        number = _number(s.name, s.value) or 0
        if number > cpus:
            hint = f"use {max(1, cpus // ranks)} or less: the ranks of a node share the CPUs"
            yield s.found(THREADS, f"{number} threads, but the task has {cpus} CPUs", hint)
    elif s.name == "CUDA_VISIBLE_DEVICES":
        count = len([device for device in s.value.split(",") if device.strip()])
        yield s.found(
            HIDDEN_GPUS,
            f"`{s.value}` shows {count} GPUs to {ranks} ranks on every node",
            "remove it",
        )


def _connections(s: Setting) -> Iterator[Finding]:
    if s.name != "CUDA_DEVICE_MAX_CONNECTIONS":
        return
    number = _number(s.name, s.value) or 0
    if number == 1 and s.job.sharding > 1:
        message = (
            f"1 keeps the gathers of sharding {s.job.sharding} from overlapping with computation"
        )
        yield s.found(ONE_QUEUE, message, "remove it, or use 8 or more")
    elif number > 1 and s.job.mp > 1 and s.job.sharding == 1:
        message = f"{number} does not keep the order in which mp {s.job.mp} overlaps communication"
        yield s.found(MANY_QUEUES, message, "use 1; from Blackwell on the value does not matter")


def _failures(s: Setting) -> Iterator[Finding]:
    handling = s.env.get(
        "TORCH_NCCL_ASYNC_ERROR_HANDLING", "1"
    ).strip()  # torchrun sets 1 where it is not set
    if s.name == "TORCH_NCCL_ASYNC_ERROR_HANDLING" and handling in ("0", "1"):
        effect = (
            "leaves the other ranks hanging"
            if handling == "0"
            else "aborts communicators first, which can hang"
        )
        yield s.found(HANDLING, f"{handling} {effect}", "use 3; without a value torchrun sets 1")
    elif s.new_name == "TORCH_NCCL_BLOCKING_WAIT" and _on(s.name, s.value) and handling != "0":
        message = f"it takes the place of TORCH_NCCL_ASYNC_ERROR_HANDLING, which is {handling}"
        yield s.found(BLOCKING, message, "remove it: a timeout ends the process without it")
    elif s.name in HANG_FINDERS and s.value.strip() and not _on(s.name, s.value):
        yield s.found(SWITCHED_OFF, f"`{s.value}`: {HANG_FINDERS[s.name]}", "remove it")


def _cancelled(s: Setting) -> Iterator[Finding]:
    if s.name == "NCCL_IB_DISABLE" and _on(s.name, s.value):
        others = [name for name in s.env if name.startswith("NCCL_IB_") and name != s.name]
        if others:
            yield s.found(
                NO_EFFECT, f"`{s.value}` makes {_quoted(others)} useless", "remove one or the other"
            )
    elif s.name == "NCCL_OOB_NET_IFNAME" and not _on(
        "NCCL_OOB_NET_ENABLE", s.env.get("NCCL_OOB_NET_ENABLE")
    ):
        yield s.found(
            NO_EFFECT,
            "NCCL reads it only if NCCL_OOB_NET_ENABLE is 1",
            "set NCCL_OOB_NET_ENABLE to 1",
        )
    elif s.name == "TORCH_NCCL_DUMP_ON_TIMEOUT" and _on(s.name, s.value):
        needed = ("TORCH_NCCL_ENABLE_MONITORING", "TORCH_FR_BUFFER_SIZE")
        for off in (name for name in needed if name in s.env and not _on(name, s.env[name])):
            yield s.found(
                NO_EFFECT, f"nothing is dumped while {off} is `{s.env[off]}`", f"remove {off}"
            )
    elif s.name.startswith("FI_EFA_") and "efa" not in s.env.get("FI_PROVIDER", "efa"):
        yield s.found(
            NO_EFFECT,
            f"FI_PROVIDER is `{s.env['FI_PROVIDER']}`, not efa",
            "remove one or the other",
        )


Check = Callable[[Setting], Iterator[Finding]]
CHECKS: tuple[Check, ...] = (
    *(_name, _renamed, _integer, _boolean, _choice, _filter, _interfaces, _plain_names),
    *(_debugging, _logs, _resources, _connections, _failures, _cancelled),
)
