"""The watcher of a rank. The oracle is what the operating system says of real processes and files."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from gptctl.engine.processes import identity, is_alive
from tests.conftest import ROOT

RANK_LOG = str(ROOT / "trainer" / "rank_log.py")


def start(folder: Path, program: str, *arguments: str, **env: str) -> subprocess.Popen[bytes]:
    (folder / "program.py").write_text(program)
    who = {
        "GPTCTL_LOG_DIR": str(folder),
        "GPTCTL_ATTEMPT_DIR": str(folder),
        "GPTCTL_NODE": "1",
        "RANK": "3",
        "LOCAL_RANK": "1",
    }
    return subprocess.Popen(
        [sys.executable, RANK_LOG, str(folder / "program.py"), *arguments],
        env={**os.environ, **who, **env}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, cwd=folder,
    )  # fmt: skip


def events(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "ranks.1.jsonl").read_text().splitlines()]


def log(folder: Path) -> str:
    file = folder / "workerlog.3"
    return file.read_text() if file.exists() else ""


def wait_for(folder: Path, text: str) -> None:
    deadline = time.monotonic() + 20
    while text not in log(folder):
        assert time.monotonic() < deadline, log(folder)
        time.sleep(0.02)


def test_everything_a_rank_and_its_children_print_is_in_its_file(tmp_path) -> None:
    program = "import os, sys\nprint('python')\nprint('error', file=sys.stderr)\nos.system('echo child')\nos.write(1, b'descriptor')\nos.write(2, b' two\\n')\nprint(sys.argv[1:], sys.path[0], __name__, __file__)"
    process = start(tmp_path, program, "a b", "--x=1", "-m", "")
    assert (process.communicate()[0], process.returncode) == (b"", 0)
    where = tmp_path / "program.py"
    assert (
        log(tmp_path)
        == f"python\nerror\nchild\ndescriptor two\n['a b', '--x=1', '-m', ''] {tmp_path} __main__ {where}\n"
    )
    first, last = events(tmp_path)
    assert (first["event"], last["event"], last["exit"], last["signal"]) == ("start", "end", 0, None)
    assert (first["rank"], first["local_rank"], first["node"], first["pid"]) == (3, 1, 1, last["pid"])
    assert (tmp_path / "workerlog.3").stat().st_mode & 0o777 == 0o600


def test_a_second_start_appends(tmp_path) -> None:
    for word in ("one", "two"):
        assert start(tmp_path, f"print('{word}')").wait() == 0
    assert log(tmp_path) == "one\ntwo\n"


@pytest.mark.parametrize("code", [0, 1, 3, 93, 255])
def test_the_exit_code_is_the_programs(tmp_path, code: int) -> None:
    assert start(tmp_path, f"raise SystemExit({code})").wait() == code
    assert events(tmp_path)[-1]["exit"] == code


@pytest.mark.parametrize("name", ["SIGKILL", "SIGTERM", "SIGSEGV", "SIGABRT"])
def test_a_killed_program_is_noted_and_its_last_words_are_kept(tmp_path, name: str) -> None:
    """The watcher dies of the same signal, so that torchrun sees what happened."""
    number = getattr(signal, name)
    program = f"import os, signal\nos.write(1, b'last words')\nsignal.signal({int(number)}, signal.SIG_DFL) if {int(number)} != 9 else 0\nos.kill(os.getpid(), {int(number)})"
    process = start(tmp_path, program, PYTHONFAULTHANDLER="")
    assert process.wait() == -number
    assert events(tmp_path)[-1]["signal"] == number
    assert log(tmp_path).startswith("last words")
    assert log(tmp_path) == f"last words\nrank 3 (pid {events(tmp_path)[0]['pid']}) was killed by {name}\n"


@pytest.mark.parametrize("name", ["SIGTERM", "SIGUSR1", "SIGINT"])
@pytest.mark.parametrize("to_group", [False, True])
def test_a_signal_arrives_once(tmp_path, name: str, to_group: bool) -> None:
    program = f"import signal, time\nsignal.signal(signal.{name}, lambda *_: print('got it', flush=True))\nprint('ready', flush=True)\ntime.sleep(1)\ntime.sleep(0.5)"
    (tmp_path / "program.py").write_text(program)
    process = subprocess.Popen(
        [sys.executable, RANK_LOG, str(tmp_path / "program.py")],
        env={**os.environ, "GPTCTL_LOG_DIR": str(tmp_path), "RANK": "3"}, start_new_session=True,
    )  # fmt: skip
    wait_for(tmp_path, "ready")
    (os.killpg if to_group else os.kill)(process.pid, getattr(signal, name))
    assert process.wait() == 0
    assert log(tmp_path).count("got it") == 1


def test_neither_watcher_nor_program_outlives_torchrun(tmp_path) -> None:
    """A parent in torchrun's place is killed with SIGKILL."""
    (tmp_path / "program.py").write_text("import time\nprint('ready', flush=True)\ntime.sleep(60)")
    command = [sys.executable, RANK_LOG, str(tmp_path / "program.py")]
    parent = subprocess.Popen(
        [sys.executable, "-c", f"import subprocess, time\nsubprocess.Popen({command!r})\ntime.sleep(60)"],
        env={**os.environ, "GPTCTL_LOG_DIR": str(tmp_path), "GPTCTL_ATTEMPT_DIR": str(tmp_path), "GPTCTL_NODE": "1", "RANK": "3"},
    )  # fmt: skip
    wait_for(tmp_path, "ready")
    program = identity(events(tmp_path)[0]["pid"])
    assert is_alive(program)
    parent.kill()
    parent.wait()
    deadline = time.monotonic() + 10
    while is_alive(program):
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_data_loaders_of_a_failed_program_are_ended(tmp_path) -> None:
    program = "import os, subprocess, sys\nchild = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'])\nprint(child.pid, flush=True)\nos.kill(os.getpid(), 9)"
    assert start(tmp_path, program).wait() == -9
    child = identity(int(log(tmp_path).split()[0]))
    deadline = time.monotonic() + 10
    while is_alive(child):
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_without_a_log_folder_the_output_stays_where_it_is(tmp_path) -> None:
    process = start(
        tmp_path,
        "print('here')",
        GPTCTL_LOG_DIR=str(tmp_path / "missing"),
        GPTCTL_ATTEMPT_DIR=str(tmp_path / "missing"),
    )
    output, _ = process.communicate()
    assert process.returncode == 0
    assert b"here\n" in output
    assert b"rank 3: cannot open log file " in output


def test_modules_beside_it_are_not_taken_for_its_own(tmp_path) -> None:
    """A copy of the file in a folder with hostile names, as user scripts have them."""
    (tmp_path / "rank_log.py").write_text(Path(RANK_LOG).read_text())
    for name in ("json", "signal", "ctypes", "time"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('the wrong module')")
    (tmp_path / "program.py").write_text("print('fine')")
    command = [sys.executable, str(tmp_path / "rank_log.py"), "-m", "program"]
    result = subprocess.run(
        command, cwd=tmp_path, env={**os.environ, "GPTCTL_ATTEMPT_DIR": str(tmp_path)}, capture_output=True, text=True
    )
    assert "wrong module" not in result.stderr.splitlines()[:1]
    assert json.loads((tmp_path / "ranks.0.jsonl").read_text().splitlines()[0])["event"] == "start"


def test_a_signal_at_the_moment_of_the_exit_costs_no_record(tmp_path) -> None:
    """SIGTERM every 0.3 ms while the program exits: its exit code is recorded in every run."""
    program = "import signal, time\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\nprint('up')\ntime.sleep(0.02)\nraise SystemExit(93)"
    for number in range(12):
        folder = tmp_path / str(number)
        folder.mkdir()
        process = start(folder, program)
        wait_for(folder, "up")
        while process.poll() is None:
            process.send_signal(signal.SIGTERM)
            time.sleep(0.0003)
        assert "Traceback" not in log(folder)
        assert events(folder)[-1]["exit"] == 93
        assert (folder / "unrecoverable").exists()
