"""Format a checked config for people (tables, YAML) and for programs (JSON).

Pure: frozen data in, text and plain data out.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import asdict, replace
from typing import Any

from gptctl.spec.check import Checked
from gptctl.spec.launch import Launch
from gptctl.text import count
from trainer.config.kinds import Section, keys_of
from trainer.config.resolve import Resolved, sections
from trainer.config.sections import RunConfig
from trainer.estimate import GB, GIB, Estimate, assumptions
from trainer.layout import AXES, UNKNOWN_VOCAB, Layout, Machines, padded_vocab

# Keys whose derived values depend on the number of ranks.
BY_WORLD = (
    "Distributed.dp_degree",
    "Global.global_batch_size",
    "Global.local_batch_size",
    "Engine.accumulate_steps",
)


def verdict(checked: Checked, is_valid: bool) -> str:
    """Summarize the findings in a few words: `valid, 2 warnings`."""
    levels = [finding.level for finding in checked.findings]
    counts = [
        count(levels.count(level), level) for level in ("error", "warning") if level in levels
    ]
    # With --strict, warnings make a valid config fail: say so.
    if checked.is_valid:
        counts.insert(0, "valid" if is_valid else "not valid with --strict")
    return ", ".join(counts)


def summary(checked: Checked) -> list[tuple[str, str]]:
    """The table of `gptctl validate`: layout, world, batches, model, memory."""
    resolved, estimated = checked.resolved, checked.estimate
    if resolved is None or estimated is None:
        return []
    # On CPUs a rank has no GPU of its own.
    run, batch, machines = resolved.run, resolved.batch, checked.machines
    unit = "GPU" if run.Global.device == "gpu" else "rank"
    nodes = f"{count(machines.nodes, 'node')} × {machines.per_node}"
    # A derived number of ranks is shown with its origin: it may not be what the user expects.
    origin = checked.launch_origins["Launch.gpus_per_node"]
    guess = f" ({origin.removeprefix('derived: ')})" if origin.startswith("derived: ") else ""
    replicas = resolved.layout.data_ranks
    # Epochs have no length before the data is read; steps have.
    tokens = batch.global_size * run.Data.Train.dataset.max_seq_len
    length = f"{tokens * run.Engine.max_steps:,} in {run.Engine.max_steps:,} updates"
    if run.Engine.run_mode == "epoch":
        length = count(run.Engine.num_train_epochs, "epoch")
    return [
        ("layout", f"{resolved.layout}{_stage(resolved)}"),
        (
            "world",
            f"{count(machines.world, unit)}, {nodes}{guess} on cluster {checked.cluster.name}",
        ),
        (
            "batch",
            f"global {batch.global_size} = local {batch.local} × {count(replicas, 'replica')}",
        ),
        (
            "accumulation",
            f"{count(batch.accumulate, 'micro-batch', 'micro-batches')} of {batch.micro} "
            "per update",
        ),
        ("tokens", f"{tokens:,} per update; {length}"),
        ("model", _model(resolved)),
        (
            "parameters",
            f"{estimated.parameters:,} ({_rounded(estimated.parameters)}{_guess(resolved)})",
        ),
        ("FLOPs", f"{estimated.flops_per_token:,} per token"),
        (f"memory per {unit}", _memory(estimated, checked)),
    ]


def _stage(resolved: Resolved) -> str:
    return (
        f", sharding stage {resolved.run.Distributed.sharding.sharding_stage}"
        if resolved.layout.sharding > 1
        else ""
    )


def _model(resolved: Resolved) -> str:
    model = resolved.run.Model
    # A character model takes its vocabulary from its text.
    vocab = "vocabulary from the data"
    if model.vocab_size:
        padded = padded_vocab(model.vocab_size, model.vocab_size_divisible_unit)
        vocab = f"vocabulary {model.vocab_size} (padded {padded})"
    layers, heads = count(model.num_layers, "layer"), count(model.num_attention_heads, "head")
    sizes = f"{layers}, hidden {model.hidden_size}, {heads}"
    return f"{model.name}: {sizes}, {vocab}, {model.max_position_embeddings} positions"


def _guess(resolved: Resolved) -> str:
    # The vocabulary of a character model is known only when its data is read.
    return "" if resolved.run.Model.vocab_size else f", if the data has {UNKNOWN_VOCAB} characters"


def _rounded(parameters: int) -> str:
    size, unit = (1e9, "B") if parameters >= 1e9 else (1e6, "M")
    if parameters < 1e5:
        size, unit = 1e3, "K"
    return f"{parameters / size:.1f} {unit}"


def _memory(estimated: Estimate, checked: Checked) -> str:
    limit, total = checked.cluster.gpu_memory_gb, estimated.memory.total
    compared = f" ({total / GB:.1f} of {limit:g} GB)" if limit else ""
    # Small models need some MiB: in GiB every part would be 0.00.
    size, unit = (GIB, "GiB") if estimated.memory.total >= GIB else (GIB >> 10, "MiB")
    parts = ", ".join(
        f"{part} {value / size:.2f}" for part, value in estimated.memory.parts.items() if value
    )
    return f"about {estimated.memory.total / size:.2f} {unit}{compared}: {parts}"


def estimate_note(resolved: Resolved) -> str:
    """What the memory estimate assumes about this run."""
    return "\n  · ".join(["memory is an estimate:", *assumptions(resolved.run, resolved.layout)])


def as_json(checked: Checked, with_config: bool) -> dict[str, Any]:
    """The answer of `gptctl validate --json`, and a part of a job's config.json."""
    resolved, estimated = checked.resolved, checked.estimate
    report: dict[str, Any] = {
        "config": checked.name,
        "valid": checked.is_valid,
        "findings": [finding.as_json() for finding in checked.findings],
    }
    # With errors there may be no layout, and so neither batch sizes nor an estimate.
    if resolved is None or estimated is None:
        return report
    machines, batch = checked.machines, resolved.batch
    report |= {
        "cluster": checked.cluster.name,
        "layout": dict(zip(AXES, resolved.layout)),
        "world": {
            "nodes": machines.nodes,
            "gpus_per_node": machines.per_node,
            "world_size": machines.world,
        },
        "batch": {
            "global_batch_size": batch.global_size,
            "local_batch_size": batch.local,
            "micro_batch_size": batch.micro,
            "accumulate_steps": batch.accumulate,
        },
        "parameters": estimated.parameters,
        "flops_per_token": estimated.flops_per_token,
        "bytes_per_rank": {part: round(value) for part, value in estimated.memory.parts.items()}
        | {"total": round(estimated.memory.total)},
        "assumptions": assumptions(resolved.run, resolved.layout),
    }
    if with_config:
        report["resolved"] = {**asdict(_shown(checked)), "Launch": asdict(checked.launch)}
        report["origins"] = {**resolved.origins, **checked.launch_origins}
    return report


def _shown(checked: Checked) -> RunConfig:
    """The resolved config, without what an elastic job derives from its number of nodes."""
    assert checked.resolved is not None
    run, origins = checked.resolved.run, checked.resolved.origins
    if not checked.is_elastic:
        return run
    # Only derived values: what the user wrote stays.
    open_keys = [key for key in BY_WORLD if origins[key].startswith("derived: ")]

    def opened(section: str) -> Any:
        names = [key.partition(".")[2] for key in open_keys if key.startswith(section + ".")]
        return replace(getattr(run, section), **dict.fromkeys(names))

    return replace(
        run, Global=opened("Global"), Engine=opened("Engine"), Distributed=opened("Distributed")
    )


def resolved_yaml(checked: Checked) -> str:
    """Format the resolved config as YAML, with the origin of every value that is not a default.

    The YAML is valid input: loading it gives the same config.
    """
    assert checked.resolved is not None
    origins = {**checked.resolved.origins, **checked.launch_origins}
    lines = list(_yaml_lines(RunConfig, _shown(checked), "", origins, 0))
    # Launch is not part of the trainer's config, so it is added here.
    lines += ["Launch:", *_yaml_lines(type(checked.launch), checked.launch, "Launch", origins, 1)]
    return "\n".join(lines)


def _yaml_lines(
    cls: type, section: Any, path: str, origins: dict[str, str], depth: int
) -> Iterator[str]:
    for name, key in keys_of(cls).items():
        full = f"{path}.{name}" if path else name
        value = getattr(section, name)
        # Values follow their section as they do in the file.
        if isinstance(key.kind, Section):
            yield f"{'  ' * depth}{name}:"
            yield from _yaml_lines(key.kind.cls, value, full, origins, depth + 1)
            continue
        line = f"{'  ' * depth}{name}: {_yaml_value(value)}".rstrip()
        origin = " ".join(origins[full].split())  # a flag or file name may contain newlines
        yield line if origin == "default" else f"{line:<48}  # {origin}"


def _yaml_value(value: Any) -> str:
    """Format a value as YAML; JSON is a subset of YAML, so strings are quoted as in JSON."""
    if value is None:
        return ""
    if isinstance(value, (dict, tuple)):
        return json.dumps(value, ensure_ascii=False)
    if isinstance(value, str) and not (_PLAIN.fullmatch(value) and value.lower() not in _WORDS):
        return json.dumps(value, ensure_ascii=False)
    return str(value)


# Strings that need no quotes in YAML, unless they are one of the words that mean another type.
_PLAIN = re.compile(r"[A-Za-z0-9_./][A-Za-z0-9_./-]*")
_WORDS = frozenset(("null", "none", "true", "false", "yes", "no", "on", "off"))


def topo_rows(layout: Layout, machines: Machines, ranks: Iterable[int]) -> Iterator[dict[str, int]]:
    """The rows of `gptctl topo`: where each rank runs, and its coordinate on every axis."""
    for rank in ranks:
        yield {
            "rank": rank,
            "node": rank // machines.per_node,
            "local_rank": rank % machines.per_node,
            **layout.coordinates(rank)._asdict(),
            "data_rank": layout.data_rank(rank),
        }


def topo_groups(layout: Layout, ranks: Iterable[int]) -> dict[str, list[list[int]]]:
    """All groups of these ranks, by axis; each group once."""
    ranks = list(ranks)
    # Ranks of one group report the same group; a dict drops repetitions and keeps the order.
    return {
        axis: [list(group) for group in dict.fromkeys(layout.group(axis, rank) for rank in ranks)]
        for axis in AXES
    }


def group_text(group: range) -> str:
    """Format the ranks of a group: `0-7`, `0,8`, or `0,8,…,120` for a long one."""
    if len(group) > 2 and group.step == 1:
        return f"{group[0]}-{group[-1]}"
    # A long group has a constant step: its first two ranks and its last show all of it.
    if len(group) > 4:
        return f"{group[0]},{group[1]},…,{group[-1]}"
    return ",".join(str(rank) for rank in group)


def key_rows(prefix: str) -> list[dict[str, str]]:
    """The rows of `gptctl keys`: the keys below a section, or of a name, with defaults."""
    # The trainer's sections and ours: to users they are one file.
    everything = {**sections(), "Launch": Launch}
    rows = [row for name, cls in everything.items() for row in _section_rows(cls, name)]
    # Any part of a path may start with it: people look for mp_degree, not for Distributed.
    return [row for row in rows if f".{prefix}".lower() in f".{row['key']}".lower()]


def _section_rows(cls: type, path: str) -> Iterator[dict[str, str]]:
    for name, key in keys_of(cls).items():
        if isinstance(key.kind, Section):
            yield from _section_rows(key.kind.cls, f"{path}.{name}")
        # An empty default means that the value is derived or not set.
        else:
            yield {"key": f"{path}.{name}", "default": _yaml_value(key.default), "meaning": key.doc}
