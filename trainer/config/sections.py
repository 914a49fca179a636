"""The sections of a run config: every key with its default and its meaning.

The names follow FleetX and PaddleNLP's GPT. If a default is None and the text says `derived`,
`derive.py` fills the value in before the section is built, so code that reads it never sees None.
"""

from __future__ import annotations

from types import MappingProxyType

from trainer.config.corpora import InputDir, corpora
from trainer.config.kinds import (
    Choices,
    Integers,
    OutputPath,
    Text,
    Words,
    boolean,
    choice,
    file_path,
    integer,
    key,
    number,
    section,
)
from trainer.config.presets import PRESETS
from trainer.config.record import record
from trainer.trackers import PACKAGES

MAX_DEGREE = 1 << 20  # a million GPUs; anything larger is a typing error
MAX_BATCH = 1 << 30
LOWEST_TEMPERATURE = 1e-6  # logits divided by less would not be finite


@record(frozen=True)
class Global:
    device: str = choice("gpu", ["gpu", "cpu"], "where to train: gpu | cpu")
    seed: int = integer(1024, "random seed for weights, data order and dropout", low=0)
    global_batch_size: int = integer(
        None,
        "samples per update, all ranks together; derived: local · dp · sharding",
        low=1,
        high=MAX_BATCH,
    )
    local_batch_size: int = integer(
        None,
        "samples per update and model replica; derived: global / (dp · sharding), or micro",
        low=1,
        high=MAX_BATCH,
    )
    micro_batch_size: int = integer(1, "samples per forward pass", low=1, high=MAX_BATCH)


@record(frozen=True)
class MixPrecision:
    enable: bool = boolean(False, "train in mixed precision (PaddleNLP: use_amp)")
    # bfloat16 needs no loss scale, but not every GPU supports it: float16 is FleetX's default.
    dtype: str = choice(
        "float16",
        ["float16", "bfloat16"],
        "half-precision type: float16 | bfloat16",
        fp16="float16",
        bf16="bfloat16",
        half="float16",
    )
    level: str = choice(
        "O1",
        ["O1", "O2"],
        "O1 (autocast) | O2 (half-precision parameters, fp32 master weights); equal with sharding",
    )
    scale_loss: float = number(
        32768.0, "initial dynamic loss scale (float16 only)", above=0, high=2.0**32
    )


@record(frozen=True)
class SaveLoad:
    save_steps: int = integer(
        1000, "save a checkpoint every n updates (run_mode step); <= 0 or empty: only at the end"
    )
    save_epoch: int = integer(1, "save a checkpoint every n epochs (run_mode epoch)", low=1)
    output_dir: str | None = file_path(
        None, "folder for checkpoints; empty: <run_dir>/output, or ./output without gptctl"
    )
    ckpt_dir: str | None = file_path(
        None,
        "checkpoint to resume from: a path | auto (the latest in output_dir) | "
        "empty (start from scratch)",
    )
    load_optimizer: bool = boolean(
        True, "False: take only weights from ckpt_dir, and train them from step 0 (fine-tuning)"
    )
    # Not 1: the newest checkpoint may turn out to be damaged.
    keep_last: int | None = integer(None, "checkpoints to keep, the newest; empty: all", low=2)
    snapshot_path: str | None = file_path(
        None, "save the character GPT to this single file every save_epoch epochs, as minGPT does"
    )


@record(frozen=True)
class Engine:
    run_mode: str = choice("step", ["step", "epoch"], "unit of the run length: step | epoch")
    max_steps: int = integer(
        500000, "stop after this many updates; <= 0, without run_mode: after num_train_epochs"
    )
    num_train_epochs: int = integer(1, "number of epochs (run_mode epoch)", low=1)
    accumulate_steps: int = integer(
        None, "micro-batches per update; derived: local_batch_size / micro_batch_size", low=1
    )
    logging_freq: int = integer(1, "log every n updates", low=1)
    eval_freq: int = integer(
        500, "evaluate every n updates, or after each epoch (run_mode epoch); <= 0: never"
    )
    eval_iters: int = integer(10, "batches per evaluation", low=0)
    test_iters: int = integer(
        None, "batches of the test run at the end; derived: 10 · eval_iters", low=0
    )
    check_accuracy: bool = boolean(
        False, "make the losses of different layouts comparable: no dropout, evaluation or save"
    )
    log_style: str = choice(
        "fleetx", ["fleetx", "mingpt", "json"], "format of the log lines: fleetx | mingpt | json"
    )
    trackers: tuple[str, ...] = key(
        Choices(tuple(PACKAGES), MappingProxyType({"tensorboardx": "tensorboard"})),
        (),
        "also send what metrics.jsonl records to: tensorboard | wandb | swanlab | mlflow",
    )
    compile: str = choice(
        "auto",
        ["auto", "true", "false"],
        "compile the layers with torch.compile: auto (on GPUs, if a compiler is installed) | "
        "true | false",
        on="true",
        off="false",
        yes="true",
        no="false",
    )
    tf32: bool = boolean(
        False, "multiply fp32 matrices in TF32 on GPUs: faster, but exact to three digits only"
    )
    mix_precision: MixPrecision = section(MixPrecision, "half precision and loss scaling")
    save_load: SaveLoad = section(SaveLoad, "where and when to save, and what to resume from")


@record(frozen=True)
class Model:
    name: str = choice(
        "gpt2-en",
        [*PRESETS, "GPT", "GPT-cn"],
        "a preset, or GPT with the sizes below; sizes in the config override the preset",
    )
    vocab_size: int | None = integer(
        None,
        "tokens in the vocabulary; derived: from the preset, else 50304; "
        "CharDataset: counted in the data",
        low=1,
        high=1 << 24,
    )
    vocab_size_divisible_unit: int = integer(
        128, "pad the vocabulary to a multiple of this", low=1, high=1 << 20
    )
    hidden_size: int = integer(
        None, "width of the hidden states; derived: from the preset", low=1, high=1 << 20
    )
    num_layers: int = integer(
        None, "transformer layers; derived: from the preset", low=1, high=1 << 16
    )
    num_attention_heads: int = integer(
        None, "attention heads per layer; derived: from the preset", low=1, high=1 << 16
    )
    ffn_hidden_size: int = integer(
        None, "width of the feed-forward layer; derived: 4 · hidden_size", low=1, high=1 << 22
    )
    hidden_dropout_prob: float = number(
        0.1, "dropout probability of embeddings and block outputs", low=0, below=1
    )
    attention_probs_dropout_prob: float = number(
        0.1, "dropout probability of attention weights", low=0, below=1
    )
    max_position_embeddings: int = integer(
        None,
        "longest sequence that the model accepts; derived: 1024; CharDataset: max_seq_len",
        low=1,
        high=1 << 24,
    )
    initializer_range: float = number(
        0.02, "standard deviation of the initial weights", above=0, high=10
    )
    use_recompute: bool = boolean(False, "save memory: recompute activations in the backward pass")
    recompute_granularity: str = choice(
        "full",
        ["full", "full_attn", "core_attn"],
        "what to recompute: full (whole layer) | full_attn (attention) | core_attn (softmax(QK)V)",
    )
    no_recompute_layers: tuple[int, ...] = key(
        Integers(), (), "layers that keep their activations, counted from 0"
    )
    # FleetX configs contain the next three keys. Here they do not change the computation.
    fuse_attn_qkv: bool = boolean(True, "one projection for query, key and value: always on")
    use_flash_attn: bool = boolean(
        False,
        "without effect: torch chooses the attention kernel, and on GPUs none stores scores",
    )
    scale_qk_by_layer_num: bool = boolean(
        False, "scale QK by the layer number and undo it in the softmax: not needed here"
    )
    sequence_parallel: bool = boolean(
        False, "split the sequence over the mp group between tensor-parallel regions"
    )
    virtual_pp_degree: int = integer(
        1, "pipeline chunks per stage; > 1: interleaved schedule", low=1, high=1 << 10
    )


@record(frozen=True)
class Dataset:
    name: str = choice(
        "GPTDataset",
        ["GPTDataset", "CharDataset"],
        "GPTDataset (token files) | CharDataset (the characters of a text file)",
    )
    input_dir: InputDir = corpora(
        "./data",
        "GPTDataset: a folder of token files (*_ids.npy + *_idx.npz, *_ids.npz, *.bin + *.idx), "
        "one such file, or a blend {path: weight, …}",
    )
    split: tuple[int, ...] = key(
        Integers(longest=3), (949, 50, 1), "GPTDataset: shares of train, valid and test documents"
    )
    eos_id: int | None = integer(
        None,
        "GPTDataset: the token after which nothing is predicted, -1: none; "
        "derived: 50256 or 7 if vocab_size or Model.name is that of GPT-2 or CPM",
        low=-1,
    )
    max_seq_len: int = integer(1024, "tokens per sample (minGPT: block_size)", low=1, high=1 << 24)
    path: str | None = file_path(None, "CharDataset: a text file, or builtin (the demo corpus)")
    train_split: float = number(
        0.9, "CharDataset: fraction of the samples to train on", above=0, high=1
    )
    truncate: float = number(1.0, "CharDataset: fraction of the text to use", above=0, high=1)


@record(frozen=True)
class Sampler:
    shuffle: bool = boolean(False, "shuffle the samples once more; the index is already shuffled")
    drop_last: bool = boolean(True, "drop the last batch of an epoch if it is incomplete")


@record(frozen=True)
class Loader:
    # FleetX starts this many processes. Here one thread is enough: samples are read from memory.
    num_workers: int = integer(
        1, "0: read data when needed; otherwise one thread reads ahead", low=0, high=1024
    )


@record(frozen=True)
class DataPart:
    dataset: Dataset = section(Dataset, "files, split and sequence length")
    sampler: Sampler = section(Sampler, "order of the samples")
    loader: Loader = section(Loader, "how data is read")


@record(frozen=True)
class Data:
    cache_dir: str | None = file_path(
        None, "folder for index maps; empty: next to the data, or ~/.cache/gptctl if that fails"
    )
    Train: DataPart = section(DataPart, "training data")
    Eval: DataPart = section(DataPart, "validation data; empty keys: same as Train")
    Test: DataPart = section(DataPart, "test data; empty keys: same as Train")


@record(frozen=True)
class LearningRate:
    name: str = choice(
        "CosineAnnealingWithWarmupDecay",
        ["CosineAnnealingWithWarmupDecay", "none"],
        "schedule: CosineAnnealingWithWarmupDecay | none (constant max_lr)",
        cosine="CosineAnnealingWithWarmupDecay",
        constant="none",
    )
    decay_steps: int = integer(
        360000, "updates until the rate reaches min_lr; empty: max_steps", low=1
    )
    warmup_rate: float = number(
        0.01, "fraction of decay_steps used for linear warm-up", low=0, high=1
    )
    max_lr: float = number(5.0e-5, "learning rate at the end of the warm-up", above=0, high=100)
    min_lr: float = number(1.0e-5, "learning rate after decay_steps", low=0)


@record(frozen=True)
class GradClip:
    name: str = choice(
        "ClipGradByGlobalNorm", ["ClipGradByGlobalNorm"], "clipping method; the only choice"
    )
    clip_norm: float = number(1.0, "clip gradients to this global norm; <= 0: no clipping")


@record(frozen=True)
class Optimizer:
    name: str = choice(
        "AdamW", ["AdamW"], "optimizer; the only choice", fusedadamw="AdamW", adam="AdamW"
    )
    weight_decay: float = number(0.01, "weight decay, except for biases and norms", low=0)
    beta1: float = number(0.9, "decay rate of Adam's first moment", low=0, below=1)
    beta2: float = number(0.999, "decay rate of Adam's second moment", low=0, below=1)
    epsilon: float = number(1.0e-8, "added to Adam's denominator", above=0)
    lr: LearningRate = section(LearningRate, "learning-rate schedule")
    grad_clip: GradClip = section(GradClip, "a bare number sets clip_norm", shorthand="clip_norm")
    tensor_fusion: bool = boolean(
        False, "flat buffers for parameters and gradients: not needed here"
    )


@record(frozen=True)
class Sharding:
    sharding_degree: int = integer(
        1, "ranks that share one copy of the training state", low=1, high=MAX_DEGREE
    )
    sharding_stage: int = integer(
        2,
        "what to shard: 0 nothing | 1 optimizer state | 2 + gradients | 3 + parameters",
        low=0,
        high=3,
    )
    sharding_offload: bool = boolean(
        False, "keep each rank's shard of parameters, gradients and optimizer state on the CPU"
    )
    reduce_overlap: bool = boolean(
        False, "overlap gradient reduction with the backward pass: always on"
    )
    broadcast_overlap: bool = boolean(
        False, "gather the parameters of the next layer while the current one runs"
    )


@record(frozen=True)
class Distributed:
    dp_degree: int = integer(
        None, "data-parallel degree; derived: GPUs / (mp · pp · sharding)", low=1, high=MAX_DEGREE
    )
    mp_degree: int = integer(1, "tensor (model) parallel degree", low=1, high=MAX_DEGREE)
    pp_degree: int = integer(1, "pipeline-parallel degree", low=1, high=MAX_DEGREE)
    sharding: Sharding = section(Sharding, "group sharding (ZeRO, FSDP)")
    pp_schedule: str = choice(
        "1F1B",
        ["1F1B", "GPipe"],
        "pipeline schedule: 1F1B | GPipe (all forward passes first); "
        "empty, with fewer micro-batches than stages: GPipe; "
        "virtual_pp_degree > 1: always interleaved 1F1B",
    )
    pp_recompute_interval: int = integer(
        1, "layers to recompute together (full recompute with pp)", low=1
    )
    bucket_cap_mb: float = number(25.0, "size of a data-parallel gradient bucket in MB", above=0)
    # Only needed to run GPUs without nccl, for example to debug communication.
    backend: str = choice(
        None, ["nccl", "gloo"], "communication backend; derived: nccl on gpu, gloo on cpu"
    )
    timeout_minutes: float = number(
        30.0,
        "stop the job if ranks wait longer than this for another rank, and name that rank",
        low=0.01,
        high=1_000_000,
    )


@record(frozen=True)
class Profiler:
    enable: bool = boolean(
        False,
        "record some steps: a chrome trace per rank, a table of operators; see `gptctl trace`",
    )
    scheduler: tuple[int, ...] = key(
        Integers(longest=2), (1, 5), "steps to record, counted from 1: [first, last + 1]"
    )
    profiler_log: str = key(
        OutputPath(),
        "profiler_log",
        "folder for the traces and memory snapshots; a relative path is below output_dir",
    )
    detailed: bool = boolean(
        False, "also record shapes and allocations, and log every table of operators"
    )


@record(frozen=True)
class Generation:
    top_k: int = integer(50, "sample from the k most likely tokens; 0: from all", low=0)
    top_p: float = number(
        0.75, "sample from the most likely tokens with this total probability", above=0, high=1
    )
    temperature: float = number(
        1.0, "below 1: more likely text, above 1: more varied", low=LOWEST_TEMPERATURE
    )
    min_dec_len: int = integer(
        1, "tokens before a text may end; a character GPT has no end token: max_dec_len", low=0
    )
    max_dec_len: int = integer(200, "tokens per sample", low=1)
    num_return_sequences: int = integer(1, "number of samples; 0: none", low=0)
    decode_strategy: str = choice(
        "sampling",
        ["sampling", "greedy_search"],
        "how to choose the next token: sampling | greedy_search (always the most likely)",
        topk_sampling="sampling",
        topp_sampling="sampling",
    )
    repetition_penalty: float = number(
        1.0, "above 1: tokens that the text already has become less likely", low=0.01, high=100
    )
    stop_words: tuple[str, ...] = key(
        Words(Text(r"(?s).+", "a text", has_lines=True)), (), "a text ends before any of these"
    )


@record(frozen=True)
class OfflineEval:
    eval_path: str | None = file_path(
        None, "a text file, or JSON lines with a `text` each (*.jsonl)"
    )
    cloze_eval: bool = boolean(
        False, "measure how often the last word is predicted, instead of perplexity"
    )
    overlapping_eval: int = integer(
        32, "tokens from one window to the next, at most max_seq_len", low=1
    )
    batch_size: int = integer(8, "windows per forward pass", low=1)
    max_seq_len: int = integer(
        1024, "tokens per window, at most max_position_embeddings of the model", low=1
    )
    logging_freq: int = integer(10, "log every n batches", low=1)


# The order of sections and keys is the order of `gptctl keys` and of the config in the log.
@record(frozen=True)
class RunConfig:
    Global: Global = section(Global, "device, seed, batch sizes")
    Engine: Engine = section(Engine, "length of the run, logging, evaluation, checkpoints")
    Model: Model = section(Model, "size and options of the GPT")
    Data: Data = section(Data, "training, validation and test data")
    Optimizer: Optimizer = section(Optimizer, "AdamW and its learning-rate schedule")
    Distributed: Distributed = section(Distributed, "the layout: mp · sharding · pp · dp = GPUs")
    Profiler: Profiler = section(Profiler, "recording where the time of some steps goes")
    Generation: Generation = section(
        Generation,
        "text that a model writes: the tasks generate and serve, and the sample of a character GPT",
    )
    Offline_Eval: OfflineEval = section(
        OfflineEval, "the evaluation of a checkpoint: the task eval"
    )
