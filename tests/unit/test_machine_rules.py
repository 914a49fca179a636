"""What a local job asks of this machine. Oracles: the variable that hides GPUs, and the cores of this process."""

from __future__ import annotations

import errno
import os
import pwd

import pytest

from gptctl.spec.machine_rules import (
    RANKS_PER_CORE,
    check_cache_here,
    check_cores_here,
    check_gpus_here,
    check_trackers_here,
)
from trainer.cache_folder import cache_folders
from trainer.trackers import PACKAGES

TRAINER = "Data: {Train: {dataset: {name: CharDataset, path: builtin}}}\n"


@pytest.mark.parametrize(
    ("visible", "overrides", "expected"),
    [
        ("", [], ["S016"]),
        ("-1", [], ["S016"]),
        ("0", [], []),
        ("", ["Global.device=cpu"], []),
        ("", ["Launch.entrypoint=train.py"], []),  # the script decides
    ],
)
def test_only_the_bundled_trainer_needs_a_gpu_here(check, monkeypatch, visible: str, overrides, expected) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    checked = check(TRAINER, *overrides)
    found = [*check_gpus_here(checked)]
    assert [finding.code for finding in found] == expected
    assert all(finding.level == "notice" for finding in found)
    # The answer of `validate` is the same on every machine.
    assert "S016" not in [finding.code for finding in checked.findings]


def test_other_clusters_have_other_machines(check, monkeypatch, tmp_path) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    profile = tmp_path / "far.yaml"
    profile.write_text("kind: slurm\nrun_root: /shared/runs\ngpus_per_node: 8\n")
    assert [*check_gpus_here(check(TRAINER, f"Launch.cluster={profile}"))] == []


@pytest.mark.parametrize(("device", "extra", "expected"), [("cpu", 0, []), ("cpu", 1, ["S017"]), ("gpu", 1, [])])
def test_more_than_four_ranks_per_core(check, device: str, extra: int, expected: list[str]) -> None:
    ranks = RANKS_PER_CORE * len(os.sched_getaffinity(0)) + extra
    checked = check(TRAINER, f"Global.device={device}", f"Launch.gpus_per_node={ranks}")
    found = [*check_cores_here(checked)]
    assert [finding.code for finding in found] == expected
    assert all(finding.level == "warning" for finding in found)


@pytest.mark.skipif(os.geteuid() == 0, reason="root can write everywhere")
def test_index_maps_need_a_folder_somewhere(check, monkeypatch, tmp_path) -> None:
    read_only, other = tmp_path / "data", tmp_path / "cache"
    for folder in (read_only, other):
        folder.mkdir(mode=0o555)
    assert_cache_findings(check, monkeypatch, read_only, other)


def test_index_maps_need_a_folder_somewhere_even_for_root(check, monkeypatch, tmp_path) -> None:
    """Nobody can create files below a file."""
    file = tmp_path / "x_ids.npz"
    file.write_text("")
    assert_cache_findings(check, monkeypatch, tmp_path, file, can_write_data=True)


def test_a_folder_that_cannot_be_looked_into_is_no_crash(check, monkeypatch, tmp_path) -> None:
    """A stand-in for its permissions, which root would not need: what the system call answers."""
    config = f"Global: {{device: cpu}}\nData: {{Train: {{dataset: {{input_dir: {tmp_path}}}}}}}\n"
    hidden, stat = tmp_path / "hidden", os.stat
    hidden.mkdir()
    cases = [check(config, f"Data.Train.dataset.input_dir={hidden}/data"), check(config, f"Data.cache_dir={hidden}/x")]

    def refuse(path: object, **more: object) -> os.stat_result:
        if str(path).startswith(f"{hidden}/"):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return stat(path, **more)  # type: ignore[call-overload]

    monkeypatch.setattr(os, "stat", refuse)
    assert [[*check_cache_here(checked)] for checked in cases] == [[], []]


def test_a_user_without_a_home_has_the_folder_of_the_data(monkeypatch, tmp_path) -> None:
    """As in a container with a user id that has no account: only the folder of the data is left."""
    for name in ("HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(pwd, "getpwuid", lambda number: {}[number])
    assert cache_folders(tmp_path, None) == [tmp_path]


def assert_cache_findings(check, monkeypatch, data, cache, can_write_data: bool = False) -> None:
    """Oracle: what the trainer would find if it tried."""
    config = f"Data: {{Train: {{dataset: {{input_dir: {data}}}}}}}\nGlobal: {{device: cpu}}\n"
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache))
    found = [finding.code for finding in check_cache_here(check(config))]
    assert found == ([] if can_write_data else ["S019"])
    assert [finding.code for finding in check_cache_here(check(config, f"Data.cache_dir={cache}"))] == ["S019"]
    assert [*check_cache_here(check(config, f"Data.cache_dir={data.parent / 'new'}"))] == []


def test_every_verb_says_so_and_only_submit_refuses(gptctl, tmp_path) -> None:
    (tmp_path / "config.yaml").write_text(TRAINER)
    (tmp_path / "x.py").write_text("")
    for verb in (["validate", "--strict"], ["topo"], ["render"], ["submit", "--dry-run"]):
        answer = gptctl(*verb, CUDA_VISIBLE_DEVICES="")
        assert answer.returncode == 0, answer.stderr
        assert "notice: S016 Global.device: this machine has no GPU" in answer.stderr
        assert "S016" not in answer.stdout
    refused = gptctl("submit", CUDA_VISIBLE_DEVICES="")
    assert refused.returncode == 1
    assert "error: S016 Global.device: this machine has no GPU that a job may use\n" in refused.stderr
    assert "notice" not in refused.stderr
    assert not (tmp_path / "runs").exists()
    script = gptctl("submit", "--dry-run", "--", "x.py", CUDA_VISIBLE_DEVICES="")
    assert (script.returncode, "S016" in script.stderr) == (0, False)


@pytest.mark.parametrize(
    ("profile", "overrides", "expected"),
    [
        ("", [], ["S040"]),
        ("", ["Launch.entrypoint=train.py"], []),
        ("kind: local\npython: /opt/python\n", [], []),  # its packages are unknown
        ("kind: local\nsetup: [conda activate x]\n", [], []),
        ("kind: slurm\nrun_root: /shared/runs\ngpus_per_node: 8\n", [], []),
    ],
)
def test_packages_of_trackers_are_looked_for_where_the_ranks_run(
    check, monkeypatch, tmp_path, profile: str, overrides: list[str], expected: list[str]
) -> None:
    """Of two trackers, one has no package."""
    monkeypatch.setitem(PACKAGES, "wandb", "no_such_package")
    if profile:
        (tmp_path / "here.yaml").write_text(profile)
        overrides = [*overrides, f"Launch.cluster={tmp_path}/here.yaml"]
    checked = check(TRAINER, "Engine.trackers=[tensorboard,wandb]", *overrides)
    found = [*check_trackers_here(checked)]
    assert [finding.code for finding in found] == expected
    for finding in found:
        assert finding.level == "warning"
        assert "no_such_package (for wandb); the run" in finding.message
        assert finding.hint == "pip install 'gptctl[track]'"
    assert [*check_trackers_here(check(TRAINER, "Engine.trackers=[tensorboard]"))] == []
