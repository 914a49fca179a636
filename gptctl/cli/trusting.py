"""What verbs say about files that decide what runs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gptctl.spec.trust import Source


def show_doubts(sources: Sequence[Source], trust: bool) -> None:
    """Say in a dry run what a submit would refuse, or would trust from then on."""
    from gptctl.cli import ui
    from gptctl.spec.trust import doubts

    advice = "a submit with --trust trusts it" if trust else "to submit it, add --trust"
    for doubt in doubts(sources):
        ui.say(f"note: {doubt}: {advice}")


def announce_files(sources: Sequence[Source]) -> None:
    """Name the profiles and templates that are neither bundled nor in the user's config folder."""
    from gptctl.cli import ui
    from gptctl.spec.trust import announced

    for line in announced(sources):
        ui.say(line)
