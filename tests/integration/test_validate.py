"""`gptctl validate` as a person types it. The oracle is what the process prints and its exit code."""

from __future__ import annotations

import json
import os
import time

import pytest

from gptctl.spec.resources import named_files
from tests.conftest import ROOT, SIX_MISTAKES
from trainer.config import load
from trainer.layout import Machines

TEMPLATES = named_files("templates/configs")


def test_validate_config_typed_literally(gptctl, tmp_path) -> None:
    (tmp_path / "config.yaml").write_text("Distributed:\n  dp_degree: 8\n")
    result = gptctl("validate", "config")
    assert (result.returncode, result.stdout.splitlines()[0]) == (0, "config.yaml: valid")
    for word in ("layout", "world", "batch", "accumulation", "parameters", "memory per GPU"):
        assert word in result.stdout
    assert gptctl("validate").stdout == result.stdout


@pytest.mark.parametrize("name", ["config.yaml", "config.yml", "configs.yaml", "configs/config.yaml"])
def test_a_bare_name_finds_its_file(gptctl, tmp_path, name: str) -> None:
    (tmp_path / "configs").mkdir()
    (tmp_path / name).write_text("Global: {seed: 1}\n")
    for arguments in (["validate"], ["validate", "config"]):
        result = gptctl(*arguments)
        assert (result.returncode, result.stdout.splitlines()[0]) == (0, f"{name}: valid")


def test_a_name_in_the_folder_of_configs(gptctl, tmp_path) -> None:
    (tmp_path / "configs").mkdir()
    (tmp_path / "configs" / "big.yaml").write_text("Global: {seed: 1}\n")
    assert gptctl("validate", "big").returncode == 0


def test_six_mistakes_six_findings_six_lines(gptctl, tmp_path) -> None:
    (tmp_path / "config.yaml").write_text(SIX_MISTAKES)
    result = gptctl("validate", "config")
    assert result.returncode == 1
    errors = [line for line in result.stdout.splitlines() if line.startswith("error: ")]
    lines = [int(error.split("(config.yaml:")[1].split(")")[0]) for error in errors]
    assert lines == [2, 3, 4, 7, 9, 11]
    assert len([line for line in result.stdout.splitlines() if line.startswith("hint: ")]) == 6
    assert result.stdout.splitlines()[-1] == "config.yaml: 6 errors"


@pytest.mark.parametrize("name", TEMPLATES)
def test_every_template_fits_its_own_world_and_no_other(gptctl, name: str) -> None:
    file = str(TEMPLATES[name])
    report = json.loads(gptctl("validate", file, "--json").stdout)
    assert report["valid"] is True
    assert report["findings"] == []
    dp, world = report["layout"]["dp"], report["world"]
    for nodes, per_node in {(1, 1), (1, 3), (2, 7), (3, 5), (16, 8), (1, 32)}:
        if nodes * per_node == world["world_size"]:
            continue
        arguments = ["--nodes", str(nodes), "--gpus-per-node", str(per_node), "-o", f"Distributed.dp_degree={dp}"]
        other = json.loads(gptctl("validate", file, "--json", *arguments).stdout)
        (finding,) = [finding for finding in other["findings"] if finding["code"] == "L001"]
        assert other["valid"] is False
        assert "fit" in finding["hint"]
        assert f"= {nodes * per_node} " in finding["message"]


def test_a_proposed_layout_is_valid(gptctl) -> None:
    """What the hint proposes is tried with the command itself."""
    file = str(TEMPLATES["mp2-sharding4"])
    world = ["--nodes", "2", "--gpus-per-node", "8"]
    report = json.loads(gptctl("validate", file, *world, "--json").stdout)
    (finding,) = [finding for finding in report["findings"] if finding["code"] == "L001"]
    proposals = finding["hint"].removeprefix("layouts that fit: ").split("; ")
    assert len(proposals) == 3
    keys = {"mp": "mp_degree", "sharding": "sharding_degree", "pp": "pp_degree", "dp": "dp_degree"}
    for proposal in proposals:
        degrees = [part.split() for part in proposal.split(" × ")]
        overrides = [word for axis, degree in degrees for word in ("-o", f"{keys[axis]}={degree}")]
        result = gptctl("validate", file, *world, *overrides)
        assert result.returncode == 0, result.stdout


BAD_FILES = {
    "empty": (b"", 1),
    "list at the root": (b"- 1\n- 2\n", 1),
    "not UTF-8": (b"Global: {seed: \xff}\n", 1),
    "NUL": (b"Global: {seed: \x00}\n", 1),
    "tabs": (b"Global:\n\tseed: 1\n", 1),
    "10 MB": (b"# " + b"x" * 10_000_000, 1),
    "deep": (b"[" * 100_000, 1),
}

BAD_DEGREES = ["0", "-1", str(2**63), "1.5", "true", '"8 "', "NaN", ".inf", "8 8", "[8]", "{a: 8}", "'٨'", "0x8"]


@pytest.mark.parametrize("kind", BAD_FILES)
def test_bad_files(gptctl, tmp_path, kind: str) -> None:
    data, code = BAD_FILES[kind]
    (tmp_path / "config.yaml").write_bytes(data)
    result = gptctl("validate", "config")
    assert result.returncode == code
    assert result.stdout.startswith("error: C0")
    assert "config.yaml" in result.stdout.splitlines()[0]
    assert "Traceback" not in result.stdout + result.stderr


@pytest.mark.parametrize("degree", BAD_DEGREES)
def test_bad_degrees(gptctl, tmp_path, degree: str) -> None:
    (tmp_path / "config.yaml").write_text(f"Distributed:\n  mp_degree: {degree}\n", encoding="utf-8")
    result = gptctl("validate", "config")
    assert result.returncode == 1
    assert result.stdout.startswith("error: C01")
    assert "Distributed.mp_degree (config.yaml:2)" in result.stdout
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize("world", ["7", "13", "1021"])
def test_prime_worlds(gptctl, tmp_path, world: str) -> None:
    (tmp_path / "config.yaml").write_text("Distributed: {mp_degree: 2}\n")
    result = gptctl("validate", "config", "--gpus-per-node", world)
    assert result.returncode == 1
    assert f"mp 1 × sharding 1 × pp 1 × dp {world}" in result.stdout


@pytest.mark.parametrize("argument", ["missing.yaml", "missing", ".", "/proc/self/mem", "a/b/c.yaml"])
def test_unreadable_configs_are_wrong_usage(gptctl, argument: str) -> None:
    result = gptctl("validate", argument)
    assert result.returncode == 2
    assert result.stderr.startswith("error: ")
    assert "Traceback" not in result.stderr


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads every file")
def test_a_file_without_permission(gptctl, tmp_path) -> None:
    (tmp_path / "config.yaml").write_text("Global: {seed: 1}\n")
    (tmp_path / "config.yaml").chmod(0)
    assert gptctl("validate", "config").returncode == 2


@pytest.mark.parametrize("arguments", [["--nods", "2"], ["-o", "nothing"], ["a", "b"], ["--nodes"]])
def test_wrong_usage(gptctl, tmp_path, arguments: list[str]) -> None:
    (tmp_path / "config.yaml").write_text("Global: {seed: 1}\n")
    assert gptctl("validate", *arguments).returncode == 2


def test_warnings_fail_only_when_strict(gptctl, tmp_path) -> None:
    (tmp_path / "config.yaml").write_text("Optimizer: {lr: {max_lr: 1e-5, min_lr: 5e-5}}\n")
    assert gptctl("validate", "config").returncode == 0
    assert gptctl("validate", "config", "--strict").returncode == 1
    assert json.loads(gptctl("validate", "config", "--strict", "--json").stdout)["valid"] is False
    assert "not valid with --strict" in gptctl("validate", "config", "--strict").stdout


@pytest.mark.parametrize("name", TEMPLATES)
def test_the_resolved_config_loads_back_to_the_same_object(gptctl, tmp_path, name: str) -> None:
    world = json.loads(gptctl("validate", str(TEMPLATES[name]), "--json", "--resolved").stdout)
    machines = Machines(world["world"]["nodes"], world["world"]["gpus_per_node"])
    original = load(TEMPLATES[name], machines=machines)
    as_yaml, as_json = tmp_path / "run.yaml", tmp_path / "run.json"
    as_yaml.write_text(gptctl("validate", str(TEMPLATES[name]), "--resolved").stdout)
    as_json.write_text(json.dumps(world["resolved"]))
    assert load(as_yaml, machines=machines).run == original.run
    assert load(as_json, machines=machines).run == original.run
    again = json.loads(gptctl("validate", str(as_json), "--json", "--resolved").stdout)
    assert again["resolved"] == world["resolved"]  # with Launch


def test_resolved_tells_where_values_came_from(gptctl, tmp_path) -> None:
    (tmp_path / "base.yaml").write_text("Global:\n  seed: 3\n")
    (tmp_path / "config.yaml").write_text("_base_: base.yaml\nModel:\n  name: 345M\n")
    report = json.loads(
        gptctl("validate", "config", "--nodes", "2", "-o", "Global.device=cpu", "--resolved", "--json").stdout
    )
    origins = report["origins"]
    assert origins["Global.seed"] == "base.yaml:2"
    assert origins["Model.name"] == "config.yaml:3"
    assert origins["Global.device"] == "-o Global.device=cpu"
    assert origins["Launch.nodes"] == "--nodes 2"
    assert origins["Engine.max_steps"] == "default"
    text = gptctl("validate", "config", "--resolved").stdout
    assert "  seed: 3 " in text
    assert "# base.yaml:2" in text


@pytest.mark.parametrize("page", ["docs/quickstart.md", "docs/zh-CN/quickstart.md"])
def test_the_quickstart_shows_what_the_command_prints(gptctl, tmp_path, page: str) -> None:
    """The session in the quickstart is run again: same config, same words."""
    readme = (ROOT / page).read_text(encoding="utf-8")
    config = readme.split("```yaml\n# run.yaml\n")[1].split("```")[0]
    shown = readme.split("$ gptctl validate run.yaml --nodes 2\n")[1].split("```")[0]
    (tmp_path / "run.yaml").write_text("# run.yaml\n" + config, encoding="utf-8")
    result = gptctl("validate", "run.yaml", "--nodes", "2")
    assert result.stdout == shown


@pytest.mark.parametrize("flag", ["--nodes", "--gpus-per-node", "--cluster"])
def test_an_empty_flag_does_not_choose_another_world(gptctl, tmp_path, flag: str) -> None:
    (tmp_path / "config.yaml").write_text("Launch: {nodes: 2, gpus_per_node: 4}\n")
    assert gptctl("validate", "config", flag, "").returncode == 2


ODD_TEXTS = [
    "-",
    "~",
    "null",
    "yes",
    "1e5",
    "#x",
    "a: b",
    " x ",
    "'",
    '"',
    "\\",
    "数据 “x”",
    "🙂",
    "{a}",
    "[a",
    "*a",
    "&a",
    "!a",
    "%j",
    "@",
    "`",
    "$(x)",
]


def test_odd_texts_come_back_from_the_resolved_config(gptctl, tmp_path) -> None:
    launch = {
        "entrypoint": "x",
        "args": ODD_TEXTS,
        "env": {f"V{number}": text for number, text in enumerate(ODD_TEXTS)},
    }
    launch |= {"secrets": {"TOKEN": {"file": "~/a b"}}, "slurm": {"time": "12:00:00"}, "devices": "0,1"}
    for number in range(0, len(ODD_TEXTS), 6):  # as commands each takes a second
        text = ODD_TEXTS[number]
        save_load = {"output_dir": text, "ckpt_dir": ODD_TEXTS[-1 - number]}
        (tmp_path / "config.yaml").write_text(
            json.dumps({"Launch": launch, "Engine": {"save_load": save_load}}, ensure_ascii=False)
        )
        first = json.loads(gptctl("validate", "config", "--json", "--resolved").stdout)["resolved"]
        (tmp_path / "again.yaml").write_text(gptctl("validate", "config", "--resolved").stdout)
        assert json.loads(gptctl("validate", "again", "--json", "--resolved").stdout)["resolved"] == first
        assert first["Launch"]["args"] == ODD_TEXTS


def test_an_elastic_job_leaves_open_what_depends_on_its_nodes(gptctl, tmp_path) -> None:
    (tmp_path / "config.yaml").write_text("Launch: {nodes: '2:4', gpus_per_node: 8}\nGlobal: {local_batch_size: 4}\n")
    report = json.loads(gptctl("validate", "config", "--json", "--resolved").stdout)
    assert report["world"]["world_size"] == 32
    resolved = report["resolved"]
    assert (resolved["Distributed"]["dp_degree"], resolved["Global"]["global_batch_size"]) == (None, None)
    assert resolved["Global"]["local_batch_size"] == 4
    (tmp_path / "again.yaml").write_text(gptctl("validate", "config", "--resolved").stdout)
    assert gptctl("validate", "again", "--strict").returncode == 0


QUICK = [
    "Distributed: {dp_degree: 1048576, pp_degree: 1048575, mp_degree: 1048571, sharding: {sharding_degree: 1048573}}\nLaunch: {nodes: 3}\n",
    "Model: {num_layers: 65536, use_recompute: true, no_recompute_layers: '" + ",".join(["9"] * 50_000) + "'}\n",
    "Distributed: {dp_degree: 7}\nLaunch: {nodes: 45045, gpus_per_node: 16}\n",
    "Launch:\n  env:\n" + "".join(f"    NCCL_FOO_{number}: 1\n" for number in range(9000)),
    "".join(f"key{number}: 1\n" for number in range(9000)),
    "Global: {global_batch_size: 1073741789, micro_batch_size: 1073741788}\n",
]


@pytest.mark.parametrize("text", QUICK, ids=range(len(QUICK)))
def test_large_numbers_are_answered_soon(gptctl, tmp_path, text: str) -> None:
    (tmp_path / "config.yaml").write_text(text)
    start = time.perf_counter()
    assert gptctl("validate", "config").returncode in (0, 1)
    assert time.perf_counter() - start < 2.5
