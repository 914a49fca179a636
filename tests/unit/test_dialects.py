"""Other people's configs load. The oracle is the meaning their own documentation gives each key."""

from __future__ import annotations

import pytest

from gptctl.spec.launch import Launch
from trainer.config import Override, load, load_tree, read_run
from trainer.config.flags import parse_flags
from trainer.config.read import build
from trainer.config.rules import value_at
from trainer.layout import Machines

# FleetX's tutorial on data parallelism, and the one on group sharding: indented as printed there.
DATA_PARALLEL = "  Distributed:\n    dp_degree: 8\n"
GROUP_SHARDING = """\
  Distributed:
    sharding:
      sharding_degree: 8
      sharding_stage: 2
      sharding_offload: False
"""

# The example run of PaddleNLP's GPT-3: its 25 training flags.
FLAGS = """
--model_type gpt --model_name_or_path gpt2-en --input_dir ./data --output_dir output/task --max_seq_len 1024
--micro_batch_size 8 --global_batch_size 32 --sharding_degree 4 --mp_degree 2 --dp_degree 1 --pp_degree 1
--use_sharding true --use_amp true --use_recompute true --max_lr 0.00015 --min_lr 0.00001 --max_steps 500000
--save_steps 100000 --decay_steps 320000 --weight_decay 0.01 --warmup_rate 0.01 --grad_clip 1.0 --logging_freq 1
--eval_freq 10000 --device gpu
""".split()

FLAG_MEANINGS = {
    "Model.name": "gpt2-en",
    "Data.Train.dataset.input_dir": "./data",
    "Data.Eval.dataset.input_dir": "./data",
    "Engine.save_load.output_dir": "output/task",
    "Data.Train.dataset.max_seq_len": 1024,
    "Global.micro_batch_size": 8,
    "Global.global_batch_size": 32,
    "Distributed.sharding.sharding_degree": 4,
    "Distributed.mp_degree": 2,
    "Distributed.dp_degree": 1,
    "Distributed.pp_degree": 1,
    "Engine.mix_precision.enable": True,
    "Model.use_recompute": True,
    "Optimizer.lr.max_lr": 1.5e-4,
    "Optimizer.lr.min_lr": 1e-5,
    "Engine.max_steps": 500000,
    "Engine.save_load.save_steps": 100000,
    "Optimizer.lr.decay_steps": 320000,
    "Optimizer.weight_decay": 0.01,
    "Optimizer.lr.warmup_rate": 0.01,
    "Optimizer.grad_clip.clip_norm": 1.0,
    "Engine.logging_freq": 1,
    "Engine.eval_freq": 10000,
    "Global.device": "gpu",
}

# FleetX's first era: everything below one root, flat keys beside nested sections.
PRETRAINING = """\
PreTraining:
  device: gpu
  max_steps: 500
  num_train_epochs: 1
  seed: 7
  use_recompute: True
  batch_size: {global_batch_size: 8, local_batch_size: , micro_batch_size: 1}
  mix_precision: {use_pure_fp16: True, scale_loss: 1024.0}
  logging_freq: 2
  eval_freq: 50
  eval_iters: 5
  dataset: {input_dir: ./corpus, split: '949,50,1', max_seq_len: 512}
  save_load: {save_steps: 100, output_dir: ./output, ckpt_dir: }
  Model: {vocab_size: 51200, hidden_size: 1024, num_layers: 4, num_attention_heads: 2, ffn_hidden_size: , type_vocab_size: 16, name: GPT}
  Distributed: {dp_degree: 2, mp_degree: 1, pp_degree: 1, sharding: {sharding_degree: 4, sharding_stage: 2, sharding_offload: False}}
  Optimizer: {weight_decay: 0.1, adam_beta1: 0.8, adam_beta2: 0.9, adam_epsilon: 1.0e-7, lr: {decay_steps: 100, max_lr: 1.0e-5, min_lr: 5.0e-5}, grad_clip: 0.5}
"""

PRETRAINING_MEANINGS = {
    "Global.seed": 7,
    "Global.global_batch_size": 8,
    "Global.local_batch_size": 1,
    "Engine.max_steps": 500,
    "Engine.logging_freq": 2,
    "Engine.eval_iters": 5,
    "Engine.test_iters": 50,
    "Engine.mix_precision.enable": True,
    "Engine.mix_precision.level": "O2",
    "Engine.mix_precision.scale_loss": 1024.0,
    "Engine.save_load.save_steps": 100,
    "Model.use_recompute": True,
    "Model.ffn_hidden_size": 4096,
    "Data.Train.dataset.input_dir": "./corpus",
    "Data.Test.dataset.split": (949, 50, 1),
    "Data.Train.dataset.max_seq_len": 512,
    "Distributed.sharding.sharding_degree": 4,
    "Optimizer.beta1": 0.8,
    "Optimizer.beta2": 0.9,
    "Optimizer.epsilon": 1e-7,
    "Optimizer.grad_clip.clip_norm": 0.5,
}

# FleetX's later era: section roots, a base file, Paddle's own keys; and the spellings in between.
FLEETX_BASE = """\
Global: {device: gpu, seed: 1024, local_batch_size: 1, micro_batch_size: 1, flags: {}, max_steps: 300}
Engine: {mix_precision: {enable: True, level: O2, custom_black_list: [reduce_sum], custom_white_list: [lookup_table]}}
Model: {module: GPTModule, name: GPT, fused_linear: False, fuse_attn_qkv: True, no_recompute_layers: }
Data:
  Train: {dataset: {name: GPTDataset, input_dir: ./data/, split: [949, 50, 1]}, sampler: {name: GPTBatchSampler}, loader: {return_list: False, collate_fn: gpt_collate_fn}}
Optimizer: {name: FusedAdamW, lr: {name: CosineAnnealingWithWarmupDecay}, grad_clip: {name: ClipGradByGlobalNorm, clip_norm: 1.0}}
Distributed: {fuse_sequence_parallel_allreduce: False}
Fused: {tensor_fusion: False}
Profiler: {enable: False, scheduler: [1, 5]}
"""
FLEETX = """\
_base_: ./base.yaml
Global: {local_batch_size: 1536}
Model: {vocab_size: 51200, hidden_size: 12288, num_layers: 96, num_attention_heads: 96, use_recompute: True, recompute_granularity: }
Distributed: {dp_degree: , mp_degree: 8, pp_degree: 16, sharding: {sharding_degree: 1, sharding_stage: 1, comm_overlap: False}}
"""

MINGPT = """\
data_config: {path: ./data/input.txt, block_size: 128, train_split: 0.9, truncate: 0.05}
gpt_config: {n_layer: 8, n_head: 8, n_embd: 512}
trainer_config: {max_epochs: 10, batch_size: 216, data_loader_workers: 4, grad_norm_clip: 1.0, snapshot_path: gpt_snapshot.pt, save_every: 3, use_amp: True}
optimizer_config: {weight_decay: 0.1, learning_rate: 0.0003}
hydra: {run: {dir: ./}}
"""

MINGPT_MEANINGS = {
    "Data.Train.dataset.name": "CharDataset",
    "Data.Train.dataset.path": "./data/input.txt",
    "Data.Train.dataset.max_seq_len": 128,
    "Data.Train.dataset.truncate": 0.05,
    "Data.Train.loader.num_workers": 4,
    "Model.num_layers": 8,
    "Model.num_attention_heads": 8,
    "Model.hidden_size": 512,
    "Model.max_position_embeddings": 128,
    "Model.vocab_size": None,
    "Engine.run_mode": "epoch",
    "Engine.log_style": "mingpt",
    "Engine.num_train_epochs": 2,
    "Engine.mix_precision.enable": True,
    "Engine.save_load.save_epoch": 3,
    "Engine.save_load.snapshot_path": "gpt_snapshot.pt",
    "Global.local_batch_size": 216,
    "Global.micro_batch_size": 216,
    "Global.global_batch_size": 864,
    "Optimizer.weight_decay": 0.1,
    "Optimizer.beta2": 0.95,
    "Optimizer.lr.max_lr": 3e-4,
    "Optimizer.lr.name": "none",
    "Optimizer.grad_clip.clip_norm": 1.0,
}


def load_text(tmp_path, text: str, world: Machines | None = None, *overrides: str):
    file = tmp_path / "run.yaml"
    file.write_text(text)
    return load(file, [Override.parse(override) for override in overrides], world)


def assert_means(resolved, meanings: dict[str, object]) -> None:
    assert {path: value_at(resolved.run, path) for path in meanings} == meanings


def test_data_parallel_snippet_as_it_stands(tmp_path) -> None:
    assert load_text(tmp_path, DATA_PARALLEL, Machines(1, 8)).run.Distributed.dp_degree == 8


def test_group_sharding_snippet_as_it_stands(tmp_path) -> None:
    resolved = load_text(tmp_path, GROUP_SHARDING, Machines(1, 8))
    assert_means(resolved, {"Distributed.sharding.sharding_degree": 8, "Distributed.sharding.sharding_stage": 2})


def test_snippets_below_the_old_root(tmp_path) -> None:
    assert load_text(tmp_path, "PreTraining:\n" + DATA_PARALLEL).run.Distributed.dp_degree == 8


def test_all_25_flags() -> None:
    flags = parse_flags(FLAGS)
    assert len(flags) == 25
    assert_means(load(None, flags, Machines(1, 8)), FLAG_MEANINGS)


def test_every_flag_is_also_a_key_of_a_file(tmp_path) -> None:
    pairs = "\n".join(f"{flag.key}: {flag.value}" for flag in parse_flags(FLAGS))
    assert_means(load_text(tmp_path, pairs, Machines(1, 8)), FLAG_MEANINGS)


def test_flags_in_other_spellings() -> None:
    resolved = load(None, parse_flags(["--use_amp", "--mp-degree=2", "--eval_freq", "-1", "--lr_decay_style", "none"]))
    meanings = {
        "Engine.mix_precision.enable": True,
        "Distributed.mp_degree": 2,
        "Engine.eval_freq": -1,
        "Optimizer.lr.name": "none",
    }
    assert_means(resolved, meanings)


def test_use_sharding_false_forces_degree_1() -> None:
    resolved = load(None, parse_flags(["--use_sharding", "false", "--sharding_degree", "4"]))
    assert resolved.layout.sharding == 1


def test_model_name_or_path_can_be_a_checkpoint(tmp_path) -> None:
    resolved = load(None, parse_flags(["--model_name_or_path", str(tmp_path)]))
    assert_means(resolved, {"Engine.save_load.ckpt_dir": str(tmp_path), "Model.name": "gpt2-en"})


def test_fleetx_of_the_first_era(tmp_path) -> None:
    resolved = load_text(tmp_path, PRETRAINING, Machines(1, 8))
    assert_means(resolved, PRETRAINING_MEANINGS)
    assert {finding.code for finding in resolved.findings} == {"N001", "T020"}  # type_vocab_size; min_lr above max_lr


def test_fleetx_with_section_roots_and_a_base(tmp_path) -> None:
    (tmp_path / "base.yaml").write_text(FLEETX_BASE)
    resolved = load_text(tmp_path, FLEETX, Machines(16, 8))
    assert (resolved.layout.dp, resolved.layout.mp, resolved.layout.pp) == (1, 8, 16)
    meanings = {
        "Global.local_batch_size": 1536,
        "Engine.max_steps": 300,
        "Model.recompute_granularity": "full",
        "Optimizer.name": "AdamW",
    }
    assert_means(resolved, meanings)
    notices = [finding for finding in resolved.findings if finding.code == "N001"]
    assert len(notices) == 1  # one notice for all of Paddle's keys
    for key in ("Global.flags", "custom_black_list", "Data.Train.sampler.name", "Distributed.fuse_"):
        assert key in notices[0].message


def test_pure_fp16_and_amp_are_two_flags(tmp_path) -> None:
    def amp(*flags: str) -> tuple[bool, str]:
        precision = load(None, parse_flags(list(flags))).run.Engine.mix_precision
        return precision.enable, precision.level

    assert amp("--use_pure_fp16", "true") == (True, "O2")
    assert amp("--use_amp", "true", "--use_pure_fp16", "false") == (True, "O1")
    assert amp("--use_pure_fp16", "false") == (False, "O1")
    assert amp("--use_amp", "false", "--use_pure_fp16", "true") == (True, "O2")
    resolved = load_text(tmp_path, PRETRAINING, Machines(1, 8), "use_pure_fp16=false")
    assert resolved.run.Engine.mix_precision.enable is False
    resolved = load_text(tmp_path, "Engine: {mix_precision: {enable: False}}\n", None, "use_pure_fp16=true")
    assert resolved.run.Engine.mix_precision.enable is True
    resolved = load_text(tmp_path, "use_pure_fp16: true\n", None, "Engine.mix_precision.enable=False")
    assert resolved.run.Engine.mix_precision.enable is False


def test_a_switch_can_be_taken_back(check) -> None:
    assert check("standalone: true\n").launch.style == "standalone"
    assert check("standalone: true\n", "standalone=false").launch.style is None


def test_two_spellings_of_one_value_are_one(check) -> None:
    assert check("gpt_config: {embd_pdrop: 0.1, resid_pdrop: .1}\n").findings == ()
    sharding = "Distributed: {sharding: {sharding_degree: 2, comm_overlap: True, reduce_overlap: true}}\nEngine: {logging_freq: 2}\n"
    assert [finding.code for finding in check(sharding).findings] == ["N004"]


def test_a_preset_wins_over_a_folder_of_its_name(tmp_path, monkeypatch) -> None:
    (tmp_path / "gpt2-en").mkdir()
    monkeypatch.chdir(tmp_path)
    assert load(None, parse_flags(["--model_name_or_path", "gpt2-en"])).run.Engine.save_load.ckpt_dir is None


def test_an_override_in_another_dialect_changes_that_key_only(tmp_path) -> None:
    resolved = load_text(tmp_path, "Global: {seed: 1}\n", None, "optimizer_config.weight_decay=0.3")
    assert_means(resolved, {"Optimizer.weight_decay": 0.3, "Optimizer.beta2": 0.999, "Engine.log_style": "fleetx"})


LAUNCHER = """
--gpus 0,1 --log_dir logs --nnodes 1 --nproc_per_node 2 --rdzv_backend c10d --rdzv_id job7 --rdzv_endpoint head:29400
--master_port 29400 --max_restarts 3 --standalone true
""".split()


def test_flags_of_launchers() -> None:
    """paddle.distributed.launch and torchrun: what they say is in Launch."""
    found: list = []
    tree = load_tree(None, parse_flags(LAUNCHER), found)
    reading = read_run(tree, found, others={"Launch": Launch})
    launch = build(Launch, reading.values, "Launch")
    assert not found
    assert (launch.devices, launch.log_dir, launch.nodes, launch.gpus_per_node) == (("0", "1"), "logs", 1, 2)
    assert (launch.rdzv.backend, launch.rdzv.id, launch.rdzv.endpoint, launch.rdzv.port) == (
        "c10d",
        "job7",
        "head:29400",
        29400,
    )
    assert (launch.max_restarts, launch.style) == (3, "standalone")


OTHER_NAMES = {
    "seed": ("7", "Global.seed", 7),
    "local_batch_size": ("4", "Global.local_batch_size", 4),
    "num_train_epochs": ("3", "Engine.num_train_epochs", 3),
    "eval_iters": ("4", "Engine.eval_iters", 4),
    "check_accuracy": ("true", "Engine.check_accuracy", True),
    "split": ("9,1,0", "Data.Train.dataset.split", (9, 1, 0)),
    "ckpt_dir": ("auto", "Engine.save_load.ckpt_dir", "auto"),
    "sharding_stage": ("3", "Distributed.sharding.sharding_stage", 3),
    "sharding_offload": ("true", "Distributed.sharding.sharding_offload", False),  # no effect with degree 1
    "hidden_dropout_prob": ("0.2", "Model.hidden_dropout_prob", 0.2),
    "attention_probs_dropout_prob": ("0.2", "Model.attention_probs_dropout_prob", 0.2),
    "amp_level": ("O2", "Engine.mix_precision.level", "O2"),
    "scale_loss": ("128", "Engine.mix_precision.scale_loss", 128.0),
    "adam_beta1": ("0.8", "Optimizer.beta1", 0.8),
    "adam_beta2": ("0.8", "Optimizer.beta2", 0.8),
    "adam_epsilon": ("1e-6", "Optimizer.epsilon", 1e-6),
    "topk": ("5", "Generation.top_k", 5),
    "topp": ("0.5", "Generation.top_p", 0.5),
    "temperature": ("0.5", "Generation.temperature", 0.5),
    "max_dec_len": ("20", "Generation.max_dec_len", 20),
    "min_dec_len": ("2", "Generation.min_dec_len", 2),
    "decoding_strategy": ("topk_sampling", "Generation.decode_strategy", "sampling"),
    "Global.logging_freq": ("3", "Engine.logging_freq", 3),
    "Distributed.sharding_degree": ("2", "Distributed.sharding.sharding_degree", 2),
    "Data.dataset.max_seq_len": ("64", "Data.Train.dataset.max_seq_len", 64),
    "Data.batch_size.micro_batch_size": ("2", "Global.micro_batch_size", 2),
    "Fused.tensor_fusion": ("true", "Optimizer.tensor_fusion", True),
    "Optimizer.adam_beta2": ("0.7", "Optimizer.beta2", 0.7),
    "gpt_config.resid_pdrop": ("0.3", "Model.hidden_dropout_prob", 0.3),
    "gpt_config.attn_pdrop": ("0.3", "Model.attention_probs_dropout_prob", 0.3),
    "gpt_config.model_type": ("gpt-mini", "Model.num_layers", 6),
}


@pytest.mark.parametrize("name", OTHER_NAMES)
def test_other_names_for_a_key(tmp_path, name: str) -> None:
    text, path, value = OTHER_NAMES[name]
    assert value_at(load_text(tmp_path, "Engine: {max_steps: 10}\n", None, f"{name}={text}").run, path) == value


def test_mingpt_with_a_hydra_override(tmp_path) -> None:
    resolved = load_text(tmp_path, MINGPT, Machines(1, 4), "trainer_config.max_epochs=2")
    assert_means(resolved, MINGPT_MEANINGS)


def test_what_is_written_wins_over_what_a_dialect_implies(tmp_path) -> None:
    resolved = load_text(tmp_path, MINGPT, None, "Engine.log_style=json", "trainer_config.max_epochs=3")
    assert_means(resolved, {"Engine.log_style": "json", "Engine.run_mode": "epoch"})


def test_two_names_for_one_key_are_two_values(tmp_path, check) -> None:
    checked = check("Engine:\n  max_steps: 5\nGlobal:\n  max_steps: 6\n")
    assert [(finding.code, finding.place.line) for finding in checked.findings] == [("C002", 4)]


def test_an_unsupported_family_is_refused(check) -> None:
    assert [finding.code for finding in check("model_type: bert\n").findings] == ["C016"]


def test_the_url_of_the_tutorial_comes_with_the_command_that_downloads_it(check) -> None:
    """minGPT reads its text through fsspec; here it must be a file."""
    url = "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt"
    text = f"data_config: {{path: {url}, block_size: 64}}\n"
    (finding,) = check(text).findings
    assert finding.code == "C014"
    assert f"curl -L -o input.txt {url};" in finding.hint
    override = finding.hint.rpartition("-o ")[2]
    assert override == "Data.Train.dataset.path=input.txt"
    assert not check(text, override).findings


@pytest.mark.parametrize(
    "url", ["s3://bucket/x.txt", "https://host/", "https://host/a b.txt", "https://host/$(id).txt"]
)
def test_no_command_is_made_of_other_urls(check, url: str) -> None:
    (finding,) = check(f"data_config: {{path: '{url}', block_size: 64}}\n").findings
    assert (finding.code, "curl" in finding.hint) == ("C014", False)
