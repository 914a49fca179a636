"""How the configs of two jobs differ, and which of the differences change the training.

For reruns and resumed jobs, which report these, and for `gptctl diff`, which also shows others.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from gptctl.engine.file_reading import read_json
from gptctl.jobs.store import JobRecord
from gptctl.spec.check import Checked
from gptctl.text import count
from trainer.named_tuple import NamedTuple

# Differences in these keys are not reported: they change where files go and what is printed.
NOT_REPORTED = (
    "Launch.",
    "Engine.save_load.",
    "Engine.logging_freq",
    "Engine.trackers",
    "Profiler.",
    "Offline_Eval.",
)
REPORTED = ("Launch.args",)  # all that a script has instead of a config


class Difference(NamedTuple):
    """A value of the run that is not the one of the job that it resumes."""

    key: str
    before: Any
    now: Any

    def __str__(self) -> str:
        return f"{self.key}: {_shown(self.before)} → {_shown(self.now)}"


def _shown(value: Any) -> str:
    return "(empty)" if value is None else str(value)


def differences(record: JobRecord, checked: Checked, now: Mapping[str, Any]) -> list[Difference]:
    """Compare the frozen configs of two jobs; the differences that change the training."""
    machines, found = checked.machines, []
    # Nodes and ranks per node together: people think of the number of ranks.
    if (record.nodes, record.per_node) != machines:
        before = world_text(record.nodes, record.per_node)
        found.append(Difference("world", before, world_text(machines.nodes, machines.per_node)))
    before_values, now_values = dict(_flat(resolved_config(record), "")), dict(_flat(now, ""))
    found += [
        Difference(key, before_values[key], value)
        for key, value in now_values.items()
        # Keys that the older version of gptctl did not have cannot be compared.
        if key in before_values and before_values[key] != value and affects_training(key)
    ]
    return [*found, *_secret_differences(resolved_config(record), now)]


def _secret_differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[Difference]:
    """Secrets that are read from elsewhere, or added, or gone: one may be the key of checkpoints.

    By their references: gptctl never reads the values.
    """
    old, new = _secrets(before), _secrets(now)
    # Without the job's config nothing can be compared.
    for name in dict.fromkeys([*old, *new]) if "Launch" in before else ():
        if old.get(name) != new.get(name):
            shown = [secret_reference(values.get(name)) for values in (old, new)]
            yield Difference(f"Launch.secrets.{name}", *shown)


def _secrets(resolved: Mapping[str, Any]) -> Mapping[str, Any]:
    launch = resolved.get("Launch")
    found = launch.get("secrets") if isinstance(launch, Mapping) else None
    return found if isinstance(found, Mapping) else {}


def secret_reference(source: Any) -> str:
    if not isinstance(source, Mapping):
        return "none"
    # Only these two keys: the file of the other job may contain anything.
    return "".join(f"{{{key}: {source[key]}}}" for key in ("file", "env") if key in source)


def affects_training(key: str) -> bool:
    """Whether a difference in this key changes what is trained, or how fast."""
    return key in REPORTED or not key.startswith(NOT_REPORTED)


def world_text(nodes: int, per_node: int) -> str:
    return f"{count(nodes * per_node, 'rank')} ({nodes} × {per_node})"


def _flat(values: Mapping[str, Any], path: str) -> Iterator[tuple[str, Any]]:
    for name, value in values.items():
        full = f"{path}.{name}" if path else name
        if isinstance(value, Mapping):
            yield from _flat(value, full)
        else:
            # Tuples of this process are lists in the file of the other job.
            yield full, list(value) if isinstance(value, tuple) else value


def resolved_config(record: JobRecord) -> Mapping[str, Any]:
    """The resolved config of a job; empty if its file is missing or damaged."""
    values = (read_json(record.run_folder / "config.json") or {}).get("resolved")
    return values if isinstance(values, dict) else {}
