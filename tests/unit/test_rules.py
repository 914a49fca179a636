"""Every rule fires where it should, on the line where it can be mended. The oracle is this table, one row a rule."""

from __future__ import annotations

import pytest

from gptctl.spec.rules import MODULES, all_rules
from tests.conftest import ROOT, SIX_MISTAKES, codes

# the codes that are found, the config, the line of the first of them (0: a flag or none)
CASES = [
    ("A001", "Launch:\n  cluster: nowhere\n", 2),
    ("A002", "Launch:\n  devices: '0,1'\n  gpus_per_node: 4\nDistributed: {dp_degree: 4}\n", 2),
    ("A003", "Launch:\n  cluster: slurm-example\n  gpus_per_node: 8\n", 3),
    ("A003", "Launch:\n  cluster: slurm-example\n  devices: '0,4'\n", 3),
    ("A003", "Launch:\n  cluster: ssh-example\n  nodes: 2\n  gpus_per_node: 64\n", 4),
    ("A004", "Launch:\n  cluster: ssh-example\n  nodes: 3\n", 3),
    ("A005", "Launch:\n  nodes: 1:2\n  gpus_per_node: 1\nDistributed:\n  dp_degree: 2\n", 5),
    ("A005", "Launch:\n  nodes: 1:2\n  gpus_per_node: 1\n  rdzv:\n    backend: static\n", 5),
    ("A005", "Launch:\n  nodes: 1:2\n  gpus_per_node: 1\n  style: static\n", 4),
    ("A006", "Launch:\n  style: sbatch\n", 2),
    ("A006", "Launch:\n  style: standalone\n  nodes: 2\n", 2),
    ("A007", "Launch:\n  env: {TOKEN: x}\n  secrets:\n    TOKEN: {env: TOKEN}\n", 4),
    ("A008", "Launch:\n  rdzv:\n    port: 40000\n", 3),
    ("A008", "Launch:\n  rdzv:\n    port: 1023\n", 3),
    ("A008", "Launch:\n  rdzv:\n    endpoint: head:60999\n", 3),
    ("A009", "Launch:\n  cluster: slurm-example\n  nodes: 2\n  rdzv:\n    endpoint: 127.0.0.1:29500\n", 5),
    ("A009", "Launch:\n  cluster: slurm-example\n  nodes: 2\n  rdzv:\n    endpoint: '[::1]:29500'\n", 5),
    ("A010", "Launch:\n  style: static\n  rdzv:\n    backend: c10d\n", 4),
    ("A010", "Launch:\n  rdzv:\n    endpoint: head:29500\n    port: 29400\n", 4),
    ("A014", "Launch:\n  cluster: slurm-example\n  slurm: {time: 5, save_before: 300}\n", 3),
    ("A015", "Launch:\n  cluster: ssh-example\n  nodes: 2\nDistributed:\n  sharding: {sharding_degree: 4}\n", 2),
    ("A016", "Launch:\n  notify: https://hooks.slack.com/services/T0/B0/x\n", 2),
    ("A011", "Launch:\n  cluster: slurm-example\n  slurm:\n    extra: {nodes: 4}\n", 4),
    ("B001", "Global:\n  global_batch_size: 30\nDistributed:\n  dp_degree: 4\n", 2),
    ("B001", "Global:\n  local_batch_size: 2\n  global_batch_size: 30\nDistributed:\n  dp_degree: 4\n", 3),
    ("B001", "Global: {global_batch_size: 64}\nLaunch:\n  nodes: 2:4\n  gpus_per_node: 1\n", 3),
    ("B002", "Global:\n  local_batch_size: 10\n  micro_batch_size: 4\n", 2),
    ("B002", "Global:\n  global_batch_size: 10\n  micro_batch_size: 4\n", 3),
    ("C010", "Distributed:\n  dp_degree: 1\n  mp_degre: 2\n", 3),
    ("C010", "trainer_config:\n  max_epochs: 2\n  save_evry: 1\n", 3),
    ("C010", "Global: {seed: 1}\n_inherited_: False\n", 2),
    ("C010", "Global: {seed: 1}\n" + "a." * 490 + "a: 1\n", 2),
    ("C010 C010", "PreTraining:\n  " + "a." * 490 + "a: 1\nGlobal:\n  " + "a." * 490 + "a: 1\n", 2),
    ("C011 C011", "Data:\n  Train:\n    dataset:\n      split: [a, 1, b]\n", 4),
    ("C011", "use_sharding: false\nsharding_degree: abc\n", 2),
    ("C011", "Distributed:\n  mp_degree: two\n", 2),
    ("C011", "Global: 3\n", 1),
    ("C011", "Distributed: 8\nmp_degree: 2\n", 1),
    ("C011", "Launch:\n  args:\n    - ok\n    - [1]\n", 4),
    ("C012", "Distributed:\n  mp_degree: 0\n", 2),
    ("C012", "Optimizer:\n  beta1: 1\n", 2),
    ("C013", "Global:\n  device: tpu\n", 2),
    ("C014", "Launch:\n  job_name: a b\n", 2),
    ("C014", "Launch:\n  rdzv: {endpoint: 'head:99999'}\n", 2),
    ("C014 C014", "Launch:\n  env:\n    A-B: 1\n    C: 1\n    D-E: 1\n", 3),
    ("C014", "Data:\n  Train:\n    dataset:\n      input_dir: s3://bucket/x\n", 4),
    ("C016", "model_type: bert\n", 1),
    ("C017", "Model:\n  name: GPT\n  hidden_size: 64\n  num_layers: 2\n", 2),
    ("C019", "Distributed: {dp_degree: 1}\nModel:\n  module: GPTEvalModule\n", 3),
    ("L001", "Distributed:\n  mp_degree: 2\n  dp_degree: 3\nLaunch: {nodes: 2, gpus_per_node: 8}\n", 3),
    (
        "L001",
        "Distributed:\n  mp_degree: 3\nGlobal: {global_batch_size: 32}\nLaunch: {nodes: 2, gpus_per_node: 8}\n",
        2,
    ),
    ("L001 L010", "Distributed:\n  mp_degree: 4\nLaunch:\n  nodes: 1:2\n  gpus_per_node: 2\n", 4),
    ("L001", "Distributed:\n  mp_degree: 4\n  dp_degree: 2\nLaunch:\n  nodes: 3\n", 5),
    ("L002", "Distributed:\n  mp_degree: 8\n", 2),
    ("L003", "Model:\n  name: GPT\n  hidden_size: 100\n  num_layers: 2\n  num_attention_heads: 3\n", 5),
    ("L003", "Model:\n  hidden_size: 770\n", 2),
    ("L004", "Model: {vocab_size_divisible_unit: 1}\nDistributed:\n  mp_degree: 2\n", 3),
    ("L005", "Model:\n  ffn_hidden_size: 3001\nDistributed:\n  mp_degree: 2\n", 4),
    ("L006", "Distributed:\n  pp_degree: 13\nGlobal: {local_batch_size: 13}\n", 2),
    ("L007", "Model:\n  virtual_pp_degree: 2\nDistributed: {pp_degree: 2}\nGlobal: {local_batch_size: 3}\n", 2),
    ("L008", "Distributed:\n  pp_degree: 2\n  pp_schedule: 1F1B\n", 2),
    ("L007 L008", "Model:\n  virtual_pp_degree: 2\nDistributed:\n  pp_degree: 2\n", 2),
    ("L012", "Distributed:\n  pp_degree: 2\n", 2),
    ("L012", "Distributed:\n  pp_degree: 2\n  pp_schedule: GPipe\n", 2),
    (
        "L009",
        "Model: {sequence_parallel: True}\nData: {Train: {dataset: {max_seq_len: 1023}}}\nDistributed:\n  mp_degree: 2\n",
        4,
    ),
    ("L010", "Distributed:\n  mp_degree: 4\nLaunch: {nodes: 2, gpus_per_node: 2}\n", 2),
    ("L011", "Distributed:\n  pp_degree: 5\nGlobal: {local_batch_size: 5}\n", 2),
    ("M001", "Model: {name: 13B}\nLaunch: {cluster: ssh-example}\nDistributed:\n  mp_degree: 1\n", 3),
    ("N001", "Global:\n  flags: {}\n", 0),
    ("N001", "gpt_config: {model_type: gpt2, vocab_size: 50257, block_size: 64}\n", 0),
    ("N003", "Engine:\n  check_accuracy: True\n", 2),
    ("N004", "Optimizer:\n  tensor_fusion: True\nDistributed: {dp_degree: 2}\n", 2),
    ("N004", "Model:\n  scale_qk_by_layer_num: True\n", 2),
    ("N004", "Model:\n  fuse_attn_qkv: False\n", 2),
    ("N004", "Global: {device: cpu}\nEngine:\n  tf32: True\n", 3),
    ("N006", "Data:\n  Train:\n    sample_split: 2\n", 0),
    ("N007", "Optimizer:\n  name: Adam\n", 2),
    ("T001", "Data:\n  Train:\n    dataset:\n      max_seq_len: 2048\n", 4),
    ("T001", "Model:\n  max_position_embeddings: 512\n", 2),
    ("T002", "Model:\n  no_recompute_layers: [3, 12]\n", 2),
    (
        "T003",
        "Model: {use_recompute: True}\nGlobal: {local_batch_size: 2}\nDistributed:\n  pp_degree: 2\n  pp_recompute_interval: 7\n",
        5,
    ),
    ("T004", "Distributed:\n  sharding:\n    sharding_degree: 2\n    sharding_stage: 0\n", 4),
    ("T005", "Global: {device: cpu}\nDistributed:\n  backend: nccl\n", 3),
    ("T006", "Data:\n  Train:\n    dataset:\n      name: CharDataset\n", 4),
    ("T006", "Data:\n  Eval:\n    dataset:\n      name: CharDataset\n", 4),
    ("T007", "Data:\n  Train:\n    dataset:\n      split: [0, 1, 1]\n", 4),
    ("T008", "Profiler:\n  scheduler: [5, 1]\n", 2),
    ("T008", "Profiler:\n  enable: True\n  scheduler: [0, 5]\n", 3),
    ("T029", "Engine: {max_steps: 10}\nProfiler:\n  enable: True\n  scheduler: [20, 25]\n", 4),
    ("T029", "Engine: {max_steps: 3}\nProfiler:\n  enable: True\n  scheduler: [1, 5]\n", 4),
    ("T009", "Generation:\n  min_dec_len: 300\n", 2),
    ("N004", "Distributed:\n  sharding:\n    sharding_degree: 2\n    reduce_overlap: True\n", 4),
    (
        "N005",
        "Global: {device: cpu}\nDistributed:\n  sharding:\n    sharding_degree: 2\n    sharding_offload: True\n",
        5,
    ),
    ("T011", "Engine:\n  save_load: {snapshot_path: s.pt}\nDistributed: {mp_degree: 2}\n", 2),
    (
        "T012",
        "Data:\n  Eval:\n    dataset: {max_seq_len: 512}\nDistributed: {pp_degree: 2}\nGlobal: {local_batch_size: 2}\n",
        3,
    ),
    (
        "T012",
        "Data:\n  Test:\n    dataset: {max_seq_len: 512}\nDistributed: {mp_degree: 2}\nModel: {sequence_parallel: True}\n",
        3,
    ),
    ("T013", "Data:\n  Train:\n    dataset:\n      eos_id: 50304\nModel: {vocab_size: 50304}\n", 4),
    ("T013", "Data:\n  Eval:\n    dataset:\n      eos_id: 60000\n", 4),
    ("T013", "Data:\n  Train:\n    dataset:\n      eos_id: 3\n      name: CharDataset\n      path: builtin\n", 4),
    ("T021", "Distributed:\n  pp_schedule: GPipe\n", 2),
    ("T011", "Engine:\n  save_load: {snapshot_path: s.pt}\nDistributed: {sharding: {sharding_degree: 2}}\n", 2),
    ("T010", "Engine:\n  run_mode: step\n  max_steps: 0\n", 3),
    ("T020", "Optimizer:\n  lr:\n    max_lr: 1e-5\n    min_lr: 5e-5\n", 4),
    ("T020", "Optimizer:\n  lr:\n    max_lr: 1e-6\n", 3),
    ("T021", "Model:\n  sequence_parallel: True\n", 2),
    ("T021", "Model:\n  virtual_pp_degree: 2\n", 2),
    ("T021", "Distributed:\n  sharding:\n    reduce_overlap: True\n", 3),
    ("T021", "Distributed:\n  sharding:\n    broadcast_overlap: True\n", 3),
    ("T021", "Distributed:\n  sharding:\n    sharding_offload: True\n", 3),
    ("T021", "Optimizer:\n  tensor_fusion: True\nDistributed: {mp_degree: 2}\n", 2),
    ("T022", "Distributed:\n  backend: gloo\n", 2),
    ("T023", "Model:\n  virtual_pp_degree: 3\nDistributed: {pp_degree: 2}\nGlobal: {local_batch_size: 2}\n", 2),
    ("T024", "Engine:\n  accumulate_steps: 4\n", 2),
    ("A012", "Launch:\n  args: [a]\n", 2),
    ("A013", "Launch:\n  slurm: {partition: p}\n", 2),
    ("T025", "use_sharding: true\n", 1),
    ("T025", "sharding_degree: 4\nuse_sharding: false\n", 2),
    ("T026", "Data:\n  Train:\n    dataset:\n      split: [1, 0, 0]\n", 4),
]
ELSEWHERE = "CEPSW"  # tree, kinds and layers, the lint, profiles, surroundings and sweeps have tables of their own


@pytest.mark.parametrize(("expected", "text", "line"), CASES)
def test_a_mistake_is_found_once_at_its_line(check, expected: str, text: str, line: int) -> None:
    findings = check(text).findings
    assert [finding.code for finding in findings] == expected.split(), [str(finding) for finding in findings]
    assert (findings[0].place.line if findings[0].place else 0) == line
    assert findings[0].hint or findings[0].level == "notice"


# The other side of each limit, and settings that do work: nothing is found.
FINE = [
    "Launch: {cluster: ssh-example, nodes: 2}\n",
    "Launch: {rdzv: {port: 1024}}\n",
    "Launch: {rdzv: {port: 61000}}\n",
    "Launch: {cluster: slurm-example, nodes: 2, rdzv: {endpoint: 'head:29500', port: 29500}}\n",
    "Launch: {nodes: '2:4', gpus_per_node: 1}\nGlobal: {global_batch_size: 24}\n",
    "Launch: {nodes: '1:2', gpus_per_node: 2, style: c10d}\n",
    "Distributed: {mp_degree: 4}\nLaunch: {gpus_per_node: 4}\n",
    "Distributed: {mp_degree: 4}\nLaunch: {nodes: 2, gpus_per_node: 4}\n",
    "Distributed: {pp_degree: 2, pp_recompute_interval: 6}\nModel: {use_recompute: True}\nGlobal: {local_batch_size: 2}\n",
    "Distributed: {pp_degree: 2, pp_recompute_interval: 7}\nModel: {use_recompute: True, recompute_granularity: core_attn}\n"
    "Global: {local_batch_size: 2}\n",
    "Distributed: {sharding: {sharding_degree: 2, broadcast_overlap: True}}\n",
    "Distributed: {sharding: {sharding_degree: 2, sharding_offload: True}}\n",
    "Distributed: {mp_degree: 2}\nModel: {sequence_parallel: True}\n",
    "Distributed: {pp_degree: 2}\nModel: {virtual_pp_degree: 2}\nGlobal: {local_batch_size: 2}\n",
    "Optimizer: {lr: {name: none, max_lr: 1e-6}}\n",
    "Engine: {eval_freq: -1, eval_iters: 0, max_steps: -1}\n",
    "Engine: {check_accuracy: True}\nModel: {hidden_dropout_prob: 0, attention_probs_dropout_prob: 0}\n",
    "Data: {Train: {dataset: {max_seq_len: 1024, split: [1]}}}\nEngine: {eval_freq: 0}\n",
    "Data: {Train: {dataset: {name: CharDataset, path: builtin, split: []}}}\n",
    "Model: {no_recompute_layers: [11, 0, 11]}\n",
    "use_amp: true\nuse_pure_fp16: false\n",
    "standalone: false\nnnodes: 2\nnproc_per_node: 2\n",
    "use_sharding:\n",
    "PreTraining:\nGlobal: {seed: 1}\n",
    "trainer_config:\nGlobal: {seed: 1}\n",
]


@pytest.mark.parametrize("text", FINE)
def test_what_is_fine_is_not_complained_about(check, text: str) -> None:
    assert [str(finding) for finding in check(text).findings] == []


UNRELATED = [
    ("L001", "Distributed: {dp_degree: 3}\nLaunch: {nodes: 2, gpus_per_node: 8, job_name: a b, env: {A-B: 1}}\n"),
    ("L002", "Model: {hidden_dropout_prob: x}\nDistributed: {mp_degree: 5}\n"),
    ("B002", "Global: {sed: 1, seed: x, local_batch_size: 3, micro_batch_size: 2}\n"),
    ("T001", "Data: {Train: {dataset: {max_seq_len: 2048}, loader: {num_workers: -1}}}\n"),
    ("A006", "Launch: {nodes: 2, gpus_per_node: 1, style: standalone, max_restarts: -1}\n"),
    ("E012", "Launch: {env: {A-B: 1, NCCL_DEBUG: LOUD}}\n"),
    ("T001", "Data: {Train: {dataset: {max_seq_len: 4096}}, Eval: {dataset: {max_seq_len: abc}}}\n"),
    ("T006", "Data: {Train: {dataset: {name: CharDataset}}, Test: {dataset: {path: 's3://x'}}}\n"),
    (
        "L007",
        "Global: {local_batch_size: abc}\nModel: {num_layers: 10, virtual_pp_degree: 2}\nDistributed: {pp_degree: 4}\n",
    ),
    ("B001", "Global: {global_batch_size: 7}\nDistributed: {dp_degree: 2, mp_degree: abc}\n"),
    ("T021", "Engine: {logging_freq: abc}\nModel: {sequence_parallel: True}\n"),
]


@pytest.mark.parametrize(("code", "text"), UNRELATED)
def test_a_mistake_does_not_hide_an_unrelated_one(check, code: str, text: str) -> None:
    assert code in codes(check(text))


def test_a_local_batch_below_a_micro_batch_warns_of_no_key_that_nobody_wrote(check) -> None:
    """B002 says it all: no pipeline schedule follows from a batch that is wrong."""
    found = check("Global: {local_batch_size: 6, micro_batch_size: 12}\n")
    assert "B002" in codes(found)
    assert "T021" not in codes(found)


RELATED = [
    ("C011", "Model: {hidden_size: many, num_attention_heads: 7}\n"),
    ("C011", "Distributed: {mp_degree: two, dp_degree: 3}\nLaunch: {gpus_per_node: 8}\n"),
    ("C012", "Launch: {nodes: 0, gpus_per_node: 8}\nGlobal: {global_batch_size: 30}\n"),
    ("C010", "Distributed: {sharding: {sharding_degre: 4}, dp_degree: 2}\nLaunch: {gpus_per_node: 8}\n"),
    ("C002", "Distributed: {mp_degree: 2}\nLaunch: {gpus_per_node: 8}\nDistributed: {dp_degree: 4}\n"),
    ("C013", "Model: {name: gpt5}\nDistributed: {mp_degree: 7}\n"),
    ("C010", "Distributed: {dp_degree: 1, tp_degree: 8}\nLaunch: {gpus_per_node: 8}\n"),
    ("C010", "Model: {mp_degree: 4}\nDistributed: {dp_degree: 2}\nLaunch: {gpus_per_node: 8}\n"),
    ("C010", "dp_degree: 2\nmp_degre: 4\nnproc_per_node: 8\n"),
    ("C002", "dp_degree: 2\nmp_degree: 4\nmp_degree: 2\nnproc_per_node: 4\n"),
    ("C010", "gpt_config: {n_layer: 8, n_heads: 8, n_embd: 512}\n"),
    ("C014", "Data: {Train: {dataset: {name: CharDataset, path: 's3://a/b'}}}\n"),
]


@pytest.mark.parametrize(("code", "text"), RELATED)
def test_a_value_that_cannot_be_read_silences_the_rules_that_use_it(check, code: str, text: str) -> None:
    assert codes(check(text)) == [code]


def test_an_elastic_job_fits_every_number_of_its_nodes(check) -> None:
    """Each pair of configs differs by the number of nodes only; the oracle is the check of the fixed number."""
    both = "Global: {global_batch_size: 128, local_batch_size: 8}\n"
    piped = (
        "Global: {global_batch_size: 24}\nModel: {num_layers: 16, virtual_pp_degree: 2}\nDistributed: {pp_degree: 4}\n"
    )
    for text, nodes, fixed in ((both, "1:2", 1), (piped, "2:3", 2)):
        launch = "Launch: {{nodes: '{}', gpus_per_node: 8}}\n"
        expected = codes(check(text + launch.format(fixed)))
        assert expected
        assert codes(check(text + launch.format(nodes))) == expected


def test_an_error_of_every_layout_does_not_spoil_the_proposals(check) -> None:
    for other in ("Engine: {run_mode: step, max_steps: 0}\n", "Model: {num_attention_heads: 10}\n"):
        findings = check(f"Distributed: {{dp_degree: 3}}\nLaunch: {{gpus_per_node: 8}}\n{other}").findings
        (world,) = [finding for finding in findings if finding.code == "L001"]
        assert world.hint.startswith("layouts that fit: mp 1 × sharding 1 × pp 1 × dp 8")


def test_secrets_are_not_repeated(check) -> None:
    checked = check("Launch: {secrets: {TOK: hunter2, X: {file: a}}, env: {A: 1, B-C: 2}}\n")
    shown = [finding.as_json() for finding in checked.findings]
    assert "hunter2" not in str(shown)
    assert [(finding["key"], finding["value"]) for finding in shown] == [
        ("Launch.secrets.TOK", None),
        ("Launch.env.B-C", "2"),
    ]
    assert "hunter2" not in str([finding.as_json() for finding in check("Launch: {secrets: hunter2}\n").findings])


def test_separate_datasets_have_splits_of_their_own(check) -> None:
    text = "Data: {Train: {dataset: {input_dir: a, split: [1, 0, 0]}}, Eval: {dataset: {input_dir: b, split: [0, 1, 0]}}}\n"
    assert codes(check(text)) == []


def test_a_cluster_that_cannot_be_read_is_not_judged(check, tmp_path) -> None:
    profile = tmp_path / "mine.yaml"
    profile.write_text("kind: slurm\nrun_root: /x\npartition: [\n")
    checked = check(f"Launch: {{cluster: {profile}, style: sbatch, nodes: 4}}\n")
    assert codes(checked) == ["C001"]


def test_settings_without_effect_are_switched_off(check) -> None:
    text = "Model: {sequence_parallel: True, virtual_pp_degree: 2}\nDistributed: {sharding: {reduce_overlap: True}}\n"
    run = check(text).resolved.run
    assert (run.Model.sequence_parallel, run.Model.virtual_pp_degree, run.Distributed.sharding.reduce_overlap) == (
        False,
        1,
        False,
    )


def test_check_accuracy_takes_the_dropouts_away(check) -> None:
    resolved = check("Engine: {check_accuracy: True}\nModel: {hidden_dropout_prob: 0.3}\n").resolved
    assert (resolved.run.Model.hidden_dropout_prob, resolved.run.Model.attention_probs_dropout_prob) == (0, 0)
    assert resolved.origins["Model.hidden_dropout_prob"] == "derived: check_accuracy"


def test_every_rule_has_a_case() -> None:
    with_case = {code for expected, _, _ in CASES for code in expected.split()}
    missing = {rule.code for rule in all_rules() if rule.code[0] not in ELSEWHERE} - with_case
    assert not missing


def test_every_module_with_rules_is_gathered() -> None:
    """The oracle is the source text: a module that makes a Rule is in the list."""
    makers = [
        file
        for package in ("gptctl", "trainer")
        for file in (ROOT / package).rglob("*.py")
        if " = Rule(" in file.read_text()
    ]
    assert {".".join(file.relative_to(ROOT).with_suffix("").parts) for file in makers} == set(MODULES)


def test_codes_are_unique() -> None:
    rules = [rule.code for rule in all_rules()]
    assert len(rules) == len(set(rules)) > 80


def test_codes_never_change_their_meaning() -> None:
    """The codes users have seen: removing or renumbering one breaks their scripts and their memory."""
    published = """
        A001-A016 B001-B002 C001-C008 C010-C019 E001-E032 L001-L012 M001-M001 N001-N001 N003-N007
        P001-P008
        S001-S013 S015-S020 S030-S033
        T001-T013 T020-T026 T029-T029 W001-W003
    """
    expected = []
    for span in published.split():
        first, last = span.split("-")
        expected += [f"{first[0]}{number:03}" for number in range(int(first[1:]), int(last[1:]) + 1)]
    assert sorted(rule.code for rule in all_rules()) == sorted(expected)


def test_six_mistakes_are_six_findings_with_their_lines(check) -> None:
    checked = check(SIX_MISTAKES)
    lines = [(finding.code, finding.place.line) for finding in checked.findings if finding.place]
    assert lines == [("C013", 2), ("C012", 3), ("C010", 4), ("C011", 7), ("C011", 9), ("L002", 11)]


UNKNOWN = [
    ("Distributed: {mp_degre: 2}", "did you mean mp_degree?"),
    ("distributed: {mp_degree: 2}", "did you mean Distributed?"),
    ("Model: {dp_degree: 2}", "move it to Distributed"),
    ("Data: {max_seq_len: 2}", "move it to Data.Train.dataset"),
    ("Distributed: {tp_degree: 2}", "use mp_degree"),
    ("Xyz: 1", "known here: Global, Engine,"),
    ("globalbatchsize: 8", "did you mean Global.global_batch_size?"),
]


@pytest.mark.parametrize(("text", "hint"), UNKNOWN)
def test_unknown_keys_get_a_suggestion(check, text: str, hint: str) -> None:
    finding = check(text).findings[0]
    assert finding.code == "C010"
    assert hint in finding.hint


FEW = "Distributed:\n  pp_degree: 4\nGlobal: {local_batch_size: 2}\n"


def test_few_micro_batches_run_with_gpipe_unless_a_schedule_is_written(check, tmp_path) -> None:
    """L012 warns and the config is valid, also when the resolved config is loaded again, as a job does."""
    checked = check(FEW)
    assert codes(checked) == ["L012"]
    assert "stages are idle for 60% of the time" in checked.findings[0].message  # (4 - 1) / (2 + 4 - 1)
    assert checked.resolved.run.Distributed.pp_schedule == "GPipe"
    assert checked.resolved.origins["Distributed.pp_schedule"] == "derived: fewer micro-batches than stages"
    again = check(checked.resolved.as_json())
    assert (codes(again), again.resolved.run) == (["L012"], checked.resolved.run)
    assert codes(check(FEW, "Distributed.pp_schedule=1F1B")) == ["L008"]
    assert codes(check(FEW, "Global.local_batch_size=4")) == []
    assert check(FEW, "Global.local_batch_size=4").resolved.run.Distributed.pp_schedule == "1F1B"


def test_the_hint_for_few_micro_batches_is_enough(check) -> None:
    """Each change that the hint names removes the warning."""
    text = "Distributed: {pp_degree: 4}\nGlobal: {local_batch_size: 8, micro_batch_size: 4}\n"
    hint = check(text).findings[0].hint
    assert hint == "raise local_batch_size to 16 (global_batch_size to 16) or more, or lower micro_batch_size to 2"
    assert codes(check(text, "Global.local_batch_size=16")) == codes(check(text, "Global.micro_batch_size=2")) == []


def test_no_layout_with_few_micro_batches_is_proposed(check) -> None:
    """3 GPUs for pp 2: pp 3 would leave stages without work."""
    (finding,) = check(
        "Distributed: {pp_degree: 2, dp_degree: 2}\nModel: {num_layers: 12}\nLaunch: {gpus_per_node: 3}\n"
    ).findings[:1]
    assert finding.code == "L001"
    assert "pp 3" not in finding.hint
