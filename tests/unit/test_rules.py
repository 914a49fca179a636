"""Every rule fires where it should, on the line where it can be mended. The oracle is this table, one row a rule."""

from __future__ import annotations

import pytest

from gptctl.rules import all_rules
from tests.conftest import codes

# code, the config, the line of the finding (0: a flag or none)
CASES = [
    ("A001", "Launch:\n  cluster: nowhere\n", 2),
    ("A002", "Launch:\n  devices: '0,1'\n  gpus_per_node: 4\nDistributed: {dp_degree: 4}\n", 2),
    ("A003", "Launch:\n  cluster: slurm-example\n  gpus_per_node: 8\n", 3),
    ("A004", "Launch:\n  cluster: ssh-example\n  nodes: 3\n", 3),
    ("A005", "Launch:\n  nodes: 1:2\n  gpus_per_node: 1\nDistributed:\n  dp_degree: 2\n", 5),
    ("A005", "Launch:\n  nodes: 1:2\n  gpus_per_node: 1\n  rdzv:\n    backend: static\n", 5),
    ("A006", "Launch:\n  style: sbatch\n", 2),
    ("A006", "Launch:\n  style: standalone\n  nodes: 2\n", 2),
    ("A007", "Launch:\n  env: {TOKEN: x}\n  secrets:\n    TOKEN: {env: TOKEN}\n", 4),
    ("A008", "Launch:\n  rdzv:\n    port: 40000\n", 3),
    ("A008", "Launch:\n  rdzv:\n    port: 80\n", 3),
    ("A009", "Launch:\n  cluster: slurm-example\n  nodes: 2\n  rdzv:\n    endpoint: 127.0.0.1:29500\n", 5),
    ("B001", "Global:\n  global_batch_size: 30\nDistributed:\n  dp_degree: 4\n", 2),
    ("B001", "Global:\n  local_batch_size: 2\n  global_batch_size: 30\nDistributed:\n  dp_degree: 4\n", 3),
    ("B002", "Global:\n  local_batch_size: 10\n  micro_batch_size: 4\n", 2),
    ("B002", "Global:\n  global_batch_size: 10\n  micro_batch_size: 4\n", 3),
    ("C010", "Distributed:\n  dp_degree: 1\n  mp_degre: 2\n", 3),
    ("C011", "Distributed:\n  mp_degree: two\n", 2),
    ("C011", "Global: 3\n", 1),
    ("C012", "Distributed:\n  mp_degree: 0\n", 2),
    ("C013", "Global:\n  device: tpu\n", 2),
    ("C014", "Launch:\n  job_name: a b\n", 2),
    ("C014", "Data:\n  Train:\n    dataset:\n      input_dir: s3://bucket/x\n", 4),
    ("C016", "model_type: bert\n", 1),
    ("C017", "Model:\n  name: GPT\n  hidden_size: 64\n  num_layers: 2\n", 1),
    ("L001", "Distributed:\n  mp_degree: 2\n  dp_degree: 3\nLaunch: {nodes: 2, gpus_per_node: 8}\n", 3),
    ("L001", "Distributed:\n  mp_degree: 3\nLaunch: {nodes: 2, gpus_per_node: 8}\n", 2),
    ("L001", "Distributed:\n  mp_degree: 4\nLaunch:\n  nodes: 1:2\n  gpus_per_node: 2\n", 4),
    ("L002", "Distributed:\n  mp_degree: 8\n", 2),
    ("L003", "Model:\n  name: GPT\n  hidden_size: 100\n  num_layers: 2\n  num_attention_heads: 3\n", 5),
    ("L004", "Model: {vocab_size_divisible_unit: 1}\nDistributed:\n  mp_degree: 2\n", 3),
    ("L005", "Model:\n  ffn_hidden_size: 3001\nDistributed:\n  mp_degree: 2\n", 4),
    ("L006", "Distributed:\n  pp_degree: 13\nGlobal: {local_batch_size: 13}\n", 2),
    ("L007", "Model:\n  virtual_pp_degree: 2\nDistributed: {pp_degree: 2}\nGlobal: {local_batch_size: 3}\n", 2),
    ("L008", "Distributed:\n  pp_degree: 2\n", 2),
    (
        "L009",
        "Model: {sequence_parallel: True}\nData: {Train: {dataset: {max_seq_len: 1023}}}\nDistributed:\n  mp_degree: 2\n",
        4,
    ),
    ("L010", "Distributed:\n  mp_degree: 4\nLaunch: {nodes: 2, gpus_per_node: 2}\n", 2),
    ("L011", "Distributed:\n  pp_degree: 5\nGlobal: {local_batch_size: 5}\n", 2),
    ("M001", "Model: {name: 13B}\nLaunch: {cluster: ssh-example}\nDistributed:\n  mp_degree: 1\n", 3),
    ("N001", "Global:\n  flags: {}\n", 0),
    ("N002", "Generation: {top_k: 5}\n", 0),
    ("T001", "Data:\n  Train:\n    dataset:\n      max_seq_len: 2048\n", 4),
    ("T002", "Model:\n  no_recompute_layers: [3, 12]\n", 2),
    (
        "T003",
        "Model: {use_recompute: True}\nGlobal: {local_batch_size: 2}\nDistributed:\n  pp_degree: 2\n  pp_recompute_interval: 7\n",
        5,
    ),
    ("T004", "Distributed:\n  sharding:\n    sharding_degree: 2\n    sharding_stage: 0\n", 4),
    ("T005", "Global: {device: cpu}\nDistributed:\n  backend: nccl\n", 3),
    ("T006", "Data:\n  Train:\n    dataset:\n      name: CharDataset\n", 3),
    ("T007", "Data:\n  Train:\n    dataset:\n      split: [0, 1, 1]\n", 4),
    ("T008", "Profiler:\n  scheduler: [5, 1]\n", 2),
    ("T009", "Generation:\n  min_dec_len: 300\n", 2),
    ("T020", "Optimizer:\n  lr:\n    max_lr: 1e-5\n    min_lr: 5e-5\n", 4),
    ("T021", "Model:\n  sequence_parallel: True\n", 2),
    ("T021", "use_sharding: true\n", 1),
    ("T021", "Distributed:\n  sharding:\n    reduce_overlap: True\n", 3),
    ("T022", "Distributed:\n  backend: gloo\n", 2),
    ("T023", "Model:\n  virtual_pp_degree: 3\nDistributed: {pp_degree: 2}\nGlobal: {local_batch_size: 2}\n", 2),
    ("T024", "Engine:\n  accumulate_steps: 4\n", 2),
]
ELSEWHERE = "CEP"  # tree, kinds and layers, the environment lint, and cluster profiles have tables of their own


@pytest.mark.parametrize(("code", "text", "line"), CASES)
def test_a_rule_fires_at_its_line(check, code: str, text: str, line: int) -> None:
    fired = [finding for finding in check(text).findings if finding.code == code]
    assert fired, [str(finding) for finding in check(text).findings]
    assert (fired[0].place.line if fired[0].place else 0) == line
    assert fired[0].hint or fired[0].level == "notice"


def test_every_rule_has_a_case() -> None:
    with_case = {code for code, _, _ in CASES}
    missing = {rule.code for rule in all_rules() if rule.code[0] not in ELSEWHERE} - with_case
    assert not missing


def test_codes_are_unique() -> None:
    rules = [rule.code for rule in all_rules()]
    assert len(rules) == len(set(rules)) > 80


def test_codes_never_change_their_meaning() -> None:
    """The codes users have seen: removing or renumbering one breaks their scripts and their memory."""
    published = (
        "A001-A009 B001-B002 C001-C007 C010-C018 E001-E031 L001-L011 M001-M001 N001-N002 P001-P003 T001-T009 T020-T024"
    )
    expected = []
    for span in published.split():
        first, last = span.split("-")
        expected += [f"{first[0]}{number:03}" for number in range(int(first[1:]), int(last[1:]) + 1)]
    assert sorted(rule.code for rule in all_rules()) == sorted(expected)


def test_a_value_that_cannot_be_read_silences_the_rules_that_use_it(check) -> None:
    checked = check("Model:\n  hidden_size: many\n  num_attention_heads: 7\nDistributed:\n  mp_degree: 2\n")
    assert codes(checked) == ["C011"]


SIX = """\
Global:
  device: tpu
  micro_batch_size: 0
Engin:
  max_steps: 10
Engine:
  max_steps: 1.5
Optimizer:
  lr: {max_lr: fast}
Distributed:
  mp_degree: 5
"""


def test_six_mistakes_are_six_findings_with_their_lines(check) -> None:
    checked = check(SIX)
    lines = [(finding.code, finding.place.line) for finding in checked.findings if finding.place]
    assert lines == [("C013", 2), ("C012", 3), ("C010", 4), ("C011", 7), ("C011", 9), ("L002", 11)]


UNKNOWN = [
    ("Distributed: {mp_degre: 2}", "did you mean mp_degree?"),
    ("distributed: {mp_degree: 2}", "did you mean Distributed?"),
    ("Model: {dp_degree: 2}", "it belongs in Distributed"),
    ("Data: {max_seq_len: 2}", "it belongs in Data.Train.dataset"),
    ("Xyz: 1", "known here: Global, Engine,"),
    ("globalbatchsize: 8", "did you mean Global.global_batch_size?"),
]


@pytest.mark.parametrize(("text", "hint"), UNKNOWN)
def test_unknown_keys_get_a_suggestion(check, text: str, hint: str) -> None:
    finding = check(text).findings[0]
    assert finding.code == "C010"
    assert hint in finding.hint
