"""What follows from what is written: preset sizes, dp from the world, batch sizes, everything a config may leave empty.

A function from flat values to flat values; nothing is judged here except what cannot be solved.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

from trainer.config.kinds import keys_of
from trainer.config.presets import DEFAULT_POSITIONS, DEFAULT_VOCAB, PRESETS
from trainer.config.read import paths_of
from trainer.config.sections import Dataset, Distributed, Engine, Global, Model, RunConfig, Sharding
from trainer.errors import Finding, Rule
from trainer.layout import Batch, Layout, Machines, solve_batch, solve_layout

MISSING_SIZE = Rule("C017", "the model's sizes come from a preset or are written", uses=("Model.name",))

_DEFAULTS = {
    "Global": Global,
    "Engine": Engine,
    "Model": Model,
    "Distributed": Distributed,
    "Distributed.sharding": Sharding,
    "Data.Train.dataset": Dataset,
}


class Derived(NamedTuple):
    values: dict[str, Any]
    origins: dict[str, str]  # of what was filled in
    layout: Layout
    batch: Batch
    found: tuple[Finding, ...]


def derive(values: Mapping[str, Any], emptied: Collection[str], machines: Machines | None) -> Derived:
    filling = _Filling(dict(values))
    _fill_model(filling)
    _fill_engine(filling, "Optimizer.lr.decay_steps" in emptied)
    layout = _fill_layout(filling, machines)
    batch = _fill_batch(filling, layout)
    _fill_data(filling)
    return Derived(filling.values, filling.origins, layout, batch, tuple(filling.found))


class _Filling:
    def __init__(self, values: dict[str, Any]) -> None:
        self.values = values
        self.origins: dict[str, str] = {}
        self.found: list[Finding] = []

    def get(self, path: str) -> Any:
        """The value, written or default; None when it is to be derived."""
        if path in self.values:
            return self.values[path]
        parent, _, name = path.rpartition(".")
        return keys_of(_DEFAULTS[parent])[name].default

    def fill(self, path: str, value: Any, origin: str) -> None:
        if path not in self.values:
            self.values[path] = value
            self.origins[path] = origin


def _fill_model(filling: _Filling) -> None:
    name = filling.get("Model.name")
    preset = PRESETS.get(name)
    for key in ("hidden_size", "num_layers", "num_attention_heads"):
        path = f"Model.{key}"
        if preset is None and path not in filling.values:
            hint = f"write {path}, or a preset as Model.name ({', '.join(list(PRESETS)[:3])}, …)"
            filling.found.append(MISSING_SIZE.found(path, None, f"model {name} has no sizes of its own", hint))
        sizes = preset or PRESETS["gpt2-en"]
        filling.fill(path, getattr(sizes, key), f"preset {name}")
    filling.fill("Model.ffn_hidden_size", 4 * filling.values["Model.hidden_size"], "4 · hidden_size")
    if filling.get("Data.Train.dataset.name") == "CharDataset":
        seq_len = filling.get("Data.Train.dataset.max_seq_len")
        filling.fill("Model.max_position_embeddings", seq_len, "max_seq_len")
    else:
        positions = preset.max_position_embeddings if preset else DEFAULT_POSITIONS
        filling.fill("Model.vocab_size", preset.vocab_size if preset else DEFAULT_VOCAB, f"preset {name}")
        filling.fill("Model.max_position_embeddings", positions, f"preset {name}")


def _fill_engine(filling: _Filling, decay_to_the_end: bool) -> None:
    filling.fill("Engine.test_iters", 10 * filling.get("Engine.eval_iters"), "10 · eval_iters")
    if decay_to_the_end:
        filling.fill("Optimizer.lr.decay_steps", filling.get("Engine.max_steps"), "max_steps")
    backend = "nccl" if filling.get("Global.device") == "gpu" else "gloo"
    filling.fill("Distributed.backend", backend, "device")


def _fill_layout(filling: _Filling, machines: Machines | None) -> Layout:
    layout = solve_layout(
        dp=filling.get("Distributed.dp_degree"),
        pp=filling.get("Distributed.pp_degree"),
        sharding=filling.get("Distributed.sharding.sharding_degree"),
        mp=filling.get("Distributed.mp_degree"),
        world=machines.world if machines else None,
    )
    filling.fill("Distributed.dp_degree", layout.dp, "GPUs / (mp · pp · sharding)")
    return layout


def _fill_batch(filling: _Filling, layout: Layout) -> Batch:
    batch, found = solve_batch(
        filling.get("Global.global_batch_size"),
        filling.get("Global.local_batch_size"),
        filling.get("Global.micro_batch_size"),
        layout.data_ranks,
    )
    filling.found += found
    filling.fill("Global.global_batch_size", batch.global_size, "local · dp · sharding")
    filling.fill("Global.local_batch_size", batch.local, "global / (dp · sharding), or micro")
    # A written value is overwritten, as FleetX does; `rules.py` warns when the two differ.
    filling.values["Engine.accumulate_steps"] = batch.accumulate
    filling.origins["Engine.accumulate_steps"] = "local / micro"
    return batch


def _fill_data(filling: _Filling) -> None:
    """Eval and Test are as Train where they say nothing."""
    for path in [path for path in paths_of(RunConfig) if path.startswith("Data.Train.")]:
        if path in filling.values:
            for part in ("Eval", "Test"):
                other = path.replace("Train", part, 1)
                filling.fill(other, filling.values[path], "as Train")
