"""The sections of a run config: every key with its default, and what it means.

The names are those of FleetX and PaddleNLP's GPT. A default of None with `derived` in its text is filled in by
`derive.py` before a section is built, so code that uses a section finds a value there.
"""

from __future__ import annotations

from trainer.config.kinds import Integers, boolean, choice, file_path, integer, key, number, section
from trainer.config.presets import PRESETS
from trainer.config.record import record

MAX_DEGREE = 1 << 20  # a million GPUs; larger worlds are typing mistakes
MAX_BATCH = 1 << 30


@record(frozen=True)
class Global:
    device: str = choice("gpu", ["gpu", "cpu"], "gpu | cpu")
    seed: int = integer(1024, "base seed of weights, data order and dropout", low=0)
    global_batch_size: int = integer(
        None,
        "samples per update of the whole job; derived: local · dp · sharding",
        low=1,
        high=MAX_BATCH,
    )
    local_batch_size: int = integer(
        None,
        "samples per replica and update; derived: global / (dp · sharding), or micro",
        low=1,
        high=MAX_BATCH,
    )
    micro_batch_size: int = integer(1, "samples per forward pass", low=1, high=MAX_BATCH)


@record(frozen=True)
class MixPrecision:
    enable: bool = boolean(False, "mixed precision (PaddleNLP: use_amp)")
    dtype: str = choice(
        "float16",
        ["float16", "bfloat16"],
        "float16 | bfloat16",
        fp16="float16",
        bf16="bfloat16",
        half="float16",
    )
    level: str = choice(
        "O1", ["O1", "O2"], "O1 autocast | O2 half parameters + fp32 master weights"
    )
    scale_loss: float = number(
        32768.0, "initial dynamic loss scale of float16", above=0, high=2.0**32
    )


@record(frozen=True)
class SaveLoad:
    save_steps: int = integer(1000, "checkpoint every n updates; <= 0 or empty: only at the end")
    save_epoch: int = integer(1, "checkpoint every n epochs (run_mode epoch)", low=1)
    output_dir: str | None = file_path(
        None, "root of checkpoints; empty: <run_dir>/output, or ./output without gptctl"
    )
    ckpt_dir: str | None = file_path(
        None, "checkpoint to go on from: a path | auto (the latest in output_dir) | empty"
    )
    keep_last: int | None = integer(None, "checkpoints to keep; empty: all", low=2)
    snapshot_path: str | None = file_path(
        None, "single-file snapshot of the character GPT, every save_epoch epochs"
    )


@record(frozen=True)
class Engine:
    run_mode: str = choice("step", ["step", "epoch"], "step | epoch")
    max_steps: int = integer(500000, "stop after this many updates; <= 0: after num_train_epochs")
    num_train_epochs: int = integer(1, "epochs (run_mode epoch)", low=1)
    accumulate_steps: int = integer(
        None, "micro-batches per update; derived: local_batch_size / micro_batch_size", low=1
    )
    logging_freq: int = integer(1, "log every n updates", low=1)
    eval_freq: int = integer(500, "evaluate every n updates; <= 0: never")
    eval_iters: int = integer(10, "batches per evaluation", low=0)
    test_iters: int = integer(
        None, "batches of the final test run; derived: 10 · eval_iters", low=0
    )
    check_accuracy: bool = boolean(False, "compare layouts: dropouts 0, no evaluation, no save")
    log_style: str = choice(
        "fleetx", ["fleetx", "mingpt", "json"], "fleetx | mingpt | json: the form of the log lines"
    )
    mix_precision: MixPrecision = section(MixPrecision)
    save_load: SaveLoad = section(SaveLoad)


@record(frozen=True)
class Model:
    name: str = choice(
        "gpt2-en",
        [*PRESETS, "GPT", "GPT-cn"],
        "a preset, or GPT with the sizes below; written sizes win",
    )
    vocab_size: int | None = integer(
        None,
        "derived: the preset's, else 50304; CharDataset: counted in the data",
        low=1,
        high=1 << 24,
    )
    vocab_size_divisible_unit: int = integer(
        128, "the vocabulary is padded to a multiple of this", low=1, high=1 << 20
    )
    hidden_size: int = integer(None, "derived: the preset's", low=1, high=1 << 20)
    num_layers: int = integer(None, "derived: the preset's", low=1, high=1 << 16)
    num_attention_heads: int = integer(None, "derived: the preset's", low=1, high=1 << 16)
    ffn_hidden_size: int = integer(None, "derived: 4 · hidden_size", low=1, high=1 << 22)
    hidden_dropout_prob: float = number(
        0.1, "dropout of embeddings and block outputs", low=0, below=1
    )
    attention_probs_dropout_prob: float = number(
        0.1, "dropout of attention weights", low=0, below=1
    )
    max_position_embeddings: int = integer(
        None, "derived: 1024; CharDataset: max_seq_len", low=1, high=1 << 24
    )
    initializer_range: float = number(
        0.02, "standard deviation of initial weights", above=0, high=10
    )
    use_recompute: bool = boolean(False, "recompute activations in the backward pass")
    recompute_granularity: str = choice(
        "full",
        ["full", "full_attn", "core_attn"],
        "full (whole layer) | full_attn (attention) | core_attn (softmax(QK)V)",
    )
    no_recompute_layers: tuple[int, ...] = key(Integers(), (), "layers that keep their activations")
    fuse_attn_qkv: bool = boolean(True, "one projection for query, key and value")
    use_flash_attn: bool = boolean(
        False, "estimate memory without attention scores; torch always fuses where it can"
    )
    scale_qk_by_layer_num: bool = boolean(
        False, "scale QK by the layer number and undo it in the softmax"
    )
    sequence_parallel: bool = boolean(False, "split the sequence over the mp group between layers")
    virtual_pp_degree: int = integer(
        1, "pipeline chunks per stage (interleaved schedule)", low=1, high=1 << 10
    )


@record(frozen=True)
class Dataset:
    name: str = choice("GPTDataset", ["GPTDataset", "CharDataset"], "GPTDataset | CharDataset")
    input_dir: str = file_path(
        "./data", "GPTDataset: a folder of *_ids.npy + *_idx.npz or *_ids.npz, or one such file"
    )
    split: tuple[int, ...] = key(
        Integers(longest=3), (949, 50, 1), "shares of train, valid and test documents"
    )
    max_seq_len: int = integer(
        1024, "tokens per sample (CharDataset: block_size)", low=1, high=1 << 24
    )
    path: str | None = file_path(None, "CharDataset: a text file, or builtin (the demo corpus)")
    train_split: float = number(
        0.9, "CharDataset: share of the samples that is trained on", above=0, high=1
    )
    truncate: float = number(1.0, "CharDataset: share of the text that is used", above=0, high=1)


@record(frozen=True)
class Sampler:
    shuffle: bool = boolean(False, "shuffle on top of the shuffled index")
    drop_last: bool = boolean(True, "leave out an incomplete last batch")


@record(frozen=True)
class Loader:
    num_workers: int = integer(
        1, "0: read when needed; else a thread reads ahead", low=0, high=1024
    )


@record(frozen=True)
class DataPart:
    dataset: Dataset = section(Dataset)
    sampler: Sampler = section(Sampler)
    loader: Loader = section(Loader)


@record(frozen=True)
class Data:
    Train: DataPart = section(DataPart, "what is trained on")
    Eval: DataPart = section(DataPart, "empty keys: as Train")
    Test: DataPart = section(DataPart, "empty keys: as Train")


@record(frozen=True)
class LearningRate:
    name: str = choice(
        "CosineAnnealingWithWarmupDecay",
        ["CosineAnnealingWithWarmupDecay", "none"],
        "CosineAnnealingWithWarmupDecay | none (always max_lr)",
        cosine="CosineAnnealingWithWarmupDecay",
        constant="none",
    )
    decay_steps: int = integer(360000, "updates until min_lr is reached; empty: max_steps", low=1)
    warmup_rate: float = number(0.01, "share of decay_steps with a rising rate", low=0, high=1)
    max_lr: float = number(5.0e-5, "highest learning rate", above=0, high=100)
    min_lr: float = number(1.0e-5, "learning rate after decay_steps", low=0)


@record(frozen=True)
class GradClip:
    name: str = choice("ClipGradByGlobalNorm", ["ClipGradByGlobalNorm"], "the only way of clipping")
    clip_norm: float = number(1.0, "largest global gradient norm; <= 0: off")


@record(frozen=True)
class Optimizer:
    name: str = choice("AdamW", ["AdamW"], "the only optimizer", fusedadamw="AdamW")
    weight_decay: float = number(0.01, "not applied to biases and norms", low=0)
    beta1: float = number(0.9, "", low=0, below=1)
    beta2: float = number(0.999, "", low=0, below=1)
    epsilon: float = number(1.0e-8, "", above=0)
    lr: LearningRate = section(LearningRate)
    grad_clip: GradClip = section(GradClip, "a bare number is clip_norm", shorthand="clip_norm")
    tensor_fusion: bool = boolean(False, "flat buffers for parameters and gradients")


@record(frozen=True)
class Sharding:
    sharding_degree: int = integer(
        1, "ranks that share one copy of the states", low=1, high=MAX_DEGREE
    )
    sharding_stage: int = integer(
        2, "0 off | 1 optimizer | 2 + gradients | 3 + parameters", low=0, high=3
    )
    sharding_offload: bool = boolean(
        False, "keep a rank's own part of parameters, gradients and optimizer state on the CPU"
    )
    reduce_overlap: bool = boolean(
        False, "overlap gradient reduction with the backward pass: always done"
    )
    broadcast_overlap: bool = boolean(
        False, "gather the parameters of a layer while the one before runs"
    )


@record(frozen=True)
class Distributed:
    dp_degree: int = integer(
        None, "data parallel; derived: GPUs / (mp · pp · sharding)", low=1, high=MAX_DEGREE
    )
    mp_degree: int = integer(1, "tensor (model) parallel", low=1, high=MAX_DEGREE)
    pp_degree: int = integer(1, "pipeline parallel", low=1, high=MAX_DEGREE)
    sharding: Sharding = section(Sharding)
    pp_schedule: str = choice(
        "1F1B",
        ["1F1B", "GPipe"],
        "1F1B | GPipe (all forward passes first); virtual_pp_degree > 1: interleaved 1F1B",
    )
    pp_recompute_interval: int = integer(
        1, "layers recomputed together (full recompute with pp)", low=1
    )
    bucket_cap_mb: float = number(25.0, "size of a DDP bucket", above=0)
    backend: str = choice(None, ["nccl", "gloo"], "derived: nccl on gpu, gloo on cpu")
    timeout_minutes: float = number(
        30.0,
        "ranks that wait for one longer than this end the job, and name it",
        low=0.01,
        high=1_000_000,
    )


@record(frozen=True)
class Profiler:
    enable: bool = boolean(False, "record a profile")
    scheduler: tuple[int, ...] = key(
        Integers(longest=2), (1, 5), "[first step, step after the last]"
    )
    profiler_log: str = file_path("profiler_log", "folder of the traces")
    detailed: bool = boolean(False, "print every summary table")


@record(frozen=True)
class Generation:
    top_k: int = integer(50, "0: off", low=0)
    top_p: float = number(0.75, "", above=0, high=1)
    temperature: float = number(1.0, "", above=0)
    min_dec_len: int = integer(1, "characters have no end token: always max_dec_len", low=0)
    max_dec_len: int = integer(200, "", low=1)
    num_return_sequences: int = integer(1, "samples to write; 0: none", low=0)
    decode_strategy: str = choice(
        "sampling",
        ["sampling", "greedy_search"],
        "sampling | greedy_search",
        topk_sampling="sampling",
        topp_sampling="sampling",
    )


@record(frozen=True)
class OfflineEval:
    eval_path: str | None = file_path(None, "text file (perplexity) or jsonl (cloze)")
    cloze_eval: bool = boolean(False, "accuracy of the last word instead of perplexity")
    overlapping_eval: int = integer(32, "tokens by which windows move on", low=1)
    batch_size: int = integer(8, "", low=1)
    max_seq_len: int = integer(1024, "", low=1)
    logging_freq: int = integer(10, "", low=1)


@record(frozen=True)
class RunConfig:
    Global: Global = section(Global, "device, seed, batch sizes")
    Engine: Engine = section(Engine, "how long, how often, where to")
    Model: Model = section(Model, "the GPT")
    Data: Data = section(Data, "what it reads")
    Optimizer: Optimizer = section(Optimizer, "AdamW and its schedule")
    Distributed: Distributed = section(Distributed, "the layout: mp · sharding · pp · dp = GPUs")
    Profiler: Profiler = section(Profiler)
    Generation: Generation = section(
        Generation, "the sample that a character GPT writes at its end"
    )
    Offline_Eval: OfflineEval = section(OfflineEval)
