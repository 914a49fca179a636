"""The memory of an export: at most three times the largest tensor. Oracle: what the kernel counts for the process."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.bench.export import LIMIT, in_a_process, make_checkpoint

# Its largest tensor has 64 MiB, and all of them have 260 MiB: more than the limit.
SMALL = {"Model.vocab_size": 8192, "Model.num_layers": 4, "Model.hidden_size": 2048, "Model.num_attention_heads": 16}


@pytest.mark.long
@pytest.mark.parametrize(
    ("preset", "changes"),
    [("GPT", {**SMALL, "Model.ffn_hidden_size": 2048}), ("345M", {}), ("1.3B", {})],
)
def test_an_export_needs_little_memory(tmp_path: Path, preset: str, changes: dict[str, object]) -> None:
    largest = make_checkpoint(tmp_path / "step_0", preset, **changes)
    cost = in_a_process("ours", tmp_path / "step_0", tmp_path / "export")
    total = sum(file.stat().st_size for file in (tmp_path / "export").iterdir())
    assert total > 1.2 * LIMIT * largest  # otherwise this could not fail
    assert cost["peak"] <= LIMIT * largest
