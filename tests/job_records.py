"""Records and run folders of jobs that nobody ran, for tests of what works on many jobs."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from gptctl.engine.processes import this_process
from gptctl.jobs.store import JobRecord, Store

DAY = 86_400.0


def save_verified(output: Path, step: int, is_verified: bool = True) -> None:
    """A checkpoint whose only file was read back after it was written, or not yet."""
    folder = output / f"step_{step}"
    folder.mkdir(parents=True)
    names = ["manifest.json", "0.safetensors", *(["0.safetensors.verified"] if is_verified else [])]
    for name in names:
        (folder / name).write_text("{}")


def add_job(
    root: Path,
    name: str,
    state: str = "COMPLETED",
    days: float = 0.0,
    checkpoints: Mapping[int, bool] | Sequence[int] = (),
    loss: float | None = None,
    ran: float = 60.0,
    **facts: Any,
) -> JobRecord:
    """Record a job that was submitted so many days ago and ran for so many seconds; RUNNING: by this process. An empty
    `output_dir`: it is a script."""
    run = root / "runs" / name
    chosen = facts.pop("output_dir", run / "output")
    output = Path(chosen or run / "output")
    output.mkdir(parents=True, exist_ok=True)
    (run / "attempt-0").mkdir(parents=True)
    created = time.time() - days * DAY
    (run / ".token").write_text(f"token-{name}")
    (run / "attempt-0" / "ranks.0.jsonl").write_text(json.dumps({"event": "start", "rank": 0, "time": created}) + "\n")
    if state == "RUNNING":
        (run / "claim.json").write_text(json.dumps(this_process()))
    elif state != "UNKNOWN":
        (run / "result.json").write_text(json.dumps({"state": state, "reason": "", "ended": created + ran}))
    if loss is not None:
        rows = [{"step": step, "loss": loss, "step_time": 0.1, "job": name} for step in (1, 2)]
        (output / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    verified = checkpoints if isinstance(checkpoints, Mapping) else dict.fromkeys(checkpoints, True)
    for step, is_verified in verified.items():
        save_verified(output, step, is_verified)
    where = {"local_dir": str(run), "log_dir": str(run / "logs"), "output_dir": str(chosen)}
    size = {"nodes": 1, "per_node": 1, "world": 1}
    values = {"cluster": "local", "kind": "local", "handle": {"pid": 1}, **size, **where, **facts}
    record = JobRecord(name, "gpt", created, token=f"token-{name}", **values)
    store = Store(root / "home")
    assert store.add(record)
    store.accept(record)
    return record
