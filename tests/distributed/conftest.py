"""Every layout is trained once, and looked at by several tests."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import pytest

from tests.distributed.layouts import Case
from tests.distributed.measured import Trained, train

Train = Callable[..., Trained]


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Train:
    @cache
    def once(case: Case, accumulate: int = 1, recompute: bool = False) -> Trained:
        return train(tmp_path_factory.mktemp(case.name), case, accumulate, recompute)

    return once
