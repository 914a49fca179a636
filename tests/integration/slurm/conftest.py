"""Two labs for all tests of this folder, each started by the first test that asks for it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.lab import Lab, missing


@pytest.fixture(scope="session")
def possible() -> None:
    if lacking := missing():
        pytest.skip(lacking)


@pytest.fixture(scope="session")
def lab(possible: None) -> Iterator[Lab]:
    with Lab(nodes=4, laptop=True) as lab:
        yield lab


@pytest.fixture(scope="session")
def lab_with_accounting(possible: None) -> Iterator[Lab]:
    with Lab(nodes=2, accounting=True) as lab:
        yield lab


@pytest.fixture(autouse=True)
def _tidy(request: pytest.FixtureRequest) -> Iterator[None]:
    """Whatever a test did to a lab is undone, so that no test depends on another."""
    yield
    for name in ("lab", "lab_with_accounting"):
        if name in request.fixturenames:
            request.getfixturevalue(name).tidy()
