"""Launch commands of other programs as run configs. Oracles: keys written by hand from each program's own reference, and
the config as it is loaded again from the written file."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from gptctl.cli.init_from import translate
from gptctl.spec.check import Checked, check_config
from gptctl.spec.config_text import config_text
from gptctl.spec.foreign_commands import ForeignJob, translate_command
from gptctl.spec.shell_text import MAX_TEXT
from trainer.config import Override
from trainer.errors import UserError

SIZES = "--num-layers 24 --hidden-size 1024 --num-attention-heads 16 --seq-length 512 --max-position-embeddings 1024"
MEGATRON = f"torchrun --nproc_per_node 8 --nnodes 2 pretrain_gpt.py {SIZES} --micro-batch-size 4 --lr 1.5e-4 --train-iters 1000"

# The command, what it becomes, and the first words of everything that is named as not translated.
LINES: list[tuple[str, dict[str, Any], str]] = [
    # Paddle
    (
        'python -m paddle.distributed.launch --log_dir dp8 --devices "0,1,2,3,4,5,6,7" run_pretrain.py --mp_degree 2 '
        "--sharding_degree 4 --use_pure_fp16 true --grad_clip 0.5 --split 949,50,1 --beam_size 4 --odd 1",
        {
            "Launch.devices": ("0", "1", "2", "3", "4", "5", "6", "7"),
            "Launch.log_dir": "dp8",
            "Launch.entrypoint": "trainer",
            "Distributed.mp_degree": 2,
            "Distributed.sharding.sharding_degree": 4,
            "Engine.mix_precision.enable": True,
            "Engine.mix_precision.level": "O2",
            "Optimizer.grad_clip.clip_norm": 0.5,
            "Data.Train.dataset.split": (949, 50, 1),
        },
        "--beam_size --odd",
    ),
    (
        "python -u -m paddle.distributed.fleet.launch --gpus 0,1 --log_dir output/$task/log run_pretrain_static.py "
        '--model_type gpt --model_name_or_path "gpt2-medium-en" --output_dir output/$task --use_sharding false '
        "--max_lr 0.00015",
        {"Launch.devices": ("0", "1"), "Model.name": "gpt2-medium-en", "Optimizer.lr.max_lr": 0.00015},
        "--log_dir --output_dir",
    ),
    (
        "fleetrun --nnodes=2 --nproc_per_node=8 --master 10.0.0.1:49178 --rank 0 --job_id job7 --max_restart 3 "
        "--elastic_level 1 run_pretrain.py --max_steps 7",
        {
            "Launch.nodes": 2,
            "Launch.gpus_per_node": 8,
            "Launch.rdzv.endpoint": "10.0.0.1:49178",
            "Launch.job_name": "job7",
            "Launch.max_restarts": 3,
            "Engine.max_steps": 7,
        },
        "--rank --elastic_level",
    ),
    # torchrun
    (
        "export NCCL_IB_DISABLE=1 && export NCCL_SOCKET_IFNAME=bond0 && torchrun --nproc_per_node=2 --nnodes=2 "
        "--node_rank=0 --master_addr=10.0.2.46 --master_port=29500 main.py --batch_size 32 10 'a b' ''",
        {
            "Launch.nodes": 2,
            "Launch.gpus_per_node": 2,
            "Launch.rdzv.endpoint": "10.0.2.46",
            "Launch.rdzv.port": 29500,
            "Launch.entrypoint": "main.py",
            "Launch.args": ("--batch_size", "32", "10", "a b", ""),
            "Launch.env": {"NCCL_IB_DISABLE": "1", "NCCL_SOCKET_IFNAME": "bond0"},
        },
        "--node_rank",
    ),
    (
        "torchrun --standalone --nproc-per-node=4 -m pkg.train null 1e3 true",
        {
            "Launch.style": "standalone",
            "Launch.entrypoint": "-m pkg.train",
            "Launch.args": ("null", "1e3", "true"),
        },
        "",
    ),
    (
        "torchrun --nnodes=1:4 --nproc_per_node=gpu --rdzv-id=7 --rdzv-backend=etcd --rdzv-endpoint=$HEAD:2379 "
        "--tee 3 --role x t.py",
        {"Launch.nodes": "1:4", "Launch.rdzv.id": "7", "Launch.rdzv.port": 2379},
        "--nproc_per_node --rdzv-backend --rdzv-endpoint --tee --role",
    ),
    (
        "CUDA_VISIBLE_DEVICES=2,3 python /opt/torch/distributed/launch.py --nnode=1 --node_rank=0 --nproc_per_node=2 "
        "example.py --local_world_size=2 2>&1 | tee log.txt",
        {"Launch.devices": ("2", "3"), "Launch.gpus_per_node": 2, "Launch.args": ("--local_world_size=2",)},
        "--node_rank 2>&1",
    ),
    (
        "torchrun --nnodes 2 --nproc_per_node 8 --node_rank 0 --rdzv_endpoint localhost:0 a.py\n"
        "torchrun --nnodes 2 --nproc_per_node 8 --node_rank 1 --rdzv_endpoint localhost:0 a.py",
        {"Launch.nodes": 2, "Launch.rdzv.endpoint": None, "Launch.rdzv.port": None},
        "--node_rank --rdzv_endpoint",
    ),
    # Slurm
    (
        "srun --nodes=2 -p gpu --gres=gpu:a100:8 -t 12:00:00 singularity run --nv -B /a:/b img.sif torchrun --nnodes=2 "
        "--nproc_per_node=8 --rdzv_id=$SLURM_JOB_ID --rdzv_backend=c10d --rdzv_endpoint=$MASTER_ADDR:29400 t.py",
        {
            "Launch.nodes": 2,
            "Launch.gpus_per_node": 8,
            "Launch.slurm.partition": "gpu",
            "Launch.slurm.time": "12:00:00",
            "Launch.rdzv.backend": "c10d",
            "Launch.rdzv.port": 29400,
        },
        "--gres singularity --rdzv_id --rdzv_endpoint",
    ),
    (
        'sbatch -N2 -A me --qos=high --exclusive --output=x.out --wrap "srun bash -c \'x\'; torchrun --nproc_per_node 4 t.py"',
        {
            "Launch.nodes": 2,
            "Launch.gpus_per_node": 4,
            "Launch.slurm.account": "me",
            "Launch.slurm.extra": {"qos": "high", "exclusive": "True"},
        },
        "--output",
    ),
    (
        "srun -N 2 --ntasks-per-node=4 --cpus-per-task=8 bash -c 'A=1 python train.py'",
        {"Launch.nodes": 2, "Launch.gpus_per_node": 4, "Launch.slurm.cpus_per_task": 8, "Launch.env": {"A": "1"}},
        "",
    ),
    (
        "#!/bin/bash\n#SBATCH --nodes=4\n#SBATCH --gpus-per-node=8\n#SBATCH -J gpt3\n#SBATCH --requeue\n"
        "module load cuda\nexport HF_TOKEN=hf_x\nexport MASTER_ADDR=$(hostname)\n"
        'ARGS="--nnodes $SLURM_NNODES --nproc_per_node $SLURM_GPUS_ON_NODE --master_addr $MASTER_ADDR"\n'
        "torchrun $ARGS --node_rank $SLURM_NODEID t.py &\nwait",
        {
            "Launch.nodes": 4,
            "Launch.gpus_per_node": 8,
            "Launch.job_name": "gpt3",
            "Launch.slurm.requeue": True,
            "Launch.env": {},
        },
        "HF_TOKEN MASTER_ADDR module --master_addr --node_rank &",
    ),
    (
        '#SBATCH --ntasks-per-node=8 --nodes=2\n#SBATCH -J "odd name"\nDIR=`pwd`\n'
        f'options=" {SIZES} --train-samples 146_484_352 --global-batch-size 5_12 --lr-decay-style cosine"\n'
        'run_cmd="python -u ${DIR}/pretrain_gpt.py ${options}"\necho $run_cmd\n'
        'srun -l --container-image nvcr.io/x:1 --output=$DIR/log sh -c "${run_cmd}"\n',
        {
            "Launch.nodes": 2,
            "Launch.gpus_per_node": 8,
            "Global.global_batch_size": 512,
            "Engine.max_steps": 286102,
            "Launch.entrypoint": "trainer",
        },
        "-J -l --container-image --output",
    ),
    (
        "python run_pretrain.py --decay_steps None --max_steps 9",
        {"Optimizer.lr.decay_steps": 9, "Engine.max_steps": 9},
        "",
    ),
    (
        "nohup env A=1 B='2 3' srun -N 2 torchrun --nproc_per_node 2 t.py &",
        {"Launch.nodes": 2, "Launch.gpus_per_node": 2, "Launch.env": {"A": "1", "B": "2 3"}},
        "&",
    ),
    ("conda run -n x torchrun t.py", {"Launch.entrypoint": "t.py"}, "conda"),
    ("mpirun -np 8 python train.py", {"Launch.entrypoint": "train.py"}, "mpirun"),
    ("run_cmd='torchrun --nproc_per_node 2 t.py'; eval $run_cmd \"$@\"", {"Launch.gpus_per_node": 2}, ""),
    # python alone
    ("python train.py --lr 1", {"Launch.gpus_per_node": 1, "Launch.args": ("--lr", "1")}, ""),
    ("python -u -m trainer --max_steps 3 Global.seed=7", {"Engine.max_steps": 3, "Global.seed": 7}, ""),
    # Megatron-LM
    (
        MEGATRON,
        {
            "Model.num_layers": 24,
            "Model.hidden_size": 1024,
            "Model.num_attention_heads": 16,
            "Model.max_position_embeddings": 1024,
            "Model.vocab_size": 50304,
            "Data.Train.dataset.max_seq_len": 512,
            "Data.Train.dataset.split": (969, 30, 1),
            "Global.micro_batch_size": 4,
            "Global.global_batch_size": 64,
            "Global.seed": 1234,
            "Engine.max_steps": 1000,
            "Engine.logging_freq": 100,
            "Engine.eval_freq": 1000,
            "Engine.eval_iters": 100,
            "Engine.test_iters": 100,
            "Engine.mix_precision.enable": False,
            "Engine.save_load.save_steps": 0,
            "Optimizer.lr.max_lr": 1.5e-4,
            "Optimizer.lr.min_lr": 0.0,
            "Optimizer.lr.decay_steps": 1000,
            "Optimizer.lr.warmup_rate": 0.0,
            "Distributed.dp_degree": 16,
            "Launch.nodes": 2,
            "Launch.gpus_per_node": 8,
            "Launch.entrypoint": "trainer",
        },
        "--lr-decay-style",
    ),
    (
        f"{MEGATRON} --tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --sequence-parallel "
        "--use-distributed-optimizer --num-layers-per-virtual-pipeline-stage 3 --global-batch-size 64 --bf16 --seed 7 "
        "--lr-decay-style cosine --lr-decay-iters 800 --lr-warmup-iters 8 --min-lr 1e-5 --weight-decay 0.1 "
        "--clip-grad 0.5 --adam-beta1 .9 --adam-beta2 .95 --adam-eps 1e-9 --attention-dropout 0 --hidden-dropout 0.2 "
        "--init-method-std 0.006 --log-interval 10 --eval-interval 50 --eval-iters 5 --save-interval 200 --save ck "
        "--load ck --split 98,2,0 --num-workers 0 --vocab-size 50257 --make-vocab-size-divisible-by 64 "
        "--distributed-backend nccl --distributed-timeout-minutes 20 --exit-duration-in-mins 90 --overlap-param-gather",
        {
            "Distributed.mp_degree": 2,
            "Distributed.pp_degree": 2,
            "Distributed.dp_degree": 1,
            "Distributed.sharding.sharding_degree": 4,
            "Distributed.sharding.sharding_stage": 1,
            "Distributed.sharding.broadcast_overlap": True,
            "Distributed.backend": "nccl",
            "Distributed.timeout_minutes": 20.0,
            "Model.sequence_parallel": True,
            "Model.virtual_pp_degree": 4,
            "Model.attention_probs_dropout_prob": 0.0,
            "Model.hidden_dropout_prob": 0.2,
            "Model.initializer_range": 0.006,
            "Model.vocab_size": 50257,
            "Model.vocab_size_divisible_unit": 64,
            "Engine.mix_precision.enable": True,
            "Engine.mix_precision.level": "O2",
            "Engine.mix_precision.dtype": "bfloat16",
            "Engine.logging_freq": 10,
            "Engine.eval_freq": 50,
            "Engine.eval_iters": 5,
            "Engine.test_iters": 5,
            "Engine.save_load.save_steps": 200,
            "Engine.save_load.output_dir": "ck",
            "Engine.save_load.ckpt_dir": "auto",
            "Global.seed": 7,
            "Global.global_batch_size": 64,
            "Optimizer.lr.name": "CosineAnnealingWithWarmupDecay",
            "Optimizer.lr.decay_steps": 800,
            "Optimizer.lr.warmup_rate": 0.01,
            "Optimizer.lr.min_lr": 1e-5,
            "Optimizer.weight_decay": 0.1,
            "Optimizer.grad_clip.clip_norm": 0.5,
            "Optimizer.beta1": 0.9,
            "Optimizer.beta2": 0.95,
            "Optimizer.epsilon": 1e-9,
            "Data.Train.dataset.split": (98, 2, 0),
            "Data.Train.loader.num_workers": 0,
            "Launch.slurm.time": "01:30:00",
        },
        "",
    ),
    (
        f"python pretrain_gpt.py {SIZES} --micro-batch-size 2 --global-batch-size 8 --lr 1e-4 --train-samples 1005 "
        "--lr-decay-samples 801 --lr-warmup-samples 89 --lr-decay-style constant --fp16 --initial-loss-scale 4096 "
        "--recompute-activations --data-path 0.5 a 0.5 b --load other --swiglu --rampup-batch-size 4 4 100 "
        "--tokenizer-type GPT2BPETokenizer --use-mcore-models --context-parallel-size 1 --optimizer adam",
        {
            "Launch.gpus_per_node": 1,
            "Engine.max_steps": 125,
            "Optimizer.lr.decay_steps": 101,
            "Optimizer.lr.warmup_rate": 89 / 801,
            "Optimizer.lr.name": "none",
            "Optimizer.name": "AdamW",
            "Engine.mix_precision.dtype": "float16",
            "Engine.mix_precision.scale_loss": 4096.0,
            "Model.use_recompute": True,
            "Model.recompute_granularity": "core_attn",
            "Engine.save_load.ckpt_dir": "other",
            "Data.Train.dataset.input_dir": {"a": 0.5, "b": 0.5},
        },
        "--swiglu --rampup-batch-size --tokenizer-type --use-mcore-models --load",
    ),
    (
        f"CUDA_DEVICE_MAX_CONNECTIONS=1 {MEGATRON} --pipeline-model-parallel-size 2 --recompute-granularity full "
        "--recompute-method block --recompute-num-layers 10 --lr-decay-style cosine --data-parallel-sharding-strategy "
        "optim_grads_params --num-distributed-optimizer-instances 2 --data-path /data/x --lr-warmup-fraction .02 --global-batch-size 64",
        {
            "Model.recompute_granularity": "full",
            "Model.no_recompute_layers": (10, 11, 22, 23),
            "Distributed.dp_degree": 2,
            "Distributed.sharding.sharding_degree": 4,
            "Distributed.sharding.sharding_stage": 3,
            "Data.Train.dataset.input_dir": "/data/x",
            "Optimizer.lr.warmup_rate": 0.02,
            "Launch.env": {},
        },
        "CUDA_DEVICE_MAX_CONNECTIONS=1",
    ),
    (
        f"{MEGATRON} --pipeline-model-parallel-size 2 --recompute-granularity full --recompute-method uniform "
        "--recompute-num-layers 3 --lr-decay-style cosine --global-batch-size 64",
        {"Distributed.pp_recompute_interval": 3, "Model.use_recompute": True},
        "",
    ),
    # Another program of Megatron's keeps its flags.
    (
        "torchrun --nproc_per_node 8 pretrain_t5.py --num-layers 12 --tensor-model-parallel-size 2",
        {"Launch.entrypoint": "pretrain_t5.py"},
        "",
    ),
]  # fmt: skip


def value_at(checked: Checked, key: str) -> Any:
    assert checked.resolved is not None
    section, *rest = key.split(".")
    value: Any = checked.launch if section == "Launch" else getattr(checked.resolved.run, section)
    for name in rest:
        value = getattr(value, name)
    return value


def named(job: ForeignJob) -> str:
    return " ".join(dict.fromkeys(each.what.split()[0] for each in job.unmapped))


@pytest.mark.parametrize(("line", "expected", "unmapped"), LINES)
def test_a_command_becomes_a_config(tmp_path: Path, line: str, expected: dict[str, Any], unmapped: str) -> None:
    """The written file is loaded again: its values are those of the flags, and it is valid."""
    job = translate_command(line, {})
    assert named(job) == unmapped
    assert all(each.reason for each in job.unmapped)
    file = tmp_path / "config.yaml"
    file.write_text(config_text(job.overrides, head=["a head"]))
    checked = check_config(file, [])
    assert checked.is_valid, [str(finding) for finding in checked.findings]
    assert {key: value_at(checked, key) for key in expected} == {
        key: pytest.approx(value, rel=1e-11) if isinstance(value, float) else value for key, value in expected.items()
    }
    direct = check_config(None, job.overrides)
    assert (checked.resolved and checked.resolved.run, checked.launch) == (
        direct.resolved and direct.resolved.run,
        direct.launch,
    )


def test_a_config_that_the_command_names_becomes_the_base(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "sub").mkdir()
    (tmp_path / "configs.yaml").write_text("Engine: {max_steps: 10}\nGlobal: {seed: 3}\n")
    line = "python -m paddle.distributed.launch --devices 0,1 run_pretrain.py -c ./configs.yaml -o Engine.max_steps=5"
    translated = translate(line, "sub/run.yaml")
    (tmp_path / "sub/run.yaml").write_text(translated.text)
    run = check_config(tmp_path / "sub/run.yaml", []).resolved
    assert run is not None
    assert (run.run.Engine.max_steps, run.run.Global.seed) == (5, 3)
    assert translated.command == "gptctl submit sub/run.yaml"
    with pytest.raises(UserError) as error:
        translate(line, "configs.yaml")
    assert error.value.message == "configs.yaml is the config that the command names"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "there is no launch command in this text"),
        ("rm -rf x; ls", "there is no launch command in this text"),
        ("python -c 'x'; python -m pip install y", "there is no launch command in this text"),
        ("torchrun --nproc_per_node 8", "line 1: the launcher has no script"),
        ("srun hostname", "there is no launch command in this text"),
        ("sbatch -N 2 m.sh", "m.sh, which the command starts, does not exist"),
        ("bash a.sh; sbatch b.sh", "several scripts: a.sh, b.sh"),
        ("deepspeed --num_gpus 8 t.py", "line 1: deepspeed is not a launcher that gptctl can translate"),
        ("nohup accelerate launch t.py &", "line 1: accelerate is not a launcher that gptctl can translate"),
        (
            "python -m paddle.distributed.launch run_pretrain.py -c ./configs.yaml",
            "./configs.yaml, which -c in the command names, does not exist",
        ),
        ("torchrun a.py\ntorchrun b.py", "several launch commands, in lines 1, 2"),
        ("torchrun a.py $(touch owned)", "$(touch owned): known only when a shell runs the command"),
        ("torchrun a.py `touch owned`", "`touch owned`: known only when a shell runs the command"),
        ("python -m trainer $(touch owned)", "$(touch owned) is neither a flag nor KEY=VALUE"),
        ("torchrun a.py 'b", "line 1: a quote ' is not closed"),
        (f"torchrun a.py {'x' * MAX_TEXT}", "the text has more than 65,5"),
        ("torchrun a.py\ntorchrun b.py\n" * 500, "several launch commands, in lines 1, 2, 3, 4, 5 and 995 more"),
        (f"{'a ' * 4000}bash -c '{'x;' * 4000}'", "line 1: too many commands in one argument"),
    ],
)
def test_a_text_that_gives_no_config(tmp_path: Path, monkeypatch, text: str, said: str) -> None:
    """Nothing of it runs: no file appears."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError) as error:
        translate(text, "config.yaml")
    assert error.value.message.startswith(said)
    assert error.value.hint
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("line", "named_as"),
    [
        ("'' torchrun t.py", "''"),
        ("torchrun --nnodes 2 --rdzv_endpoint $H:\u00b2 t.py", "--rdzv_endpoint"),
        (f"torchrun --nnodes 2 --rdzv_endpoint $H:{'1' * 5000} t.py", "--rdzv_endpoint"),
        ("#SBATCH -N 2 -o $(date)\nsrun torchrun t.py", "-o"),
    ],
)
def test_odd_words_are_named(tmp_path: Path, line: str, named_as: str) -> None:
    translated = translate(line, str(tmp_path / "config.yaml"))
    assert f"# not in this config: {named_as}\n" in translated.text


SCRIPT = """#!/bin/bash
#SBATCH --nodes=4 --time=2:00:00
torchrun --nnodes $SLURM_NNODES --nproc_per_node 8 train.py --size ${1:-small} "$@"
"""


@pytest.mark.parametrize(
    ("line", "nodes", "args"),
    [
        ("sbatch m.sh", "4", ("--size", "small")),
        ("sbatch --nodes 8 m.sh", "8", ("--size", "small")),
        ("sbatch -N8 --parsable ./m.sh big 'a b'", "8", ("--size", "big", "big", "a b")),
        ("srun --nodes=2 ./m.sh", "2", ("--size", "small")),
        ("bash m.sh big", "4", ("--size", "big", "big")),
        ("bash -c 'sbatch m.sh'", "4", ("--size", "small")),
        ("zsh -c 'sbatch m.sh'", "4", ("--size", "small")),
        ("outer.sh", "3", ("--size", "x", "x")),
    ],
)
def test_the_script_that_a_command_starts_is_read(tmp_path: Path, monkeypatch, line, nodes, args) -> None:
    """As for Slurm, options of the command count more than the lines in the script."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "m.sh").write_text(SCRIPT)
    (tmp_path / "outer.sh").write_text("#SBATCH -N 2\nexport A=1\nsrun -N 3 ./m.sh x\n")
    values = {each.key: each.value for each in translate(line, "config.yaml").job.overrides}
    assert (values["Launch.nodes"], values["Launch.args"], values["Launch.slurm.time"]) == (nodes, args, "2:00:00")
    assert values.get("Launch.env.A") == ("1" if line == "outer.sh" else None)


def test_a_script_that_starts_itself_is_read_a_few_times(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "m.sh").write_text("sbatch --nodes $N m.sh")
    with pytest.raises(UserError, match="there is no launch command"):
        translate("sbatch --nodes $N m.sh", "config.yaml")


def test_what_happens_to_the_output_is_named(tmp_path: Path) -> None:
    line = "nohup torchrun --nnodes 2 --rdzv_endpoint $H:29400 t.py --x 1 3> err.txt > log.txt 2>&1 &"
    translated = translate(line, str(tmp_path / "c.yaml"))
    assert [f"{each.what}: {each.reason}" for each in translated.job.unmapped] == [
        "--rdzv_endpoint $H:29400: set as port 29400; the host is not needed: gptctl uses the first host of the job",
        "3> err.txt > log.txt 2>&1: not needed: gptctl logs shows the output",
        "&: not needed: the job runs in the background",
    ]
    assert "not in this config" not in translated.text
    assert "port: 29400 " in translated.text
    piped = translate_command("torchrun t.py 2>&1 | tee log.txt", {})
    assert piped.unmapped[-1].what == "2>&1 | tee log.txt"


def test_secrets_are_not_written(tmp_path: Path) -> None:
    """A flag with a secret is left out and named; words of the model and numbers are none."""
    line = (
        "HF_TOKEN=hf_1 TOKENIZERS_PARALLELISM=false torchrun t.py --api-key=sk-1 --hub_token hf_2 "
        "--eos-token x --max_token 5 --tokenizer gpt2 --use-token --b 1"
    )
    translated = translate(line, str(tmp_path / "c.yaml"))
    assert not any(secret in translated.text for secret in ("sk-1", "hf_1", "hf_2"))
    assert named(translated.job) == "HF_TOKEN --api-key --hub_token"
    values = {each.key: each.value for each in translated.job.overrides}
    kept = "--eos-token x --max_token 5 --tokenizer gpt2 --use-token --b 1"
    assert values["Launch.args"] == tuple(kept.split())
    assert values["Launch.env.TOKENIZERS_PARALLELISM"] == "false"


def test_only_files_are_read(tmp_path: Path) -> None:
    """A pipe would be waited for, and it does exist."""
    os.mkfifo(tmp_path / "pipe.sh")
    for place in (tmp_path, tmp_path / "pipe.sh"):
        with pytest.raises(UserError) as error:
            translate(str(place), "config.yaml")
        assert error.value.message == f"{place} is not a regular file"
        with pytest.raises(UserError, match="is not a regular file"):
            translate(f"sbatch {place}", "config.yaml")


def test_a_layout_that_does_not_fit_is_reported_with_its_flags(tmp_path: Path) -> None:
    with pytest.raises(UserError) as error:
        translate(f"{MEGATRON} --tensor-model-parallel-size 3", str(tmp_path / "x.yaml"))
    assert any("--tensor-model-parallel-size 3" in str(finding) for finding in error.value.findings)


def test_nothing_in_a_hostile_script_runs(tmp_path: Path, monkeypatch) -> None:
    """Commands, quotes and line breaks in every place end up as text, or are named."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "job.sh").write_text(
        "#!/bin/bash\n#SBATCH --comment='$(touch owned)'\nexport A=$(touch owned) B='x: {y: 1} # z'\ntouch owned\n"
        "X=`touch owned`; eval 'touch owned'; trap 'touch owned' EXIT\n"
        "touch owned | torchrun --nproc_per_node 2 --log_dir $X t.py '$(touch owned)' '`touch owned`' 'a: [b' '# c' '\\' &\n"
    )
    translated = translate("job.sh", "config.yaml")
    (tmp_path / "config.yaml").write_text(translated.text)
    launch = check_config(tmp_path / "config.yaml", []).launch
    assert launch.args == ("$(touch owned)", "`touch owned`", "a: [b", "# c", "\\")
    assert launch.slurm.extra == {"comment": "$(touch owned)"}
    assert launch.env == {"B": "x: {y: 1} # z"}
    assert named(translated.job) == "A=$(touch --log_dir &"
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["config.yaml", "job.sh"]


def test_comments_cannot_become_keys(tmp_path: Path) -> None:
    """An origin with line breaks stays in its comment."""
    source = "--x\nEngine: {max_steps: 1}\u2028\x85- y"
    text = config_text([Override("Global.seed", "7", source)], head=["a\nModel: {name: GPT}"])
    (tmp_path / "x.yaml").write_text(text)
    checked = check_config(tmp_path / "x.yaml", [])
    assert checked.is_valid
    assert checked.resolved is not None
    assert (checked.resolved.run.Global.seed, checked.resolved.run.Engine.max_steps) == (7, 500000)
