"""The progress of a job as text, for `gptctl list` and `gptctl status`. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gptctl.engine.file_reading import is_time
from gptctl.text import clock_time, duration

LARGE = 1e9
Facts = Mapping[str, Any]  # a row of `gptctl list --json`


def list_cells(facts: Facts) -> dict[str, str]:
    """The columns of `gptctl list` that tell how far a job is; empty where nothing is known."""
    progress = facts["progress"] or {}
    percent, left = progress.get("percent"), progress.get("seconds_left")
    return {
        "done": "" if percent is None else f"{percent}%",
        "step": _step(progress, "/"),
        "loss": _number(progress.get("loss"), ".4f"),
        "tokens/s": _number(progress.get("tokens_per_second"), ",.0f"),
        "time": "" if facts["duration"] is None else duration(facts["duration"]),
        "left": "" if left is None else duration(left),
    }


def state_text(facts: Facts) -> str:
    """The state of a job; while nobody tells it, the last known one with its age."""
    if facts["last_state"] is None:
        return str(facts["state"])
    return f"{facts['last_state']} ({age_text(facts['age'])} ago)"


def age_text(seconds: float) -> str:
    """Format an age in its largest unit: `40 s`, `12 min`, `3 h`, `2 d`."""
    for size, unit in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= size:
            return f"{seconds / size:,.0f} {unit}"
    return f"{seconds:.0f} s"


def status_pairs(facts: Facts, now: float) -> list[tuple[str, str]]:
    """The lines of `gptctl status` that tell how far a job is."""
    from gptctl.jobs.job_phase import phase_text

    progress, cells = facts["progress"] or {}, list_cells(facts)
    done = f" ({cells['done']})" if cells["done"] else ""
    valid = _number(progress.get("valid_loss"), ".4f")
    left = progress.get("seconds_left")
    # A training of a million years has no date.
    until = f", about {clock_time(now + left)}" if left is not None and is_time(now + left) else ""
    phase = facts.get("phase")
    return [
        ("phase", phase_text(phase, age_text(phase["seconds"])) if phase else ""),
        ("step", f"{_step(progress, ' of ')}{done}"),
        ("loss", ", valid ".join(text for text in (cells["loss"], valid) if text)),
        ("speed", f"{cells['tokens/s']} tokens/s" if cells["tokens/s"] else ""),
        ("duration", cells["time"]),
        ("left", f"{cells['left']}{until}"),
    ]


def _step(progress: Facts, between: str) -> str:
    if not progress:
        return ""
    total = progress["total"]
    return f"{progress['step']:,}" + (f"{between}{total:,}" if total else "")


def _number(value: float | None, form: str) -> str:
    if value is None:
        return ""
    # A diverging loss can have any number of digits.
    return format(value, form if abs(value) < LARGE else ".3g")
