"""Two labs for all tests of this folder, each started by the first test that asks for it."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.lab import Lab, missing
from tests.lab.machines import USERS


@pytest.fixture(scope="session")
def possible() -> None:
    if lacking := missing():
        pytest.skip(lacking)


@pytest.fixture(scope="session")
def lab(possible: None) -> Iterator[Lab]:
    with Lab(nodes=4) as lab:
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


@pytest.fixture
def for_others() -> None:
    """For tests with an ordinary user, who must come to the interpreter."""
    open_ones = {Path(home) for home in USERS.values()}  # covered in the lab
    above = [place for place in Path(sys.prefix).parents if place not in open_ones]
    closed = [place for place in above if not place.stat().st_mode & 0o001]
    if closed:
        pytest.skip(f"{closed[0]} is closed to other users")
