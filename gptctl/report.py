"""What a checked config looks like to a person and to a program. Frozen data in, text and plain data out."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from gptctl.check import Checked
from trainer.config.kinds import Section, keys_of
from trainer.config.resolve import Resolved
from trainer.config.sections import RunConfig
from trainer.estimate import ASSUMPTIONS, GIB, UNKNOWN_VOCAB, Estimate
from trainer.layout import AXES, Layout, Machines, padded_vocab


def verdict(checked: Checked) -> str:
    counts = {level: len([f for f in checked.findings if f.level == level]) for level in ("error", "warning")}
    if not counts["error"] and not counts["warning"]:
        return "valid"
    counted = ", ".join(f"{count} {level}{'s' if count > 1 else ''}" for level, count in counts.items() if count)
    return counted if counts["error"] else f"valid, {counted}"


def summary(checked: Checked) -> list[tuple[str, str]]:
    """The table of `gptctl validate`: layout, world, batches, model, memory."""
    resolved, known = checked.resolved, checked.estimate
    if resolved is None or known is None:
        return []
    run, batch, machines = resolved.run, resolved.batch, checked.machines
    unit = "GPU" if run.Global.device == "gpu" else "rank"
    nodes = f"{_count(machines.nodes, 'node')} × {machines.per_node}"
    replicas = resolved.layout.data_ranks
    tokens = batch.global_size * run.Data.Train.dataset.max_seq_len
    length = f"{tokens * run.Engine.max_steps:,} in {run.Engine.max_steps:,} updates"
    if run.Engine.run_mode == "epoch":
        length = _count(run.Engine.num_train_epochs, "epoch")
    return [
        ("layout", f"{resolved.layout}{_stage(resolved)}"),
        ("world", f"{_count(machines.world, unit)}, {nodes} on cluster {checked.cluster.name}"),
        ("batch", f"global {batch.global_size} = local {batch.local} × {_count(replicas, 'replica')}"),
        ("accumulation", f"{_count(batch.accumulate, 'micro-batch', 'micro-batches')} of {batch.micro} per update"),
        ("tokens", f"{tokens:,} per update; {length}"),
        ("model", _model(resolved)),
        ("parameters", f"{known.parameters:,} ({_millions(known.parameters)}{_guess(resolved)})"),
        ("FLOPs", f"{known.flops_per_token:,} per token"),
        (f"memory per {unit}", _memory(known, checked)),
    ]


def _count(number: int, one: str, many: str = "") -> str:
    return f"{number:,} {one if number == 1 else many or one + 's'}"


def _stage(resolved: Resolved) -> str:
    return (
        f", sharding stage {resolved.run.Distributed.sharding.sharding_stage}" if resolved.layout.sharding > 1 else ""
    )


def _model(resolved: Resolved) -> str:
    model = resolved.run.Model
    vocab = "vocabulary from the data"
    if model.vocab_size:
        vocab = (
            f"vocabulary {model.vocab_size} (padded {padded_vocab(model.vocab_size, model.vocab_size_divisible_unit)})"
        )
    sizes = (
        f"{_count(model.num_layers, 'layer')}, hidden {model.hidden_size}, {_count(model.num_attention_heads, 'head')}"
    )
    return f"{model.name}: {sizes}, {vocab}, {model.max_position_embeddings} positions"


def _guess(resolved: Resolved) -> str:
    return "" if resolved.run.Model.vocab_size else f", if the data has {UNKNOWN_VOCAB} characters"


def _millions(parameters: int) -> str:
    return f"{parameters / 1e9:.2f} B" if parameters >= 1e9 else f"{parameters / 1e6:.1f} M"


def _memory(known: Estimate, checked: Checked) -> str:
    limit = f" of {checked.cluster.gpu_memory_gb:g} GiB" if checked.cluster.gpu_memory_gb else ""
    size, unit = (GIB, "GiB") if known.memory.total >= GIB else (GIB >> 10, "MiB")
    parts = ", ".join(f"{part} {getattr(known.memory, part) / size:.2f}" for part in known.memory._fields)
    return f"about {known.memory.total / size:.2f} {unit}{limit}: {parts}"


def assumptions() -> str:
    return "\n".join(["memory is an estimate:", *(f"  · {text}" for text in ASSUMPTIONS)])


def as_json(checked: Checked, with_config: bool) -> dict[str, Any]:
    resolved, known = checked.resolved, checked.estimate
    report: dict[str, Any] = {
        "config": str(checked.path) if checked.path else None,
        "valid": checked.is_valid,
        "findings": [finding.as_json() for finding in checked.findings],
    }
    if resolved is None or known is None:
        return report
    machines, batch = checked.machines, resolved.batch
    report |= {
        "cluster": checked.cluster.name,
        "layout": dict(zip(AXES, resolved.layout)),
        "world": {"nodes": machines.nodes, "gpus_per_node": machines.per_node, "world_size": machines.world},
        "batch": {
            "global_batch_size": batch.global_size,
            "local_batch_size": batch.local,
            "micro_batch_size": batch.micro,
            "accumulate_steps": batch.accumulate,
        },
        "parameters": known.parameters,
        "flops_per_token": known.flops_per_token,
        "bytes_per_rank": {part: round(getattr(known.memory, part)) for part in known.memory._fields}
        | {"total": round(known.memory.total)},
        "assumptions": list(ASSUMPTIONS),
    }
    if with_config:
        report["resolved"] = {**asdict(resolved.run), "Launch": asdict(checked.launch)}
        report["origins"] = {**resolved.origins, **checked.launch_origins}
    return report


def resolved_yaml(checked: Checked) -> str:
    """The resolved config as YAML that loads back, with the origin of every value that is not a default."""
    assert checked.resolved is not None
    origins = {**checked.resolved.origins, **checked.launch_origins}
    lines = list(_yaml_lines(RunConfig, checked.resolved.run, "", origins, 0))
    lines += ["Launch:", *_yaml_lines(type(checked.launch), checked.launch, "Launch", origins, 1)]
    return "\n".join(lines)


def _yaml_lines(cls: type, section: Any, path: str, origins: dict[str, str], depth: int) -> Iterator[str]:
    for name, key in keys_of(cls).items():
        full = f"{path}.{name}" if path else name
        value = getattr(section, name)
        if isinstance(key.kind, Section):
            yield f"{'  ' * depth}{name}:"
            yield from _yaml_lines(key.kind.cls, value, full, origins, depth + 1)
            continue
        line = f"{'  ' * depth}{name}: {_yaml_value(value)}".rstrip()
        origin = origins.get(full, "default")
        yield line if origin == "default" else f"{line:<48}  # {origin}"


def _yaml_value(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, (dict, tuple)):
        return json.dumps(value, ensure_ascii=False)
    if isinstance(value, str):
        plain = value.replace("_", "a").replace("-", "a").replace("/", "a").replace(".", "a")
        return (
            value
            if plain.isalnum() and plain.isascii() and value.lower() not in _WORDS
            else json.dumps(value, ensure_ascii=False)
        )
    return str(value)


_WORDS = frozenset(("null", "none", "true", "false", "yes", "no", "on", "off"))


def topo_rows(layout: Layout, machines: Machines, ranks: list[int]) -> list[dict[str, Any]]:
    return [
        {
            "rank": rank,
            "node": rank // machines.per_node,
            "local_rank": rank % machines.per_node,
            **layout.coordinates(rank)._asdict(),
            "data_rank": layout.data_rank(rank),
            "groups": {axis: list(layout.group(axis, rank)) for axis in AXES},
        }
        for rank in ranks
    ]


def group_text(members: list[int]) -> str:
    """`0-7`, `0,8`, or `0,8,…,120` for a long one."""
    if len(members) > 2 and members[-1] - members[0] == len(members) - 1:
        return f"{members[0]}-{members[-1]}"
    if len(members) > 8:
        return f"{members[0]},{members[1]},…,{members[-1]} ({len(members)})"
    return ",".join(str(member) for member in members)
