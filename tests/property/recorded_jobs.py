"""Stores and run folders of jobs in every state, made by gptctl's own writers. Nothing is trained.

A world is one GPTCTL_HOME with a few jobs. Its processes are sleeping ones: they stand for supervisors.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from unittest import mock

from gptctl.backends import Backends
from gptctl.backends.slurm.arrays import write_array
from gptctl.engine.attempt_outcome import record_outcome
from gptctl.engine.cause import Cause
from gptctl.engine.job_result import CANCELLED, COMPLETED, FAILED, TIMEOUT, Result
from gptctl.engine.machine_queue import MachineQueue, queue_folder
from gptctl.engine.node import NodeExit
from gptctl.engine.processes import identity, this_process
from gptctl.engine.queue_rules import Ticket
from gptctl.engine.run_folder import RunFolder
from gptctl.jobs.array_folders import array_name
from gptctl.jobs.history import History
from gptctl.jobs.labels import Labels, LabelStore
from gptctl.jobs.state import state_of
from gptctl.jobs.store import JobRecord, Store
from gptctl.jobs.submit import Prepared, add_record, freeze_job, new_token, prepare, this_site
from gptctl.jobs.sweeps import SweepStore, new_sweep
from gptctl.spec.check import check_config
from trainer import rank_log
from trainer.config import Override

CONFIG = """
Global: {device: cpu, local_batch_size: 8, micro_batch_size: 8}
Engine: {max_steps: 40, save_load: {save_steps: 20}}
Model: {hidden_size: 32, num_layers: 2, num_attention_heads: 4, vocab_size: 64}
Data: {Train: {dataset: {name: CharDataset, path: builtin, max_seq_len: 16}}}
Launch: {gpus_per_node: 1}
"""
PROFILES = {
    "desk": "kind: local\nrun_root: ./runs\n",
    "lab": "kind: ssh\nrun_root: /srv/runs\nhosts: [{host: 127.0.0.1, port: 1}, {host: 127.0.0.2, port: 1}]\n",
    "farm": "kind: slurm\nrun_root: %s\ngpu_request: none\n",
    "far": "kind: slurm\nrun_root: /srv/runs\ngpu_request: none\nlogin: {host: 127.0.0.1, port: 1}\n",
}
NEVER = 1 << 22  # a pid that no process has
DEAD = {"pid": NEVER, "started": 1}


class World:
    """A folder in which the user works, with jobs; `keep` makes the state to which `restore` returns."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.home = folder, folder / "home"
        self.environment = {
            "GPTCTL_HOME": str(self.home),
            "XDG_STATE_HOME": str(folder / "state"),
            "XDG_CONFIG_HOME": str(folder / "config"),
            "HOME": str(folder),
            # Neither Slurm nor ssh: what a scheduler or a host says is not what is tested here.
            "PATH": str(folder / "bin"),
        }
        self.jobs: dict[str, JobRecord] = {}
        self.sweep = ""
        self._kept: dict[str, tuple[int, bytes, int]] = {}
        self._sleepers: list[int] = []

    @contextmanager
    def entered(self) -> Iterator[None]:
        before = os.getcwd()
        tools = self.folder / "bin"
        tools.mkdir(parents=True, exist_ok=True)
        for name in ("bash", "git"):
            if (found := shutil.which(name)) and not (tools / name).exists():
                (tools / name).symlink_to(found)
        with mock.patch.dict(os.environ, self.environment):
            os.chdir(self.folder)
            try:
                yield
            finally:
                os.chdir(before)

    def prepared(self, cluster: str = "desk", *options: str, script: bool = False) -> Prepared:
        (self.folder / "run.yaml").write_text(CONFIG, encoding="utf-8")
        (self.folder / "train.py").write_text("print('hello')\n", encoding="utf-8")
        profile = self.folder / "config" / "gptctl" / "clusters" / f"{cluster}.yaml"
        profile.parent.mkdir(parents=True, exist_ok=True)
        text = PROFILES[cluster]
        profile.write_text(text % (self.folder / "runs") if "%s" in text else text, encoding="utf-8")
        words = [f"Launch.cluster={cluster}", *options, *(["Launch.entrypoint=train.py"] if script else [])]
        typed = [Override.parse(word) for word in words]
        config = None if script else self.folder / "run.yaml"
        checked = check_config(config, typed)
        return prepare(checked, Store(), Backends(lambda text: None), this_site(), typed)

    def frozen(self, name: str, prepared: Prepared, token: str = "", array_dir: str = "") -> JobRecord:
        """Record and freeze a job; it is half-submitted then."""
        backend = Backends(lambda text: None).of(prepared.plan.kind)
        prepared, record = add_record(prepared._replace(git={}), Store(), backend, token, array_dir)
        freeze_job(prepared, record)
        LabelStore().keep(record, Labels({"exp": "lr", "best": ""}, "a note"))
        # A hundred files of code are not read by any verb, and slow to restore.
        for file in (record.run_folder / "code").rglob("*"):
            if file.is_file() and file.name not in ("rank_log.py", "train.py", "__init__.py"):
                file.unlink()
        self.jobs[name] = record
        return record

    def accepted(self, name: str, handle: dict[str, object]) -> JobRecord:
        record = self.jobs[name]._replace(handle=handle)
        RunFolder(record.local_dir).try_claim(handle)
        Store().accept(record)
        self.jobs[name] = record
        return record

    def sleeper(self, record: JobRecord) -> dict[str, object]:
        """Start a process of a job that lives until it is cancelled."""
        command = "setsid sleep 3000 </dev/null >/dev/null 2>&1 & echo $!"
        environment = {"PATH": "/usr/bin:/bin", "GPTCTL_RUN_DIR": record.local_dir}
        said = subprocess.run(["/bin/sh", "-c", command], env=environment, stdout=subprocess.PIPE, check=True)
        self._sleepers.append(int(said.stdout))
        return identity(int(said.stdout))

    def close(self) -> None:
        for pid in self._sleepers:
            with suppress(ProcessLookupError):
                os.kill(pid, 9)

    def keep(self) -> None:
        """Remember all files: mode, content (of a link: where it leads) and time of change."""
        self._kept = {}
        for place, folders, names in os.walk(self.folder):
            for name in (*folders, *names):
                path = os.path.join(place, name)
                status = os.lstat(path)
                self._kept[path] = (status.st_mode, _content(path, status.st_mode), status.st_mtime_ns)

    @property
    def kept(self) -> dict[str, tuple[int, bytes, int]]:
        return self._kept

    def restore(self) -> None:
        """Undo whatever a corruption and the commands after it have changed."""
        left: dict[str, os.stat_result] = {}
        for place, folders, names in os.walk(self.folder, topdown=False):
            for name in (*names, *folders):
                path = os.path.join(place, name)
                left[path] = status = os.lstat(path)
                if path not in self._kept or status.st_mode >> 12 != self._kept[path][0] >> 12:
                    del left[path]
                    shutil.rmtree(path) if status.st_mode >> 12 == FOLDER else os.unlink(path)
        for path, (mode, content, changed) in self._kept.items():
            now = left.get(path)
            is_same = now is not None and (now.st_size, now.st_mtime_ns) == (len(content), changed)
            if mode >> 12 == FOLDER:
                os.makedirs(path, exist_ok=True) if now is None else None
            elif not is_same:
                _write(path, mode, content, changed)


FILE, LINK, FOLDER = 0o10, 0o12, 0o4  # of a mode, shifted by 12 bits


def _content(path: str, mode: int) -> bytes:
    if mode >> 12 == LINK:
        return os.fsencode(os.readlink(path))
    return Path(path).read_bytes() if mode >> 12 == FILE else b""


def _write(path: str, mode: int, content: bytes, changed: int) -> None:
    if mode >> 12 == LINK:
        if os.path.lexists(path):
            os.unlink(path)
        os.symlink(os.fsdecode(content), path)
    else:
        Path(path).write_bytes(content)
        os.chmod(path, mode & 0o7777)
    os.utime(path, ns=(changed, changed), follow_symlinks=False)


# What ranks, launch scripts and the trainer leave behind


def run_attempt(record: JobRecord, codes: Sequence[int], host: str = "here", trainer: str = "finished") -> None:
    """Write what an attempt leaves: records of its ranks, exit codes, logs, metrics."""
    folder = RunFolder(record.local_dir)
    number = folder.begin_attempt()
    attempt, logs = folder.attempt(number), Path(record.log_dir) / f"attempt-{number}"
    logs.mkdir(parents=True)
    (attempt / "endpoint.json").write_text(json.dumps({"host": "127.0.0.1", "port": 4242}))
    (attempt / "hosts").write_text("".join(f"{host}{node}\n" for node in range(len(codes))))
    folder.record_start(number, -1)
    for node, code in enumerate(codes):
        variables = {"GPTCTL_NODE": str(node), "RANK": str(node), "GPTCTL_ATTEMPT_DIR": str(attempt)}
        with mock.patch.dict(os.environ, variables):
            rank_log.note("start", NEVER + node, log_start=0)
            rank_log.note("end", NEVER + node, exit=code, signal=None, max_rss_mb=10, oom=None)
        (attempt / f"node.{node}.exit").write_text(f"{code}\n")
        (attempt / f"node.{node}.pid").write_text(f"{NEVER + node}\n")
        ending = "RuntimeError: the data is bad\n" if code else "done\n"
        (logs / f"workerlog.{node}").write_text(f"[2026-01-01 00:00:00] step 1 of {record.id}\n{ending}")
        (logs / f"node.{node}.log").write_text("torchrun was here\n")
    if record.output_dir:
        _train(record, number, trainer)


def _train(record: JobRecord, attempt: int, state: str) -> None:
    output = Path(record.output_dir)
    (output / "step_20").mkdir(parents=True)
    (output / "step_20" / "manifest.json").write_text(json.dumps({"step": 20, "files": {}}))
    who = {"job": record.id, "attempt": attempt}
    (output / "status.json").write_text(json.dumps({"state": state, "time": time.time(), "step": 40, **who}, indent=1))
    rows = [{"step": step, "loss": 3 / step, "step_time": 0.1, "max_steps": 40, **who} for step in range(5, 41, 5)]
    (output / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def finish(record: JobRecord, state: str, reason: str = "", code: int = 0) -> None:
    folder, cause = RunFolder(record.local_dir), None
    if state == FAILED:
        cause = Cause("RuntimeError: the data is bad", 0, 0, "here0", code, None, time.time())
        reason = cause.reason()
    if folder.attempts():
        result = Result(state, reason, time.time(), cause)
        record_outcome(folder, folder.attempts() - 1, result, {0: NodeExit(code, False, cause)})
    folder.finish(state, reason, cause)


# The worlds


def local_world(folder: Path) -> World:
    """Jobs of this machine that have ended: each in its own way."""
    world = World(folder)
    with world.entered():
        ends = {
            "completed": (COMPLETED, 0),
            "failed": (FAILED, 1),
            "timeout": (TIMEOUT, 0),
            "cancelled": (CANCELLED, 0),
        }
        for name, (state, code) in ends.items():
            world.frozen(name, world.prepared("desk", "Launch.nodes=2"))
            record = world.accepted(name, {**this_process(), **DEAD})
            run_attempt(record, [code, 0], trainer="finished" if state == COMPLETED else "stopped")
            if state == CANCELLED:
                RunFolder(record.local_dir).cancel(now=False)
            finish(record, state, "time limit reached" if state == TIMEOUT else "", code)
        _keep_history(world)
    return world


def orphan_world(folder: Path) -> World:
    """Jobs whose supervisor was killed: only exit codes tell how they ended."""
    world = World(folder)
    with world.entered():
        for name, code in (("orphan", 0), ("failed-orphan", 1)):
            world.frozen(name, world.prepared(script=True))
            run_attempt(world.accepted(name, {**this_process(), **DEAD}), [code])
        _keep_history(world)
    return world


def running_world(folder: Path) -> World:
    """A job that runs, one that waits, one that is being submitted, and one whose gptctl was killed."""
    world = World(folder)
    with world.entered():
        running = world.frozen("running", world.prepared())
        running = world.accepted("running", world.sleeper(running))
        run_attempt(running, [0], trainer="running")
        (RunFolder(running.local_dir).attempt(0) / "node.0.exit").unlink()
        waiting = world.frozen("waiting", world.prepared(script=True))
        waiting = world.accepted("waiting", world.sleeper(waiting))
        RunFolder(waiting.local_dir).set_waiting("waits for other jobs")
        queue = MachineQueue(queue_folder())
        queue.add(Ticket(0, running.id, running.local_dir, is_running=True))
        queue.add(Ticket(0, waiting.id, waiting.local_dir, waits=True))
        world.frozen("submitting", world.prepared(script=True))
        killed = world.frozen("killed", world.prepared(script=True))
        # As if gptctl had been killed between freezing and starting.
        dead = killed._replace(submitter={**killed.submitter, **DEAD})
        store = Store()
        store.remove(killed)
        assert store.add(dead)
        world.jobs["killed"] = dead
    return world


def ssh_world(folder: Path) -> World:
    return _remote_world(folder, ("ssh", "lab", 2))


def slurm_world(folder: Path) -> World:
    return _remote_world(folder, ("slurm", "farm", 2))


def login_world(folder: Path) -> World:
    return _remote_world(folder, ("login", "far", 1))


def _remote_world(folder: Path, *clusters: tuple[str, str, int]) -> World:
    """Jobs of ssh hosts or of Slurm, here or behind a login host: ended, and out of reach."""
    world = World(folder)
    boot = {"boot": "another", "host": "127.0.0.1"}
    with world.entered():
        for name, cluster, nodes in clusters:
            for is_over in (True, False):
                key = f"{name}-{'ended' if is_over else 'running'}"
                world.frozen(key, world.prepared(cluster, f"Launch.nodes={nodes}"))
                number = str(100 + len(world.jobs))
                handle = {"pid": 4242, "started": 1, **boot} if name == "ssh" else {"scheduler_id": number, **boot}
                record = world.accepted(key, handle)
                run_attempt(record, [0] * nodes, trainer="finished" if is_over else "running")
                if is_over:
                    finish(record, COMPLETED)
        _keep_history(world)
    return world


def sweep_world(folder: Path) -> World:
    """A sweep of two jobs in a Slurm array, and a local job whose folder was removed."""
    world = World(folder)
    with world.entered():
        runs = ({"Engine.max_steps": "40"}, {"Engine.max_steps": "80"})
        facts = {"file": "sweep.yaml", "folder": str(folder), "config": str(folder / "run.yaml")}
        sweep = SweepStore().add(new_sweep(id="steps", runs=runs, arguments={"overrides": []}, **facts))
        token, records, plans = new_token(), [], []
        array = str(folder / "runs" / array_name(sweep.id, token))
        for index, run in enumerate(runs):
            options = [f"{key}={value}" for key, value in run.items()]
            prepared = world.prepared("farm", *options)._replace(sweep=sweep.id, sweep_index=index)
            records.append(world.frozen(f"task-{index}", prepared, token, array))
            plans.append(prepared.plan)
        write_array(plans, records, None)
        for index in (0, 1):
            record = world.accepted(f"task-{index}", {"scheduler_id": f"17_{index}", "host": "farm"})
            (record.run_folder / "slurm-job").write_text(f"{18 + index}\n")
            run_attempt(record, [index])
            finish(record, FAILED if index else COMPLETED, code=index)
        removed = world.frozen("removed", world.prepared())
        removed = world.accepted("removed", {**this_process(), **DEAD})
        run_attempt(removed, [0])
        finish(removed, COMPLETED)
        _keep_history(world)
        shutil.rmtree(removed.local_dir)
        History().mark_removed(removed, time.time())
        world.sweep = sweep.id
    return world


def _keep_history(world: World) -> None:
    for record in world.jobs.values():
        if RunFolder(record.local_dir).result():
            state_of(record, Backends(lambda text: None))


WORLDS: dict[str, Callable[[Path], World]] = {
    "local": local_world,
    "orphans": orphan_world,
    "running": running_world,
    "ssh": ssh_world,
    "slurm": slurm_world,
    "login": login_world,
    "sweep": sweep_world,
}
