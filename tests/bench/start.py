"""How long a job takes until its first step: `python tests/bench/start.py [ROUNDS]`

Two nodes of two ranks on this machine, in turns and in changing order: `gptctl submit --nodes 2`, bare torchrun with the
same trainer and config, and a submit whose ranks each start a Python of their own, as they do beside a sitecustomize of
the user. Wall time is that of the log line of step 1, less that of the command; CPU seconds are those of all processes of a
job of one step. Exit code 1 if a start takes longer than with bare torchrun, by the medians of both.
"""

from __future__ import annotations

import os
import re
import resource
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from datetime import datetime
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from gptctl.engine.processes import adopt_orphans
from tests.bench.recorder import record

ROUNDS = 5
GPTCTL = str(Path(sys.executable).with_name("gptctl"))
DEMO = str(ROOT / "templates" / "configs" / "char-gpt.yaml")
ONE_STEP = {
    "Engine.max_steps": 1,
    "Engine.logging_freq": 1,
    "Engine.test_iters": 0,
    "Generation.num_return_sequences": 0,
}
FIRST_STEP = re.compile(r"^\[([\d :,-]+)\].* global step 1,", re.MULTILINE)
ENVIRONMENT = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}


class Sample(NamedTuple):
    wall: float
    cpu: float


def overrides(output: Path) -> list[str]:
    values = {**ONE_STEP, "Engine.save_load.output_dir": output}
    return [word for key, value in values.items() for word in ("-o", f"{key}={value}")]


def submit(folder: Path, **environment: str) -> Path:
    """Return the log of rank 0."""
    command = [GPTCTL, "submit", "--nodes", "2", "--follow", DEMO, *overrides(folder / "output")]
    own = {**ENVIRONMENT, "GPTCTL_HOME": str(folder / "home"), **environment}
    subprocess.run(command, cwd=folder, env=own, check=True, capture_output=True)
    return next(folder.glob("runs/*-*/logs/attempt-0/workerlog.0"))


def submit_beside_a_sitecustomize(folder: Path) -> Path:
    (folder / "python").mkdir()
    (folder / "python" / "sitecustomize.py").touch()
    return submit(folder, PYTHONPATH=str(folder / "python"))


def torchrun(folder: Path) -> Path:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    environment = {**ENVIRONMENT, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nnodes=2",
        "--nproc-per-node=2",
        f"--master-port={port}",
    ]
    program = ["--master-addr=127.0.0.1", "-m", "trainer", "-c", DEMO, *overrides(folder / "output")]
    log = folder / "log"
    with log.open("w") as file:
        nodes = [
            subprocess.Popen(
                [*command, f"--node-rank={node}", *program], cwd=ROOT, env=environment, stdout=file, stderr=file
            )
            for node in range(2)
        ]
    assert [node.wait() for node in nodes] == [0, 0], log.read_text()
    return log


def measure(start: object) -> Sample:
    with tempfile.TemporaryDirectory() as folder:
        before, began = cpu_seconds(), time.time()
        text = start(Path(folder)).read_text()  # type: ignore[operator]
        wait_for_orphans()
        step = FIRST_STEP.search(text)
        assert step, text
        wall = datetime.strptime(step[1], "%Y-%m-%d %H:%M:%S,%f").timestamp() - began
        return Sample(wall, cpu_seconds() - before)


def cpu_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def wait_for_orphans() -> None:
    """The supervisor of a job outlives the command, and this process has adopted it."""
    while True:
        try:
            os.wait()
        except ChildProcessError:
            return


STARTS = {
    "gptctl submit --nodes 2": submit,
    "bare torchrun": torchrun,
    "gptctl submit, ranks not forked": submit_beside_a_sitecustomize,
}


def main() -> int:
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else ROUNDS
    adopt_orphans()
    names, samples = list(STARTS), defaultdict(list)
    for number in range(rounds):
        turn = number % len(names)
        for name in names[turn:] + names[:turn]:
            samples[name].append(measure(STARTS[name]))
    ours, bare = names[0], names[1]
    print(
        f"{'start until step 1':<34} {'wall s':>7} {'CPU s':>7} {'wall':>6} {'CPU':>6} of bare torchrun, medians of the ratios"
    )
    walls = {}
    for name, taken in samples.items():
        wall, cpu = (statistics.median(column) for column in zip(*taken))
        ratios = [[a / b for a, b in zip(own, other)] for own, other in zip(taken, samples[bare])]
        walls[name], ratio = (statistics.median(column) for column in zip(*ratios))
        print(f"{name:<34} {wall:>7.2f} {cpu:>7.2f} {walls[name]:>6.2f} {ratio:>6.2f}")
        for what in Sample._fields:
            mine, peers = ([getattr(each, what) for each in samples[of]] for of in (name, bare))
            peers = [] if name == bare else peers
            record(f"{name} until step 1, {what}", ours=mine, peer=peers, goal=1.0 if name == ours else None)
    load = os.getloadavg()[0]
    print(f"{rounds} rounds; load average {load:.1f}")
    return int(walls[ours] > 1)


if __name__ == "__main__":
    sys.exit(main())
