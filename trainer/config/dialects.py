"""Translates other config formats: old and new FleetX, PaddleNLP's GPT flags, minGPT's YAML.

Each layer (a file, a `_base_`, an `-o`) is translated on its own, so that
`-o trainer_config.max_epochs=2` works on a minGPT file. The tables map keys to keys; messages still
refer to the lines that the user wrote.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping

from trainer.config.kinds import BadValue, Boolean
from trainer.config.presets import PRESETS
from trainer.config.tree import MAX_DEPTH, TWICE, List, Map, Node, Scalar, is_null, plain
from trainer.errors import Finding, Place, Rule, closest
from trainer.named_tuple import NamedTuple

UNKNOWN = Rule("C010", "a key must be known")
MODEL_FAMILY = Rule("C016", "model_type must be gpt or gpt-cn")

_ENGINE_KEYS = (
    "run_mode max_steps num_train_epochs accumulate_steps logging_freq eval_freq eval_iters "
    "test_iters check_accuracy mix_precision save_load"
).split()
_BATCH_KEYS = ("global_batch_size", "local_batch_size", "micro_batch_size")
_SHARDING_KEYS = ("sharding_degree", "sharding_stage", "sharding_offload")
_DEGREES = ("dp_degree", "mp_degree", "pp_degree")
_DROPOUTS = ("hidden_dropout_prob", "attention_probs_dropout_prob")

RENAMED: dict[str, tuple[str, ...]] = {
    # flat names: the flags of PaddleNLP's GPT, and the keys under `PreTraining` in old FleetX
    **{name: (f"Engine.{name}",) for name in _ENGINE_KEYS},
    **{name: (f"Global.{name}",) for name in ("device", "seed", *_BATCH_KEYS)},
    **{name: (f"Distributed.{name}",) for name in _DEGREES},
    **{name: (f"Distributed.sharding.{name}",) for name in _SHARDING_KEYS},
    **{name: (f"Data.Train.dataset.{name}",) for name in ("input_dir", "split", "max_seq_len")},
    **{name: (f"Engine.save_load.{name}",) for name in ("save_steps", "output_dir", "ckpt_dir")},
    **{
        name: (f"Optimizer.lr.{name}",)
        for name in ("max_lr", "min_lr", "decay_steps", "warmup_rate")
    },
    **{name: (f"Model.{name}",) for name in ("use_recompute", *_DROPOUTS)},
    "recompute_granularity": ("Model.recompute_granularity",),
    "fused_linear": ("Model.fused_linear",),
    "tensor_fusion": ("Optimizer.tensor_fusion",),
    "Gradclip": ("Optimizer.grad_clip",),
    "Eval": ("Offline_Eval",),
    "batch_size": ("Global",),
    "dataset": ("Data.Train.dataset",),
    "use_amp": ("Engine.mix_precision.enable",),
    "amp_level": ("Engine.mix_precision.level",),
    "use_pure_fp16": ("Engine.mix_precision.use_pure_fp16",),
    "scale_loss": ("Engine.mix_precision.scale_loss",),
    "weight_decay": ("Optimizer.weight_decay",),
    "adam_beta1": ("Optimizer.beta1",),
    "adam_beta2": ("Optimizer.beta2",),
    "adam_epsilon": ("Optimizer.epsilon",),
    "grad_clip": ("Optimizer.grad_clip",),
    "lr_decay_style": ("Optimizer.lr.name",),
    "use_sharding": ("Distributed.use_sharding",),
    "topk": ("Generation.top_k",),
    "topp": ("Generation.top_p",),
    "temperature": ("Generation.temperature",),
    "max_dec_len": ("Generation.max_dec_len",),
    "min_dec_len": ("Generation.min_dec_len",),
    "decoding_strategy": ("Generation.decode_strategy",),
    # flags of paddle.distributed.launch and torchrun
    "gpus": ("Launch.devices",),
    "devices": ("Launch.devices",),
    "log_dir": ("Launch.log_dir",),
    "nnodes": ("Launch.nodes",),
    "nproc_per_node": ("Launch.gpus_per_node",),
    "rdzv_backend": ("Launch.rdzv.backend",),
    "rdzv_id": ("Launch.rdzv.id",),
    "rdzv_endpoint": ("Launch.rdzv.endpoint",),
    "master_addr": ("Launch.rdzv.endpoint",),
    "master_port": ("Launch.rdzv.port",),
    "max_restarts": ("Launch.max_restarts",),
    # intermediate versions of FleetX
    **{f"Global.{name}": (f"Engine.{name}",) for name in _ENGINE_KEYS},
    **{f"Distributed.{name}": (f"Distributed.sharding.{name}",) for name in _SHARDING_KEYS},
    "Data.batch_size": ("Global",),
    "Data.dataset": ("Data.Train.dataset",),
    "Fused.tensor_fusion": ("Optimizer.tensor_fusion",),
    "Engine.use_recompute": ("Model.use_recompute",),
    "Engine.save_load.save_by_steps": ("Engine.save_load.save_steps",),
    "Optimizer.Gradclip": ("Optimizer.grad_clip",),
    "Optimizer.adam_beta1": ("Optimizer.beta1",),
    "Optimizer.adam_beta2": ("Optimizer.beta2",),
    "Optimizer.adam_epsilon": ("Optimizer.epsilon",),
    "Distributed.sharding.comm_overlap": (
        "Distributed.sharding.reduce_overlap",
        "Distributed.sharding.broadcast_overlap",
    ),
    # minGPT
    "data_config.path": ("Data.Train.dataset.path",),
    "data_config.block_size": ("Data.Train.dataset.max_seq_len",),
    "data_config.train_split": ("Data.Train.dataset.train_split",),
    "data_config.truncate": ("Data.Train.dataset.truncate",),
    "gpt_config.model_type": ("Model.name",),
    "gpt_config.n_layer": ("Model.num_layers",),
    "gpt_config.n_head": ("Model.num_attention_heads",),
    "gpt_config.n_embd": ("Model.hidden_size",),
    "gpt_config.resid_pdrop": ("Model.hidden_dropout_prob",),
    "gpt_config.embd_pdrop": ("Model.hidden_dropout_prob",),
    "gpt_config.attn_pdrop": ("Model.attention_probs_dropout_prob",),
    "trainer_config.max_epochs": ("Engine.num_train_epochs",),
    # minGPT's batch size is per rank, without gradient accumulation.
    "trainer_config.batch_size": ("Global.local_batch_size", "Global.micro_batch_size"),
    "trainer_config.data_loader_workers": ("Data.Train.loader.num_workers",),
    "trainer_config.grad_norm_clip": ("Optimizer.grad_clip.clip_norm",),
    "trainer_config.snapshot_path": ("Engine.save_load.snapshot_path",),
    "trainer_config.save_every": ("Engine.save_load.save_epoch",),
    "trainer_config.use_amp": ("Engine.mix_precision.enable",),
    "optimizer_config.learning_rate": ("Optimizer.lr.max_lr",),
    "optimizer_config.weight_decay": ("Optimizer.weight_decay",),
}

# Values that the presence of a foreign group implies; any value written in a config wins over them.
IMPLIED: dict[str, dict[str, str]] = {
    "data_config": {
        "Data.Train.dataset.name": "CharDataset",
        "Data.Train.sampler.drop_last": "False",
    },
    "trainer_config": {"Engine.run_mode": "epoch", "Engine.log_style": "mingpt"},
    "optimizer_config": {"Optimizer.lr.name": "none", "Optimizer.beta2": "0.95"},
}

PURE_FP16 = "Engine.mix_precision.use_pure_fp16"
BY_PURE_FP16 = "as use_pure_fp16"  # placeholder for `enable` until all layers are merged

# Groups of other formats. An unknown key in them is reported with the known keys of that group.
FOREIGN_GROUPS = ("data_config", "gpt_config", "trainer_config", "optimizer_config", "Fused")

# Accepted with one notice: only Paddle or hydra uses these keys, or the trainer always computes
# them, or they switch something off that it does not have (`tasks.py` refuses what they switch on).
# `*` stands for Train, Eval or Test.
IGNORED = frozenset(
    """
    Global.flags Global.enable_partial_send_recv Global.to_static
    Engine.mix_precision.custom_black_list Engine.mix_precision.custom_white_list
    Engine.mix_precision.use_main_grad
    Model.module Model.type_vocab_size Model.fused_linear Model.fused_softmax_with_triangular
    Model.use_memory_attn
    Data.*.dataset.num_samples Data.*.dataset.mode Data.*.sampler.name Data.*.sampler.batch_size
    Data.*.loader.return_list Data.*.loader.collate_fn
    Optimizer.multi_precision Optimizer.lr.use_increments Optimizer.lr.run_mode
    Distributed.fuse_sequence_parallel_allreduce Distributed.hcg
    Profiler.record_shapes Profiler.profile_memory Profiler.summary
    Generation.num_beams Generation.length_penalty Generation.early_stopping
    Generation.use_topp_sampling Generation.inference Generation.early_finish Offline_Eval.ckpt_dir
    Inference Compress Quantization Prune quantization Distributed.sep_degree
    Model.num_experts Model.moe_configs Model.expert_interval Model.gate Model.topk
    Model.moe_use_residual Model.moe_train_capacity_factor Model.moe_eval_capacity_factor
    Model.moe_min_capacity Model.moe_token_dropping Model.balance_loss_weight
    Model.enable_expert_tensor_parallelism Engine.balance_loss_weight
    enable_addto fuse_transformer fuse_mt profiler_options beam_size
    save_inference_model_then_exist
    hydra gpt_config.vocab_size gpt_config.block_size
    node_rank
    """.split()
)


class Translated(NamedTuple):
    written: Map
    implied: Map


def is_ignored(path: str) -> bool:
    section, _, rest = path.partition(".")
    if section == "Data":
        path = f"Data.*.{rest.partition('.')[2]}"
    return path in IGNORED


def translate(tree: Map, found: list[Finding], implies: bool = True) -> Translated:
    """Translate one layer to our keys, and list what its format implies.

    A single override implies nothing (`implies=False`): it does not make a config a minGPT config.
    """
    walk = _Walk(tree.place, found, IMPLIED if implies else {})
    for name, node in tree.items.items():
        if name == "_inherited_":
            found.append(
                UNKNOWN.found(
                    name,
                    plain(node),
                    "_inherited_ is allowed only inside a section",
                    "to inherit nothing at all, delete _base_",
                    node.place,
                )
            )
        elif name == "PreTraining" and is_null(node):
            continue
        elif name == "PreTraining" and isinstance(node, Map):
            for inner, child in node.items.items():
                walk.visit(inner, child)
        else:
            walk.visit(name, node)
    return Translated(walk.written, walk.implied)


class _Walk:
    def __init__(
        self, place: Place, found: list[Finding], implications: Mapping[str, Mapping[str, str]]
    ) -> None:
        self.written, self.implied = Map({}, place), Map({}, place)
        self.found, self.implications = found, implications

    def visit(self, path: str, node: Node) -> None:
        for key, text in self.implications.get(path, {}).items():
            put(self.implied, key, Scalar(text, node.place, True), [])
        special = SPECIAL.get(path)
        if special and isinstance(node, Scalar):
            special(self, node)
        elif path in RENAMED:
            for target in RENAMED[path]:
                self.visit(target, node)  # not put(): a target can be special, such as grad_clip
        elif isinstance(node, Map) and any(
            name.startswith(path + ".") for name in (*RENAMED, *SPECIAL)
        ):
            self.visit_section(path, node)
        elif path in FOREIGN_GROUPS and is_null(node):
            pass  # an empty group
        elif path.partition(".")[0] in FOREIGN_GROUPS and not is_ignored(path) and "." in path:
            self.found.append(_unknown_in_group(path, node))
        else:
            put(self.written, path, node, self.found)

    def visit_section(self, path: str, node: Map) -> None:
        for name, child in node.items.items():
            self.visit(f"{path}.{name}", child)
        section = self.written.items.get(path)
        # `put` created the section at the line of its first key; use the line of the section.
        if isinstance(section, Map):
            self.written.items[path] = Map(section.items, node.place)

    def model_type(self, node: Scalar) -> None:
        if node.text.lower() not in ("gpt", "gpt-cn"):
            message = f"unsupported model family {node.text}"
            self.found.append(
                MODEL_FAMILY.found(
                    "model_type", node.text, message, "use gpt or gpt-cn", node.place
                )
            )

    def model_name_or_path(self, node: Scalar) -> None:
        """A preset, or the folder of a checkpoint to resume from."""
        is_folder = node.text not in PRESETS and os.path.isdir(node.text)
        put(
            self.written,
            "Engine.save_load.ckpt_dir" if is_folder else "Model.name",
            node,
            self.found,
        )

    def standalone(self, node: Scalar) -> None:
        # If off, leave it empty: gptctl then derives the style from the number of nodes.
        style = "standalone" if switch(node, "standalone", self.found) else ""
        put(self.written, "Launch.style", Scalar(style, node.place), self.found)

    def use_pure_fp16(self, node: Scalar) -> None:
        """True also enables mixed precision; `apply_switches` sets level and dtype later.

        `enable` has to be set in this layer, so that later layers can override it.
        """
        wanted = switch(node, "use_pure_fp16", self.found)
        put(self.written, PURE_FP16, Scalar(str(wanted), node.place), self.found)
        if wanted:
            put(self.written, "Engine.mix_precision.enable", Scalar(BY_PURE_FP16, node.place), [])

    def grad_clip(self, node: Scalar) -> None:
        """A bare number sets the norm."""
        name = "Optimizer.grad_clip" if node.is_empty else "Optimizer.grad_clip.clip_norm"
        put(self.written, name, node, self.found)


# Keys whose meaning depends on their value.
SPECIAL: dict[str, Callable[[_Walk, Scalar], None]] = {
    "model_type": _Walk.model_type,
    "model_name_or_path": _Walk.model_name_or_path,
    "standalone": _Walk.standalone,
    PURE_FP16: _Walk.use_pure_fp16,
    "Optimizer.grad_clip": _Walk.grad_clip,
}


def switch(node: Node, key: str, found: list[Finding]) -> bool | None:
    """Read a boolean; None if it is empty, or invalid (which is reported)."""
    if is_null(node):
        return None
    try:
        return Boolean().read(node)
    except BadValue as bad:
        found.append(bad.rule.found(key, plain(node), bad.message, bad.hint, node.place))
        return None


def _unknown_in_group(path: str, node: Node) -> Finding:
    group, _, name = path.partition(".")
    known = [old.partition(".")[2] for old in RENAMED if old.startswith(group + ".")]
    near = closest(name, known)
    hint = f"did you mean {near[0]}?" if near else f"known here: {', '.join(known)}"
    meant = RENAMED[f"{group}.{near[0]}"] if near else ()
    return UNKNOWN.using(*meant).found(
        path, plain(node), f"{group} has no key {name}", hint, node.place
    )


def put(tree: Map, path: str, node: Node, found: list[Finding]) -> None:
    """Put a node at a path of a tree under construction.

    Two different values for the same key are reported.
    """
    *parents, name = path.split(".")
    if len(parents) >= MAX_DEPTH:  # a key that contains dots is a path
        found.append(UNKNOWN.found(path[:60], None, "the key is too long", "delete it", node.place))
        return
    for parent in parents:
        child = tree.items.get(parent)
        if child is not None and not isinstance(child, Map) and not is_null(child):
            return  # a value instead of a section: reading reports it
        if not isinstance(child, Map):
            child = tree.items[parent] = Map({}, node.place)
        tree = child
    there = tree.items.get(name)
    if isinstance(there, Map) and isinstance(node, Map):
        for key, child in node.items.items():
            put(there, key, child, found) if "." not in key else there.items.setdefault(key, child)
    elif there is None or is_null(there) or (isinstance(there, Map) and not there.items):
        tree.items[name] = copied(node)
    elif not is_null(node) and not _same(there, node):
        message = f"set twice, under two names; first at {there.place}"
        found.append(TWICE.found(path, None, message, "delete one of the two", node.place))


def _same(one: Node, other: Node) -> bool:
    """Whether two texts are the same value, such as 1e-5 and 0.00001."""
    if not isinstance(one, Scalar) or not isinstance(other, Scalar):
        return False
    try:
        return float(one.text) == float(other.text)
    except ValueError:
        return one.text.lower() == other.text.lower()


def copied(node: Node) -> Node:
    """A deep copy: with YAML aliases, several keys share one mapping, which `put` would change."""
    if isinstance(node, Map):
        return Map({key: copied(child) for key, child in node.items.items()}, node.place)
    return (
        List(tuple(copied(item) for item in node.items), node.place)
        if isinstance(node, List)
        else node
    )
