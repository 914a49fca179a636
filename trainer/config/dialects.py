"""Other spellings of the same config: FleetX of both eras, the flags of PaddleNLP's GPT, minGPT's YAML.

Each layer (a file, a `_base_`, an `-o`) is translated by itself, so that `-o trainer_config.max_epochs=2` works on a
minGPT file. The tables say which key becomes which; lines stay those of the text the user wrote.
"""

from __future__ import annotations

import os
from typing import NamedTuple

from trainer.config.tree import TWICE, List, Map, Node, Scalar, is_null
from trainer.errors import Finding, Place, Rule

MODEL_FAMILY = Rule("C016", "the model family is gpt or gpt-cn")

_ENGINE_KEYS = (
    "run_mode max_steps num_train_epochs accumulate_steps logging_freq eval_freq eval_iters test_iters check_accuracy "
    "mix_precision save_load"
).split()
_BATCH_KEYS = ("global_batch_size", "local_batch_size", "micro_batch_size")
_SHARDING_KEYS = ("sharding_degree", "sharding_stage", "sharding_offload")
_DEGREES = ("dp_degree", "mp_degree", "pp_degree")
_DROPOUTS = ("hidden_dropout_prob", "attention_probs_dropout_prob")

RENAMED: dict[str, tuple[str, ...]] = {
    # flat names: the flags of PaddleNLP's GPT, and the keys below FleetX's old root `PreTraining`
    **{name: (f"Engine.{name}",) for name in _ENGINE_KEYS},
    **{name: (f"Global.{name}",) for name in ("device", "seed", *_BATCH_KEYS)},
    **{name: (f"Distributed.{name}",) for name in _DEGREES},
    **{name: (f"Distributed.sharding.{name}",) for name in _SHARDING_KEYS},
    **{name: (f"Data.Train.dataset.{name}",) for name in ("input_dir", "split", "max_seq_len")},
    **{name: (f"Engine.save_load.{name}",) for name in ("save_steps", "output_dir", "ckpt_dir")},
    **{name: (f"Optimizer.lr.{name}",) for name in ("max_lr", "min_lr", "decay_steps", "warmup_rate")},
    **{name: (f"Model.{name}",) for name in ("use_recompute", *_DROPOUTS)},
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
    # FleetX between the eras
    **{f"Global.{name}": (f"Engine.{name}",) for name in _ENGINE_KEYS},
    **{f"Distributed.{name}": (f"Distributed.sharding.{name}",) for name in _SHARDING_KEYS},
    "Data.batch_size": ("Global",),
    "Data.dataset": ("Data.Train.dataset",),
    "Fused.tensor_fusion": ("Optimizer.tensor_fusion",),
    "Engine.mix_precision.use_pure_fp16": ("Engine.mix_precision.enable",),
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
    "gpt_config.vocab_size": ("Model.vocab_size",),
    "gpt_config.block_size": ("Model.max_position_embeddings",),
    "gpt_config.resid_pdrop": ("Model.hidden_dropout_prob",),
    "gpt_config.embd_pdrop": ("Model.hidden_dropout_prob",),
    "gpt_config.attn_pdrop": ("Model.attention_probs_dropout_prob",),
    "trainer_config.max_epochs": ("Engine.num_train_epochs",),
    "trainer_config.batch_size": ("Global.local_batch_size", "Global.micro_batch_size"),
    "trainer_config.data_loader_workers": ("Data.Train.loader.num_workers",),
    "trainer_config.grad_norm_clip": ("Optimizer.grad_clip.clip_norm",),
    "trainer_config.snapshot_path": ("Engine.save_load.snapshot_path",),
    "trainer_config.save_every": ("Engine.save_load.save_epoch",),
    "trainer_config.use_amp": ("Engine.mix_precision.enable",),
    "optimizer_config.learning_rate": ("Optimizer.lr.max_lr",),
    "optimizer_config.weight_decay": ("Optimizer.weight_decay",),
}

# What a foreign key says beside its value; anything written wins over it.
IMPLIED: dict[str, dict[str, str]] = {
    "Engine.mix_precision.use_pure_fp16": {"Engine.mix_precision.level": "O2", "Engine.mix_precision.dtype": "float16"},
    "data_config": {"Data.Train.dataset.name": "CharDataset"},
    "trainer_config": {"Engine.run_mode": "epoch", "Engine.log_style": "mingpt"},
    "optimizer_config": {"Optimizer.lr.name": "none", "Optimizer.beta2": "0.95"},
}

# Keys that mean something to Paddle only; `*` stands for Train, Eval and Test.
PADDLE_ONLY = frozenset(
    """
    Global.flags Global.enable_partial_send_recv
    Engine.mix_precision.custom_black_list Engine.mix_precision.custom_white_list Engine.mix_precision.use_main_grad
    Model.module Model.type_vocab_size Model.fused_linear Model.fused_softmax_with_triangular
    Data.*.dataset.num_samples Data.*.dataset.mode Data.*.sampler.name Data.*.sampler.batch_size
    Data.*.loader.return_list Data.*.loader.collate_fn
    Optimizer.multi_precision Optimizer.lr.use_increments Optimizer.lr.run_mode
    Distributed.fuse_sequence_parallel_allreduce Distributed.hcg
    Profiler.record_shapes Profiler.profile_memory Profiler.summary
    Inference Compress hydra enable_addto fuse_transformer fuse_mt profiler_options node_rank
    """.split()
)


class Translated(NamedTuple):
    written: Map
    implied: Map


def is_paddle_only(path: str) -> bool:
    section, _, rest = path.partition(".")
    if section == "Data":
        path = f"Data.*.{rest.partition('.')[2]}"
    return path in PADDLE_ONLY


def translate(tree: Map, found: list[Finding]) -> Translated:
    """One layer in the canonical vocabulary, and what its dialect implies."""
    walk = _Walk(tree.place, found)
    for name, node in tree.items.items():
        if name == "PreTraining" and isinstance(node, Map):
            for inner, child in node.items.items():
                walk.visit(inner, child)
        else:
            walk.visit(name, node)
    return Translated(walk.written, walk.implied)


class _Walk:
    def __init__(self, place: Place, found: list[Finding]) -> None:
        self.written, self.implied = Map({}, place), Map({}, place)
        self.found = found

    def visit(self, path: str, node: Node) -> None:
        for key, text in IMPLIED.get(path, {}).items():
            put(self.implied, key, Scalar(text, node.place, True), [])
        if path in ("model_type", "model_name_or_path") and isinstance(node, Scalar):
            self.model(path, node)
        elif path == "standalone":
            put(self.written, "Launch.style", Scalar("standalone", node.place, True), self.found)
        elif path in RENAMED:
            for target in RENAMED[path]:
                self.visit(target, node)
        elif isinstance(node, Map) and any(name.startswith(path + ".") for name in RENAMED):
            for name, child in node.items.items():
                self.visit(f"{path}.{name}", child)
            section = self.written.items.get(path)
            if isinstance(section, Map):  # it was made when its first key came; its place is its own line
                self.written.items[path] = Map(section.items, node.place)
        else:
            put(self.written, path, node, self.found)

    def model(self, path: str, node: Scalar) -> None:
        if path == "model_type":
            if node.text.lower() not in ("gpt", "gpt-cn"):
                message = f"model family {node.text} is not supported"
                self.found.append(MODEL_FAMILY.found(path, node.text, message, "use gpt or gpt-cn", node.place))
        else:  # a preset, or the folder of an earlier checkpoint
            target = "Engine.save_load.ckpt_dir" if os.path.isdir(node.text) else "Model.name"
            put(self.written, target, node, self.found)


def put(tree: Map, path: str, node: Node, found: list[Finding]) -> None:
    """Places a node at a path of a tree under construction; two different values for one key are a finding."""
    *parents, name = path.split(".")
    for parent in parents:
        child = tree.items.get(parent)
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
        message = f"written twice, under two names; first in {there.place}"
        found.append(TWICE.found(path, None, message, "delete one of the two", node.place))


def _same(one: Node, other: Node) -> bool:
    return isinstance(one, Scalar) and isinstance(other, Scalar) and one.text == other.text


def copied(node: Node) -> Node:
    """The node with mappings of its own: an alias in the text makes several keys share one."""
    if isinstance(node, Map):
        return Map({key: copied(child) for key, child in node.items.items()}, node.place)
    return List(tuple(copied(item) for item in node.items), node.place) if isinstance(node, List) else node
