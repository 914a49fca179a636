"""How gptctl grows with the number of hosts and ranks: `python tests/bench/scale.py [--kind ssh|slurm|files] [--sizes 4,16,64] [--ranks 16]`

ssh, slurm: real sshd or slurmd in namespaces of this machine, and ranks that sleep (`--ranks` on each host, started by a
stand-in for torchrun, which alone would take 200 MB for each host). For every size: seconds of submit, status, list and
cancel; CPU seconds and memory of gptctl; of `logs --follow`, the CPU use; memory and CPU time of the first host's agent
or engine; and what is left afterwards, which must be nothing. One machine does the work of all hosts, so seconds grow
at least with their number.
files: status, list and logs over the folder of a job with 64 and 1,024 ranks, without any host. Exit code 1 if something
takes more than 1.3 times as long for each rank as with 64 ranks, or if anything of a job is left.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.integration.local.causes import LAUNCHER
from tests.lab import Lab, missing
from tests.lab.keeper import child_of
from tests.lab.lab import write_profile

GPTCTL = str(Path(sys.executable).with_name("gptctl"))
MAX_GROWTH = 1.3
FOLLOWED = 5.0  # seconds
SLEEP = """\
import time
print("up", flush=True)
time.sleep(3600)
"""


class Cost(NamedTuple):
    """What one command took."""

    seconds: float
    cpu: float
    megabytes: float
    out: str

    def __str__(self) -> str:
        return f"{self.seconds:.2f} s, {self.cpu:.2f} CPU s, {self.megabytes:.0f} MB"


def cost(command: list[str], env: dict[str, str], cwd: Path, seconds: float | None = None) -> Cost:
    """Run a command, or interrupt it after a while; the memory is that of its largest process."""
    with tempfile.TemporaryFile() as out:
        begun = time.perf_counter()
        process = subprocess.Popen(command, env={**os.environ, **env}, cwd=cwd, stdout=out, stderr=out)
        if seconds is not None:
            time.sleep(seconds)
            # Not nsenter, which started it: nobody would count what its child took.
            os.kill(child_of(process.pid), signal.SIGINT)
        _, status, usage = os.wait4(process.pid, 0)
        took = time.perf_counter() - begun
        process.returncode = os.waitstatus_to_exitcode(status)
        out.seek(0)
        text = out.read().decode(errors="replace")
    if seconds is None and process.returncode:
        raise RuntimeError(f"{' '.join(command)} exits {process.returncode}\n{text}")
    return Cost(took, usage.ru_utime + usage.ru_stime, usage.ru_maxrss / 1024, text)


class Site:
    """A user on the head of a lab, with a profile of all its hosts or nodes."""

    def __init__(self, lab: Lab, kind: str, size: int) -> None:
        self.lab, self.folder = lab, lab.shared / "scale"
        self.folder.mkdir()
        launcher = lab.folder / "tmp" / "launcher"
        launcher.write_text(LAUNCHER)
        launcher.chmod(0o755)
        self.root = "/home/gpt/runs" if kind == "ssh" else str(self.folder / "runs")
        keys: dict[str, Any] = {"kind": kind, "run_root": self.root, "python": str(launcher)}
        hosts = [host for host in lab.hosts if host.name not in ("bastion", "private1")][:size]
        if kind == "ssh":
            keys["hosts"] = [{"host": host.name, "address": host.addresses[-1]} for host in hosts]
        else:
            keys |= {"gpu_request": "none"}
        self.machines = [host.name for host in hosts] if kind == "ssh" else [node.name for node in lab.nodes]
        write_profile(self.folder, "scale", keys)
        (self.folder / "config.yaml").write_text("Global: {device: cpu}\n")
        (self.folder / "sleep.py").write_text(SLEEP)
        lab.run("head", "chown", "-R", "gpt", str(self.folder), check=True)

    def gptctl(self, *arguments: str, seconds: float | None = None) -> Cost:
        env = {"GPTCTL_HOME": str(self.folder / "home")}
        words = self.lab.argv("head", GPTCTL, *arguments, user="gpt", cwd=str(self.folder), env=env)
        return cost(words, {}, Path("/"), seconds)


def processes_of(root: str) -> list[int]:
    """All processes of jobs below a folder, on all machines of the lab: one kernel runs them."""
    found = []
    for entry in filter(str.isdigit, os.listdir("/proc")):
        try:
            if f"GPTCTL_RUN_DIR={root}/".encode() in Path("/proc", entry, "environ").read_bytes():
                found.append(int(entry))
        except OSError:
            continue
    return found


def engine_of(root: str) -> str:
    """Memory and CPU time of the agent of the first host, or of the engine in the batch script."""
    found = []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            words = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")[:-1]
            is_engine = any(os.path.basename(word) == "engine.pyz" for word in words)
            # The guard of an agent has the same words, but does nothing: the busiest one is meant.
            is_first = "srun_node" in words or words[-1:] == ["0"]
            if is_engine and is_first and any(word.startswith(f"{root}/") for word in words):
                found.append(usage_of(pid))
        except OSError:
            continue
    cpu, memory = max(found, default=(0.0, 0.0))
    return f"{memory:.0f} MB, {cpu:.2f} CPU s" if found else "not found"


def usage_of(pid: str) -> tuple[float, float]:
    """CPU seconds and megabytes of a process."""
    status = Path(f"/proc/{pid}/status").read_text()
    memory = next(line for line in status.splitlines() if line.startswith("VmHWM")).split()[1]
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK"), int(memory) / 1024


def await_count(what: str, wanted: int, count: Any, seconds: float) -> float:
    begun = time.perf_counter()
    while (found := count()) < wanted:
        if time.perf_counter() - begun > seconds:
            raise RuntimeError(f"{what}: {found} of {wanted} after {seconds:g} s")
        time.sleep(0.2)
    return time.perf_counter() - begun


def is_up(pids: list[int]) -> int:
    """How many ranks run the script: without the watcher of each."""
    lines = [Path(f"/proc/{pid}/cmdline") for pid in pids]
    return sum(
        b"sleep.py" in line.read_bytes() and b"rank_log.py" not in line.read_bytes() for line in lines if line.exists()
    )


def measure(kind: str, size: int, ranks: int) -> list[tuple[str, str]]:
    begun = time.perf_counter()
    with Lab(nodes=size if kind == "slurm" else 0, ssh=size if kind == "ssh" else 0) as lab:
        rows = [("lab", f"{time.perf_counter() - begun:.1f} s")]
        site = Site(lab, kind, size)
        asked = ["submit", "--cluster", "scale", "--nodes", str(size), "--gpus-per-node", str(ranks), "--json"]
        sent = site.gptctl(*asked, "--", "sleep.py")
        job = json.loads(sent.out[sent.out.index("{") :])["job"]
        rows.append(("submit", str(sent)))
        up = await_count("ranks up", size * ranks, lambda: is_up(processes_of(site.root)), 600)
        rows.append(("all ranks up after", f"{up:.1f} s"))
        for verb in (["status", job], ["list"], ["logs", job, "--tail", "1"]):
            rows.append((verb[0], str(site.gptctl(*verb))))
        before = engine_of(site.root)
        followed = site.gptctl("logs", job, "--follow", seconds=FOLLOWED)
        rows.append((f"logs --follow for {FOLLOWED:.0f} s", f"{followed.cpu:.2f} CPU s, {followed.megabytes:.0f} MB"))
        rows.append(("first agent" if kind == "ssh" else "engine", f"{before}; then {engine_of(site.root)}"))
        rows.append(("cancel", str(site.gptctl("cancel", job))))
        deadline = time.monotonic() + 30
        while (left := processes_of(site.root)) and time.monotonic() < deadline:
            time.sleep(0.2)
        rows.append(("processes left", str(len(left))))
    return rows


# Without hosts


def fake_job(home: Path, world: int, per_node: int = 8) -> str:
    """A running job with this many ranks, as its run folder shows it."""
    from gptctl.engine.processes import this_process
    from gptctl.jobs.store import Store, new_record

    job, folder = f"gpt-{world:06x}", home / "runs" / f"gpt-{world:06x}"
    attempt, logs = folder / "attempt-0", folder / "logs" / "attempt-0"
    attempt.mkdir(parents=True)
    logs.mkdir(parents=True)
    for rank in range(world):
        node, clock = rank // per_node, 1000.0 + rank / 1000
        facts = {"rank": rank, "local_rank": rank % per_node, "node": node, "host": f"h{node}", "pid": 1}
        event = {"event": "start", "time": 1_700_000_000 + clock, "clock": clock, "log_start": 0, **facts}
        with (attempt / f"ranks.{node}.jsonl").open("a") as stream:
            stream.write(json.dumps(event) + "\n")
        lines = [f"[2026-11-17 10:00:{line:02},000] [    INFO] - rank {rank}: line {line}\n" for line in range(20)]
        (logs / f"workerlog.{rank}").write_text("".join(lines))
    (folder / ".token").write_text("t")
    (folder / "claim.json").write_text(json.dumps(this_process()))
    where = {"local_dir": str(folder), "log_dir": str(folder / "logs"), "nodes": world // per_node}
    record = new_record(
        id=job, name="gpt", cluster="local", kind="local", token="t", per_node=per_node, world=world, **where
    )
    store = Store(home)
    store.add(record)
    store.accept(record._replace(handle={"pid": os.getpid()}))
    return job


def measure_files(sizes: tuple[int, int] = (64, 1024), rounds: int = 5) -> dict[str, tuple[float, float, float]]:
    """CPU seconds of each command at both sizes, and how much more each rank takes at the larger one."""
    found: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory() as name:
        for size in sizes:
            home = Path(name, str(size))
            job, env = fake_job(home, size), {"GPTCTL_HOME": str(home), "HOME": name, "COLUMNS": "200"}
            for verb in (
                ("status", job),
                ("list",),
                ("logs", job),
                ("logs", job, "--tail", "1"),
                ("logs", job, "--list"),
            ):
                runs = [cost([GPTCTL, *verb], env, Path(name)).cpu for _ in range(rounds)]
                found.setdefault(" ".join(word for word in verb if word != job), []).append(statistics.median(runs))
    ratio = sizes[1] / sizes[0]
    return {verb: (small, large, large / small / ratio) for verb, (small, large) in found.items()}


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--kind", choices=("ssh", "slurm", "files"), default="files")
    parser.add_argument("--sizes", default="4,16,64")
    parser.add_argument("--ranks", type=int, default=16)
    asked = parser.parse_args()
    if asked.kind == "files":
        table = measure_files()
        for verb, (small, large, growth) in table.items():
            print(f"{verb:<12} 64 ranks {small:.2f} CPU s, 1,024 ranks {large:.2f} CPU s: {growth:.2f} × per rank")
        return int(any(growth > MAX_GROWTH for _, _, growth in table.values()))
    if lacking := missing():
        print(lacking)
        return 1
    is_clean = True
    for size in map(int, asked.sizes.split(",")):
        print(f"== {asked.kind}: {size} hosts, {size * asked.ranks} ranks", flush=True)
        for what, result in measure(asked.kind, size, asked.ranks):
            print(f"{what:<24} {result}", flush=True)
            is_clean &= what != "processes left" or result == "0"
    return int(not is_clean)


if __name__ == "__main__":
    sys.exit(main())
