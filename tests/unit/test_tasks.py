"""FleetX's files of other tasks are refused in one line; its pre-training files load. The oracle is what FleetX does with
each file: the module in it, and the switches of its sections. The texts are written anew from the keys of FleetX's files."""

from __future__ import annotations

import pytest

from tests.conftest import codes
from trainer.config import load
from trainer.config.rules import value_at
from trainer.config.tasks import NOT_SUPPORTED_YET
from trainer.errors import UserError

# The base file of FleetX's GPT, shortened: every task starts from it.
BASE = """\
Global: {device: gpu, seed: 1024, global_batch_size: , local_batch_size: 8, micro_batch_size: 8}
Engine:
  max_steps: 500000
  accumulate_steps:
  test_iters:
  mix_precision: {enable: True, dtype: float16, level: O2, scale_loss: 32768.0, custom_black_list: [reduce_sum]}
  save_load: {save_steps: 500, save_epoch: 1, output_dir: ./output, ckpt_dir: }
Model: {module: GPTModule, name: GPT, vocab_size: 50304, hidden_size: 1024, num_layers: 24, num_attention_heads: 16, ffn_hidden_size: , type_vocab_size: 16, recompute_granularity: , fused_linear: False}
Data:
  Train: {dataset: {name: GPTDataset, input_dir: ./data/, split: [949, 50, 1], max_seq_len: 1024}, sampler: {name: GPTBatchSampler, shuffle: False}, loader: {num_workers: 1, return_list: False, collate_fn: gpt_collate_fn}}
Optimizer: {name: FusedAdamW, lr: {name: CosineAnnealingWithWarmupDecay, max_lr: 5.0e-5, min_lr: 1.0e-5}, grad_clip: {name: ClipGradByGlobalNorm, clip_norm: 1.0}}
Distributed: {dp_degree: 1, mp_degree: 1, pp_degree: 1, sharding: {sharding_degree: 1, sharding_stage: 1}}
Profiler: {enable: False, scheduler: [1, 5], profiler_log: profiler_log}
"""
GENERATION = "Generation: {top_k: 50, top_p: 0.75, temperature: 1.0, min_dec_len: 1, max_dec_len: 200, num_return_sequences: 1, decode_strategy: sampling%s}\n"
EVALUATION = "Offline_Eval: {eval_path: ./lambada_test.jsonl, cloze_eval: True, overlapping_eval: 32, batch_size: 8, max_seq_len: 1024, logging_freq: 10}\n"
QUANTIZATION = "Quantization: {enable: True, weight_quantize_type: abs_max, weight_bits: 8, activation_bits: 8, quantizable_layer_type: [Linear], onnx_format: True}"
PRUNE = "Prune: {enable: True, cal_sens: False, criterion: l1_norm, ratio: 0.125}"
MODEL_ONLY = """\
Global: {seed: 1024, local_batch_size: 8, micro_batch_size: 8, max_steps: 500000}
Model: {name: GPT, vocab_size: 50304, hidden_size: 1024, num_layers: 24, num_attention_heads: 16, type_vocab_size: 16}
Distributed: {dp_degree: 1, sharding: {sharding_degree: 1, sharding_stage: 1}}
"""

# name of the file's kind -> what stands in the file beside `_base_`, and what the one line names
OTHERS = {
    "generation": ("Model: {module: GPTGenerationModule}\n" + GENERATION % "", "GPTGenerationModule"),
    "generation, quantized": (
        "Model: {module: GPTGenerationModule}\n"
        + GENERATION % ", use_topp_sampling: True, inference: True, early_finish: True"
        + f"Compress:\n  pretrained:\n  {QUANTIZATION}\n",
        "GPTGenerationModule",
    ),
    "generation, auto": (
        "Engine: {mix_precision: {level: }}\nModel: {module: GPTGenerationModuleAuto}\n" + GENERATION % "",
        "GPTGenerationModuleAuto",
    ),
    "evaluation": ("Engine: {save_load: {ckpt_dir: ./model}}\nModel: {module: GPTEvalModule}\n" + EVALUATION, "GPTEvalModule"),
    "evaluation, pruned": (f"Model: {{module: GPTEvalModule}}\nCompress:\n  {PRUNE}\n" + EVALUATION, "GPTEvalModule"),
    "fine-tuning": (
        "Engine: {run_mode: epoch, max_steps: -1}\nModel: {module: GPTFinetuneModule, pretrained: ./model, num_classes: 2, loss: {train: {name: CELoss}}}\n"
        "Data: {Train: {dataset: {name: SST2, root: ./SST-2, split: train, max_length: 128}}}\n"
        "Optimizer: {lr: {name: LinearDecayWithWarmup, warmup: 0.1, learning_rate: 3e-5}}\n",
        "GPTFinetuneModule",
    ),
    "distillation": (
        "Model: {module: GPTDistillModule}\nCompress: {pretrained: ./model, Distillation: {enable: True, T: 1.5, Teacher: {Model: {num_layers: 24}}}}\n",
        "GPTDistillModule",
    ),
    "quantization": (f"Compress:\n  pretrained:\n  {QUANTIZATION}\n", "Quantization"),
    "quantization, older": (f"{QUANTIZATION}\n", "Quantization"),
    "quantization, first era": ("PreTraining: {quantization: {use_qat: True, weight_bits: 8}}\n", "quantization"),
    "pruning": (f"Compress:\n  pretrained: ./model\n  {PRUNE}\n", "Prune"),
    # FleetX's file has its model in Global, by a mistake of indentation
    "pruning, misplaced": (f"Global:\n  Model:\n  vocab_size: 50304\n  hidden_size: 9\nModel: {{num_layers: 1, num_attention_heads: 7}}\nCompress:\n  {PRUNE}\n", "Prune"),
    "pruning, older": (f"{PRUNE}\n", "Prune"),
    "ernie": ("Model: {module: ErnieModule, binary_head: True}\n", "ErnieModule"),
    "moe": (
        "Engine: {balance_loss_weight: 1.0}\nModel: {module: MoEModule, name: MoE, moe_configs: {expert_mode: True, gate: gshard, top_k: 2, num_experts: 2}}\n"
        "Optimizer: {grad_clip: {name: ClipGradForMOEByGlobalNorm}}\n",
        "MoEModule",
    ),
    "moe, without a module": (
        "Model: {num_experts: '2,', expert_interval: 2, topk: 1, moe_use_residual: False, moe_min_capacity: 4, moe_token_dropping: True, balance_loss_weight: 0.01, moe_train_capacity_factor: 1.0, moe_eval_capacity_factor: 1.0, enable_expert_tensor_parallelism: False}\n",
        "num_experts",
    ),
    "segment parallelism": ("Distributed: {sep_degree: 2}\n", "sep_degree"),
    "tuning": ("Tuning: {enable: True, tuning_recompute: True, profile_start_step: 1, profile_end_step: 5}\n", "Tuning"),
    "full auto": ("Engine: {auto_mode: full_rule_based}\n", "auto_mode"),
}  # fmt: skip


def with_base(tmp_path, text: str) -> str:
    (tmp_path / "base.yaml").write_text(BASE)
    return f"_base_: ./base.yaml\n{text}"


@pytest.mark.parametrize("kind", OTHERS)
def test_another_task_is_refused_in_one_line(tmp_path, check, kind: str) -> None:
    text, name = OTHERS[kind]
    checked = check(with_base(tmp_path, text))
    errors = [finding for finding in checked.findings if finding.level == "error"]
    assert [finding.code for finding in errors] == ["C019"], [str(finding) for finding in checked.findings]
    is_task = name in ("GPTGenerationModule", "GPTGenerationModuleAuto", "GPTEvalModule")
    start = "not a training" if is_task else "not supported yet"
    assert errors[0].message.startswith(f"{start}: {name} (")
    assert errors[0].hint
    assert errors[0].place.line
    assert set(codes(checked)) <= {"C019", "N001"}
    with pytest.raises(UserError) as refused:  # the trainer says the same
        load(tmp_path / "run.yaml")
    assert [finding.message for finding in refused.value.findings if finding.level == "error"] == [errors[0].message]


def test_the_base_itself_loads(tmp_path, check) -> None:
    assert codes(check(BASE)) == ["N001"]


@pytest.mark.parametrize(
    ("text", "name"),
    [
        (MODEL_ONLY + GENERATION % "", "Generation"),
        (MODEL_ONLY + EVALUATION + "Data: {Eval: {dataset: {name: LM_Eval_Dataset, overlapping_eval: 32}}}\n", "name"),
        (MODEL_ONLY + EVALUATION, "Offline_Eval"),
    ],
)
def test_files_of_2023_name_no_module(check, text: str, name: str) -> None:
    """There a script of its own belongs to each task: what tells is that nothing is there to train with."""
    (finding,) = check(text).findings
    assert (finding.code, finding.message.partition(" (")[0]) == ("C019", f"not a training: {name}")
    verb = "generate" if name == "Generation" else "eval"
    assert f"`gptctl {verb} CHECKPOINT -c FILE`" in finding.hint


LOADS = {
    "sections of other tasks beside a pre-training": GENERATION % "" + EVALUATION + "Inference: {model_dir: ./output, mp_degree: 1}\n",
    "compression that is off": "Compress: {pretrained: , Quantization: {enable: False}, Prune: {enable: False}}\nQuantization: {enable: False}\n",
    "dense": "Model: {num_experts: 1, moe_configs: {expert_mode: False, num_experts: 1}}\nDistributed: {sep_degree: 1}\n",
    "tuning that is off": "Tuning: {enable: False}\nEngine: {auto_mode: semi}\n",
    "September 2022": GENERATION % ", num_beams: 0, length_penalty: 1.0, early_stopping: False"
    + "Eval: {eval_path: None, cloze_eval: False, overlapping_eval: 32, ckpt_dir: None, batch_size: 8}\nGlobal: {to_static: False}\n",
}  # fmt: skip


@pytest.mark.parametrize("kind", LOADS)
def test_pretraining_files_still_load(tmp_path, check, kind: str) -> None:
    checked = check(with_base(tmp_path, LOADS[kind]))
    assert checked.is_valid
    assert set(codes(checked)) <= {"N001", "N006"}


AUTO = """\
Engine: {use_recompute: True, mix_precision: {level: o2, use_fp16_guard: False}}
FusedPasses: {enable: False, fused_passes_list: []}
Model: {module: GPTModuleAuto, sr: 0, refined_ops_patterns: [{main_ops: [matmul_v2], num: 0}]}
Data:
  Train: {collate_fn: gpt_collate_fn, sample_split: 2}
  Eval: {collate_fn: gpt_collate_fn, sample_split: 2}
Distributed: {dp_degree: 4, mp_degree: 2, schedule_mode: 1F1B, sharding: {sharding_degree: 2, sharding_stage: 2}}
"""


def test_files_of_automatic_parallelism_get_one_notice(tmp_path, check) -> None:
    """There, dp 4 with sharding 2 are 4 ranks along both (Paddle's process_auto_dist_configs)."""
    checked = check(with_base(tmp_path, AUTO), "Launch.gpus_per_node=8")
    assert codes(checked) == ["N006", "N001"], [str(finding) for finding in checked.findings]
    (notice,) = [finding for finding in checked.findings if finding.code == "N006"]
    for key in ("Model.module", "use_fp16_guard", "Data.Eval.sample_split", "schedule_mode", "FusedPasses", "Model.sr"):
        assert key in notice.message
    assert "dp_degree becomes 2" in notice.message
    run = checked.resolved.run
    assert (run.Distributed.dp_degree, run.Distributed.sharding.sharding_degree, run.Distributed.mp_degree) == (2, 2, 2)
    assert run.Global.global_batch_size == 4 * run.Global.local_batch_size
    assert run.Model.use_recompute


def test_a_dp_degree_that_does_not_hold_its_shards_is_left_alone(tmp_path, check) -> None:
    text = "Model: {module: GPTModuleAuto}\nDistributed: {dp_degree: 3, sharding: {sharding_degree: 2}}\n"
    assert check(with_base(tmp_path, text)).resolved.layout.dp == 3


def test_an_override_makes_a_pretraining_of_it(tmp_path, check) -> None:
    text, _ = OTHERS["generation"]
    assert check(with_base(tmp_path, text), "Model.module=GPTModule").is_valid


def test_a_script_may_do_any_task(tmp_path, check) -> None:
    text, _ = OTHERS["generation"]
    assert "C019" not in codes(check(with_base(tmp_path, text), "Launch.entrypoint=generate.py"))


def test_two_limits_are_two_lines(tmp_path, check) -> None:
    text = "Distributed: {sep_degree: 2, mp_degre: 2}\nModel: {num_experts: 4}\n"
    assert codes(check(with_base(tmp_path, text))) == ["C019", "C010", "C019", "N001"]


def test_every_row_of_the_table_is_tried() -> None:
    """Each row is reached by some file above: a row that nothing reaches would hide a mistake in its key."""
    words = "".join(text for text, _ in OTHERS.values()) + BASE + EVALUATION + GENERATION
    for other in NOT_SUPPORTED_YET:
        assert all(path.rpartition(".")[2] in words for path in other.signs), other.what


OCTOBER = """\
PreTraining:
  fused_linear: True
  recompute_granularity: full_attn
  tensor_fusion: False
  Gradclip: {name: ClipGradByGlobalNorm, clip_norm: 0.7}
  save_load: {save_by_steps: 300}
  Model: {hidden_size: 64, num_layers: 2, num_attention_heads: 2, name: GPT}
  Optimizer: {name: Adam}
"""


def test_keys_of_autumn_2022(check) -> None:
    checked = check(OCTOBER)
    assert sorted(codes(checked)) == ["N001", "N007"]
    meanings = {
        "Model.recompute_granularity": "full_attn",
        "Optimizer.grad_clip.clip_norm": 0.7,
        "Engine.save_load.save_steps": 300,
        "Optimizer.name": "AdamW",
    }
    assert {path: value_at(checked.resolved.run, path) for path in meanings} == meanings


@pytest.mark.parametrize("text", ["Optimizer: {Gradclip: 0.7}\n", "Gradclip: 0.7\n", "Gradclip: {clip_norm: 0.7}\n"])
def test_gradclip_in_its_other_places(check, text: str) -> None:
    assert check(text).resolved.run.Optimizer.grad_clip.clip_norm == 0.7
