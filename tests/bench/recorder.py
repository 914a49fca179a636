"""`bench.json`: what the benches measured, for `compare.py`. Standard library only: peers have an environment of their own.

A bench calls `record` once for each row that it prints, with the values of all rounds. Running it again replaces its rows;
with BENCH_MORE=1 it adds rounds to them. BENCH_FILE names another file.
"""

from __future__ import annotations

import json
import os
import platform
import time
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from statistics import median
from typing import Any

FILE = Path(__file__).resolve().parents[2] / "bench.json"


def record(
    name: str,
    *,
    ours: Sequence[float],
    peer: Sequence[float] = (),
    unit: str = "s",
    goal: float | None = None,
    more_is_better: bool = False,
) -> None:
    """Add a row. `peer`: the same of a peer, or of a limit, in turns with ours. `goal`: for the ratio if there is a peer."""
    file = Path(os.environ.get("BENCH_FILE") or FILE)
    found = load(file) if file.exists() else {"rows": {}}
    before = found["rows"].get(name) if os.environ.get("BENCH_MORE") else None
    if before:
        ours, peer = [*before["ours"], *ours], [*before["peer"], *peer]
    row = {"unit": unit, "goal": goal, "more_is_better": more_is_better, "ours": list(ours), "peer": list(peer)}
    about = {"ratio": median(ratios(row)) if peer else None, "load": round(os.getloadavg()[0], 2), "time": time.time()}
    rows = {**found["rows"], name: {**row, **about}}
    part = file.with_name(f"{file.name}.part")
    part.write_text(json.dumps({"machine": machine(), "rows": rows}, indent=1) + "\n")
    part.replace(file)


def load(file: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(file.read_text())
    return found


def ratios(row: dict[str, Any]) -> list[float]:
    """Ours / peer of each round; against the median of a peer that ran another number of rounds."""
    ours, peer = row["ours"], row["peer"]
    others = peer if len(peer) == len(ours) else [median(peer)] * len(ours)
    return [mine / theirs for mine, theirs in zip(ours, others)]


def machine() -> dict[str, Any]:
    """What the numbers depend on. Those of another machine can be compared only as ratios to a peer."""
    try:
        torch = version("torch")
    except PackageNotFoundError:
        torch = ""
    cores = len(os.sched_getaffinity(0))
    return {"cpu": _cpu_model(), "cores": cores, "python": platform.python_version(), "torch": torch}


def _cpu_model() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(named, platform.machine())
