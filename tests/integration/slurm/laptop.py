"""gptctl as a person runs it on a machine without Slurm, whose cluster has a login host."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from typing import Any

import yaml

from tests.integration.slurm.login import GPTCTL, STAND_IN, TINY, await_true
from tests.lab import Lab
from tests.lab.machines import HERE

CUTTER_PORT = 2222
_NUMBERS = itertools.count()


class Laptop:
    """A user's home on the laptop, and one on the cluster: they share nothing."""

    def __init__(self, lab: Lab, **profile: Any) -> None:
        self.lab = lab
        number = next(_NUMBERS)
        self.folder, self.run_root = f"/home/gpt/user-{number}", f"/home/gpt/runs-{number}"
        self.stand_in = f"/home/gpt/python-{number}"
        self.env = {"GPTCTL_HOME": f"{self.folder}/home", "COLUMNS": "200"}
        self.write("head", self.stand_in, STAND_IN)
        self.on("head", f"chmod 755 {self.stand_in}")
        self.write_profile("hpc", **profile)
        self.write_profile("quick", python=self.stand_in, **profile)
        self.write("laptop", f"{self.folder}/job.py", "")
        self.write("laptop", f"{self.folder}/config.yaml", "Global: {device: cpu}\n")

    def write_profile(self, name: str, **keys: Any) -> None:
        usual = {"kind": "slurm", "login": "head", "gpus_per_node": 1, "gpu_request": "none"}
        own = {"run_root": self.run_root, "python": sys.executable, "env": {"OMP_NUM_THREADS": 1}}
        self.write("laptop", f"{self.folder}/clusters/{name}.yaml", yaml.safe_dump({**usual, **own, **keys}))

    def write(self, machine: str, file: str, text: str) -> None:
        command = 'mkdir -p "$(dirname "$1")" && exec cat > "$1"'
        self.lab.run(machine, "sh", "-c", command, "sh", file, user="gpt", input=text, check=True)

    def on(self, machine: str, command: str) -> str:
        """What a shell of the user prints there."""
        return self.lab.run(machine, "sh", "-c", command, user="gpt", check=False).stdout

    def run(self, *arguments: str, timeout: float = 120, **env: str) -> subprocess.CompletedProcess[str]:
        how = {"cwd": self.folder, "env": {**self.env, **env}, "user": "gpt"}
        return self.lab.run("laptop", GPTCTL, *arguments, check=False, timeout=timeout, **how)

    def start(self, *arguments: str, **streams: Any) -> subprocess.Popen[str]:
        return self.lab.start("laptop", GPTCTL, *arguments, cwd=self.folder, env=self.env, user="gpt", **streams)

    def json(self, *arguments: str, **how: Any) -> Any:
        done = self.run(*arguments, "--json", **how)
        assert done.returncode == 0, done.stdout + done.stderr
        return json.loads(done.stdout)

    def quick(self, *options: str, cluster: str = "quick", **env: str) -> list[str]:
        """Arguments that submit a job of the stand-in."""
        variables = [word for name, value in env.items() for word in ("--env", f"{name}={value}")]
        return ["submit", "--cluster", cluster, *options, *variables, "--", "job.py"]

    def submit_quick(self, *options: str, **env: str) -> dict[str, Any]:
        done = self.run(*self.quick("--json", *options, **env))
        assert done.returncode == 0, done.stdout + done.stderr
        return json.loads(done.stdout)  # type: ignore[no-any-return]

    def train(self, *options: str, keys: tuple[str, ...] = ()) -> list[str]:
        overrides = [word for key in (*TINY, *keys) for word in ("-o", key)]
        return ["submit", "--cluster", "hpc", *options, *overrides]

    def wait(self, job: str, *states: str, seconds: float = 90) -> dict[str, Any]:
        facts: dict[str, Any] = {}

        def has_come() -> bool:
            facts.update(self.json("status", job))
            return facts["state"] in states

        await_true(has_come, seconds, lambda: str(facts))
        return facts

    def ran(self, job: str) -> list[str]:
        """A line for every start of the stand-in on a node."""
        return self.on("head", f"cat {self.run_root}/{job}/ran 2> /dev/null").splitlines()

    def folders(self) -> set[str]:
        """What is in run_root, hidden folders included."""
        return set(self.on("head", f"ls -A {self.run_root} 2> /dev/null").split())

    def jobs_in_slurm(self) -> list[list[str]]:
        """Id, state and folder of everything that Slurm remembers of this user's folder."""
        lines = self.lab.slurm.ask("squeue", "-h", "-t", "all", "-o", "%i %T %Z").splitlines()
        return [line.split(" ", 2) for line in lines if f"{self.run_root}/" in line]


class Cutter:
    """Between the laptop and the sshd of the head: cuts connections at random moments."""

    def __init__(self, laptop: Laptop) -> None:
        self.laptop = laptop
        self.folder = laptop.folder
        key = self.laptop.lab.known_hosts.read_text().split("head", 1)[1].split(" ", 1)[1]
        laptop.write("laptop", f"{self.folder}/known_hosts", f"[127.0.0.1]:{CUTTER_PORT} {key}")
        self.profile = {
            "login": {"host": "127.0.0.1", "port": CUTTER_PORT},
            "known_hosts": f"{self.folder}/known_hosts",
        }
        self.order("0 0 0")

    def __enter__(self) -> Cutter:
        words = [sys.executable, "-IS", str(HERE / "cutter.py"), self.folder, str(CUTTER_PORT), "head", "22"]
        self._process = self.laptop.lab.start("laptop", *words, user="gpt")
        listens = f"ss -Hltn 'sport = {CUTTER_PORT}'"
        await_true(lambda: bool(self.laptop.on("laptop", listens)), 20)
        return self

    def __exit__(self, *reason: object) -> None:
        self._process.kill()
        self._process.wait()

    def order(self, text: str) -> None:
        file = f"{self.folder}/cuts"
        self.laptop.write("laptop", f"{file}.new", text)
        self.laptop.on("laptop", f"mv {file}.new {file}")

    def cuts(self) -> int:
        return len(self.laptop.on("laptop", f"cat {self.folder}/number-of-cuts 2> /dev/null"))

    def connections(self) -> int:
        return len(self.laptop.on("laptop", f"cat {self.folder}/connections 2> /dev/null"))
