"""Every launch style that one machine can run, as `gptctl render` prints it. The oracle is what the ranks print.

The script knows no torch, so that a case takes the seconds of torchrun itself.
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from tests.ranks import free_port

SCRIPT = """
import json, os, sys
names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "GROUP_RANK", "OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES", "TOKEN")
line = json.dumps([sys.argv[1:], {name: os.environ.get(name) for name in names}])
os.write(1, f"{line}\\n".encode())  # in one piece: other ranks write to the same pipe
"""
ARGUMENTS = ["--batch_size", "32", "10", "5", "a b", "it's", "$HOME", '"q"']


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "main.py").write_text(SCRIPT)
    return tmp_path


def run_text(folder: Path, *texts: str, path: str = "") -> list[list]:
    """Runs each text in a bash of its own, all at once; the lines that ranks printed, by rank."""
    env = {**os.environ, "PATH": f"{path}{os.pathsep if path else ''}{os.environ['PATH']}"}
    processes = [
        subprocess.Popen(
            ["bash", "-c", text], cwd=folder, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        for text in texts
    ]
    lines = []
    for process in processes:
        output, errors = process.communicate(timeout=100)
        assert process.returncode == 0, errors
        assert "Setting OMP_NUM_THREADS" not in errors
        lines += [json.loads(line) for line in output.splitlines() if line.startswith("[")]
    return sorted(lines, key=lambda line: int(line[1]["RANK"]))


@pytest.mark.parametrize("style", ["standalone", "c10d", "static"])
def test_one_node(gptctl, folder, style: str) -> None:
    rendered = gptctl("render", "--style", style, "--gpus-per-node", "2", "-o", f"Launch.rdzv.port={free_port()}", "--", "main.py", *ARGUMENTS)  # fmt: skip
    assert rendered.returncode == 0, rendered.stderr
    ranks = run_text(folder, rendered.stdout)
    assert [arguments for arguments, _ in ranks] == [ARGUMENTS] * 2
    assert [(env["RANK"], env["LOCAL_RANK"], env["WORLD_SIZE"]) for _, env in ranks] == [
        ("0", "0", "2"),
        ("1", "1", "2"),
    ]


def test_two_nodes_static_and_rank_0_is_on_node_0(gptctl, folder) -> None:
    endpoint = f"Launch.rdzv.endpoint=127.0.0.1:{free_port()}"
    asked = ["--style", "static", "--nodes", "2", "--gpus-per-node", "1", "-o", endpoint]
    commands = [gptctl("render", *asked, "--node", str(node), "--", "main.py").stdout for node in (0, 1)]
    both = gptctl("render", *asked, "--", "main.py").stdout
    assert all(command.splitlines()[-1] in both for command in commands)
    ranks = run_text(folder, *reversed(commands))  # started in the wrong order
    assert [(env["RANK"], env["GROUP_RANK"]) for _, env in ranks] == [("0", "0"), ("1", "1")]


def test_two_nodes_c10d_with_the_same_command(gptctl, folder) -> None:
    """The shell that runs the command knows the variable, as in PyTorch's tutorial."""
    endpoint = f"Launch.rdzv.endpoint=$MASTER_ADDR:{free_port()}"
    asked = ["--style", "c10d", "--nodes", "2", "--gpus-per-node", "1", "-o", endpoint]
    command = gptctl("render", *asked, "--", "main.py").stdout
    assert "GLOO_SOCKET_IFNAME" not in command
    ranks = run_text(folder, *[f"MASTER_ADDR=127.0.0.1\n{command}"] * 2)
    assert [env["WORLD_SIZE"] for _, env in ranks] == ["2", "2"]


def test_the_legacy_launcher_tells_a_script_its_local_rank_by_a_flag(gptctl, folder) -> None:
    asked = ["--style", "launch", "--gpus-per-node", "2", "-o", f"Launch.rdzv.port={free_port()}", "--log-dir", "logs"]
    rendered = gptctl("render", *asked, "--", "main.py", "--local_world_size=2")
    assert run_text(folder, rendered.stdout) == []  # every rank writes into a file of its own
    for rank in (0, 1):
        arguments, env = json.loads((folder / "logs" / f"workerlog.{rank}").read_text())
        assert arguments == [f"--local-rank={rank}", "--local_world_size=2"]
        assert env["RANK"] == str(rank)


def test_devices_set_the_number_of_ranks_and_the_visible_cards(gptctl, folder) -> None:
    asked = ["--devices", "4,6", "-o", f"Launch.rdzv.port={free_port()}", "--env", "OMP_NUM_THREADS=3"]
    ranks = run_text(folder, gptctl("render", *asked, "--", "main.py").stdout)
    assert [(env["CUDA_VISIBLE_DEVICES"], env["OMP_NUM_THREADS"]) for _, env in ranks] == [("4,6", "3")] * 2


def test_setup_container_and_secrets_in_their_order(gptctl, folder) -> None:
    """A `singularity` on the PATH notes its own words and runs the rest; `module` is a function of the setup."""
    fake = folder / "bin" / "singularity"
    fake.parent.mkdir()
    fake.write_text('#!/bin/bash\nprintf "%s\\n" "$@" > singularity.words\nshift 6\nexec "$@"\n')
    fake.chmod(0o755)
    (folder / "token").write_text("s e c r e t\n")
    profile = {
        "kind": "local",
        "python": os.sys.executable,
        "setup": ['module() { echo "$@" > module.words; }', "module load cuda/12"],
        "container": {"runtime": "singularity", "image": "gpt 1.sif", "binds": ["/a b:/b:rw"], "nv": False, "pwd": "."},
    }
    (folder / "lab.json").write_text(json.dumps(profile))
    asked = ["--cluster", "./lab.json", "--gpus-per-node", "1", "-o", "Launch.secrets={TOKEN: {file: token}}"]
    rendered = gptctl("render", *asked, "-o", f"Launch.rdzv.port={free_port()}", "--", "main.py").stdout
    assert "s e c r e t" not in rendered
    ((_, env),) = run_text(folder, rendered, path=str(fake.parent))
    assert env["TOKEN"] == "s e c r e t"
    assert (folder / "module.words").read_text() == "load cuda/12\n"
    assert (folder / "singularity.words").read_text().splitlines()[:6] == [
        "exec",
        "--pwd",
        ".",
        "-B",
        "/a b:/b:rw",
        "gpt 1.sif",
    ]


def test_the_trainer_in_place_with_its_overrides(gptctl, folder) -> None:
    """`render` for the bundled trainer: the config as it lies there, and what was typed."""
    gptctl("init")
    asked = [
        "-o",
        "Engine.max_steps=2",
        "-o",
        "Engine.test_iters=1",
        "-o",
        "Model.num_layers=1",
        "--style",
        "standalone",
    ]
    text = gptctl("render", *asked).stdout
    assert "Launch" not in text
    output = subprocess.run(["bash", "-c", text], cwd=folder, capture_output=True, text=True, timeout=100)
    assert output.returncode == 0, output.stderr
    assert "2 steps of 24 samples" in output.stdout
