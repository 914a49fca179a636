"""The device of a rank. Oracle: torch's own setting; the calls that need a GPU are replaced."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from trainer.config import Override, load
from trainer.device import choose_device


@pytest.fixture
def _one_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    before = torch.get_float32_matmul_precision()
    yield
    torch.set_float32_matmul_precision(before)


@pytest.mark.usefixtures("_one_gpu")
@pytest.mark.parametrize("before", ["high", "highest"])
@pytest.mark.parametrize(("tf32", "expected"), [(True, "high"), (False, "highest")])
def test_tf32_is_on_only_if_it_is_asked_for(before: str, tf32: bool, expected: str) -> None:
    """Whatever torch's default is: the environment can change it."""
    torch.set_float32_matmul_precision(before)
    run = load(None, [Override.parse("Global.device=gpu"), Override.parse(f"Engine.tf32={tf32}")]).run
    assert choose_device(run, 0) == torch.device("cuda", 0)
    assert torch.get_float32_matmul_precision() == expected
