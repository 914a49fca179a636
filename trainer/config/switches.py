"""Keys of other formats whose meaning depends on the whole config, after all layers are merged.

`dialects.py` translates each layer on its own; what cannot be decided there is decided here.
"""

from __future__ import annotations

from trainer.config.dialects import BY_PURE_FP16, switch
from trainer.config.tree import Map, Scalar, plain
from trainer.errors import Finding, Rule

SWITCH = Rule("T025", "use_sharding and sharding_degree should agree", "warning")
# Only a notice: FleetX's own files of 2022 say Adam and train with AdamW.
ADAM = Rule("N007", "Optimizer.name should be AdamW, which is what the trainer uses", "notice")


def apply_switches(tree: Map, found: list[Finding]) -> Map:
    """Apply PaddleNLP's use_sharding and use_pure_fp16, which depend on all merged layers."""
    _report_adam(tree, found)
    return _apply_pure_fp16(_apply_use_sharding(tree, found))


def _report_adam(tree: Map, found: list[Finding]) -> None:
    optimizer = tree.items.get("Optimizer")
    name = optimizer.items.get("name") if isinstance(optimizer, Map) else None
    if isinstance(name, Scalar) and name.text.lower() == "adam":
        message = "Adam is read as AdamW: weight decay applies to the weights, not to the gradients"
        found.append(ADAM.found("Optimizer.name", name.text, message, "", name.place))


def _apply_pure_fp16(tree: Map) -> Map:
    """True selects O2 and float16 unless the config sets them, and enables mixed precision."""
    engine = tree.items.get("Engine")
    precision = engine.items.get("mix_precision") if isinstance(engine, Map) else None
    if (
        not isinstance(engine, Map)
        or not isinstance(precision, Map)
        or "use_pure_fp16" not in precision.items
    ):
        return tree
    keys = {key: node for key, node in precision.items.items() if key != "use_pure_fp16"}
    switch_node = precision.items["use_pure_fp16"]
    wanted, enable = plain(switch_node) == "True", keys.get("enable")
    # The placeholder is still there only if no later layer has set `enable`.
    if isinstance(enable, Scalar) and enable.text == BY_PURE_FP16:
        keys["enable"] = Scalar(str(wanted), switch_node.place)
    if wanted:
        keys = {
            "level": Scalar("O2", switch_node.place),
            "dtype": Scalar("float16", switch_node.place),
            **keys,
        }
    engine = Map({**engine.items, "mix_precision": Map(keys, precision.place)}, engine.place)
    return Map({**tree.items, "Engine": engine}, tree.place)


def _apply_use_sharding(tree: Map, found: list[Finding]) -> Map:
    """use_sharding false forces sharding_degree 1."""
    distributed = tree.items.get("Distributed")
    if not isinstance(distributed, Map) or "use_sharding" not in distributed.items:
        return tree
    rest = {key: node for key, node in distributed.items.items() if key != "use_sharding"}
    node = distributed.items["use_sharding"]
    sharding = rest.get("sharding", Map({}, distributed.place))
    wanted = switch(node, "use_sharding", found)
    degree = sharding.items.get("sharding_degree") if isinstance(sharding, Map) else None
    written = plain(degree) if degree else None
    one = written in (None, "1")
    if wanted and one:
        message, hint = "no effect: sharding_degree is 1", "set sharding_degree to 2 or more"
        found.append(SWITCH.found("use_sharding", True, message, hint, node.place))
    if wanted is False and isinstance(sharding, Map) and (one or str(written).isdigit()):
        if not one:
            message = f"use_sharding is off: sharding_degree {written} is ignored"
            hint = "delete one of the two keys"
            found.append(SWITCH.found("use_sharding", False, message, hint, node.place))
        rest["sharding"] = Map(
            {**sharding.items, "sharding_degree": Scalar("1", node.place)}, sharding.place
        )
    return Map({**tree.items, "Distributed": Map(rest, distributed.place)}, tree.place)
