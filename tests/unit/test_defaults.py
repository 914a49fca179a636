"""Every default, written out a second time. The oracle is this table, taken from the specification of the run config."""

from __future__ import annotations

from gptctl.spec.launch import Launch
from trainer.config import RunConfig
from trainer.config.presets import PRESETS
from trainer.config.read import paths_of
from trainer.config.rules import value_at

DEFAULTS = """
Global.device gpu
Global.seed 1024
Global.global_batch_size None
Global.local_batch_size None
Global.micro_batch_size 1
Engine.run_mode step
Engine.max_steps 500000
Engine.num_train_epochs 1
Engine.accumulate_steps None
Engine.logging_freq 1
Engine.eval_freq 500
Engine.eval_iters 10
Engine.test_iters None
Engine.check_accuracy False
Engine.log_style fleetx
Engine.compile auto
Engine.tf32 False
Engine.mix_precision.enable False
Engine.mix_precision.dtype float16
Engine.mix_precision.level O1
Engine.mix_precision.scale_loss 32768.0
Engine.save_load.save_steps 1000
Engine.save_load.save_epoch 1
Engine.save_load.output_dir None
Engine.save_load.ckpt_dir None
Engine.save_load.load_optimizer True
Engine.save_load.keep_last None
Engine.save_load.snapshot_path None
Model.name gpt2-en
Model.vocab_size None
Model.vocab_size_divisible_unit 128
Model.hidden_size None
Model.num_layers None
Model.num_attention_heads None
Model.ffn_hidden_size None
Model.hidden_dropout_prob 0.1
Model.attention_probs_dropout_prob 0.1
Model.max_position_embeddings None
Model.initializer_range 0.02
Model.use_recompute False
Model.recompute_granularity full
Model.no_recompute_layers ()
Model.fuse_attn_qkv True
Model.use_flash_attn False
Model.scale_qk_by_layer_num False
Model.sequence_parallel False
Model.virtual_pp_degree 1
Data.cache_dir None
Data.Train.dataset.name GPTDataset
Data.Train.dataset.input_dir ./data
Data.Train.dataset.split (949,50,1)
Data.Train.dataset.eos_id None
Data.Train.dataset.max_seq_len 1024
Data.Train.dataset.path None
Data.Train.dataset.train_split 0.9
Data.Train.dataset.truncate 1.0
Data.Train.sampler.shuffle False
Data.Train.sampler.drop_last True
Data.Train.loader.num_workers 1
Optimizer.name AdamW
Optimizer.weight_decay 0.01
Optimizer.beta1 0.9
Optimizer.beta2 0.999
Optimizer.epsilon 1e-08
Optimizer.lr.name CosineAnnealingWithWarmupDecay
Optimizer.lr.decay_steps 360000
Optimizer.lr.warmup_rate 0.01
Optimizer.lr.max_lr 5e-05
Optimizer.lr.min_lr 1e-05
Optimizer.grad_clip.name ClipGradByGlobalNorm
Optimizer.grad_clip.clip_norm 1.0
Optimizer.tensor_fusion False
Distributed.dp_degree None
Distributed.mp_degree 1
Distributed.pp_degree 1
Distributed.sharding.sharding_degree 1
Distributed.sharding.sharding_stage 2
Distributed.sharding.sharding_offload False
Distributed.sharding.reduce_overlap False
Distributed.sharding.broadcast_overlap False
Distributed.pp_schedule 1F1B
Distributed.pp_recompute_interval 1
Distributed.bucket_cap_mb 25.0
Distributed.backend None
Distributed.timeout_minutes 30.0
Profiler.enable False
Profiler.scheduler (1,5)
Profiler.profiler_log profiler_log
Profiler.detailed False
Generation.top_k 50
Generation.top_p 0.75
Generation.temperature 1.0
Generation.min_dec_len 1
Generation.max_dec_len 200
Generation.num_return_sequences 1
Generation.decode_strategy sampling
Generation.repetition_penalty 1.0
Generation.stop_words ()
Offline_Eval.eval_path None
Offline_Eval.cloze_eval False
Offline_Eval.overlapping_eval 32
Offline_Eval.batch_size 8
Offline_Eval.max_seq_len 1024
Offline_Eval.logging_freq 10
"""

LAUNCH = """
cluster local
nodes 1
gpus_per_node None
devices None
style None
rdzv.backend None
rdzv.id None
rdzv.endpoint None
rdzv.port None
max_restarts 0
job_name gpt
log_dir None
entrypoint trainer
files ()
args ()
env {}
secrets {}
notify None
slurm.partition None
slurm.account None
slurm.time None
slurm.cpus_per_task None
slurm.requeue None
slurm.save_before None
slurm.extra {}
"""

SIZES = {  # layers, hidden, heads
    "gpt2-small-en": (4, 1024, 4), "gpt2-en": (12, 768, 12), "gpt2-medium-en": (24, 1024, 16), "345M": (24, 1024, 16),
    "gpt2-large-en": (36, 1280, 20), "gpt2-xl-en": (48, 1600, 25), "1.3B": (24, 2048, 16), "6.7B": (32, 4096, 32),
    "13B": (40, 5120, 40), "175B": (96, 12288, 96), "gpt-cpm-large-cn": (32, 2560, 32), "gpt-cpm-small-cn-distill": (12, 768, 12),
    "openai-gpt": (12, 768, 12), "gpt2": (12, 768, 12), "gpt2-medium": (24, 1024, 16), "gpt2-large": (36, 1280, 20),
    "gpt2-xl": (48, 1600, 25), "gopher-44m": (8, 512, 16), "gpt-mini": (6, 192, 6), "gpt-micro": (4, 128, 4), "gpt-nano": (3, 48, 3),
}  # fmt: skip


def written(table: str) -> dict[str, str]:
    return dict(line.split(" ", 1) for line in table.strip().splitlines())


def test_every_key_and_default_of_a_run_config() -> None:
    expected = written(DEFAULTS)
    for part in ("Eval", "Test"):
        expected |= {key.replace("Train", part): value for key, value in written(DEFAULTS).items() if "Train" in key}
    run = RunConfig()
    assert {path: str(value_at(run, path)).replace(", ", ",") for path in paths_of(RunConfig)} == expected


def test_every_key_and_default_of_launch() -> None:
    launch = Launch()
    assert {path: str(value_at(launch, path)) for path in paths_of(Launch)} == written(LAUNCH)


def test_the_sizes_of_every_preset() -> None:
    assert {name: tuple(preset[:3]) for name, preset in PRESETS.items()} == SIZES
