"""The budgets of the design, as CI checks them. The oracle is the operating system's account of CPU time."""

from __future__ import annotations

from tests.bench import startup


def test_commands_start_within_their_budgets() -> None:
    medians = startup.measure()
    for name, (_, budget) in startup.COMMANDS.items():
        print(f"{name}: {medians[name]:.3f} CPU s")
        assert budget is None or medians[name] <= budget, f"{name} took {medians[name]:.3f} CPU s, budget {budget}"
