"""gptctl as a person runs it on a machine that reaches some hosts by ssh."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.integration.slurm.login import TINY
from tests.lab import Lab

GPTCTL = str(Path(sys.executable).with_name("gptctl"))
HOSTS = ("ssh1", "ssh2", "private1")
ADDRESSES = {"ssh1": "10.78.0.51", "ssh2": "10.78.0.52", "private1": "10.78.0.1"}  # on the training network
_NUMBERS = itertools.count()

# In the place of Python: as torchrun it only notes that it ran, and waits; as anything else it is the real one.
STAND_IN = f"""#!/bin/bash
case "$1 $2" in
"-m torch.distributed.run") ;;
*) exec {sys.executable} "$@" ;;
esac
echo "$GPTCTL_ATTEMPT $(hostname) $*" >> "$GPTCTL_RUN_DIR/ran"
printf '%s\\0%s' "$V" "${{@: -1}}" > "$GPTCTL_RUN_DIR/words"
sleep "${{JOB_SECONDS:-0}}" &
trap 'kill $!; exit 1' TERM USR1
wait $!
exit "${{JOB_EXIT:-0}}"
"""


class Desk:
    """A user's folder, with a profile `hosts` of all three hosts, whose runs are in their private homes."""

    def __init__(self, lab: Lab, **profile: Any) -> None:
        self.lab = lab
        number = next(_NUMBERS)
        self.folder = lab.shared / f"desk-{number}"
        self.run_root = f"/home/gpt/runs-{number}"
        self.folder.mkdir()
        self.stand_in = lab.folder / "tmp" / f"python-{number}"
        self.stand_in.write_text(STAND_IN)
        self.stand_in.chmod(0o755)
        self.write_profile("hosts", **profile)
        self.write_profile("quick", python=str(self.stand_in), **profile)
        (self.folder / "config.yaml").write_text("Global: {device: cpu}\n")
        (self.folder / "job.py").write_text("")
        self.env = {"GPTCTL_HOME": str(self.folder / "home"), "COLUMNS": "200"}
        lab.run("head", "chown", "-R", "gpt", str(self.folder), check=True)

    def write_profile(self, name: str, **keys: Any) -> None:
        own = {"run_root": self.run_root, "env": {"OMP_NUM_THREADS": 1}, "start_timeout": 5, **keys}
        self.lab.hosts_profile(self.folder, name, **own)

    def run(self, *arguments: str, timeout: float = 120, stdin: str | None = None, **env: str) -> Any:
        return self.lab.run(
            "head",
            GPTCTL,
            *arguments,
            cwd=str(self.folder),
            env={**self.env, **env},
            user="gpt",
            check=False,
            timeout=timeout,
            **({} if stdin is None else {"input": stdin}),
        )

    def start(self, *arguments: str, **streams: Any) -> subprocess.Popen[str]:
        return self.lab.start("head", GPTCTL, *arguments, cwd=str(self.folder), env=self.env, user="gpt", **streams)

    def json(self, *arguments: str, **how: Any) -> Any:
        done = self.run(*arguments, "--json", **how)
        assert done.returncode == 0, done.stdout + done.stderr
        return json.loads(done.stdout)

    def train(self, *options: str, keys: tuple[str, ...] = ()) -> list[str]:
        overrides = [word for key in (*TINY, *keys) for word in ("-o", key)]
        return ["submit", "--cluster", "hosts", *options, *overrides]

    def quick(self, *options: str, **env: str) -> list[str]:
        """Arguments that submit a job of the stand-in on all three hosts."""
        variables = [word for name, value in env.items() for word in ("--env", f"{name}={value}")]
        return [
            "submit",
            "--cluster",
            "quick",
            "--nodes",
            "3",
            "--gpus-per-node",
            "1",
            *options,
            *variables,
            "--",
            "job.py",
        ]

    def submit_quick(self, *options: str, **env: str) -> dict[str, Any]:
        done = self.run(*self.quick("--json", *options, **env))
        assert done.returncode == 0, done.stdout + done.stderr
        return json.loads(done.stdout)  # type: ignore[no-any-return]

    def wait(self, job: str, *states: str, seconds: float = 60) -> dict[str, Any]:
        facts: dict[str, Any] = {}

        def has_come() -> bool:
            facts.update(self.json("status", job))
            return facts["state"] in states

        await_true(has_come, seconds, lambda: str(facts))
        return facts

    def on(self, host: str, command: str) -> str:
        """What a shell of the user prints there."""
        return self.lab.run(host, "sh", "-c", command, user="gpt", check=False).stdout

    def ran(self, host: str) -> list[str]:
        return self.on(host, f"cat {self.run_root}/*/ran 2> /dev/null").splitlines()

    def left(self, host: str) -> list[str]:
        """Every process of the user on a host but those of sshd, and those that look."""
        looking = 'ps -u gpt -o pid=,ppid=,comm=,args= | awk -v me="$$" \'$1 != me && $2 != me && $3 != "sshd"\''
        return self.on(host, looking).splitlines()


def await_true(holds: Callable[[], bool], seconds: float, words: Callable[[], str] = lambda: "") -> None:
    deadline = time.monotonic() + seconds
    while not holds():
        if time.monotonic() > deadline:
            raise AssertionError(f"not in {seconds} s: {words()}")
        time.sleep(0.1)
