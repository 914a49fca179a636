"""Fills in what a config leaves empty: preset sizes, dp_degree, batch sizes.

A function from flat values to flat values. It reports only values that cannot be derived;
`rules.py` checks everything else.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from functools import cache
from typing import Any

from trainer.config.kinds import Section, keys_of
from trainer.config.presets import (
    CPM_END,
    DEFAULT_POSITIONS,
    DEFAULT_VOCAB,
    GPT2_END,
    GPT2_VOCAB,
    PRESETS,
)
from trainer.config.read import join, paths_of
from trainer.config.sections import DataPart, RunConfig
from trainer.errors import Finding, Rule
from trainer.layout import DEGREE_KEYS, Machines, solve_layout
from trainer.layout_rules import solve_batch
from trainer.named_tuple import NamedTuple

MISSING_SIZE = Rule(
    "C017", "model sizes must be given, by a preset or in the config", uses=("Model.name",)
)

DROPOUTS = ("Model.hidden_dropout_prob", "Model.attention_probs_dropout_prob")


class Derived(NamedTuple):
    values: dict[str, Any]
    origins: dict[str, str]  # key path -> how its value was derived
    found: tuple[Finding, ...]


def derive(
    values: Mapping[str, Any], emptied: Collection[str], machines: Machines | None
) -> Derived:
    filling = _Filling(dict(values))
    # In this order: the batch sizes depend on dp_degree, which the layout step derives.
    _fill_model(filling)
    _fill_engine(filling, emptied)
    _fill_layout(filling, machines)
    _fill_batch(filling)
    _fill_data(filling)
    return Derived(filling.values, filling.origins, tuple(filling.found))


class _Filling:
    def __init__(self, values: dict[str, Any]) -> None:
        self.values = values
        self.origins: dict[str, str] = {}
        self.found: list[Finding] = []

    def get(self, path: str) -> Any:
        """The written or default value; None if it has not been derived yet."""
        return self.values[path] if path in self.values else _defaults(RunConfig)[path]

    def fill(self, path: str, value: Any, origin: str) -> None:
        if path not in self.values:
            self.replace(path, value, origin)

    def replace(self, path: str, value: Any, origin: str) -> None:
        self.values[path] = value
        self.origins[path] = origin


@cache
def _defaults(cls: type) -> dict[str, Any]:
    """Every default by key path."""
    defaults: dict[str, Any] = {}
    for name, key in keys_of(cls).items():
        if isinstance(key.kind, Section):
            defaults.update(
                {join(name, path): value for path, value in _defaults(key.kind.cls).items()}
            )
        else:
            defaults[name] = key.default
    return defaults


def _fill_model(filling: _Filling) -> None:
    name = filling.get("Model.name")
    preset = PRESETS.get(name)
    origin = f"preset {name}" if preset else "no preset"
    for key in ("hidden_size", "num_layers", "num_attention_heads"):
        path = f"Model.{key}"
        if preset is None and path not in filling.values:
            hint = f"write {path}, or a preset as Model.name ({', '.join(list(PRESETS)[:3])}, …)"
            filling.found.append(
                MISSING_SIZE.found(path, None, f"missing: model {name} has no preset sizes", hint)
            )
        # Some number is needed even after the finding, so that the other rules can still run.
        filling.fill(path, getattr(preset or PRESETS["gpt2-en"], key), origin)
    filling.fill("Model.ffn_hidden_size", 4 * filling.get("Model.hidden_size"), "4 · hidden_size")
    if filling.get("Data.Train.dataset.name") == "CharDataset":
        # No vocab_size here: the trainer counts the characters when it reads the text.
        filling.fill(
            "Model.max_position_embeddings",
            filling.get("Data.Train.dataset.max_seq_len"),
            "max_seq_len",
        )
    else:
        filling.fill("Model.vocab_size", preset.vocab_size if preset else DEFAULT_VOCAB, origin)
        positions = preset.max_position_embeddings if preset else DEFAULT_POSITIONS
        filling.fill("Model.max_position_embeddings", positions, origin)
    if filling.get("Engine.check_accuracy"):
        for path in DROPOUTS:
            filling.replace(path, 0.0, "check_accuracy")
    # Equal sets of layers should give equal configs.
    if kept := filling.values.get("Model.no_recompute_layers"):
        filling.values["Model.no_recompute_layers"] = tuple(sorted(set(kept)))


def _fill_engine(filling: _Filling, emptied: Collection[str]) -> None:
    filling.fill("Engine.test_iters", 10 * filling.get("Engine.eval_iters"), "10 · eval_iters")
    # An explicitly empty key means "as long as the run"; a missing key means the default.
    if "Optimizer.lr.decay_steps" in emptied and filling.get("Engine.max_steps") > 0:
        filling.fill("Optimizer.lr.decay_steps", filling.get("Engine.max_steps"), "max_steps")
    if "Engine.save_load.save_steps" in emptied:
        filling.fill("Engine.save_load.save_steps", 0, "empty: only at the end")
    # As in PaddleNLP, num_train_epochs counts if max_steps is not positive.
    if filling.get("Engine.max_steps") <= 0:
        filling.fill("Engine.run_mode", "epoch", "max_steps <= 0")
    backend = "nccl" if filling.get("Global.device") == "gpu" else "gloo"
    filling.fill("Distributed.backend", backend, "device")


def _fill_layout(filling: _Filling, machines: Machines | None) -> None:
    degrees = {axis: filling.get(path) for axis, path in DEGREE_KEYS.items()}
    layout = solve_layout(**degrees, world=machines.world if machines else None)
    filling.fill("Distributed.dp_degree", layout.dp, "GPUs / (mp · pp · sharding)")


def _fill_batch(filling: _Filling) -> None:
    replicas = filling.get(DEGREE_KEYS["dp"]) * filling.get(DEGREE_KEYS["sharding"])
    batch, found = solve_batch(
        global_size=filling.get("Global.global_batch_size"),
        local=filling.get("Global.local_batch_size"),
        micro=filling.get("Global.micro_batch_size"),
        replicas=replicas,
    )
    filling.found += found
    filling.fill("Global.global_batch_size", batch.global_size, "local · dp · sharding")
    filling.fill("Global.local_batch_size", batch.local, "global / (dp · sharding), or micro")
    # Like FleetX, overwrite the value in the config; `resolve.py` warns if the two differ.
    filling.replace("Engine.accumulate_steps", batch.accumulate, "local / micro")
    # 1F1B cannot run with fewer micro-batches than stages, GPipe can.
    pp, chunks = filling.get(DEGREE_KEYS["pp"]), filling.get("Model.virtual_pp_degree")
    # 0: a micro-batch is larger than the local batch, which B002 reports.
    if 0 < batch.accumulate < pp and chunks == 1:
        filling.fill("Distributed.pp_schedule", "GPipe", "fewer micro-batches than stages")


def _end_of_document(filling: _Filling) -> int | None:
    """The end token of a known vocabulary; in an unknown one, no id has a meaning."""
    name = filling.get("Model.name")
    if filling.get("Data.Train.dataset.name") != "GPTDataset":
        return None
    if name.endswith("-cn") or "-cn-" in name:
        return CPM_END if filling.get("Model.vocab_size") > CPM_END else None
    return GPT2_END if filling.get("Model.vocab_size") in GPT2_VOCAB else None


def _fill_data(filling: _Filling) -> None:
    """Keys that Eval and Test leave empty take the value of Train."""
    end = _end_of_document(filling)
    if end is not None:
        filling.fill("Data.Train.dataset.eos_id", end, "the vocabulary")
    for path in paths_of(DataPart):
        if f"Data.Train.{path}" in filling.values:
            for part in ("Eval", "Test"):
                filling.fill(
                    f"Data.{part}.{path}", filling.values[f"Data.Train.{path}"], "as Train"
                )
