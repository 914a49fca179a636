"""What a pipeline stage allocates at most in an update. Oracle: torch's own record of every allocation."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest
from torch.profiler import profile

from tests.ranks import Ranks, tiny
from trainer import train as loop
from trainer.__main__ import main

HIDDEN = 2 * 32 * 64 * 4  # bytes of a message: samples x tokens x hidden x fp32


def peak_main(arguments: Sequence[str]) -> int:
    """The trainer, whose first update is watched, in which torch's stages allocate their buffers."""
    compute_gradients = loop.compute_gradients

    def watched(t: Any, *rest: Any) -> Any:
        if t.progress.step:
            return compute_gradients(t, *rest)
        with profile(profile_memory=True) as profiled:
            result = compute_gradients(t, *rest)
        events = profiled.profiler.kineto_results.events()
        changes = sorted((event.start_ns(), event.nbytes()) for event in events if event.name() == "[memory]")
        Path(f"peak.{t.mesh.rank}").write_text(str(max(accumulate(size for _, size in changes))))
        return result

    loop.compute_gradients = watched
    return main(arguments)


def peaks(folder: Path, micro_batches: int, **keys: Any) -> list[int]:
    """Of both ranks."""
    folder.mkdir()
    keys = {
        "layers": 4, "heads": 4, "hidden": 64, "seq_len": 32, "micro_batch": 2,
        "global_batch": 2 * micro_batches, "max_steps": 1, "Distributed.pp_degree": 2, **keys,
    }  # fmt: skip
    ended = Ranks(tiny(**keys), 2, folder, {}, peak_main).wait(120)
    assert ended.ok, ended.text
    return [int((folder / f"peak.{rank}").read_text()) for rank in range(2)]


@pytest.mark.parametrize(("virtual", "filled"), [(1, 4), (2, 8)])
def test_memory_does_not_grow_with_micro_batches(tmp_path: Path, virtual: int, filled: int) -> None:
    """By less than one message from as many micro-batches as fill the schedule to 64; torch's stage keeps the buffers of all
    of them."""
    few, many = (
        peaks(tmp_path / str(count), count, **{"Model.virtual_pp_degree": virtual, "Model.use_recompute": True})
        for count in (filled, 64)
    )
    assert all(after - before < HIDDEN for before, after in zip(few, many))
