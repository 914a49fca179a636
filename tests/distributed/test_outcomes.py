"""The host starts steps without waiting for their numbers. Oracles: torch's own calls, counted; the run that reads at once.

Without a GPU, the delay with which a host reads the numbers of a GPU's step is forced on a CPU.
"""

from __future__ import annotations

import os
import re
import signal
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.distributed.layouts import ALONE, Case, cases
from tests.distributed.test_resume import assert_equal
from tests.ranks import Ended, Ranks, run, tiny
from trainer import train as loop
from trainer.__main__ import main
from trainer.checkpoint.manifest import read_manifest
from trainer.device import READ_LAG
from trainer.state import Training

FLOAT16 = {"Engine.mix_precision.enable": True, "Engine.mix_precision.scale_loss": 2.0**26}
FIRST, LAST = 3, 8  # the steps that are watched, between two logged ones


class HostReads(TorchDispatchMode):
    """Counts values that Python reads from tensors: item, float, int, bool and tolist."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __enter__(self) -> HostReads:
        self.tolist = torch.Tensor.tolist
        torch.Tensor.tolist = lambda tensor: [self._count("tolist"), self.tolist(tensor)][1]  # type: ignore
        return super().__enter__()  # type: ignore[no-any-return]

    def __exit__(self, *arguments: Any) -> None:
        torch.Tensor.tolist = self.tolist  # type: ignore[method-assign]
        super().__exit__(*arguments)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default:
            self._count("scalar")
        return func(*args, **(kwargs or {}))

    def _count(self, name: str) -> None:
        self.counts[name] += 1


def watching_main(arguments: Sequence[str]) -> int:
    compute_gradients, reads = loop.compute_gradients, HostReads()

    def watched(t: Training, *rest: Any) -> Any:
        if t.progress.step + 1 == FIRST:
            reads.__enter__()
        if t.progress.step + 1 == LAST:
            reads.__exit__(None, None, None)
            Path(f"reads.{t.mesh.rank}").write_text(repr(dict(reads.counts)))
        return compute_gradients(t, *rest)

    loop.compute_gradients = watched
    return main(arguments)


@pytest.mark.parametrize(
    "case", cases([ALONE, Case(dp=2), Case(sharding=2, stage=3), Case(mp=2, sequence=True), Case(pp=2)])
)
def test_the_host_reads_one_summary_per_step_and_nothing_else(
    tmp_path: Path, case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In float16, where the loss scale could be one more thing to wait for; the scale overflows in some of the steps."""
    monkeypatch.setitem(READ_LAG, "cpu", 1)
    keys = {**case.keys(accumulate=2), **FLOAT16, "max_steps": 10, "logging_freq": 10}
    ended = Ranks(tiny(**keys), case.world, tmp_path, {}, watching_main).wait(300)
    assert ended.ok, ended.text
    for rank in range(case.world):
        assert (tmp_path / f"reads.{rank}").read_text() == repr({"tolist": LAST - FIRST})


def facts_of(folder: Path) -> list[Any]:
    facts = read_manifest(folder)
    return [facts[key] for key in ("step", "updates", "samples", "scaler")]


def skipped(ended: Ended) -> list[str]:
    return re.findall(r"global step \d+: the gradient norm is .*", ended.out[0])


@pytest.mark.parametrize(("case", "more"), [(ALONE, FLOAT16), (Case(pp=2), {}), (Case(sharding=2), FLOAT16)])
def test_reading_later_changes_nothing(
    tmp_path: Path, case: Case, more: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Losses, skipped updates, loss scale, learning rate, evaluations and checkpoints, bit for bit."""
    keys = {**case.keys(), **more, "max_steps": 13, "save_steps": 3, "logging_freq": 4, "eval_freq": 5, "eval_iters": 1}
    runs = []
    for lag in (0, 1):
        monkeypatch.setitem(READ_LAG, "cpu", lag)
        runs.append(run(tmp_path / str(lag), *tiny(**keys), world=case.world))
        assert runs[-1].ok, runs[-1].text
    at_once, later = runs
    for name in ("step", "loss", "grad_norm", "lr", "loss_scale", "valid_loss"):
        assert later.metrics(name) == at_once.metrics(name), name
    assert skipped(later) == skipped(at_once)
    assert bool(skipped(later)) == bool(more)
    for step in (3, 6, 9, 12, 13):
        here, there = (ended.folder / f"output/step_{step}" for ended in runs)
        assert facts_of(here) == facts_of(there)
        assert_equal(here, there)


def stopped_in_step_four(arguments: Sequence[str]) -> int:
    """The last rank gets a signal."""
    compute_gradients = loop.compute_gradients

    def signalled(t: Training, *rest: Any) -> Any:
        if t.progress.step + 1 == 4 and t.mesh.rank == t.mesh.world - 1:
            os.kill(os.getpid(), signal.SIGTERM)
        return compute_gradients(t, *rest)

    loop.compute_gradients = signalled
    return main(arguments)


@pytest.mark.parametrize("lag", [0, 1])
def test_all_ranks_stop_at_the_same_step(tmp_path: Path, lag: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the step that was under way when the request was read. Resumed, the run is the one that never stopped."""
    monkeypatch.setitem(READ_LAG, "cpu", lag)
    keys = {"max_steps": 10, "logging_freq": 10}
    whole = run(tmp_path / "whole", *tiny(**keys), world=2)
    (tmp_path / "part").mkdir()
    part = Ranks(tiny(**keys), 2, tmp_path / "part", {}, stopped_in_step_four).wait()
    assert part.ok, part.text
    assert part.status()["state"] == "stopped"
    assert part.status()["step"] == 4 + lag
    assert facts_of(part.folder / f"output/step_{4 + lag}")[:3] == [4 + lag, 4 + lag, 8 * (4 + lag)]
    rest = run(tmp_path / "part", *tiny(ckpt_dir="auto", **keys), world=2)
    assert rest.ok, rest.text
    assert_equal(rest.folder / "output/step_10", whole.folder / "output/step_10")


def never_finite(arguments: Sequence[str]) -> int:
    compute_gradients = loop.compute_gradients

    def broken(t: Training, *rest: Any) -> Any:
        summary, own_loss = compute_gradients(t, *rest)
        summary[1] = torch.nan
        return summary, own_loss

    loop.compute_gradients = broken
    return main(arguments)


def test_a_run_without_progress_gives_up_when_it_has_read_that(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(READ_LAG, "cpu", 1)
    monkeypatch.setattr(loop, "MAX_SKIPPED", 3)
    ended = Ranks(tiny(logging_freq=10), 1, tmp_path, {}, never_finite).wait()
    assert ended.codes == [93]
    assert len(skipped(ended)) == 3
    assert "error: no progress: 3 updates in a row had no finite gradient" in ended.err[0]


def own_losses(folder: Path, entry: Callable[[Sequence[str]], int] = main) -> list[str]:
    folder.mkdir()
    (folder / "text").write_text("".join(map(chr, range(97, 123))) * 40)
    keys = {"Engine.log_style": "mingpt", "max_steps": 9, "logging_freq": 4, "path": folder / "text"}
    ended = Ranks(tiny(**keys), 1, folder, {}, entry).wait()
    assert ended.ok, ended.text
    return ended.out[0].splitlines()


def test_lines_in_the_style_of_mingpt_are_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop, "MINGPT_FREQ", 2)
    at_once = own_losses(tmp_path / "0")
    monkeypatch.setitem(READ_LAG, "cpu", 1)
    assert own_losses(tmp_path / "1") == at_once
    assert sum("Train Loss" in line for line in at_once) == 5
