"""Terminals, pipes, full disks, programs that read JSON. The oracle is what arrives at the other end."""

from __future__ import annotations

import json
import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import SIX_MISTAKES


@pytest.mark.parametrize("verb", ["validate", "topo"])
@pytest.mark.parametrize(("text", "code"), [("Global: {sed: 1}\n", 1), ("", 1), (None, 2)])
def test_json_stays_json_whatever_happens(gptctl, tmp_path, verb: str, text: str | None, code: int) -> None:
    if text is not None:
        (tmp_path / "config.yaml").write_text(text)
    result = gptctl(verb, "config", "--json")
    assert result.returncode == code
    answer = json.loads(result.stdout)
    assert answer["findings"] if code == 1 else answer["error"]


def on_a_terminal(*arguments: str, cwd: Path, columns: int = 100, **environment: str) -> str:
    """What a person sees: the command runs on a pseudo-terminal of its own."""
    controller, terminal = pty.openpty()
    env = {**os.environ, "TERM": "xterm-256color", "COLUMNS": str(columns), **environment}
    command = [str(Path(sys.executable).with_name("gptctl")), *arguments]
    child = subprocess.Popen(command, stdin=terminal, stdout=terminal, stderr=terminal, cwd=cwd, env=env)
    os.close(terminal)
    shown = b""
    while True:
        try:
            chunk = os.read(controller, 65536)
        except OSError:  # the child has closed the terminal
            break
        if not chunk:
            break
        shown += chunk
    child.wait(timeout=60)
    os.close(controller)
    return shown.decode()


def test_colours_on_a_terminal_only(gptctl, tmp_path) -> None:
    (tmp_path / "config.yaml").write_text(SIX_MISTAKES)
    red = "\x1b[1;31m"
    assert red in on_a_terminal("validate", "config", cwd=tmp_path, NO_COLOR="")
    assert red not in on_a_terminal("validate", "config", cwd=tmp_path, NO_COLOR="1")
    assert "\x1b" not in gptctl("validate", "config").stdout


@pytest.mark.parametrize("columns", [40, 100])
def test_the_table_on_a_terminal(tmp_path, columns: int) -> None:
    (tmp_path / "config.yaml").write_text("Model: {name: 345M}\n")
    shown = on_a_terminal("validate", "config", cwd=tmp_path, columns=columns, NO_COLOR="1")
    assert "parameters" in shown
    assert "354,871,296" in shown


def test_escape_sequences_in_a_file_name_do_not_reach_the_terminal(gptctl, tmp_path) -> None:
    name = "x\x1b]0;owned\x07\x1b[31m.yaml"
    (tmp_path / name).write_text("Global: {sed: 1}\n")
    result = gptctl("validate", name)
    assert result.returncode == 1
    assert "\x1b" not in result.stdout + result.stderr


def shell(command: str, cwd: Path, **environment: str) -> subprocess.CompletedProcess[bytes]:
    env = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", **environment}
    env.pop("PYTHONUNBUFFERED", None)  # it would hide what a full buffer does at the end
    return subprocess.run(["bash", "-c", command], cwd=cwd, env=env, capture_output=True, timeout=60)


BROKEN_STREAMS = [  # the command, its exit code, a word that stderr has
    ("gptctl validate config >&-", 0, b"estimate"),
    ("gptctl validate config 2>&-", 0, b""),
    ("gptctl validate nothing 2>&-", 2, b""),
    ("gptctl validate config > /dev/full", 2, b"cannot write the output"),
    ("gptctl validate config 2> /dev/full", 0, b""),
    ("gptctl rules | head -1; exit ${PIPESTATUS[0]}", 0, b""),
    ("gptctl schema | head -1; exit ${PIPESTATUS[0]}", 141, b""),
    ("LC_ALL=C PYTHONUTF8=0 PYTHONCOERCECLOCALE=0 PYTHONIOENCODING=ascii gptctl validate config", 0, b"estimate"),
]


@pytest.mark.parametrize(("command", "code", "word"), BROKEN_STREAMS)
def test_streams_that_break(tmp_path, command: str, code: int, word: bytes) -> None:
    (tmp_path / "config.yaml").write_text("Global: {seed: 1}\n")
    result = shell(command, tmp_path)
    assert b"Traceback" not in result.stderr
    assert b"bug" not in result.stderr
    assert word in result.stderr
    assert result.returncode in ((code, 0, 141) if "head" in command else (code,))


def test_ctrl_c_ends_with_130_and_no_traceback(tmp_path) -> None:
    """A real signal while the command waits for its config on a pipe."""
    result = shell(
        "sleep 5 | timeout --preserve-status -s INT 1 gptctl validate /dev/stdin; exit ${PIPESTATUS[1]}", tmp_path
    )
    assert result.returncode == 130
    assert b"Traceback" not in result.stderr


def test_a_file_name_that_is_no_text(tmp_path) -> None:
    command = "printf 'Global: {sed: 1}' > $'\\xff\\xfe.yaml'; gptctl validate $'\\xff\\xfe.yaml' --json"
    result = shell(command, tmp_path)
    assert result.returncode == 1
    assert json.loads(result.stdout)["findings"][0]["code"] == "C010"


def test_wrong_usage_with_json(gptctl) -> None:
    result = gptctl("validate", "--nods", "2", "--json")
    assert (result.returncode, "--nods" in json.loads(result.stdout)["error"]) == (2, True)


def test_topo_fits_80_columns(tmp_path) -> None:
    (tmp_path / "config.yaml").write_text("Model: {name: 345M}\nGlobal: {local_batch_size: 2}\n")
    degrees = ["-o", "mp_degree=2", "-o", "pp_degree=2", "-o", "sharding_degree=2"]
    shown = on_a_terminal(
        "topo", "config", "--nodes", "2", "--gpus-per-node", "8", *degrees, cwd=tmp_path, columns=80, NO_COLOR="1"
    )
    (row,) = [line for line in shown.splitlines() if line.split()[:2] == ["1", "11"]]
    assert row.split() == ["1", "11", "3", "1", "0", "1", "1", "10,11", "9,11", "11,15", "3,11"]
    assert "…" not in shown
