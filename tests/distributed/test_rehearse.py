"""Rehearsals of one rank. Oracles: torch's own record of allocations, what real ranks send, and arithmetic."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.distributed.layouts import ALONE, FEW, LARGEST, LAYOUTS, MORE_FEW, Case, cases
from tests.distributed.measured import train
from tests.distributed.rehearsed import LEVELS, allocated, computed, resolved
from trainer import rehearse as module
from trainer.config import Override, load
from trainer.estimate import GB, flops_per_token
from trainer.layout import Machines
from trainer.memory import peak_memory
from trainer.rank_plan import BACKWARD, FORWARD, UPDATE
from trainer.rehearse import rehearse

SIZES = {"hidden": 128, "heads": 8, "seq_len": 32}
MEASURED = [ALONE, Case(sharding=2, stage=3), Case(mp=2), Case(pp=2)]
MORE = [Case(dp=2), Case(sharding=2, stage=1), Case(mp=2, sequence=True), Case(sharding=2, pp=2, stage=3)]


def assert_as_allocated(case: Case, level: str = "fp32", tolerance: float = 0.01, **keys: object) -> None:
    """In every phase, on the first and the last rank."""
    for rank in {0, case.world - 1}:
        known = resolved(case, 2, **{**SIZES, **LEVELS[level], **keys})
        found, expected = rehearse(known.run, known.layout, rank).peaks, allocated(known, rank)
        for phase in (FORWARD, BACKWARD, UPDATE):
            assert found[phase].total == pytest.approx(expected[phase], rel=tolerance), (rank, phase)


@pytest.mark.parametrize("case", cases(MEASURED))
def test_bytes_are_those_that_torch_allocates(case: Case) -> None:
    """The same update with real tensors. Not counted: what gloo holds, and copies inside of kernels."""
    assert_as_allocated(case)


@pytest.mark.long
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("case", cases([*MEASURED, *MORE]))
def test_bytes_in_half_precision(case: Case, level: str) -> None:
    """torch's CPU kernels for bfloat16 may allocate a buffer of their own, which nobody else sees."""
    assert_as_allocated(case, level, 0.02)


@pytest.mark.long
@pytest.mark.parametrize("case", cases([*MEASURED, *MORE]))
def test_bytes_with_a_large_vocabulary_and_dropout(case: Case) -> None:
    assert_as_allocated(case, vocab=32768, dropout=0.1, attention_dropout=0.1)


@pytest.mark.parametrize("case", cases([Case(sharding=2, stage=3), Case(mp=2)]))
def test_collectives_are_those_of_a_run(tmp_path: Path, case: Case) -> None:
    """Real ranks, each of which counts what it sends."""
    trained = train(tmp_path, case, max_steps=4, eval_freq=0, test_iters=0)
    known = resolved(case)
    for rank, sent in enumerate(trained.sent):
        assert rehearse(known.run, known.layout, rank).calls == sent.counted


@pytest.mark.long
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("case", cases([*LAYOUTS, *FEW, *MORE_FEW, LARGEST]))
def test_collectives_of_every_layout(case: Case, level: str) -> None:
    """Against the table, which is compared with real ranks in `test_layouts.py` and `test_collectives.py`."""
    known = resolved(case, **LEVELS[level])
    for rank in {0, case.world - 1}:
        rehearsal = rehearse(known.run, known.layout, rank)
        assert rehearsal.calls == computed(rehearsal, known, rank)


def test_flops_are_those_of_the_formula() -> None:
    """All ranks together, apart from biases and norms, which are no products. The padded vocabulary counts."""
    known = resolved(ALONE, vocab=128, hidden=256)
    tokens = 16 * 16
    flops = rehearse(known.run, known.layout, 0).flops
    assert flops == pytest.approx(tokens * flops_per_token(known.run), rel=0.01)
    halves = resolved(Case(mp=2), vocab=128, hidden=256)
    assert rehearse(halves.run, halves.layout, 0).flops == pytest.approx(flops / 2, rel=0.01)


@pytest.mark.long
def test_many_micro_batches_are_rehearsed_with_few(monkeypatch: pytest.MonkeyPatch) -> None:
    """The result says with how many. All of them have the same peak, apart from their tokens."""
    for case, expected in ((ALONE, 3), (Case(pp=2), 4), (Case(pp=2, virtual=2), 4)):
        known = resolved(case, global_batch=16, micro_batch=1)
        few = rehearse(known.run, known.layout, 0)
        with monkeypatch.context() as patch:
            patch.setattr(module, "rehearsed_config", lambda run, _: run)
            many = rehearse(known.run, known.layout, 0)
        assert (few.micro_batches, many.micro_batches) == (expected, 16)
        assert few.peak.total == pytest.approx(many.peak.total, rel=0.01)


HALF = ["Engine.mix_precision.enable=True", "Engine.mix_precision.level=O2", "Model.use_recompute=True"]
LARGE = {
    "6.7B": (Machines(2, 8), (0, 5, 15), ["micro_batch_size=8", "sharding_degree=16", "sharding_stage=3"]),
    "175B": (
        Machines(128, 8),
        (0, 77, 1023),
        ["local_batch_size=1536", "micro_batch_size=1", "mp_degree=8", "pp_degree=16"],
    ),
}


@pytest.mark.long
@pytest.mark.parametrize("name", LARGE)
def test_ranks_of_large_jobs(name: str) -> None:
    """The first, one in the middle and the last of 16 and of 1,024 ranks; the table of docs/parallelism.md.

    Their peaks fit on the GPUs of 40 GB that FleetX used. With torch's own buffers, 175B would need about 72 GiB.
    """
    machines, ranks, keys = LARGE[name]
    texts = [f"Model.name={name}", *HALF, *keys]
    known = load(None, [Override.parse(text) for text in texts], machines)
    print(f"\n{name} {known.layout}")
    for rank in ranks:
        rehearsal = rehearse(known.run, known.layout, rank)
        assert rehearsal.calls == computed(rehearsal, known, rank)
        estimated = peak_memory(known.run, known.layout, rank)
        assert estimated.total == pytest.approx(rehearsal.peak.total, rel=0.02)
        assert rehearsal.peak.total < 40 * GB
        gib = {kind: f"{size / 2**30:.2f}" for kind, size in rehearsal.peak.kinds.items()}
        print(f"rank {rank}, {rehearsal.micro_batches} micro-batches, {rehearsal.seconds:.0f} s:", end=" ")
        print(f"{rehearsal.peak.total / 2**30:.2f} GiB in the {rehearsal.peak.phase} pass {gib}", end=", ")
        print(f"{rehearsal.calls.total():,} collectives, {rehearsal.flops:.4g} FLOP")
