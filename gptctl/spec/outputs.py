"""The folder and the snapshot that a run writes to: two unfinished runs must not share them."""

from __future__ import annotations

from gptctl.spec.check import Checked
from trainer.errors import Finding, Rule

OWN_OUTPUT = Rule("W003", "runs must not write into the same folder or snapshot")

OUTPUTS = ("output_dir", "snapshot_path")


def shared_output(name: str, value: str, who: str, fix: str) -> Finding:
    """The finding for two runs that write to one place, in a sweep or not."""
    what = "write the same snapshot" if name == "snapshot_path" else "write into the same folder"
    hint = f"leave it empty: every job then has its own; or {fix}"
    return OWN_OUTPUT.found(f"Engine.save_load.{name}", value, f"{who} {what}", hint)


def output_of(name: str, checked: Checked) -> str:
    """The folder or snapshot that a run writes to, as written; empty: its own."""
    # A script of the user's own does not use these keys.
    if checked.launch.entrypoint != "trainer" or checked.resolved is None:
        return ""
    return getattr(checked.resolved.run.Engine.save_load, name) or ""
