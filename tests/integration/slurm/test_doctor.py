"""`gptctl doctor` on a real Slurm. Oracles: what was done to the lab before, and Slurm's own queue after."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.lab import Lab

GPTCTL = str(Path(sys.executable).with_name("gptctl"))
NO_PYTHON = {"python": "/nowhere/python"}  # so that the check of the nodes takes a second, not ten


class Doctor:
    """gptctl on the login node, in a folder that all nodes see."""

    def __init__(self, lab: Lab, folder: Path) -> None:
        self.lab, self.folder, self.runs = lab, folder, lab.shared / f"runs of {folder.name}"
        folder.mkdir()

    def command(self, *arguments: str, **keys: Any) -> list[str]:
        self.lab.profile(self.folder, **{"gpu_request": "none", "run_root": str(self.runs), **keys})
        return [GPTCTL, "doctor", "--cluster", "lab", *arguments]

    def __call__(self, *arguments: str, user: str = "root", **keys: Any) -> subprocess.CompletedProcess[str]:
        command = self.command(*arguments, **keys)
        answer = self.lab.run("head", *command, cwd=self.folder, user=user, timeout=150)
        assert "Traceback" not in answer.stderr
        return answer

    def rows(self, code: int, *arguments: str, **keys: Any) -> dict[tuple[str, str], dict[str, str]]:
        """By check and node; every row that is not ok suggests a fix."""
        answer = self("--json", *arguments, **keys)
        assert answer.returncode == code, answer.stdout + answer.stderr
        rows = json.loads(answer.stdout)
        assert all(row["fix"] for row in rows if row["state"] != "ok")
        self.assert_nothing_left()
        return {(row["check"], row["node"]): row for row in rows}

    def assert_nothing_left(self) -> None:
        names = self.lab.slurm.ask("squeue", "-h", "-o", "%j").split()
        assert not [name for name in names if "doctor" in name]
        assert not self.runs.exists() or not list(self.runs.iterdir())


@pytest.fixture
def doctor(lab: Lab, tmp_path: Path) -> Doctor:
    return Doctor(lab, lab.shared / f"doctor-{tmp_path.name}")


def not_ok(rows: dict[tuple[str, str], dict[str, str]]) -> dict[tuple[str, str], str]:
    return {key: row["state"] for key, row in rows.items() if row["state"] != "ok"}


def test_all_is_well_on_two_nodes(doctor: Doctor) -> None:
    answer = doctor()
    assert answer.returncode == 0, answer.stdout + answer.stderr
    lines = answer.stdout.splitlines()
    assert lines[0] == "lab: no problems, 2 notices"
    found = {(line.split()[0], *line.split()[1:2]): line for line in lines}
    assert "node1, node2" in found["torch", "node1,"]
    assert re.search(r"ok +eth0, 10\.77\.0\.12$", found["network", "node2"])
    assert re.search(r"ok +\d+\.\d\d GB/s over 2 ranks with gloo .* latency \d", answer.stdout)
    assert re.search(r"same clock +ok +within \d+(\.\d+)? m?s", answer.stdout), "namespaces share the clock"
    assert re.search(r"accounting +notice +Slurm accounting storage is disabled", answer.stdout)
    assert "cannot show the state of jobs that ended long ago" in answer.stdout
    assert re.search(r"firewall +notice +no lines: the addresses of \d+ other nodes? of the partition", answer.stdout)
    assert "requesting 2 nodes from Slurm …" in answer.stderr
    assert "measuring an all-reduce …" in answer.stderr
    doctor.assert_nothing_left()


def test_the_python_of_the_engine(doctor: Doctor) -> None:
    """Of the batch host only. The ranks' own Python does not matter to it."""
    rows = doctor.rows(1, **NO_PYTHON)
    assert rows["engine python", "node1"]["state"] == "ok"
    assert rows["engine python", "node1"]["found"] == f"{sys.version.split()[0]}, {sys.executable}"
    assert ("engine python", "node2") not in rows
    rows = doctor.rows(1, engine_python="/nowhere/python3")
    row = rows["engine python", "node1"]
    assert (row["state"], row["fix"]) == ("wrong", "set engine_python in the profile")
    assert "engine_python of profile lab (/nowhere/python3)" in row["found"]
    assert f"the interpreter that ran gptctl submit ({sys.executable})" in row["found"]
    assert "python3 after the setup" in row["found"]
    assert [key for key, state in not_ok(rows).items() if state == "wrong"] == [("engine python", "node1")]


def test_wrong_gpus_and_no_python(doctor: Doctor) -> None:
    """Slurm would refuse four GPUs: the nodes are checked with the two that they have."""
    rows = doctor.rows(1, gpus_per_node=4, gpu_request="gpus-per-node", **NO_PYTHON)
    assert rows["GPUs in Slurm", ""]["found"] == "2 per node, the profile has gpus_per_node: 4"
    assert rows["GPUs in Slurm", ""]["fix"] == "set gpus_per_node: 2 in the profile"
    for node in ("node1", "node2"):
        assert rows["python", node]["found"] == "/nowhere/python does not exist or is not executable"
    assert [key for key, state in not_ok(rows).items() if state == "wrong"] == [
        ("GPUs in Slurm", ""),
        ("python", "node1"),
        ("python", "node2"),
    ]


def test_a_setup_line_that_fails_in_a_folder_with_a_hostile_name(doctor: Doctor) -> None:
    root = doctor.lab.shared / f"it's $(touch {doctor.folder}/executed) % ; here"
    rows = doctor.rows(1, setup=["true", "echo no such module >&2; false"], run_root=str(root))
    assert rows["setup", "node2"]["found"] == "setup failed: echo no such module >&2; false; no such module"
    assert rows["run_root", ""]["state"] == "ok"
    assert not root.exists()
    assert not (doctor.folder / "executed").exists()


def test_a_folder_that_may_not_be_written_to(doctor: Doctor) -> None:
    closed = doctor.folder / "closed"
    closed.mkdir(mode=0o755)
    answer = doctor("--json", user="gpt", run_root=str(closed / "runs"))
    rows = {row["check"]: row for row in json.loads(answer.stdout)}
    assert answer.returncode == 1
    assert rows["run_root"]["state"] == "wrong"
    assert "Permission denied" in rows["run_root"]["found"]
    assert rows["partition"]["state"] == "ok"


@pytest.mark.long
def test_a_folder_that_nodes_do_not_see(doctor: Doctor) -> None:
    """/dev/shm is each machine's own; another one is covered on one node only."""
    rows = doctor.rows(1, run_root="/dev/shm/runs")
    assert rows["run_root", "node[1-2]"]["found"] == "/dev/shm/runs does not exist"
    doctor.runs.mkdir()
    doctor.lab.run("node2", "mount", "-t", "tmpfs", "none", str(doctor.runs), check=True)
    try:
        rows = doctor.rows(1, **NO_PYTHON)
    finally:
        doctor.lab.run("node2", "umount", str(doctor.runs), check=True)
    assert rows["run_root", "node2"]["found"] == f"{doctor.runs} does not exist"
    assert rows["python", "node1"]["state"] == "wrong"


def test_what_slurm_does_not_have(doctor: Doctor) -> None:
    rows = doctor.rows(1, partition="mian")
    assert rows["partition", ""]["fix"] == "did you mean main? known: main, high, small"
    assert rows["nodes", ""]["found"] == "not checked"
    assert doctor.rows(1, "--nodes", "9")["nodes", ""]["found"] == "9 requested, but a job can have at most 4"
    small = doctor.rows(1, partition="small", **NO_PYTHON)  # a job there has one node at most
    assert [node for check, node in small if check == "python"] == ["node1"]
    doctor.lab.break_client("srun")
    doctor.lab.break_client("sacct")
    rows = doctor.rows(1)
    assert rows["commands", ""]["found"] == "not found: srun"
    assert rows["accounting", ""]["state"] == "notice"


def test_an_error_of_sbatch_is_shown_as_it_is(doctor: Doctor) -> None:
    rows = doctor.rows(1, sbatch={"constraint": "nothing-has-this"})
    assert "Invalid feature specification" in rows["Slurm", ""]["found"]


def test_a_profile_that_is_wrong(doctor: Doctor) -> None:
    rows = doctor.rows(1, run_root="runs")
    assert "runs is a relative path" in rows["profile", ""]["found"]
    rows = doctor.rows(1, sbatch={"output": "mine"})
    assert "gptctl sets --output itself" in rows["profile", ""]["found"]


@pytest.mark.long
def test_slurm_is_out_of_reach(doctor: Doctor) -> None:
    doctor.lab.kill_controller()
    begin = time.monotonic()
    answer = doctor()
    assert answer.returncode == 3, answer.stdout + answer.stderr
    assert time.monotonic() - begin < 5
    assert re.search(r"controller +wrong +Slurmctld\(primary\) at head is DOWN", answer.stdout)


@pytest.mark.long
def test_the_wait_for_busy_nodes_has_a_limit(doctor: Doctor) -> None:
    doctor.lab.run("head", "sbatch", "-N4", "--exclusive", "--wrap", "sleep 60", check=True)
    rows = doctor.rows(1, "--timeout", "1")
    assert re.fullmatch(r"job \d+ waited more than 1 s: \w+", rows["job", ""]["found"])
    assert "--timeout 600" in rows["job", ""]["fix"]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_leaves_nothing(doctor: Doctor, number: int) -> None:
    """Once while the job waits, once while it runs."""
    is_waiting = number == signal.SIGINT
    if is_waiting:
        doctor.lab.run("head", "sbatch", "-N4", "--exclusive", "--wrap", "sleep 60", check=True)
    command = doctor.command(setup=["sleep 60"])
    with doctor.lab.start("head", *command, cwd=doctor.folder, stderr=subprocess.PIPE) as process:
        assert process.stderr
        sign = " is waiting" if is_waiting else "checking node1, node2"
        assert any(sign in line for line in process.stderr)
        doctor.lab.signal(process, number)
        assert "cancelling job" in process.stderr.read()
    assert process.returncode == 130
    doctor.assert_nothing_left()


def test_a_lost_answer_of_sbatch_leaves_nothing(doctor: Doctor) -> None:
    """The job is there though its client says that it got no answer: it is found by its name."""
    lost = '"$LAB_REAL" "$@" >/dev/null; echo "sbatch: error: Socket timed out" >&2; exit 1'
    doctor.lab.break_client("sbatch", f'[ "$1" != --version ] || exec "$LAB_REAL" "$@"; {lost}')
    rows = doctor.rows(1, **NO_PYTHON)
    assert rows["python", "node2"]["state"] == "wrong"


def test_with_accounting(lab_with_accounting: Lab, tmp_path: Path) -> None:
    doctor = Doctor(lab_with_accounting, lab_with_accounting.shared / f"doctor-{tmp_path.name}")
    rows = doctor.rows(1, account="nobodys", **NO_PYTHON)
    assert rows["accounting", ""]["found"] == "sacct works"
    assert rows["account", ""]["found"] == "root has no account nobodys"
    assert rows["account", ""]["fix"] == "set account in the profile: root", "which slurmdbd gives root by itself"
    lab_with_accounting.stop_accounting()
    assert doctor.rows(1, partition="mian")["accounting", ""]["state"] == "warning"
