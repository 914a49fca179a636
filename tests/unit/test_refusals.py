"""Options that contradict each other or the cluster. Oracles: the message, the hint and the exit code of wrong usage."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from gptctl.cli.dependencies import unmet
from gptctl.cli.submit import refuse_contradiction, refuse_waiting
from gptctl.spec.cluster import load_profile
from trainer.errors import WRONG_USAGE, UserError

LOCAL: Any = SimpleNamespace(cluster=load_profile("local").cluster)
NO_SESSION: Any = None


@pytest.mark.parametrize(
    ("refuse", "message", "hint"),
    [
        (lambda: unmet(["gpt-1:maybe"], NO_SESSION), "--after gpt-1:maybe: unknown condition maybe", "gpt-1:fail"),
        (lambda: refuse_waiting(LOCAL, ["gpt-1"]), "a printed script for local cannot wait", "use gptctl submit"),
        (lambda: refuse_contradiction(True, False, True), "--dry-run cannot be combined with", "omit one of them"),
    ],
)
def test_refused(refuse: Callable[[], object], message: str, hint: str) -> None:
    with pytest.raises(UserError) as caught:
        refuse()
    assert message in caught.value.message
    assert hint in caught.value.hint
    assert caught.value.exit_code == WRONG_USAGE
