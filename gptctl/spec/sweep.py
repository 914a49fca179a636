"""Sweep files: which runs of one config a sweep consists of.

Pure: text in, the overrides of every run out. It knows neither jobs nor schedulers. The words are
those of other tools: `method`, `parameters`, `metric`.
"""

from __future__ import annotations

import itertools
import json
import math
import random
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from gptctl.spec.trust import SWEEP, Source
from trainer.config import Override
from trainer.config.kinds import (
    NOT_A_NAME,
    OUT_OF_RANGE,
    WRONG_TYPE,
    BadItems,
    BadValue,
    Names,
    choice,
    file_path,
    integer,
    key,
    read_number,
    section,
    text,
)
from trainer.config.read import build, read_section
from trainer.config.record import record
from trainer.config.tree import List, Map, Node, ReadFile, Scalar, is_null, read_file
from trainer.errors import Finding, Place, Rule, UserError, errors_in, in_order

MAX_RUNS = 1000  # Slurm's default limit of an array is 1001
MAX_NAME = 48  # characters
METHODS = ("grid", "list", "random")
DISTRIBUTIONS = ("uniform", "log_uniform")
RUNS = Rule("W001", f"a sweep must consist of 1 to {MAX_RUNS} different runs")
METHOD = Rule("W002", "a sweep must have the keys of its method, and no others")


class Values(NamedTuple):
    """The values of a key that are tried, as they are written in YAML."""

    texts: tuple[str, ...]


class Range(NamedTuple):
    """The range of a key from which random values are drawn."""

    low: float
    high: float
    distribution: str = "uniform"
    is_integer: bool = False


class ParameterKind:
    """A list of values, `{values: […]}`, or `{min: …, max: …, distribution: …}`."""

    def read(self, node: Node) -> Values | Range:
        if isinstance(node, Map) and set(node.items) != {"values"}:
            return _range(node)
        listed = node.items["values"] if isinstance(node, Map) else node
        items = listed.items if isinstance(listed, List) else (listed,)
        if not items:
            raise BadValue(OUT_OF_RANGE, "no values", "list at least one value")
        return Values(tuple(yaml_text(item) for item in items))

    def schema(self) -> dict[str, Any]:
        return {}


def _range(node: Map) -> Range:
    unknown = [name for name in node.items if name not in ("min", "max", "distribution")]
    if unknown or not {"min", "max"} <= set(node.items):
        raise BadValue(
            WRONG_TYPE,
            "expected values, or min and max",
            "write [1, 2], or {min: 1e-5, max: 1e-3, distribution: log_uniform}",
        )
    texts = {name: _scalar(item) for name, item in node.items.items()}
    low, high = read_number(texts["min"]), read_number(texts["max"])
    form = texts.get("distribution", "uniform")
    if form not in DISTRIBUTIONS:
        hint = f"use {' or '.join(DISTRIBUTIONS)}"
        raise BadValue(NOT_A_NAME, f"unknown distribution {form}", hint)
    if low >= high or (form == "log_uniform" and low <= 0):
        least = "more than 0" if form == "log_uniform" else "less than max"
        raise BadValue(OUT_OF_RANGE, f"min {low:g} and max {high:g}", f"min must be {least}")
    is_integer = all(texts[name].lstrip("+-").isdecimal() for name in ("min", "max"))
    return Range(low, high, form, is_integer)


def _scalar(node: Node) -> str:
    if not isinstance(node, Scalar):
        raise BadValue(WRONG_TYPE, "expected one value", "write a number or a word").of(node)
    return node.text


class RunsKind:
    """The runs of method `list`: one mapping of keys to values for each."""

    def read(self, node: Node) -> tuple[dict[str, str], ...]:
        items = node.items if isinstance(node, List) else ()
        if not items or not all(isinstance(item, Map) and item.items for item in items):
            hint = "write one mapping for each run: - {Optimizer.lr.max_lr: 1e-4}"
            raise BadValue(WRONG_TYPE, "expected a list of mappings", hint)
        runs, faults = [], []
        for item in items:
            try:
                runs.append(Names(YamlKind(), PARAMETER, "a config key").read(item))
            except BadItems as bad:
                faults += bad.faults
        if faults:
            raise BadItems(faults, tuple(runs))
        return tuple(runs)

    def schema(self) -> dict[str, Any]:
        return {}


class YamlKind:
    """Any value, as the text that -o would take."""

    def read(self, node: Node) -> str:
        return yaml_text(node)

    def schema(self) -> dict[str, Any]:
        return {}


def yaml_text(node: Node) -> str:
    """A node in YAML's flow style: what one would type after `-o KEY=`."""
    if is_null(node):
        return ""
    # An override parses only lists, mappings and quoted text as YAML.
    return node.text if isinstance(node, Scalar) and not node.quoted else _flow(node)


def _flow(node: Node) -> str:
    if isinstance(node, List):
        return f"[{', '.join(map(_flow, node.items))}]"
    if isinstance(node, Map):
        pairs = (f"{_word(name)}: {_flow(item)}" for name, item in node.items.items())
        return f"{{{', '.join(pairs)}}}"
    return _quoted(node.text) if node.quoted else _word(node.text)


def _word(text: str) -> str:
    """Text without quotes where they are not needed: quoted text is never a number or empty."""
    return text if re.fullmatch(r"[\w.+/~$^(][\w.+*/~$%^()=-]*|-[\w.]+", text) else _quoted(text)


def _quoted(text: str) -> str:
    # YAML folds line breaks inside of single quotes. In double quotes it has the escapes of JSON.
    if not text.isprintable():
        return json.dumps(text, ensure_ascii=False)
    escaped = text.replace("'", "''")
    return f"'{escaped}'"


PARAMETER = r"[A-Za-z_][A-Za-z0-9_-]*(\.[A-Za-z0-9_-]+)*"


@record(frozen=True)
class Metric:
    """What the runs are compared by."""

    name: str = text("loss", "a metric of metrics.jsonl, such as loss or valid_loss")
    goal: str = choice("minimize", ("minimize", "maximize"), "minimize | maximize")


@record(frozen=True)
class Sweep:
    """The keys of a sweep file."""

    config: str | None = file_path(None, "the run config; empty: config.yaml")
    name: str | None = text(
        None,
        "start of the sweep's id",
        f"[A-Za-z0-9][A-Za-z0-9._-]{{0,{MAX_NAME - 1}}}",
        "a short name",
    )
    method: str = choice("grid", METHODS, f"{' | '.join(METHODS)}")
    parameters: Mapping[str, Values | Range] = key(
        Names(ParameterKind(), PARAMETER, "a config key"), {}, "config keys and their values"
    )
    runs: tuple[dict[str, str], ...] = key(RunsKind(), (), "with method list: the runs")
    samples: int | None = integer(None, "with method random: how many runs", low=1, high=MAX_RUNS)
    seed: int = integer(0, "with method random: seed of the random numbers", low=0)
    parallel: int | None = integer(
        None, "how many runs may run at once; empty: all", low=1, high=MAX_RUNS
    )
    metric: Metric = section(Metric, "what `sweep show` compares the runs by")


class SweepFile(NamedTuple):
    sweep: Sweep
    findings: tuple[Finding, ...]
    source: Source


Run = Mapping[str, str]  # key -> value of one run, as -o takes them


def load_sweep(path: Path) -> SweepFile:
    """Read and check a sweep file; collect all findings."""
    found: list[Finding] = []
    files: list[ReadFile] = []
    tree = read_file(path, found, files, SWEEP)
    reading = read_section(Sweep, tree or Map({}, Place(str(path))), found)
    sweep = build(Sweep, reading.values)
    judged = reading.valid_findings(_check(sweep)) if tree else []
    return SweepFile(sweep, in_order([*found, *judged]), Source(SWEEP, files[0]))


def _check(sweep: Sweep) -> Iterator[Finding]:
    rule = METHOD.using("method", "parameters", "runs", "samples")
    needed = {"grid": "parameters", "random": "parameters", "list": "runs"}[sweep.method]
    if not getattr(sweep, needed):
        hint = f"add {needed}, or choose another method: {', '.join(METHODS)}"
        yield rule.found(needed, None, f"method {sweep.method} needs {needed}", hint)
        return
    other = "runs" if needed == "parameters" else "parameters"
    if getattr(sweep, other):
        yield rule.found(other, None, f"method {sweep.method} does not use {other}", "remove it")
    if (sweep.method == "random") != (sweep.samples is not None):
        verb = "needs" if sweep.method == "random" else "does not use"
        hint = "write samples: 12" if sweep.method == "random" else "remove it, or use random"
        yield rule.found("samples", sweep.samples, f"method {sweep.method} {verb} samples", hint)
    ranges = [name for name, value in sweep.parameters.items() if isinstance(value, Range)]
    if ranges and sweep.method == "grid":
        hint = "list the values, or use method: random"
        yield rule.found(f"parameters.{ranges[0]}", None, "a grid needs values, not a range", hint)
        return
    yield from _check_number(sweep)


def _check_number(sweep: Sweep) -> Iterator[Finding]:
    rule = RUNS.using("parameters", "runs", "samples")
    texts = [each.texts for each in sweep.parameters.values() if isinstance(each, Values)]
    # Counted, not expanded: ten keys with ten values are ten thousand million runs.
    number = math.prod(map(len, texts)) if sweep.method == "grid" else len(sweep.runs)
    if number > MAX_RUNS:
        yield rule.found(
            "parameters" if sweep.method == "grid" else "runs",
            number,
            f"{number:,} runs are more than {MAX_RUNS:,}",
            "use fewer values, or method: random with samples",
        )
        return
    if sweep.method != "random" and len({*map(_identity, expand(sweep))}) < number:
        message, hint = "two runs have the same values", "remove the repeated values"
        yield rule.found("runs" if sweep.runs else "parameters", None, message, hint)


def _identity(run: Run) -> tuple[tuple[str, str], ...]:
    return tuple(sorted(run.items()))


def expand(sweep: Sweep) -> list[Run]:
    """The runs of a sweep, in the order in which they are submitted."""
    if sweep.method == "list":
        return list(sweep.runs)
    if sweep.method == "random":
        return _drawn(sweep)
    values = [each.texts for each in sweep.parameters.values() if isinstance(each, Values)]
    return [dict(zip(sweep.parameters, chosen)) for chosen in itertools.product(*values)]


def _drawn(sweep: Sweep) -> list[Run]:
    """Draw different runs; fewer than asked for if there are not that many."""
    generator = random.Random(sweep.seed)  # nosec B311  # draws values
    found: dict[tuple[tuple[str, str], ...], Run] = {}
    # A small grid has few combinations: drawing must end.
    for _ in range(20 * (sweep.samples or 0)):
        run = {name: _draw(each, generator) for name, each in sweep.parameters.items()}
        found.setdefault(_identity(run), run)
        if len(found) == sweep.samples:
            break
    return list(found.values())


def _draw(parameter: Values | Range, generator: random.Random) -> str:
    if isinstance(parameter, Values):
        return generator.choice(parameter.texts)
    low, high, form, is_integer = parameter
    if form == "log_uniform":
        drawn = math.exp(generator.uniform(math.log(low), math.log(high)))
    else:
        drawn = generator.uniform(low, high)
    return str(round(drawn)) if is_integer else f"{drawn:.6g}"


def overrides_of(run: Run, name: str) -> list[Override]:
    """The overrides of a run; `name` of the sweep is their origin."""
    return [Override(key, value, f"sweep {name}: {key}={value}") for key, value in run.items()]


def name_of(path: Path) -> str:
    """The start of a sweep's id, from the name of its file: it becomes part of paths."""
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", path.stem).strip("-._")
    return name[:MAX_NAME].rstrip("-._") or "sweep"


def require_valid(loaded: SweepFile, path: Path) -> Sweep:
    if errors_in(loaded.findings):
        raise UserError(f"{path}: invalid sweep", findings=loaded.findings)
    return loaded.sweep


def varied(runs: Sequence[Run]) -> list[str]:
    """The keys that differ between the runs: the columns of the table."""
    keys = dict.fromkeys(key for run in runs for key in run)
    return [key for key in keys if len({run.get(key) for run in runs}) > 1] or list(keys)


def short_names(keys: Sequence[str]) -> list[str]:
    """The last part of each key, or as many parts as tell the keys apart."""
    return [_short_name(key, [other for other in keys if other != key]) for key in keys]


def _short_name(key: str, others: Sequence[str]) -> str:
    parts = key.split(".")
    endings = (".".join(parts[at:]) for at in range(len(parts) - 1, 0, -1))
    taken = [f".{other}" for other in others]
    is_free = (each for each in endings if not any(one.endswith(f".{each}") for one in taken))
    return next(is_free, key)


def overruled(typed: Sequence[Override], runs: Sequence[Run]) -> list[str]:
    """Say which options have no effect, since the runs of the sweep set the same key."""
    notes = []
    for override in typed:
        number = sum(override.key in run for run in runs)
        where = "" if number == len(runs) else f" in {number} of {len(runs)} runs"
        if number:
            notes.append(
                f"{override.source} has no effect{where}: the sweep file sets {override.key}"
            )
    return notes
