"""Cluster profiles. The oracle is a table of profiles with the code and line a reader would name."""

from __future__ import annotations

from dataclasses import fields

import pytest
import yaml

from gptctl.engine.gpus import visible_gpus
from gptctl.spec.cluster import Cluster, find_profile, known_profiles, load_profile
from gptctl.spec.cluster_kinds import KINDS
from gptctl.spec.resources import named_files
from gptctl.spec.visible_gpus import count_visible_gpus
from trainer.errors import UserError
from trainer.estimate import GB


@pytest.mark.parametrize("name", named_files("clusters"))
def test_bundled_profiles_are_clean(name: str) -> None:
    profile = load_profile(name)
    assert profile.findings == ()
    assert profile.cluster.name == name


@pytest.mark.parametrize("kind", ["slurm", "ssh"])
def test_an_example_shows_every_key_of_its_kind(kind: str) -> None:
    """Oracle: the keys of the dataclass, without those of other kinds."""
    shown = yaml.safe_load(named_files("clusters")[f"{kind}-example"].read_text())
    of_others = {key for name, traits in KINDS.items() if name != kind for key in traits.keys}
    assert set(shown) == {field.name for field in fields(Cluster)} - of_others


def test_ssh_hosts_keep_their_order_and_details() -> None:
    hosts = load_profile("ssh-example").cluster.hosts
    assert [host.host for host in hosts] == ["10.0.0.46", "10.0.0.45"]
    assert (hosts[0].user, hosts[0].port, hosts[1].proxy_jump) == ("me", 22, "bastion")


WRONG = [
    ("kind: ssh\nrun_root: /x\n", "P001", 1),
    ("kind: ssh\nrun_root: /x\nhosts: [a, a]\n", "P001", 3),
    ("kind: slurm\nrun_root: runs\n", "P002", 2),
    ("kind: local\npartition: a800\n", "P003", 2),
    ("kind: slurm\nrun_root: /r\nsbatch:\n  arr: 0-3\n", "P004", 4),
    ("kind: cloud\n", "C013", 1),
    ("kind: slurm\nrun_rot: /x\nrun_root: /x\n", "C010", 2),
    ("kind: ssh\nrun_root: /x\nhosts:\n  - {host: a}\n  - {user: me}\n", "C011", 5),
    ("kind: ssh\nrun_root: /x\nhosts:\n  - {host: a, prt: 1}\n", "C011", 4),
    ("kind: ssh\nrun_root: /x\nhosts:\n  - 'a b'\n", "C011", 4),
    ("env: {A B: 1}\n", "C014", 1),
    ("", "C007", 0),
]


@pytest.mark.parametrize(("text", "code", "line"), WRONG)
def test_mistakes_in_a_profile(tmp_path, text: str, code: str, line: int) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text(text)
    found = [(finding.code, finding.place.line) for finding in load_profile(str(file)).findings if finding.place]
    assert (code, line) in found


def test_a_file_that_is_no_profile_is_not_called_a_run_config(tmp_path) -> None:
    """Of any size, and with any number of unknown keys."""
    (tmp_path / "zero.yaml").write_bytes(bytes(2 << 20))
    (tmp_path / "many.yaml").write_text("".join(f"k{number}: 1\n" for number in range(300)))
    assert load_profile(str(tmp_path / "zero.yaml")).findings[0].hint == "check that this is a cluster profile"
    hints = {finding.hint for finding in load_profile(str(tmp_path / "many.yaml")).findings}
    assert "check that this is the right file" in hints
    assert not any("run config" in hint for hint in hints)


def test_a_profile_in_the_current_folder_wins(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    user = tmp_path / "config" / "gptctl" / "clusters"
    user.mkdir(parents=True)
    (user / "local.yaml").write_text("gpus_per_node: 3\n")
    (user / "lab.yaml").write_text("kind: local\n")
    assert load_profile("local").cluster.gpus_per_node == 3
    (tmp_path / "clusters").mkdir()
    (tmp_path / "clusters" / "local.yaml").write_text("gpus_per_node: 5\n")
    assert load_profile("local").cluster.gpus_per_node == 5
    assert {"lab", "local", "slurm-example", "ssh-example"} <= set(known_profiles())


def test_an_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(UserError) as caught:
        find_profile("locl")
    assert "did you mean local?" in caught.value.hint
    assert "slurm-example" in caught.value.hint


def test_visible_gpus_follow_the_environment(monkeypatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,3")
    assert count_visible_gpus() == 3
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "-1")
    assert count_visible_gpus() == 0


@pytest.mark.parametrize(
    ("value", "expected"),
    [("-1", ()), ("", ()), ("1, 0", ("1", "0")), ("GPU-b", ("1",))],
)
def test_the_queue_sees_the_gpus_that_cuda_would(monkeypatch, tmp_path, value: str, expected: tuple[str, ...]) -> None:
    """Oracle: the rules of CUDA_VISIBLE_DEVICES. nvidia-smi is a stand-in: there may be no GPU."""
    (tmp_path / "nvidia-smi").write_text("#!/bin/sh\nprintf '0, GPU-a, 0, 80\\n1, GPU-b, 0, 80\\n'\n")
    (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", value)
    assert visible_gpus() == expected


def test_the_environment_is_linted_where_it_is_written(check, tmp_path) -> None:
    """A variable of the profile is reported in the profile, one of the config in the config, and the config wins."""
    profile = tmp_path / "c.yaml"
    profile.write_text("gpus_per_node: 2\nenv:\n  NCCL_TIMEOUT: 5\n  NCCL_IB_DISABEL: 1\n")
    checked = check(f"Launch:\n  cluster: {profile}\n  env:\n    NCCL_TIMEOUT: 6\n")
    places = {
        finding.code: (finding.key, str(finding.place).rsplit("/", 1)[-1], finding.value)
        for finding in checked.findings
    }
    assert places["E006"] == ("NCCL_TIMEOUT", "run.yaml:4", "6")
    assert places["E004"] == ("NCCL_IB_DISABEL", "c.yaml:4", "1")


def test_without_a_number_of_gpus_the_degrees_ask_for_ranks(check, monkeypatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert check("Distributed: {dp_degree: 8}\n").machines == (1, 8)
    assert check("Distributed: {mp_degree: 2}\n", "Launch.nodes=2").machines == (2, 2)
    assert check("Distributed: {mp_degree: 4}\n", "Launch.nodes=3").machines == (3, 4)
    assert check("Distributed: {mp_degree: 2, dp_degree: 2}\n", "Launch.nodes=4").machines == (4, 1)
    assert check("Global: {seed: 1}\n", "Launch.nodes=2").machines == (2, 1)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3")
    assert check("Global: {seed: 1}\n").machines == (1, 4)
    assert check("Global: {device: cpu}\n").machines == (1, 1)
    assert check("Launch: {devices: '0,1'}\n").machines == (1, 2)


def test_memory_is_compared_with_the_profile(check, tmp_path) -> None:
    """The oracle is the estimate itself, a little below and a little above the limit."""
    profile = tmp_path / "c.yaml"

    def codes_with(limit: float) -> list[str]:
        profile.write_text(f"gpus_per_node: 1\ngpu_memory_gb: {limit}\n")
        return [finding.code for finding in check(f"Model: {{name: 345M}}\nLaunch: {{cluster: {profile}}}\n").findings]

    profile.write_text("gpus_per_node: 1\n")
    need = check(f"Model: {{name: 345M}}\nLaunch: {{cluster: {profile}}}\n").estimate.memory.total / GB
    assert codes_with(need * 1.01) == []
    assert codes_with(need * 0.99) == ["M001"]


def test_gpus_per_node_tells_its_origin(check, tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    profile = tmp_path / "c.yaml"
    profile.write_text("gpus_per_node: 2\n")
    key = "Launch.gpus_per_node"
    cases = {
        f"Launch: {{cluster: {profile}}}\n": (2, "profile c"),
        "Launch: {devices: '0,1,2'}\n": (3, "derived: devices"),
        "Distributed: {dp_degree: 4}\n": (4, "derived: as many ranks as the degrees need"),
    }
    for text, (number, origin) in cases.items():
        checked = check(text)
        assert (checked.launch.gpus_per_node, checked.launch_origins[key]) == (number, origin)
    assert check("Launch:\n  gpus_per_node: 5\n").launch_origins[key].endswith("run.yaml:2")
    assert check("Launch:\n  gpus_per_node: 5\n").launch_origins["Launch.nodes"] == "default"
    assert check("Launch:\n  gpus_per_node: 5\n  job_name:\n").launch_origins["Launch.job_name"] == "default"


@pytest.mark.parametrize(
    ("hosts", "per_node", "words"),
    [
        ("gpus_per_node: 4\nhosts: [{host: a, gpus: 4}, {host: b, gpus: 2}]", 8, "b has 2 GPUs"),
        ("gpus_per_node: 4\nhosts: [{host: a, gpus: 8}, b]", 8, "nodes of mine have 4 GPUs"),
        ("hosts: [{host: a, gpus: 4}, {host: b, gpus: 4}]", 8, "a has 4 GPUs"),
        ("gpus_per_node: 4\nhosts: [{host: a, gpus: 8}, {host: b, gpus: 8}]", 8, ""),
        ("hosts: [{host: a, gpus: 8}, {host: b, gpus: 8}, {host: c, gpus: 1}]", 8, ""),
    ],
)
def test_too_few_gpus_are_reported_once(check, tmp_path, hosts: str, per_node: int, words: str) -> None:
    """The hosts that the job would use count, each with its own number or else that of the profile."""
    (tmp_path / "mine.yaml").write_text(f"kind: ssh\nrun_root: /x\n{hosts}\n")
    findings = check(f"Launch: {{cluster: {tmp_path}/mine.yaml, nodes: 2, gpus_per_node: {per_node}}}\n").findings
    assert [finding.code for finding in findings] == ["A003"] * bool(words)
    assert all(words in finding.message for finding in findings)


def test_the_name_of_the_file_counts(tmp_path) -> None:
    """A copied profile has the name of the other one; the frozen profile of a job has its own."""
    (tmp_path / "copy.yaml").write_text("name: first\nkind: local\n")
    profile = load_profile(str(tmp_path / "copy.yaml"))
    assert (profile.cluster.name, [finding.code for finding in profile.findings]) == ("copy", ["P008"])
    (tmp_path / "cluster.json").write_text('{"name": "first"}')
    profile = load_profile(str(tmp_path / "cluster.json"))
    assert (profile.cluster.name, profile.findings) == ("first", ())
