"""Odd files and folders in the places of ordinary ones. Oracle: what a person would expect, by hand."""

from __future__ import annotations

import json
import os
import tempfile
import time
from pathlib import Path

import pytest

from gptctl.backends import Backends
from gptctl.cli.clusters import list_clusters
from gptctl.engine.run_folder import RunFolder
from gptctl.jobs.code_files import DEEPEST, CodeFiles
from gptctl.jobs.remove import remove_tree
from gptctl.jobs.state import state_of
from gptctl.jobs.sweeps import SweepStore, new_sweep
from tests.unit.test_jobs import record
from trainer.config.tree import read_once
from trainer.errors import UserError

NOBODY = 65534
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("GPTCTL_HOME", str(tmp_path / "records"))
    monkeypatch.chdir(tmp_path)
    return tmp_path / "records"


def nested(folder: Path, levels: int) -> None:
    place = os.open(folder, os.O_RDONLY)
    for _ in range(levels):
        os.mkdir("d", dir_fd=place)
        inner = os.open("d", os.O_RDONLY, dir_fd=place)
        os.close(place)
        place = inner
    os.close(place)


@pytest.mark.parametrize("device", ["/dev/ptmx", "/dev/zero", "/dev/null"])
def test_a_device_in_the_place_of_a_config(tmp_path: Path, device: str) -> None:
    """Reading a terminal waits for somebody who types; a cloned repository can contain such a link."""
    (tmp_path / "config.yaml").symlink_to(device)
    with pytest.raises(UserError, match="is not a regular file"):
        read_once(tmp_path / "config.yaml")


@pytest.mark.parametrize("kind", ["fifo", "folder", "nowhere"])
def test_one_odd_profile_does_not_hide_the_others(
    tmp_path: Path, kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "clusters").mkdir()
    odd = tmp_path / "clusters/odd.yaml"
    {"fifo": lambda: os.mkfifo(odd), "folder": odd.mkdir, "nowhere": lambda: odd.symlink_to("x")}[kind]()
    list_clusters.main(["--json"], standalone_mode=False)
    kinds = {row["cluster"]: row["kind"] for row in json.loads(capsys.readouterr().out)}
    assert (kinds["odd"], kinds["local"]) == ("invalid", "local")


@pytest.mark.parametrize("kind", ["fifo", "link"])
def test_the_lock_of_a_sweep_is_not_another_file(tmp_path: Path, kind: str, home: Path) -> None:
    (tmp_path / "mine").write_text("precious")
    lock = home / "sweeps/s-1.lock"
    lock.parent.mkdir(parents=True)
    os.mkfifo(lock) if kind == "fifo" else lock.symlink_to(tmp_path / "mine")
    sweep = new_sweep(id="s-1", file="", folder="", config="", runs=(), arguments={})
    with pytest.raises(UserError, match="cannot lock"), SweepStore().locked(sweep):
        pass
    assert (tmp_path / "mine").read_text() == "precious"


def test_folders_deeper_than_python_can_follow(tmp_path: Path) -> None:
    """They are refused as code, and a run folder with them can be removed."""
    (tmp_path / "deep").mkdir()
    nested(tmp_path / "deep", 1500)
    (problem,) = CodeFiles().problems(str(tmp_path / "deep"))
    assert f"is nested more than {DEEPEST} folders deep" in problem.message
    remove_tree(tmp_path / "deep")
    assert not (tmp_path / "deep").exists()


def test_a_record_with_many_nodes_takes_no_longer(tmp_path: Path) -> None:
    """What nodes recorded is found by what is there, not by counting to their number."""
    folder = RunFolder(tmp_path)
    folder.attempt(0).mkdir()
    for node, code in ((0, 0), (3, 7), (5, 1)):
        (folder.attempt(0) / f"node.{node}.exit").write_text(f"{code}\n")
    (folder.attempt(0) / "node.x.exit").write_text("1\n")
    began = time.process_time()
    assert folder.exit_codes(0, range(10**7)) == {0: 0, 3: 7, 5: 1}
    assert folder.exit_codes(0, [3]) == {3: 7}
    assert time.process_time() - began < 0.5


def test_a_record_of_another_kind_is_not_a_bug(tmp_path: Path) -> None:
    """A job of this machine whose record says ssh: its frozen profile lists no hosts."""
    (tmp_path / "run").mkdir()
    (tmp_path / "run/cluster.json").write_text('{"kind": "local"}')
    (tmp_path / "run/plan.json").write_text("{}")
    job = record(local_dir=str(tmp_path / "run"))._replace(kind="ssh", handle={"pid": 1})
    state = state_of(job, Backends(lambda text: None))
    assert state.state == "UNKNOWN"
    assert "does not list the hosts of the job" in state.reason


@as_root
@pytest.mark.parametrize("mode", [0o000, 0o100])
def test_a_folder_without_permission_hides_no_other_job(mode: int) -> None:
    """As another user: root may read everything. A child process, since nobody may read our interpreter."""
    with tempfile.TemporaryDirectory() as place:
        os.chmod(place, 0o755)
        (Path(place) / "run").mkdir()
        os.chown(f"{place}/run", NOBODY, NOBODY)
        (Path(place) / "run").chmod(mode)
        job = record(local_dir=f"{place}/run")._replace(handle={"pid": 1, "started": 1, "boot": "x"})
        reading, writing = os.pipe()
        if (child := os.fork()) == 0:
            try:
                os.setuid(NOBODY)
                os.environ["GPTCTL_HOME"] = f"{place}/records"
                os.write(writing, state_of(job, Backends(print)).state.encode())
            finally:
                os._exit(0)
        os.close(writing)
        os.waitpid(child, 0)
        assert os.read(reading, 100).decode() in ("UNKNOWN", "LOST")
        os.close(reading)
