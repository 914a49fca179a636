"""Runs the trainer's own entry point on one or several ranks, forked from a process that has torch already.

What a person starts with `torchrun -m trainer …`, without the seconds that every import of torch takes. Real gloo, real
files, real signals; only the import is shared. `tests/integration/test_torchrun.py` starts the real torchrun.
"""

from __future__ import annotations

import gc
import json
import os
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

import trainer.checkpoint.shards
import trainer.parallel.pipeline
import trainer.parallel.sharding
import trainer.train
import trainer.watchdog  # noqa: F401 - imported once, for all forks
from trainer.__main__ import main

torch.set_num_threads(1)  # a process with a pool of OpenMP threads cannot be forked
gc.freeze()  # or the first collection in a fork writes to, and so copies, every page of torch


class Ended(NamedTuple):
    """How the ranks ended, what each of them wrote, and the metrics of the first."""

    codes: list[int]  # negative: ended by a signal
    out: list[str]
    err: list[str]
    folder: Path

    @property
    def ok(self) -> bool:
        return not any(self.codes)

    @property
    def text(self) -> str:
        return "\n".join(self.out + self.err)

    def metrics(self, key: str = "loss", output: str = "output") -> list[float]:
        lines = (self.folder / output / "metrics.jsonl").read_text().splitlines()
        return [record[key] for record in map(json.loads, lines) if key in record]

    def status(self, output: str = "output") -> dict[str, Any]:
        return json.loads((self.folder / output / "status.json").read_text())  # type: ignore[no-any-return]


class Ranks:
    """Ranks that are running."""

    def __init__(
        self,
        arguments: Sequence[str],
        world: int,
        folder: Path,
        environ: Mapping[str, str],
        entry: Callable[[Sequence[str]], int] = main,
    ) -> None:
        self.folder = folder
        self.logs = [(folder / f"out.{rank}", folder / f"err.{rank}") for rank in range(world)]
        port = str(free_port())
        common = {"WORLD_SIZE": str(world), "LOCAL_WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1"}
        common |= {"MASTER_PORT": port, "GLOO_SOCKET_IFNAME": "lo", **environ}
        self.pids = []
        for rank in range(world):
            variables = {**common, "RANK": str(rank), "LOCAL_RANK": str(rank)} if world > 1 else dict(environ)
            self.pids.append(fork(partial(entry, list(arguments)), folder, variables, *self.logs[rank]))
        self.codes: dict[int, int] = {}

    def kill(self, number: int, rank: int | None = None) -> None:
        for pid in self.pids if rank is None else [self.pids[rank]]:
            if pid not in self.codes:
                os.kill(pid, number)

    def poll(self) -> bool:
        """Whether any rank still runs."""
        for pid in set(self.pids) - set(self.codes):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                self.codes[pid] = os.waitstatus_to_exitcode(status)
        return len(self.codes) < len(self.pids)

    def wait(self, seconds: float = 120) -> Ended:
        deadline, failed_at = time.monotonic() + seconds, None
        while self.poll():
            if failed_at is None and any(self.codes.values()):
                failed_at = time.monotonic()
            if time.monotonic() > deadline or (failed_at and time.monotonic() > failed_at + 5):
                self.kill(signal.SIGKILL)  # as torchrun does with the ranks that are left
            time.sleep(0.005)
        texts = [[log.read_text() for log in pair] for pair in self.logs]
        return Ended([self.codes[pid] for pid in self.pids], [t[0] for t in texts], [t[1] for t in texts], self.folder)

    def wait_for(self, text: str, seconds: float = 60) -> None:
        """Until the first rank has written a text."""
        deadline = time.monotonic() + seconds
        while text not in self.logs[0][0].read_text():
            if not self.poll() or time.monotonic() > deadline:
                raise AssertionError(f"{text!r} did not come:\n" + "\n".join(log.read_text() for log in self.logs[0]))
            time.sleep(0.005)


def fork(function: Callable[[], int], folder: Path, environ: Mapping[str, str], out: Path, err: Path) -> int:
    out.write_text("")
    err.write_text("")
    pid = os.fork()
    if pid:
        return pid
    code = 70
    try:
        os.chdir(folder)
        os.environ.update(environ)
        for number, file in ((1, out), (2, err)):
            os.dup2(os.open(file, os.O_WRONLY | os.O_APPEND), number)
        sys.stdout, sys.stderr = os.fdopen(1, "w", closefd=False), os.fdopen(2, "w", closefd=False)
        code = function()
    except SystemExit as end:
        code = int(end.code or 0)
    except BaseException:
        traceback.print_exc()
    finally:
        try:
            sys.stdout.flush()
            sys.stderr.flush()
        finally:
            os._exit(code)  # whatever happens: this process must not go on with the tests


def start(folder: Path, *arguments: str, world: int = 1, **environ: str) -> Ranks:
    folder.mkdir(parents=True, exist_ok=True)
    return Ranks(arguments, world, folder, environ)


def run(folder: Path, *arguments: str, world: int = 1, seconds: float = 120, **environ: str) -> Ended:
    return start(folder, *arguments, world=world, **environ).wait(seconds)


def overrides(**keys: object) -> list[str]:
    """Arguments for the keys that tests change most, by their last name."""
    return [f"{PATHS.get(key, key)}={value}" for key, value in keys.items()]


PATHS = {
    "device": "Global.device",
    "seed": "Global.seed",
    "global_batch": "Global.global_batch_size",
    "micro_batch": "Global.micro_batch_size",
    "max_steps": "Engine.max_steps",
    "logging_freq": "Engine.logging_freq",
    "eval_freq": "Engine.eval_freq",
    "eval_iters": "Engine.eval_iters",
    "test_iters": "Engine.test_iters",
    "save_steps": "Engine.save_load.save_steps",
    "keep_last": "Engine.save_load.keep_last",
    "output_dir": "Engine.save_load.output_dir",
    "ckpt_dir": "Engine.save_load.ckpt_dir",
    "layers": "Model.num_layers",
    "hidden": "Model.hidden_size",
    "heads": "Model.num_attention_heads",
    "vocab": "Model.vocab_size",
    "dropout": "Model.hidden_dropout_prob",
    "attention_dropout": "Model.attention_probs_dropout_prob",
    "seq_len": "Data.Train.dataset.max_seq_len",
    "dataset": "Data.Train.dataset.name",
    "path": "Data.Train.dataset.path",
    "input_dir": "Data.Train.dataset.input_dir",
    "samples": "Generation.num_return_sequences",
    "max_lr": "Optimizer.lr.max_lr",
    "decay_steps": "Optimizer.lr.decay_steps",
}

# A model small enough for a hundred runs: 2 layers, 32 wide, 16 tokens.
TINY = {
    "device": "cpu",
    "Model.name": "GPT",
    "layers": 2,
    "hidden": 32,
    "heads": 2,
    "seq_len": 16,
    "dropout": 0.0,
    "attention_dropout": 0.0,
    "max_lr": 1e-3,
    "decay_steps": 100,
    "dataset": "CharDataset",
    "path": "builtin",
    "global_batch": 8,
    "micro_batch": 4,
    "max_steps": 10,
    "eval_freq": 0,
    "eval_iters": 0,
    "save_steps": 0,
    "samples": 0,
}


def tiny(**changes: object) -> list[str]:
    return overrides(**{**TINY, **changes})


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
