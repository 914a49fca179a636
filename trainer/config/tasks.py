"""Configs that ask for more than the pre-training of a dense GPT: other tasks, and other models.

FleetX keeps one format for all its tasks, so its files for text generation or pruning would load
here and start a pre-training. Both programs refuse them by the table below. Paddle's automatic
parallelism is different: its files train the same model, so its keys are only reported.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping

from trainer.config.kinds import BadValue, Boolean
from trainer.config.tree import Map, Node, Scalar, is_null
from trainer.errors import Finding, Rule
from trainer.layout import DEGREE_KEYS
from trainer.named_tuple import NamedTuple

NOT_SUPPORTED = Rule("C019", "a config must describe the pre-training of a dense GPT")
AUTO = Rule("N006", "a config should not rely on Paddle's automatic parallelism", "notice")

Sign = Callable[[Node, Map], bool]  # whether the value of a key, in this config, asks for something


def _is_word(*words: str) -> Sign:
    return lambda node, _: isinstance(node, Scalar) and node.text in words


def _is_written(node: Node, _: Map) -> bool:
    return not is_null(node)


def _is_on(node: Node, _: Map) -> bool:
    """A section such as `Prune`, unless its `enable` (or `use_qat`) is off."""
    if isinstance(node, Map):
        switches = [node.items[name] for name in ("enable", "use_qat") if name in node.items]
        return any(map(_means_true, switches)) if switches else bool(node.items)
    return _means_true(node)


def _is_many(node: Node, _: Map) -> bool:
    """A number above 1. FleetX's own file writes `num_experts: 2,`."""
    return isinstance(node, Scalar) and node.text.rstrip(",") not in ("", "0", "1", "None", "null")


def _is_full(node: Node, _: Map) -> bool:
    return isinstance(node, Scalar) and node.text.startswith("full")


def _is_alone(node: Node, tree: Map) -> bool:
    """The section of another task beside a model, but nothing to train it with."""
    to_train = [_at(tree, path) for path in ("Data.Train", "Optimizer")]
    return isinstance(node, Map) and _at(tree, "Model.num_layers") is not None and not any(to_train)


class Other(NamedTuple):
    """One thing that is not supported yet."""

    what: str
    signs: Mapping[str, Sign]  # keys that ask for it
    hint: str
    belongs: tuple[str, ...] = ()  # more keys that only it uses
    is_task: bool = True  # if so, the other keys of the config are not worth a message
    verb: str = ""  # the command of gptctl that does it; empty: none does


MODULE = "Model.module"
PRETRAINING = ("GPTModule", "GPTModuleAuto")
MOE = "MoEModule"
PRETRAIN = "this trainer only pre-trains: write Model.module: GPTModule to do that"

GENERATION = ("GPTGenerationModule", "GPTGenerationModuleAuto")
EVALUATION = ("GPTEvalModule",)
DATASETS = {"LM_Eval_Dataset": "False", "Lambada_Eval_Dataset": "True"}  # and its cloze_eval
EVAL_DATASET = "Data.Eval.dataset"
GENERATE = "`gptctl generate CHECKPOINT -c FILE` generates text with this file"
EVALUATE = "`gptctl eval CHECKPOINT -c FILE` evaluates with this file"
TO_TRAIN = "training needs Data.Train and Optimizer"

# The one table of what is refused. To support something, replace its row: name the command that
# does it in the hint, or delete the row.
NOT_SUPPORTED_YET = (
    Other(
        "text generation",
        {MODULE: _is_word(*GENERATION)},
        f"{GENERATE}; to train, write Model.module: GPTModule",
        verb="generate",
    ),
    Other(
        "offline evaluation",
        {MODULE: _is_word(*EVALUATION)},
        f"{EVALUATE}; to train, write Model.module: GPTModule",
        verb="eval",
    ),
    Other("fine-tuning", {MODULE: _is_word("GPTFinetuneModule")}, PRETRAIN),
    Other(
        "knowledge distillation",
        {MODULE: _is_word("GPTDistillModule"), "Compress.Distillation": _is_on},
        f"{PRETRAIN}, and delete Compress",
    ),
    Other(
        "mixture of experts",
        {
            MODULE: _is_word(MOE),
            "Model.name": _is_word("MoE"),
            "Model.num_experts": _is_many,
            "Model.moe_configs.num_experts": _is_many,
        },
        "delete its keys to train a dense GPT, with Model.module: GPTModule and Model.name: GPT",
        (
            *("Model.moe_configs", "Model.expert_interval", "Model.gate", "Model.topk"),
            *("Model.moe_use_residual", "Model.moe_train_capacity_factor"),
            *("Model.moe_eval_capacity_factor", "Model.moe_min_capacity"),
            *("Model.moe_token_dropping", "Model.balance_loss_weight"),
            *("Model.enable_expert_tensor_parallelism", "Engine.balance_loss_weight"),
            "Optimizer.grad_clip.name",  # ClipGradForMOEByGlobalNorm
        ),
        is_task=False,
    ),
    Other(
        "another model or task",
        {MODULE: lambda node, _: not (is_null(node) or _is_word(*PRETRAINING, MOE)(node, _))},
        PRETRAIN,
    ),
    Other(
        "quantization",
        {"Compress.Quantization": _is_on, "Quantization": _is_on, "quantization": _is_on},
        "set its enable: False, or delete it, to pre-train without it",
    ),
    Other(
        "pruning",
        {"Compress.Prune": _is_on, "Prune": _is_on},
        "set its enable: False, or delete it, to pre-train without it",
    ),
    Other(
        "loading a Paddle model",
        {"Compress.pretrained": _is_written, "Model.pretrained": _is_written},
        "delete it to train from scratch; Engine.save_load.ckpt_dir loads checkpoints of gptctl",
    ),
    Other(
        "offline evaluation",
        {f"{EVAL_DATASET}.name": _is_word(*DATASETS), "Offline_Eval": _is_alone},
        f"{EVALUATE}; {TO_TRAIN}",
        verb="eval",
    ),
    Other("text generation", {"Generation": _is_alone}, f"{GENERATE}; {TO_TRAIN}", verb="generate"),
    Other(
        "segment parallelism",
        {"Distributed.sep_degree": _is_many},
        "set it to 1; mp_degree with sequence_parallel splits the sequence as well",
        is_task=False,
    ),
    Other(
        "automatic tuning",
        {"Tuning": _is_on, "Engine.auto_mode": _is_full},
        "delete it: `gptctl validate` estimates the memory of the layout in Distributed",
        is_task=False,
    ),
)

# Keys of Paddle's automatic parallelism that change how it computes, not what.
AUTO_KEYS = (
    *("Engine.mix_precision.use_fp16_guard", "Engine.auto_mode", "Model.sr"),
    *("Model.refined_ops_patterns", "Distributed.schedule_mode", "FusedPasses", "Fused_passes"),
    *("Data.Train.collate_fn", "Data.Eval.collate_fn", "Data.Test.collate_fn"),
    *("Data.Train.sample_split", "Data.Eval.sample_split", "Data.Test.sample_split"),
    "Tuning",
)


class SetAside(NamedTuple):
    tree: Map  # without the keys that were reported
    is_other_task: bool


def set_aside(tree: Map, found: list[Finding]) -> SetAside:
    """Report what a merged config asks for beyond pre-training, one finding each."""
    refused = []
    # A script of the user's own may do anything: only the bundled trainer is limited to one task.
    entrypoint = _at(tree, "Launch.entrypoint")
    if entrypoint is None or is_null(entrypoint) or _is_word("trainer")(entrypoint, tree):
        refused = [other for other in NOT_SUPPORTED_YET if _sign_of(other, tree)]
        tasks = [other for other in refused if other.is_task]
        refused = tasks[:1] or refused  # a pruned model that generates text is one other task
    found += [_refusal(other, tree) for other in refused]
    for other in refused:
        for path in (*other.signs, *other.belongs):
            tree = _without(tree, path)
    return SetAside(_without_auto(tree, found), any(other.is_task for other in refused))


def of_any_task(tree: Map) -> Map:
    """A file of FleetX for evaluation or generation, as a config for any task with a model."""
    module, name = _at(tree, MODULE), _at(tree, f"{EVAL_DATASET}.name")
    if isinstance(model := _at(tree, "Model"), Map):
        # What is empty here, such as a vocabulary that depends on the data, the checkpoint tells.
        told = {key: node for key, node in model.items.items() if not is_null(node)}
        tree = _with(tree, "Model", Map(told, model.place))
    if isinstance(module, Scalar) and module.text in (*GENERATION, *EVALUATION):
        tree = _without(tree, MODULE)
    if isinstance(name, Scalar) and name.text in DATASETS:
        written: dict[str, Node] = {"cloze_eval": Scalar(DATASETS[name.text], name.place)}
        for key in ("input_dir", "max_seq_len", "overlapping_eval"):
            if (node := _at(tree, f"{EVAL_DATASET}.{key}")) is not None:
                written["eval_path" if key == "input_dir" else key] = node
        section = _at(tree, "Offline_Eval")
        kept = section.items if isinstance(section, Map) else {}
        items = {**written, **{key: node for key, node in kept.items() if not is_null(node)}}
        tree = _with(_without(tree, "Data.Eval"), "Offline_Eval", Map(items, name.place))
    return tree


def _sign_of(other: Other, tree: Map) -> str | None:
    """The first key that asks for something."""
    for path, asks in other.signs.items():
        node = _at(tree, path)
        if node is not None and asks(node, tree):
            return path
    return None


def _refusal(other: Other, tree: Map) -> Finding:
    path = _sign_of(other, tree)
    assert path
    node = _at(tree, path)
    assert node is not None
    value = node.text if isinstance(node, Scalar) else None
    # The name of a module says more than its key.
    name = value if path in (MODULE, "Model.name") else path.rpartition(".")[2]
    message = f"not supported yet: {name} ({other.what})"
    if other.verb:
        message = f"not a training: {name} ({other.what})"
    return NOT_SUPPORTED.found(path, value, message, other.hint, node.place)


def _without_auto(tree: Map, found: list[Finding]) -> Map:
    """Remove the keys of Paddle's automatic parallelism, with one notice."""
    places = {path: node.place for path in AUTO_KEYS if (node := _at(tree, path)) is not None}
    module, layout = _at(tree, MODULE), "Distributed gives the layout"
    if module is not None and _is_word("GPTModuleAuto")(module, tree):
        places = {MODULE: module.place, **places}
        if (dp := _own_dp(tree)) is not None:
            layout += f", but dp_degree becomes {dp.text}: Paddle's includes the shards"
            tree = _with(tree, DEGREE_KEYS["dp"], dp)
    elif module is not None and _is_word("GPTModule")(module, tree):
        tree = _without(tree, MODULE)  # what this trainer does: not worth a notice
    if places:
        keys = ", ".join(f"{path} ({place})" for path, place in places.items())
        message = f"automatic parallelism is Paddle's; {layout}. Ignored: {keys}"
        found.append(AUTO.found("", list(places), message))
    for path in places:
        tree = _without(tree, path)
    return tree


def _own_dp(tree: Map) -> Scalar | None:
    """The dp_degree here, if it differs: 8 GPUs can be dp 8 with sharding 4 there, here dp 2."""
    dp, sharding = (_at(tree, DEGREE_KEYS[axis]) for axis in ("dp", "sharding"))
    degrees = [node.text for node in (dp, sharding) if isinstance(node, Scalar)]
    if dp is None or len(degrees) < 2 or not all(re.fullmatch("[1-9][0-9]*", n) for n in degrees):
        return None
    all_data, shards = map(int, degrees)
    return None if shards == 1 or all_data % shards else Scalar(str(all_data // shards), dp.place)


def _means_true(node: Node) -> bool:
    try:
        return not is_null(node) and Boolean().read(node)
    except BadValue:
        return True  # unclear: better refused than ignored


def _at(node: Node, path: str) -> Node | None:
    for name in path.split("."):
        if not isinstance(node, Map) or name not in node.items:
            return None
        node = node.items[name]
    return node


def _without(tree: Map, path: str) -> Map:
    name, _, rest = path.partition(".")
    below = tree.items.get(name)
    if not rest:
        return Map({key: node for key, node in tree.items.items() if key != name}, tree.place)
    if not isinstance(below, Map):
        return tree
    return Map({**tree.items, name: _without(below, rest)}, tree.place)


def _with(tree: Map, path: str, node: Node) -> Map:
    name, _, rest = path.partition(".")
    below = tree.items.get(name)
    if rest and isinstance(below, Map):
        node = _with(below, rest, node)
    return Map({**tree.items, name: node}, tree.place)
