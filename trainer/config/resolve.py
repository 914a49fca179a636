"""Turns a merged tree into a complete, checked run config, and collects all findings at once."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from functools import cache

from trainer.config.derive import DROPOUTS, MISSING_SIZE, Derived, derive
from trainer.config.kinds import Section, keys_of
from trainer.config.read import Reading, build, paths_of, read_root
from trainer.config.rules import NO_EFFECT, OFF, check_run
from trainer.config.sections import RunConfig
from trainer.config.switches import apply_switches
from trainer.config.tasks import set_aside
from trainer.config.tree import Map
from trainer.errors import Finding, Rule, in_order
from trainer.layout import DEGREE_KEYS, Batch, Layout, Machines, Shape
from trainer.layout_rules import (
    FEW_MICRO_BATCHES,
    WORLD,
    check_model,
    check_mp_in_node,
    check_world,
    propose,
)
from trainer.named_tuple import NamedTuple

IGNORED = Rule("N001", "a config should not contain keys that this trainer ignores", "notice")
ACCURACY = Rule("N003", "check_accuracy should run without dropout", "notice", uses=DROPOUTS)
ACCUMULATE = Rule(
    "T024",
    "accumulate_steps should be local_batch_size / micro_batch_size",
    "warning",
    uses=(
        "Global.global_batch_size",
        "Global.local_batch_size",
        "Global.micro_batch_size",
        *DEGREE_KEYS.values(),
    ),
)

MAX_PROPOSED_WORLD = 1 << 20  # nobody has more GPUs, and searching for layouts would take long


class Resolved(NamedTuple):
    """A complete run config. Do not run it if `findings` contains an error."""

    run: RunConfig
    findings: tuple[Finding, ...]
    origins: dict[str, str]  # key path -> where its value came from

    @property
    def layout(self) -> Layout:
        return layout_of(self.run)

    @property
    def batch(self) -> Batch:
        return batch_of(self.run)

    def as_json(self) -> str:
        """The config as JSON that loads back to the same object."""
        return json.dumps(asdict(self.run), indent=2, ensure_ascii=False) + "\n"


def sections() -> dict[str, type]:
    kinds = {name: key.kind for name, key in keys_of(RunConfig).items()}
    return {name: kind.cls for name, kind in kinds.items() if isinstance(kind, Section)}


def layout_of(run: RunConfig) -> Layout:
    degrees = run.Distributed
    return Layout(
        degrees.dp_degree, degrees.pp_degree, degrees.sharding.sharding_degree, degrees.mp_degree
    )


def batch_of(run: RunConfig) -> Batch:
    return Batch(
        run.Global.global_batch_size, run.Global.local_batch_size, run.Global.micro_batch_size
    )


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
        pp_schedule=run.Distributed.pp_schedule,
    )


def read_run(
    tree: Map,
    found: list[Finding],
    others: Mapping[str, type] | None = None,
    unread: tuple[str, ...] = (),
) -> Reading:
    """Read the sections of a run config, and those of another program (`others`)."""
    tree, is_other_task = set_aside(apply_switches(tree, found), found)
    reading = Reading(found, {**sections(), **(others or {})})
    reading.is_other_task, refused = is_other_task, list(found)
    read_root(tree, reading, unread)
    if is_other_task:
        found[:] = refused  # what its keys mean is a question of that task
        return reading
    if reading.ignored:
        keys = ", ".join(f"{key} ({place})" for key, place in reading.ignored.items())
        found.append(
            IGNORED.found("", list(reading.ignored), f"keys that this trainer ignores: {keys}")
        )
    return reading


def resolve(reading: Reading, machines: Machines | None) -> Resolved:
    derived = derive(reading.values, reading.emptied, machines)
    run = build(RunConfig, derived.values)
    if reading.is_other_task:
        return Resolved(run, in_order(reading.found), _origins(reading, derived))
    dp_written = DEGREE_KEYS["dp"] in reading.values
    world = reading.valid_findings(_check_world(run, reading, machines, dp_written))
    # If dp could not be derived, findings that depend on it would only confuse: drop them.
    unsolved = not dp_written and (world or any(reading.is_bad(key) for key in WORLD.uses))
    unknown = {DEGREE_KEYS["dp"]} if unsolved else set()
    unknown |= {finding.key for finding in derived.found if finding.code == MISSING_SIZE.code}
    found = [
        *derived.found,
        *check_model(shape_of(run), layout_of(run), batch_of(run)),
        *check_run(run),
    ]
    found += _check_replaced(run, reading)
    if not world:  # a layout that does not fit at all needs no advice about nodes
        found += check_mp_in_node(layout_of(run), machines)
    judged = reading.valid_findings(found, unknown)
    # Switch settings without effect off, so that no later code has to check the layout again.
    switched_off = {
        finding.key: OFF.get(finding.key, False)
        for finding in judged
        if finding.code == NO_EFFECT.code
    }
    derived.values.update(switched_off)
    derived.origins.update(dict.fromkeys(switched_off, "no effect in this layout"))
    findings = in_order([*reading.found, *world, *judged])
    return Resolved(build(RunConfig, derived.values), findings, _origins(reading, derived))


def _check_world(
    run: RunConfig, reading: Reading, machines: Machines | None, dp_written: bool
) -> list[Finding]:
    layout, unit = layout_of(run), "GPUs" if run.Global.device == "gpu" else "ranks"
    return [
        finding._replace(hint=_proposal(layout, reading, machines, dp_written))
        for finding in check_world(layout, machines, dp_written, unit)
        if machines
    ]


def _check_replaced(run: RunConfig, reading: Reading) -> list[Finding]:
    """Report values in the config that the trainer overrides."""
    found = []
    written, accumulate = reading.values.get("Engine.accumulate_steps"), run.Engine.accumulate_steps
    if written not in (None, accumulate):
        message = (
            f"{written} is ignored: local_batch_size / micro_batch_size = {accumulate} is used"
        )
        hint = "delete it, or change the batch sizes"
        found.append(ACCUMULATE.found("Engine.accumulate_steps", written, message, hint))
    if run.Engine.check_accuracy and any(reading.values.get(key) != 0 for key in DROPOUTS):
        message = "dropout, evaluation and saving are off"
        found.append(ACCURACY.found("Engine.check_accuracy", True, message))
    return found


def _proposal(wish: Layout, reading: Reading, machines: Machines, dp_written: bool) -> str:
    """A hint with the most similar layouts that fit this many GPUs."""
    if machines.world > MAX_PROPOSED_WORLD:
        return f"check nodes and gpus_per_node: together they make {machines.world:,} GPUs"

    # Cached, because the two calls of `propose` below try the same layouts.
    @cache
    def errors_of(layout: Layout) -> frozenset[str]:
        degrees = {path: getattr(layout, axis) for axis, path in DEGREE_KEYS.items()}
        derived = derive({**reading.values, **degrees}, reading.emptied, None)
        run = build(RunConfig, derived.values)
        found = reading.valid_findings(
            [*derived.found, *check_model(shape_of(run), layout, batch_of(run)), *check_run(run)]
        )
        # Few micro-batches only cost time, but a proposal should do better.
        misfits = [f for f in found if f.level == "error" or f.code == FEW_MICRO_BATCHES.code]
        of_layout = [f for f in misfits if set(f.uses) & set(DEGREE_KEYS.values())]
        return frozenset(finding.code[0] for finding in of_layout)

    if fitting := propose(wish, machines, dp_written, lambda layout: not errors_of(layout)):
        return "layouts that fit: " + "; ".join(str(layout) for layout in fitting)
    # The second choice: layouts that break only batch rules (B001, B002), which are easy to fix.
    if fitting := propose(wish, machines, dp_written, lambda layout: errors_of(layout) <= {"B"}):
        names = "; ".join(str(layout) for layout in fitting)
        return f"layouts that fit with other batch sizes: {names}"
    return "no layout with this many GPUs fits this model"


def _origins(reading: Reading, derived: Derived) -> dict[str, str]:
    return {path: _origin(path, reading, derived) for path in paths_of(RunConfig)}


def _origin(path: str, reading: Reading, derived: Derived) -> str:
    if path in derived.origins:
        if derived.origins[path] == "as Train":
            return _origin(
                path.replace("Eval", "Train", 1).replace("Test", "Train", 1), reading, derived
            )
        return f"derived: {derived.origins[path]}"
    if path in reading.values:
        return str(reading.places[path])
    return "default"
