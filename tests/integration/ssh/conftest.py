"""One lab for all tests of this folder: ssh1 and ssh2, and private1, which only a bastion leads to."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.integration.ssh.desk import HOSTS, Desk
from tests.lab import Lab, missing


@pytest.fixture(scope="session")
def lab() -> Iterator[Lab]:
    if lacking := missing():
        pytest.skip(lacking)
    with Lab(nodes=0, ssh=2) as lab:
        yield lab


@pytest.fixture
def desk(lab: Lab) -> Iterator[Desk]:
    """After the test every host runs and is reached again, and nothing of any job is left there."""
    yield Desk(lab)
    for host in (*HOSTS, "bastion"):
        if host in lab.machines.crashed:
            lab.restart(host)
        lab.restore(host)
        lab.run(host, "pkill", "-9", "-u", "gpt", check=False)
