"""The scripts for Slurm, run by bash with stand-ins for `scontrol` and `srun`: a mock of the allocation only.

What they start is real: torchrun, twice, as on two nodes. On a real cluster they are run by the tests of that backend.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.ranks import free_port

# srun runs its command on the node that is named, or once for every node, and fails when one of them fails.
SRUN = """#!/bin/bash
nodes=(0 1)
while [[ $1 == --* ]]; do
  [[ $1 == --nodelist=node-a ]] && nodes=(0)
  [[ $1 == --nodelist=node-b ]] && nodes=(1)
  shift
done
for node in "${nodes[@]}"; do SLURM_NODEID=$node "$@" & pids+=($!); done
trap 'kill "${pids[@]}"' TERM
for _ in "${pids[@]}"; do wait -n || { code=$?; kill "${pids[@]}" 2> /dev/null; }; done
exit "${code:-0}"
"""
SCRIPT = "import os, sys\nos.write(1, f\"rank {os.environ['RANK']} of {os.environ['WORLD_SIZE']} {sys.argv[1:]}\\n\".encode())\n"


@pytest.fixture
def slurm(tmp_path: Path, gptctl):
    """Renders a style for two nodes and runs it."""
    (tmp_path / "main.py").write_text(SCRIPT)
    (tmp_path / "bin").mkdir()
    # An address that is this machine's and yet no loopback one, whatever its network.
    programs = {
        "srun": SRUN,
        "scontrol": "#!/bin/sh\necho node-a\necho node-b\n",
        "getent": "#!/bin/sh\necho 0.0.0.0 node-a\n",
    }
    for name, text in programs.items():
        (tmp_path / "bin" / name).write_text(text)
        (tmp_path / "bin" / name).chmod(0o755)
    (tmp_path / "lab.yaml").write_text(f"kind: slurm\ngpus_per_node: 1\nrun_root: /runs\npython: {sys.executable}\n")

    def run(style: str) -> subprocess.CompletedProcess[str]:
        asked = ["--cluster", "./lab.yaml", "--nodes", "2", "--style", style, "-o", f"Launch.rdzv.port={free_port()}"]
        rendered = gptctl("render", *asked, "--", "main.py", "a b", "$HOME")
        assert rendered.returncode == 0, rendered.stderr
        (tmp_path / "job.sh").write_text(rendered.stdout)
        (tmp_path / "job.sh").chmod(0o755)
        inside = {"SLURM_JOB_ID": "949", "SLURM_JOB_NODELIST": "node-[a-b]", "SLURM_NODEID": "0"}
        env = {**os.environ, **inside, "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}"}
        command = ["srun", "--nodes=2", "./job.sh"] if style == "srun-script" else ["bash", "job.sh"]
        return subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=100)

    return run


@pytest.mark.parametrize("style", ["sbatch", "loop", "srun-script"])
def test_one_torchrun_on_every_node(slurm, style: str) -> None:
    ended = slurm(style)
    assert ended.returncode == 0, ended.stderr
    lines = ended.stdout.splitlines()
    if style != "srun-script":  # node id, hosts, head, number of nodes
        assert lines[:4] == ["0", "node-a node-b", "node-a", "2"]
    assert sorted(line for line in lines if line.startswith("rank")) == [
        f"rank {rank} of 2 ['a b', '$HOME']" for rank in (0, 1)
    ]


@pytest.mark.parametrize("style", ["sbatch", "loop"])
def test_a_failing_node_fails_the_job(slurm, tmp_path, style: str) -> None:
    (tmp_path / "main.py").write_text(
        "import os, time\nif os.environ['RANK'] == '1': raise SystemExit(5)\ntime.sleep(8)\n"
    )
    assert slurm(style).returncode != 0


@pytest.mark.parametrize(
    ("program", "text"), [("scontrol", "exit 1"), ("getent", "exit 2"), ("getent", "echo 127.0.1.1 node-a")]
)
@pytest.mark.parametrize("style", ["sbatch", "srun-script"])
def test_without_an_address_the_job_stops_and_never_meets_at_localhost(
    slurm, tmp_path, program: str, text: str, style: str
) -> None:
    (tmp_path / "bin" / program).write_text(f"#!/bin/sh\n{text}\n")
    ended = slurm(style)
    assert ended.returncode != 0
    assert "error: " in ended.stderr
    assert "rank" not in ended.stdout


def test_a_failing_setup_line_stops_the_script(slurm, tmp_path) -> None:
    with open(tmp_path / "lab.yaml", "a") as file:
        file.write("setup: ['no_such_module load x']\n")
    ended = slurm("sbatch")
    assert ended.returncode != 0
    assert "error: setup failed: no_such_module load x" in ended.stderr
