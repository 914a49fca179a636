"""What a job looks like to a person and to a program: its state, its parts, where it meets, how its ranks ended."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gptctl.backends import Backends
from gptctl.engine.run_folder import FINAL, RunFolder, read_json, read_text
from gptctl.jobs.state import state_of
from gptctl.jobs.store import JobRecord
from gptctl.logs.failed import rank_runs
from gptctl.logs.local_files import LocalLogFiles
from gptctl.text import count


def rows(records: Sequence[JobRecord], backends: Backends) -> list[dict[str, Any]]:
    """Lines of `gptctl list`; each backend is asked once for all of its jobs."""
    unfinished = [record for record in records if not RunFolder(record.local_dir).result()]
    for kind in {record.kind for record in unfinished}:
        if backends.knows(kind):
            backends.of(kind).expect([record for record in unfinished if record.kind == kind])
    return [row(record, backends) for record in records]


def row(record: JobRecord, backends: Backends) -> dict[str, Any]:
    """A line of `gptctl list`."""
    state = state_of(record, backends)
    return {
        "job": record.id,
        "state": state.state,
        "reason": state.reason,
        "cluster": record.cluster,
        "nodes": record.nodes,
        "world_size": record.world,
        "scheduler_id": record.handle.get("scheduler_id"),
        "created": record.created,
        "run_dir": record.local_dir,
    }


def submitted(record: JobRecord, endpoint: str) -> dict[str, Any]:
    """What `gptctl submit` answers."""
    return {
        "job": record.id,
        "cluster": record.cluster,
        "nodes": record.nodes,
        "gpus_per_node": record.per_node,
        "world_size": record.world,
        "endpoint": endpoint,
        "scheduler_id": record.handle.get("scheduler_id"),
        "run_dir": record.local_dir,
        "log_dir": record.log_dir,
        "follow": f"gptctl logs {record.id} --follow",
    }


def status(record: JobRecord, backends: Backends) -> dict[str, Any]:
    """How a job stands, in full."""
    folder = RunFolder(record.local_dir)
    attempt = folder.attempts() - 1
    facts = row(record, backends)
    result = folder.result()
    is_complete = facts["state"] in FINAL and not folder.not_copied.exists()
    return {
        **facts,
        "gpus_per_node": record.per_node,
        "attempts": folder.attempts(),
        "hosts": read_text(folder.attempt(attempt) / "hosts").split(),
        "endpoint": folder.endpoint(),
        "ended": result.ended if result else None,
        "exit_codes": folder.exit_codes(attempt, range(record.nodes)) if attempt >= 0 else {},
        "ranks": rank_rows(record, attempt, is_complete) if attempt >= 0 else [],
        "not_ended": read_text(folder.not_ended).split(),
        "trainer": read_json(Path(record.output_dir) / "status.json")
        if record.output_dir
        else None,
        "log_dir": record.log_dir,
        "config": record.config,
    }


def rank_rows(record: JobRecord, attempt: int, is_over: bool) -> list[dict[str, Any]]:
    """How every rank of an attempt stands: its latest process. None outlives its job, though its end may be unknown."""
    runs = rank_runs(LocalLogFiles(Path(record.log_dir), record.run_folder).records(attempt))
    runs = [
        run._replace(was_killed=run.was_killed or (is_over and not run.is_over)) for run in runs
    ]
    latest = {run.rank: {**run._asdict(), "how": run.how} for run in runs}
    return list(latest.values())


def endings(ranks: list[dict[str, Any]]) -> str:
    """`3 running, 1 SIGKILL`"""
    counts = Counter(rank["how"] for rank in ranks)
    return ", ".join(f"{number} {how}" for how, number in counts.items())


def pairs(facts: dict[str, Any]) -> list[tuple[str, str]]:
    """`status` for a person; what is empty is left out."""
    reason = f": {facts['reason']}" if facts["reason"] else ""
    ended = f", ended {when(facts['ended'])}" if facts["ended"] else ""
    lines = [
        ("state", f"{facts['state']}{reason}"),
        (
            "world",
            f"{count(facts['world_size'], 'rank')}: {facts['nodes']} × {facts['gpus_per_node']} on {facts['cluster']}",
        ),
        ("scheduler", f"job {facts['scheduler_id']}" if facts["scheduler_id"] else ""),
        ("hosts", " ".join(facts["hosts"])),
        ("created", f"{when(facts['created'])}{ended}"),
        ("attempts", str(facts["attempts"])),
        ("endpoint", facts["endpoint"]),
        ("ranks", endings(facts["ranks"])),
        (
            "exit codes",
            ", ".join(f"node {node}: {code}" for node, code in facts["exit_codes"].items()),
        ),
        ("not ended", " ".join(facts["not_ended"])),
        ("trainer", (facts["trainer"] or {}).get("state", "")),
        ("folder", facts["run_dir"]),
        ("logs", facts["log_dir"]),
    ]
    return [(name, text) for name, text in lines if text]


def when(moment: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(moment))


def origins(record: JobRecord, prefix: str) -> list[tuple[str, Any, str]]:
    """Key, value and origin of everything in the frozen config below a prefix."""
    config = read_json(record.run_folder / "config.json") or {}
    found: list[tuple[str, Any, str]] = []

    def walk(values: dict[str, Any], path: str) -> None:
        for name, value in values.items():
            full = f"{path}.{name}" if path else name
            if isinstance(value, dict) and full not in config.get("origins", {}):
                walk(value, full)
            elif full.lower().startswith(prefix.lower()):
                found.append((full, value, config.get("origins", {}).get(full, "")))

    walk(config.get("resolved", {}), "")
    plan = read_json(record.run_folder / "plan.json") or {}
    for name, origin in plan.get("env_origins", {}).items():
        full = f"Launch.env.{name}"
        if full.lower().startswith(prefix.lower()):
            found.append((full, plan["env"][name], origin))
    return found


def still_running(record: JobRecord) -> str:
    """What gptctl says when it is interrupted."""
    return (
        f"\n{record.id} is still running. Follow it: gptctl logs {record.id} -f. "
        f"Stop it: gptctl cancel {record.id}."
    )


def max_steps(record: JobRecord) -> int:
    """How many steps the bundled trainer makes at most; 0 when that is not known."""
    config = (read_json(record.run_folder / "config.json") or {}).get("resolved", {})
    steps = config.get("Engine", {}).get("max_steps") if record.output_dir else None
    return steps if isinstance(steps, int) else 0


def scripts(record: JobRecord) -> list[str]:
    """In the order in which they run."""
    return [
        text
        for text in (read_text(record.run_folder / name) for name in ("job.sbatch", "launch.sh"))
        if text
    ]
