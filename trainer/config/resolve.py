"""From a merged tree to a run config that is complete and checked: read, derive, judge, all findings at once."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any, NamedTuple

from trainer.config.derive import Derived, derive
from trainer.config.kinds import BadValue, Boolean
from trainer.config.read import Reading, build, paths_of, read_root
from trainer.config.rules import NO_EFFECT, check_run
from trainer.config.sections import RunConfig
from trainer.config.tree import Map, Scalar
from trainer.errors import Finding, Place, Rule, errors_in, in_order
from trainer.layout import Batch, Layout, Machines, Shape, check_model, check_mp_in_node, check_world, propose

IGNORED = Rule("N001", "a key has a meaning under torch", "notice")
NOT_BUILT = Rule("N002", "what a section asks for is built", "notice")
ACCUMULATE = Rule(
    "T024", "accumulate_steps = local_batch_size / micro_batch_size", "warning", uses=("Global", "Distributed")
)

SECTIONS: dict[str, type] = {name: type(getattr(RunConfig(), name)) for name in RunConfig.__dataclass_fields__}
NOT_BUILT_YET = ("Profiler", "Generation", "Offline_Eval")
MAX_PROPOSED_WORLD = 1 << 20


class Resolved(NamedTuple):
    """A complete run config with its layout; worth running only when `findings` holds no error."""

    run: RunConfig
    layout: Layout
    batch: Batch
    findings: tuple[Finding, ...]
    origins: dict[str, str]  # key path -> where its value came from

    def as_json(self) -> str:
        """The config as JSON that loads back to the same object."""
        return json.dumps(asdict(self.run), indent=2, ensure_ascii=False) + "\n"


def read_run(
    tree: Map, found: list[Finding], others: Mapping[str, type] | None = None, unread: tuple[str, ...] = ()
) -> Reading:
    """Reads the sections of a run config, and with them those of another program (`others`)."""
    reading = Reading(found)
    _apply_use_sharding(tree, reading)
    read_root({**SECTIONS, **(others or {})}, tree, reading, unread)
    if reading.ignored:
        keys = ", ".join(f"{key} ({place})" for key, place in reading.ignored.items())
        found.append(IGNORED.found("", list(reading.ignored), f"ignored, no meaning under torch: {keys}"))
    written = [name for name in NOT_BUILT_YET if name in reading.places]
    if written:
        message = f"read and checked, but nothing acts on it yet: {', '.join(written)}"
        found.append(NOT_BUILT.found("", written, message))
    return reading


def _apply_use_sharding(tree: Map, reading: Reading) -> None:
    """Seed 002's switch: false forces sharding_degree 1, true with degree 1 is a doubt."""
    distributed = tree.items.get("Distributed")
    if not isinstance(distributed, Map) or "use_sharding" not in distributed.items:
        return
    node = distributed.items.pop("use_sharding")
    try:
        wanted = Boolean().read(node)
    except BadValue as bad:
        reading.found.append(bad.rule.found("use_sharding", None, bad.message, bad.hint, node.place))
        return
    sharding = distributed.items.setdefault("sharding", Map({}, node.place))
    if not isinstance(sharding, Map):
        return
    degree = sharding.items.get("sharding_degree")
    if not wanted:
        sharding.items["sharding_degree"] = Scalar("1", node.place)
    elif degree is None or (isinstance(degree, Scalar) and degree.text == "1"):
        message, hint = "no effect here: sharding_degree is 1", "write the sharding_degree you want"
        reading.found.append(NO_EFFECT.found("use_sharding", True, message, hint, node.place))


def resolve(reading: Reading, machines: Machines | None) -> Resolved:
    derived = derive(reading.values, reading.emptied, machines)
    run = build(RunConfig, derived.values)
    judged = [*derived.found, *_check(run, derived, reading, machines)]
    judged = [finding for finding in judged if not any(reading.is_bad(key) for key in finding.uses)]
    judged = [finding.at(_place(finding, reading)) for finding in judged]
    origins = {path: _origin(path, reading, derived) for path in paths_of(RunConfig)}
    return Resolved(run, derived.layout, derived.batch, in_order([*reading.found, *judged]), origins)


def _check(run: RunConfig, derived: Derived, reading: Reading, machines: Machines | None) -> list[Finding]:
    dp_written = "Distributed.dp_degree" in reading.values
    unit = "GPUs" if run.Global.device == "gpu" else "ranks"
    found = []
    for finding in check_world(derived.layout, machines, dp_written, unit):
        assert machines is not None
        hint = _proposal(derived.layout, reading, machines.world, dp_written)
        found.append(finding._replace(hint=hint))
    found += check_model(shape_of(run), derived.layout, derived.batch)
    found += check_mp_in_node(derived.layout, machines)
    found += check_run(run)
    written = reading.values.get("Engine.accumulate_steps")
    if written not in (None, derived.batch.accumulate):
        message = f"{written} is replaced by local_batch_size / micro_batch_size = {derived.batch.accumulate}"
        found.append(
            ACCUMULATE.found("Engine.accumulate_steps", written, message, "delete it, or change the batch sizes")
        )
    return found


def shape_of(run: RunConfig) -> Shape:
    model = run.Model
    return Shape(
        hidden=model.hidden_size,
        layers=model.num_layers,
        heads=model.num_attention_heads,
        ffn=model.ffn_hidden_size,
        vocab=model.vocab_size,
        vocab_unit=model.vocab_size_divisible_unit,
        seq_len=run.Data.Train.dataset.max_seq_len,
        sequence_parallel=model.sequence_parallel,
        virtual_pp=model.virtual_pp_degree,
    )


def _proposal(wish: Layout, reading: Reading, world: int, dp_written: bool) -> str:
    """The nearest layouts that this config could have on that many GPUs."""
    if world > MAX_PROPOSED_WORLD:
        return f"{world:,} GPUs are more than anybody has: check nodes and gpus_per_node"

    def errors_of(layout: Layout) -> set[str]:
        derived = derive({**reading.values, **_degrees(layout)}, reading.emptied, None)
        run = build(RunConfig, derived.values)
        found = [*derived.found, *check_model(shape_of(run), layout, derived.batch)]
        return {finding.code[0] for finding in errors_in(found) if not any(reading.is_bad(key) for key in finding.uses)}

    if fitting := propose(wish, world, dp_written, lambda layout: not errors_of(layout)):
        return "these fit: " + "; ".join(str(layout) for layout in fitting)
    fitting = propose(wish, world, dp_written, lambda layout: errors_of(layout) <= {"B"})
    if fitting:
        return "these fit with other batch sizes: " + "; ".join(str(layout) for layout in fitting)
    return "no layout of that many GPUs suits this model"


def _degrees(layout: Layout) -> dict[str, int]:
    return {
        "Distributed.dp_degree": layout.dp,
        "Distributed.pp_degree": layout.pp,
        "Distributed.sharding.sharding_degree": layout.sharding,
        "Distributed.mp_degree": layout.mp,
    }


def _place(finding: Finding, reading: Reading) -> Place | None:
    """Where the mistake can be mended: the key, its section, or what else the rule looks at."""
    for path in (finding.key, *finding.uses):
        while path:
            if place := reading.place_of(path):
                return place
            path = path.rpartition(".")[0]
    return None


def _origin(path: str, reading: Reading, derived: Derived) -> str:
    if path in derived.origins:
        if derived.origins[path] == "as Train":
            return _origin(path.replace("Eval", "Train", 1).replace("Test", "Train", 1), reading, derived)
        return f"derived: {derived.origins[path]}"
    if path in reading.values:
        return str(reading.places[path])
    return "default"


def value_at(run: Any, path: str) -> Any:
    for name in path.split("."):
        run = getattr(run, name)
    return run
