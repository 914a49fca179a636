"""Megatron-LM's flags of pretrain_gpt.py, as keys of a run config. Pure.

Names and defaults are those of megatron/training/arguments.py. A default of Megatron's that differs
from ours is written into the config, so that it trains as the command did.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

from gptctl.spec.foreign_flags import (
    NO_COUNTERPART,
    NOT_KNOWN,
    Flag,
    Mapped,
    Unmapped,
    set_key,
    without_underscores,
)
from trainer.config import Override

KEYS = {
    "tensor-model-parallel-size": "Distributed.mp_degree",
    "model-parallel-size": "Distributed.mp_degree",
    "pipeline-model-parallel-size": "Distributed.pp_degree",
    "num-virtual-stages-per-pipeline-rank": "Model.virtual_pp_degree",
    "distributed-backend": "Distributed.backend",
    "distributed-timeout-minutes": "Distributed.timeout_minutes",
    "num-layers": "Model.num_layers",
    "hidden-size": "Model.hidden_size",
    "ffn-hidden-size": "Model.ffn_hidden_size",
    "num-attention-heads": "Model.num_attention_heads",
    "max-position-embeddings": "Model.max_position_embeddings",
    "vocab-size": "Model.vocab_size",
    "make-vocab-size-divisible-by": "Model.vocab_size_divisible_unit",
    "attention-dropout": "Model.attention_probs_dropout_prob",
    "hidden-dropout": "Model.hidden_dropout_prob",
    "init-method-std": "Model.initializer_range",
    "seq-length": "Data.Train.dataset.max_seq_len",
    "split": "Data.Train.dataset.split",
    "num-workers": "Data.Train.loader.num_workers",
    "micro-batch-size": "Global.micro_batch_size",
    "global-batch-size": "Global.global_batch_size",
    "train-iters": "Engine.max_steps",
    "lr-decay-iters": "Optimizer.lr.decay_steps",
    "lr-warmup-fraction": "Optimizer.lr.warmup_rate",
    "seed": "Global.seed",
    "lr": "Optimizer.lr.max_lr",
    "min-lr": "Optimizer.lr.min_lr",
    "weight-decay": "Optimizer.weight_decay",
    "adam-beta1": "Optimizer.beta1",
    "adam-beta2": "Optimizer.beta2",
    "adam-eps": "Optimizer.epsilon",
    "clip-grad": "Optimizer.grad_clip.clip_norm",
    "initial-loss-scale": "Engine.mix_precision.scale_loss",
    "save": "Engine.save_load.output_dir",
    "save-interval": "Engine.save_load.save_steps",
    "log-interval": "Engine.logging_freq",
    "eval-interval": "Engine.eval_freq",
    "eval-iters": "Engine.eval_iters",
    "exit-duration-in-mins": "Launch.slurm.time",
}
_O2 = {"Engine.mix_precision.enable": "True", "Engine.mix_precision.level": "O2"}
_FULL = {"Model.use_recompute": "True", "Model.recompute_granularity": "full"}
_CORE = {"Model.use_recompute": "True", "Model.recompute_granularity": "core_attn"}
_COSINE = {"Optimizer.lr.name": "CosineAnnealingWithWarmupDecay"}
# Flags, or values of flags, that stand for several keys.
MEANINGS: dict[str, dict[str, str]] = {
    "fp16": {**_O2, "Engine.mix_precision.dtype": "float16"},
    "bf16": {**_O2, "Engine.mix_precision.dtype": "bfloat16"},
    "sequence-parallel": {"Model.sequence_parallel": "True"},
    "use-flash-attn": {"Model.use_flash_attn": "True"},
    "attention-backend flash": {"Model.use_flash_attn": "True"},
    "apply-query-key-layer-scaling": {"Model.scale_qk_by_layer_num": "True"},
    "overlap-param-gather": {"Distributed.sharding.broadcast_overlap": "True"},
    "optimizer-cpu-offload": {"Distributed.sharding.sharding_offload": "True"},
    "recompute-activations": _CORE,
    "recompute-granularity selective": _CORE,
    "recompute-granularity full": _FULL,
    "checkpoint-activations": _FULL,
    "lr-decay-style cosine": _COSINE,
    "lr-decay-style constant": {"Optimizer.lr.name": "none"},
    "optimizer adam": {"Optimizer.name": "AdamW"},
}
# What this trainer does anyway, or Megatron needs for its own sake.
ALWAYS_SO = frozenset(
    """
    use-mcore-models use-legacy-models transformer-impl no-masked-softmax-fusion no-bias-gelu-fusion
    no-bias-dropout-fusion no-gradient-accumulation-fusion no-persist-layer-norm overlap-grad-reduce
    no-async-tensor-model-parallel-allreduce attention-softmax-in-fp32 async-save eod-mask-loss
    accumulate-allreduce-grads-in-fp32 exit-signal-handler use-cpu-initialization DDP-impl
    distribute-saved-activations use-dist-ckpt ckpt-format dist-ckpt-format local-rank
    calculate-per-token-loss use-tp-pp-dp-mapping no-check-for-nan-in-loss-and-grad lazy-mpu-init
    cross-entropy-loss-fusion manual-gc auto-detect-ckpt-format
    """.split()
)
ONLY_VALUES = (
    "context-parallel-size 1",
    "expert-model-parallel-size 1",
    "position-embedding-type learned_absolute",
    "normalization LayerNorm",
    "recompute-modules core_attn",
    "num-distributed-optimizer-instances 1",
    "lr-warmup-init 0.0",
)
# Read together with other flags, below.
TOGETHER = frozenset(
    """
    train-samples lr-decay-samples lr-warmup-iters lr-warmup-samples use-distributed-optimizer
    data-parallel-sharding-strategy use-torch-fsdp2 num-distributed-optimizer-instances
    recompute-method recompute-num-layers checkpoint-num-layers load data-path
    num-layers-per-virtual-pipeline-stage
    """.split()
)
STAGES = {"no_shard": 0, "optim": 1, "optim_grads": 2, "optim_grads_params": 3}
DEFAULTS: dict[str, dict[str, str | tuple[str, ...]]] = {
    "seed": {"Global.seed": "1234"},
    "min-lr": {"Optimizer.lr.min_lr": "0.0"},
    "log-interval": {"Engine.logging_freq": "100"},
    "eval-interval": {"Engine.eval_freq": "1000"},
    "eval-iters": {"Engine.eval_iters": "100"},
    "save-interval": {"Engine.save_load.save_steps": "0"},
    "split": {"Data.Train.dataset.split": ("969", "30", "1")},
}
_OTHER_MODELS = """
    swiglu squared-relu group-query-attention num-query-groups num-experts disable-bias-linear
    untie-embeddings-and-output-weights normalization qk-layernorm position-embedding-type
    use-rotary-position-embeddings use-rope-scaling multi-latent-attention
""".split()
REASONS = {
    "rampup-batch-size": f"{NO_COUNTERPART}: the full batch is used from the first step",
    "ddp-bucket-size": "a number of elements: set Distributed.bucket_cap_mb",
    "save-retain-interval": "set Engine.save_load.keep_last, a number of checkpoints",
    "tokenizer-type": "not needed: the data contains token ids",
    "vocab-file": "not needed: the data contains token ids",
    "merge-file": "not needed: the data contains token ids",
    "tokenizer-model": "not needed: the data contains token ids",
    "tensorboard-dir": "set Engine.trackers=[tensorboard]: it writes to <output_dir>/tensorboard",
    **dict.fromkeys(_OTHER_MODELS, f"{NO_COUNTERPART}: the model differs, it is GPT-2's"),
}


def is_megatron(script: str, flags: Sequence[Flag]) -> bool:
    """Whether a command trains a GPT with Megatron-LM, by the name of its script or its flags."""
    names = {flag.name for flag in flags if flag.typed.startswith("--")}
    own = {"tensor-model-parallel-size", "pipeline-model-parallel-size", "use-mcore-models"}
    sizes = {"num-layers", "hidden-size", "micro-batch-size"}
    is_other = script.startswith("pretrain_") and not script.startswith("pretrain_gpt")
    return not is_other and (
        script.startswith("pretrain_gpt") or (bool(names & own) and sizes <= names)
    )


def map_megatron(flags: Sequence[Flag], world: int | None) -> Mapped:
    """Map all flags; `world` is the number of GPUs, if the command says it."""
    # As in argparse, the last one of a flag given twice counts.
    by_name = {flag.name: flag for flag in flags}
    mapped = Mapped([set_key("Model.name", "GPT", "pretrain_gpt.py")], [])
    for flag in by_name.values():
        _map_one(flag, mapped)
    known = {name: flag for name, flag in by_name.items() if flag.is_known}
    sums = _Sums(known, world, mapped)
    for step in (sums.sharding, sums.lengths, sums.warm_up, sums.recompute, sums.chunks):
        step()
    for step in (sums.checkpoint, sums.data, sums.defaults):
        step()
    return mapped


def _map_one(flag: Flag, mapped: Mapped) -> None:
    """Map a flag that does not depend on other flags."""
    meaning = MEANINGS.get(f"{flag.name} {flag.value}".strip())
    if flag.name in KEYS and not flag.value:
        mapped.unmapped.append(Unmapped(flag.typed, "it has no value"))
    elif not flag.is_known:
        mapped.unmapped.append(Unmapped(flag.source, NOT_KNOWN))
    elif meaning is not None:
        mapped.overrides.extend(set_key(key, text, flag.source) for key, text in meaning.items())
    elif flag.name in KEYS:
        value = without_underscores(flag.value)
        mapped.overrides.append(set_key(KEYS[flag.name], value, flag.source))
    elif flag.name in ALWAYS_SO:
        mapped.unmapped.append(Unmapped(flag.source, "not needed here"))
    elif f"{flag.name} {flag.value}" not in ONLY_VALUES and flag.name not in TOGETHER:
        mapped.unmapped.append(Unmapped(flag.source, REASONS.get(flag.name, NO_COUNTERPART)))


class _Sums:
    """Keys that follow from several flags and from the number of GPUs."""

    def __init__(self, flags: dict[str, Flag], world: int | None, mapped: Mapped) -> None:
        self.flags, self.world, self.mapped = flags, world, mapped
        mp = self.number("tensor-model-parallel-size", "model-parallel-size") or 1
        self.pp = self.number("pipeline-model-parallel-size") or 1
        ranks = mp * self.pp * (self.number("context-parallel-size") or 1)
        # None: not known, or a number of GPUs that does not fit; validating reports that.
        self.dp = world // ranks if world and world % ranks == 0 else None
        self.batch = self.number("global-batch-size")
        if self.batch is None and "global-batch-size" not in flags and self.dp:
            self.batch = (self.number("micro-batch-size") or 1) * self.dp

    def number(self, *names: str) -> int | None:
        """The first of these flags that is given, as a positive integer."""
        return next((self.flags[name].number for name in names if name in self.flags), None)

    def set(self, key: str, value: object, *names: str) -> None:
        """Set a key that follows from these flags."""
        source = ", ".join(self.flags[name].source for name in names if name in self.flags)
        text = f"{value:.12g}" if isinstance(value, float) else str(value)
        self.mapped.overrides.append(set_key(key, text, source or "Megatron's default"))

    def without(self, name: str, reason: str) -> None:
        if name in self.flags:
            self.mapped.unmapped.append(Unmapped(self.flags[name].source, reason))

    def sharding(self) -> None:
        """Megatron shards over all data-parallel ranks; here sharding is an axis of its own."""
        flag = next((name for name in STAGES_BY_FLAG if name in self.flags), None)
        stage = STAGES_BY_FLAG[flag] if flag else 0
        if flag == "data-parallel-sharding-strategy":
            stage = STAGES.get(self.flags[flag].value, 0)
        if not flag or not stage or self.dp == 1:
            return
        copies = self.number("num-distributed-optimizer-instances") or 1
        if self.dp is None or self.dp % copies:
            reason = "the number of GPUs is not known: set Distributed.sharding.sharding_degree"
            self.without(flag, reason)
            return
        self.set("Distributed.sharding.sharding_degree", self.dp // copies, flag)
        self.set("Distributed.sharding.sharding_stage", stage, flag)
        self.set("Distributed.dp_degree", copies, flag)

    def lengths(self) -> None:
        """Batch, steps and decay that are not given as such; samples become steps."""
        if self.batch and "global-batch-size" not in self.flags:
            self.set("Global.global_batch_size", self.batch)
        if "train-samples" in self.flags:
            self.steps("Engine.max_steps", "train-samples", rounds_up=False)
        if "lr-decay-samples" in self.flags:
            self.steps("Optimizer.lr.decay_steps", "lr-decay-samples", rounds_up=True)
        elif "lr-decay-iters" not in self.flags and self.number("train-iters"):
            self.set("Optimizer.lr.decay_steps", self.number("train-iters"), "train-iters")
        elif "lr-decay-iters" not in self.flags and "train-samples" in self.flags:
            self.steps("Optimizer.lr.decay_steps", "train-samples", rounds_up=False)

    def steps(self, key: str, name: str, rounds_up: bool) -> None:
        """Set a number of updates that is given as a number of samples."""
        samples = self.number(name)
        if samples is None or self.batch is None:
            self.without(name, f"the number of samples or the global batch is not known: set {key}")
            return
        steps = -(-samples // self.batch) if rounds_up else samples // self.batch
        self.set(key, steps, name, "global-batch-size")

    def warm_up(self) -> None:
        """Our warm-up is a fraction of decay_steps."""
        if "lr-warmup-fraction" in self.flags:
            return
        rate: float = 0
        by_iterations = ("lr-warmup-iters", "lr-decay-iters", "train-iters")
        by_samples = ("lr-warmup-samples", "lr-decay-samples", "train-samples")
        for warm_up, *whole in (by_iterations, by_samples):
            if (part := self.number(warm_up)) and (total := self.number(*whole)):
                rate = part / total
        self.set("Optimizer.lr.warmup_rate", float(rate), "lr-warmup-iters", "lr-warmup-samples")
        if not rate:
            for name in ("lr-warmup-iters", "lr-warmup-samples"):
                self.without(name, "no warm-up is set: it is 0, or the decay steps are not known")

    def recompute(self) -> None:
        names = ("recompute-method", "recompute-num-layers", "checkpoint-num-layers")
        layers, count = self.number("num-layers"), self.number(*names[1:])
        method = self.flags["recompute-method"].value if "recompute-method" in self.flags else ""
        # Far above any model: a wrong number must not make a list of millions of layers.
        is_even = layers is not None and layers < 10_000 and layers % self.pp == 0
        if count is None:
            for name in names:
                self.without(name, "it needs a number of layers")
        elif method != "block" and (self.pp > 1 or count == 1):
            self.set("Distributed.pp_recompute_interval", count, *names)
        elif method == "block" and layers and is_even and not self.has_chunks:
            # The first layers of each stage are computed again, the others keep what they have.
            each = layers // self.pp
            kept = [str(layer) for layer in range(layers) if layer % each >= count]
            source = self.flags["recompute-num-layers"].source
            self.mapped.overrides.append(Override("Model.no_recompute_layers", tuple(kept), source))
        else:
            for name in names:
                self.without(name, f"{NO_COUNTERPART} in this layout")

    @property
    def has_chunks(self) -> bool:
        return "num-layers-per-virtual-pipeline-stage" in self.flags

    def chunks(self) -> None:
        name = "num-layers-per-virtual-pipeline-stage"
        layers, each = self.number("num-layers"), self.number(name)
        if each and layers and layers % (self.pp * each) == 0:
            self.set("Model.virtual_pp_degree", layers // self.pp // each, name)
        else:
            self.without(name, "num_layers / pp_degree must be a multiple of it")

    def checkpoint(self) -> None:
        if "load" not in self.flags:
            return
        is_own = "save" in self.flags and self.flags["save"].value == self.flags["load"].value
        # Megatron starts from scratch if the folder is empty; so does `auto`.
        value = "auto" if is_own else self.flags["load"].value
        self.set("Engine.save_load.ckpt_dir", value, "load")
        if not is_own:
            self.without("load", "set as ckpt_dir; import a checkpoint of Megatron first")

    def data(self) -> None:
        if "data-path" not in self.flags:
            return
        words = self.flags["data-path"].values
        paths = [word for word in words if not _is_number(word)]
        if len(paths) == 1:
            self.set("Data.Train.dataset.input_dir", paths[0], "data-path")
        elif [word for pair in zip(words[::2], words[1::2]) for word in pair[1:]] == paths:
            blend = json.dumps(dict(zip(paths, map(float, words[::2]))))
            # Not verbatim: it is a mapping.
            source = self.flags["data-path"].source
            self.mapped.overrides.append(Override("Data.Train.dataset.input_dir", blend, source))
        else:
            reason = "Megatron weighs these paths by their size: set input_dir to {path: weight, …}"
            self.without("data-path", reason)

    def defaults(self) -> None:
        for name, keys in DEFAULTS.items():
            if name not in self.flags:
                self.mapped.overrides.extend(
                    Override(key, value, "Megatron's default", verbatim=True)
                    for key, value in keys.items()
                )
        # Megatron's test at the end is as long as an evaluation, ours ten times as long.
        evaluations = self.number("eval-iters")
        if "eval-iters" not in self.flags or evaluations:
            self.set("Engine.test_iters", evaluations or 100, "eval-iters")
        style = self.flags.get("lr-decay-style")
        if style is None:
            reason = "Megatron's default has no counterpart: cosine is used"
            self.mapped.unmapped.append(Unmapped("--lr-decay-style linear", reason))


# The most specific one counts.
STAGES_BY_FLAG = {
    "data-parallel-sharding-strategy": 0,
    "use-torch-fsdp2": 3,
    "use-distributed-optimizer": 1,
}


def _is_number(word: str) -> bool:
    return word.replace(".", "", 1).isdigit()
