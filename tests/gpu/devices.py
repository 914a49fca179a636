"""What the tests on GPUs share: the devices to run on, and functions that run in forked processes.

The process of the tests never starts CUDA: a fork could not use it then. `cpu` runs the same test bodies over gloo, so that
they are known to work before the first GPU is there.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

import trainer.train
from tests.ranks import Ended, Ranks, fork, tiny
from trainer.__main__ import main
from trainer.mesh import Mesh

BOTH = [pytest.param("cpu", marks=pytest.mark.long), pytest.param("gpu", marks=pytest.mark.gpu)]


@cache
def num_gpus() -> int:
    """Counted by another process: without NVML, counting starts CUDA."""
    if not any(Path("/dev").glob("nvidia[0-9]*")) and not Path("/dev/dxg").exists():
        return 0
    program = "import torch; print(torch.cuda.device_count())"
    answer = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    return int(answer.stdout.strip() or 0)


def need(device: str, world: int = 1) -> None:
    if device == "gpu" and num_gpus() < world:
        pytest.skip(f"needs {world} GPUs, torch sees {num_gpus()}")


def train(folder: Path, device: str, world: int = 1, patch: Callable[[], None] | None = None, **keys: Any) -> Ended:
    """Run the trainer; `patch` changes it in every rank before it starts."""
    ended = begin(folder, device, world, patch, **keys).wait(300)
    assert ended.ok, ended.text
    return ended


def begin(folder: Path, device: str, world: int = 1, patch: Callable[[], None] | None = None, **keys: Any) -> Ranks:
    need(device, world)
    folder.mkdir(parents=True, exist_ok=True)

    def entry(arguments: Sequence[str]) -> int:
        if patch:
            patch()
        return main(arguments)

    return Ranks(tiny(device=device, **keys), world, folder, {}, entry)


def in_fork(folder: Path, function: Callable[[torch.device], Any], device: str) -> Any:
    """The result of a function in a process of its own, as JSON."""
    need(device)

    def call() -> int:
        result = function(torch.device("cuda", 0) if device == "gpu" else torch.device("cpu"))
        (folder / "result.json").write_text(json.dumps(result))
        return 0

    pid = fork(call, folder, {}, folder / "out", folder / "err")
    _, status = os.waitpid(pid, 0)
    assert status == 0, (folder / "err").read_text()
    return json.loads((folder / "result.json").read_text())


def set_sync_mode(mode: str) -> None:
    """On a GPU, let torch raise an error wherever the host would wait for it."""
    if torch.cuda.is_available():
        torch.cuda.set_sync_debug_mode(mode)


def forbid_waiting(first: int, log: Path) -> None:
    """In this process: after `first` steps, the host may wait for its GPU only where it reads numbers. Each read is noted."""
    begin_step, finish = trainer.train.begin_step, trainer.train.finish
    originals = {name: getattr(Mesh, name) for name in ("read", "read_copy", "total")}

    def beginning(t: Any) -> None:
        begin_step(t)
        if t.progress.step >= first:
            note(log, f"step {t.progress.step + 1}")
            set_sync_mode("error")

    def allowed(name: str, is_counted: bool) -> Callable[..., Any]:
        def reading(*arguments: Any) -> Any:
            if is_counted:
                note(log, "read")
            set_sync_mode("default")
            try:
                return originals[name](*arguments)
            finally:
                set_sync_mode("error")

        return reading

    def adding(*arguments: Any) -> Any:
        """Numbers of the host, over gloo: this waits for other ranks, but for no GPU."""
        Mesh.read = originals["read"]  # type: ignore[method-assign]
        try:
            return allowed("total", is_counted=False)(*arguments)
        finally:
            Mesh.read = allowed("read", is_counted=True)  # type: ignore[method-assign]

    def finishing(*arguments: Any) -> None:
        """What happens after the last step may wait: saving, for example."""
        note(log, "end")
        for name, original in originals.items():
            setattr(Mesh, name, original)
        set_sync_mode("default")
        finish(*arguments)

    trainer.train.begin_step, trainer.train.finish, Mesh.total = beginning, finishing, adding  # type: ignore[method-assign]
    for name in ("read", "read_copy"):
        setattr(Mesh, name, allowed(name, is_counted=True))


def note(log: Path, text: str) -> None:
    with open(log, "a") as stream:
        stream.write(f"{text}\n")


def be_deterministic() -> None:
    """In this process: no kernel may add in another order the next time."""
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
    torch.use_deterministic_algorithms(True, warn_only=True)


def without_nvml() -> None:
    """In this process: NVML is not installed, so torch has to ask the driver."""
    torch.cuda._device_count_nvml = lambda: -1  # type: ignore[attr-defined]


ATTENTION = {
    "aten::_scaled_dot_product_flash_attention": "flash",
    "aten::_scaled_dot_product_flash_attention_for_cpu": "flash",
    "aten::_scaled_dot_product_efficient_attention": "efficient",
    "aten::_scaled_dot_product_cudnn_attention": "cudnn",
    "aten::_scaled_dot_product_attention_math": "math",
}


def attention_backends(device: torch.device, dtype: torch.dtype) -> list[str]:
    """Which implementations of attention ran in a forward and backward pass of a layer, by the names of their operations."""
    from torch.profiler import ProfilerActivity, profile

    from trainer.config import Override, load
    from trainer.layout import Machines
    from trainer.model import build_model

    keys = [Override.parse(word) for word in tiny(hidden=128, heads=2, seq_len=128, vocab=256, path="builtin")]
    run = load(None, keys, Machines(1, 1)).run
    model = build_model(run.Model, 1, device).to(dtype)
    tokens = torch.zeros((2, 128), dtype=torch.int64, device=device)
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device.type == "cuda" else [])]
    with profile(activities=activities) as trace:
        model(tokens, tokens, 1.0).backward()
    return sorted({ATTENTION[event.key] for event in trace.key_averages() if event.key in ATTENTION})


def traced(folder: Path, first: int, last: int) -> None:
    """In this process: writes a trace of some steps, to be opened in a browser."""
    from torch.profiler import profile

    begin_step, trace = trainer.train.begin_step, profile()

    def beginning(t: Any) -> None:
        if t.progress.step == first:
            trace.start()
        if t.progress.step == last:
            trace.stop()
            trace.export_chrome_trace(str(folder / f"trace.{t.mesh.rank}.json"))
        begin_step(t)

    trainer.train.begin_step = beginning
