"""`gptctl doctor` of this machine, as a person types it."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

from gptctl.engine.processes import processes_of


def rows_by_check(answer) -> dict[str, dict[str, str]]:
    return {row["check"]: row for row in json.loads(answer.stdout) if row["node"] or row["check"] != "run_root"}


def test_this_machine(gptctl, tmp_path: Path) -> None:
    """torch, two ranks over loopback, and nothing is left."""
    answer = gptctl("doctor")
    assert answer.returncode == 0, answer.stdout + answer.stderr
    assert answer.stdout.startswith("local: no problems")
    assert re.search(r"all-reduce +ok +\d+\.\d\d GB/s over 2 ranks", answer.stdout)
    assert re.search(
        rf"engine python +\S+ +ok +\d+\.\d+\.\S+, {re.escape(sys.executable)}$", answer.stdout, re.MULTILINE
    )
    assert "measuring an all-reduce …" in answer.stderr
    assert not (tmp_path / "runs").exists()


def test_no_python_no_torch_no_folder(gptctl, tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text("kind: local\npython: /nowhere/python\n")
    answer = gptctl("doctor", "--cluster", "./c.yaml", "--json")
    assert answer.returncode == 1
    assert rows_by_check(answer)["python"]["found"] == "/nowhere/python does not exist or is not executable"
    ifnames = "NCCL_SOCKET_IFNAME: nosuch9, GLOO_SOCKET_IFNAME: lo"
    (tmp_path / "c.yaml").write_text(f"kind: local\nenv: {{PYTHONPATH: {tmp_path / 'broken'}, {ifnames}}}\n")
    (tmp_path / "broken" / "torch").mkdir(parents=True)
    (tmp_path / "broken" / "torch" / "__init__.py").write_text("raise OSError('libcudart.so: cannot open')\n")
    answer = gptctl("doctor", "--cluster", "./c.yaml", "--json")
    assert answer.returncode == 1
    assert rows_by_check(answer)["torch"]["found"] == "OSError: libcudart.so: cannot open"
    assert rows_by_check(answer)["NCCL network"]["found"] == "no interface matches NCCL_SOCKET_IFNAME=nosuch9"
    assert rows_by_check(answer)["all-reduce"]["state"] == "notice"
    (tmp_path / "c.yaml").write_text("kind: local\nrun_root: c.yaml/runs\n")
    answer = gptctl("doctor", "--cluster", "./c.yaml", "--json")
    assert answer.returncode == 1
    assert "Not a directory" in json.loads(answer.stdout)[-1]["found"]
    assert not processes_of(str(tmp_path))


def test_what_cannot_be_checked(gptctl, tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text("kind: ssh\nhosts: [no-such-host.invalid]\nrun_root: /srv\n")
    answer = gptctl("doctor", "--cluster", "./c.yaml")
    assert answer.returncode == 3
    assert "cannot resolve host name no-such-host.invalid" in answer.stdout
    assert gptctl("doctor", "--nodes", "2").returncode == 2
    assert gptctl("doctor", "--cluster", "nobodys").returncode == 2
    answer = gptctl("doctor", "--cluster", "slurm-example", PATH="/nowhere")
    assert answer.returncode == 3
    assert "not found: sbatch, srun, squeue, scontrol, scancel, sinfo" in answer.stdout
