"""Compiled layers. The oracle is the same run without `Engine.compile`, to the same 5e-6.

Most tests trace layers without making machine code of them (`aot_eager`): what can go wrong with a layout is seen there,
in a tenth of the time. Those with inductor, torch's real backend, take minutes.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.distributed.layouts import ALONE, Case
from tests.ranks import Ranks, tiny
from trainer import compiling
from trainer.__main__ import main

STEPS = {"max_steps": 2, "eval_freq": 2, "eval_iters": 1, "test_iters": 0, "layers": 2, "global_batch": 8}
DROPOUT = {"dropout": 0.1, "attention_dropout": 0.1}
HALF = {"Engine.mix_precision.enable": True, "Engine.mix_precision.dtype": "bfloat16"}
RECOMPUTE = "Model.recompute_granularity"


def tracing_main(arguments: Sequence[str]) -> int:
    """The trainer, which traces layers but runs torch's own kernels. Fails if nothing was traced."""
    from torch._dynamo.utils import counters

    compiling.BACKEND = "aot_eager"
    code = main(arguments)
    if "Engine.compile=true" in arguments:
        assert counters["frames"]["ok"] > 0
        Path("graphs").write_text(str(counters["stats"]["unique_graphs"]))
    return code


def losses(folder: Path, case: Case, compile: bool, entry: object = tracing_main, **more: object) -> list[float]:
    folder.mkdir()
    keys = {**case.keys(), **STEPS, **more, "Engine.compile": str(compile).lower()}
    keys["micro_batch"] = 8 // case.layout.data_ranks // case.micro_batches
    ended = Ranks(tiny(**keys), case.world, folder, {}, entry).wait(500)  # type: ignore[arg-type]
    assert ended.ok, ended.text
    assert ("compiled with torch.compile" in ended.out[0]) == compile
    return [*ended.metrics(), *ended.metrics("grad_norm"), *ended.metrics("valid_loss")]


def assert_same(
    folder: Path, case: Case, entry: object = tracing_main, tolerance: float = 5e-6, **more: object
) -> None:
    eager = losses(folder / "eager", case, False, entry, **more)
    compiled = losses(folder / "compiled", case, True, entry, **more)
    assert max(abs(a / b - 1) for a, b in zip(compiled, eager)) <= tolerance


def test_traced_layers_with_dropout(tmp_path: Path) -> None:
    """Compiled layers drop the same elements, or losses would differ by more than 1e-3."""
    assert_same(tmp_path, ALONE, **DROPOUT)


CASES = {
    "mp": (Case(mp=2), DROPOUT),
    "sequence": (Case(mp=2, sequence=True), {**HALF, **DROPOUT}),
    "full": (Case(sharding=2, stage=3), {"Model.use_recompute": True, **DROPOUT}),
    "full_attn": (Case(mp=2), {"Model.use_recompute": True, RECOMPUTE: "full_attn", **DROPOUT}),
    "core_attn": (ALONE, {"Model.use_recompute": True, RECOMPUTE: "core_attn", **DROPOUT}),
    "pp": (Case(pp=2), DROPOUT),
    "dp": (Case(dp=2), {}),
}


@pytest.mark.long
@pytest.mark.parametrize("name", CASES)
def test_traced_layers_in_a_layout(tmp_path: Path, name: str) -> None:
    """With sharding, recomputation, autocast and pipelines."""
    case, more = CASES[name]
    assert_same(tmp_path, case, tolerance=2e-3 if "Engine.mix_precision.enable" in more else 5e-6, **more)


@pytest.mark.long
@pytest.mark.parametrize("name", ["mp", "sequence", "full_attn"])
def test_one_graph_serves_all_layers(tmp_path: Path, name: str) -> None:
    """Six layers need no more graphs than two. Otherwise torch gives up at the ninth layer, and compiles no further."""
    case, more = CASES[name]
    graphs = []
    for layers in (2, 6):
        losses(tmp_path / str(layers), case, True, **{**more, "layers": layers})
        graphs.append(int((tmp_path / str(layers) / "graphs").read_text()))
    assert graphs[0] == graphs[1] > 0


@pytest.mark.long
@pytest.mark.parametrize(
    "case", [ALONE, Case(mp=2, sequence=True), Case(pp=2), Case(sharding=2, stage=3)], ids=lambda case: case.name
)
def test_compiled_layers(tmp_path: Path, case: Case) -> None:
    """With machine code of torch's compiler, dropout included."""
    assert_same(tmp_path, case, main, tolerance=2e-5, **DROPOUT)
