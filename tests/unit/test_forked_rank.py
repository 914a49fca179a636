"""Ranks that torchrun forks. The oracle is the same program in ranks that torchrun executes."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.conftest import ROOT

# Rank 0 says what it is and fails; rank 1 is killed. So all that differs is said or recorded.
PROGRAM = """
import atexit, faulthandler, json, os, signal, sys, threading, time
if __name__ == "__main__":
    if os.environ["RANK"] == "1":
        time.sleep(0.5)
        os.kill(os.getpid(), signal.SIGKILL)
    atexit.register(print, "at exit")
    threading.Timer(0.1, print, ["thread"]).start()
    files = [os.readlink(f"/proc/self/fd/{number}") for number in range(64) if os.path.exists(f"/proc/self/fd/{number}")]
    print(json.dumps({
        "argv": sys.argv, "folder": os.getcwd(), "path": sys.path[0], "file": __file__, "files": files,
        "environment": {**os.environ}, "faulthandler": faulthandler.is_enabled(),
        "signals": {number: str(signal.getsignal(number)) for number in signal.valid_signals()},
        "blocked": sorted(signal.pthread_sigmask(signal.SIG_BLOCK, [])),
        "leads": os.getpgid(0) == os.getpid(), "session": os.getsid(0) == os.getppid(),
        "was forked": "torch" in sys.modules,
        "imported": [name for name in ("sharding", "pipeline") if f"trainer.parallel.{name}" in sys.modules],
    }))
    sys.exit(93)
"""
# What differs from run to run, and what the trainer itself sets before it imports torch.
VOLATILE = {"TORCHELASTIC_ERROR_FILE", "OMP_WAIT_POLICY", "GOMP_SPINCOUNT"}


def run(folder: Path, **variables: str) -> tuple[dict[str, Any], str, list[tuple]]:
    """What rank 0 says, the rest of its log, and how both ranks ended."""
    (folder / "python").mkdir(parents=True)
    shutil.copyfile(ROOT / "trainer/startup.py", folder / "python/sitecustomize.py")
    shutil.copyfile(ROOT / "trainer/rank_log.py", folder / "rank_log.py")
    shutil.copytree(ROOT / "trainer", folder / "trainer")
    (folder / "trainer/__main__.py").write_text(PROGRAM)
    (folder / "config.json").write_text('{"layout": {"dp": 1, "pp": 1, "sharding": 2, "mp": 1}}')
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("GPTCTL", "OMP"))}
    environment |= {
        name: str(folder) for name in ("GPTCTL_RUN_DIR", "GPTCTL_LOG_DIR", "GPTCTL_WORK_DIR", "GPTCTL_ATTEMPT_DIR")
    }
    environment |= {
        "PYTHONPATH": f"{folder}/python:{folder}",
        "OMP_NUM_THREADS": "1",
        "PYTHONFAULTHANDLER": "1",
        **variables,
    }
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", f"--master-port={port}"]
    words = [*torchrun, "--monitor-interval=2", str(folder / "rank_log.py"), "-m", "trainer", "a b", "--x=1"]
    done = subprocess.run(words, env=environment, cwd=folder, capture_output=True, text=True)
    log = folder / "workerlog.0"
    assert log.exists(), done.stderr
    first, rest = log.read_text().split("\n", 1)
    said = json.loads(first.replace(str(folder), "FOLDER").replace(str(port), "PORT"))
    said["environment"] = {name: value for name, value in said["environment"].items() if name not in VOLATILE}
    # libuv, which torch's store uses, opens one in every fork.
    said["files"] = [file for file in said["files"] if not file.startswith("pipe:")]
    events = [json.loads(line) for line in (folder / "ranks.0.jsonl").read_text().splitlines()]
    ends = sorted((event["rank"], event["exit"], event["signal"]) for event in events if event["event"] == "end")
    assert done.returncode == 1
    return said, rest, ends


def test_a_forked_rank_is_like_an_executed_one(tmp_path: Path) -> None:
    """Arguments, environment, signals, open files, session, last words, and how it ends."""
    forked, forked_rest, forked_ends = run(tmp_path / "forked", GPTCTL_FORK_RANKS="1")
    executed, rest, ends = run(tmp_path / "executed")
    assert (forked.pop("was forked"), executed.pop("was forked")) == (True, False)
    assert (forked.pop("imported"), executed.pop("imported")) == (["sharding"], [])
    assert forked == executed
    assert forked_rest == rest == "thread\nat exit\n"
    assert forked_ends == ends == [(0, 93, None), (1, None, 9)]
