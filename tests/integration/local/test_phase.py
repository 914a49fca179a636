"""The phases of a real job on this machine, in the order in which they come. Oracles: what the test does to the job, and the
events that the trainer wrote."""

from __future__ import annotations

import json
import os
import signal
import time

from tests.integration.local.test_jobs import SMALL

STARTS = ["started", "attempt", "ranks up", "process group", "first step"]
ASKED = ["--gpus-per-node", "2", "--max-restarts", "1", *SMALL, "-o", "Engine.max_steps=100000"]


def test_a_job_starts_trains_evaluates_and_starts_again(jobs) -> None:
    """A rank is killed while the second evaluation runs, which would take minutes."""
    jobs.gptctl("init")
    freq = ["-o", "Engine.eval_freq=300", "-o", "Engine.eval_iters=30000", "-o", "Engine.save_load.save_steps=300"]
    # With a sitecustomize of the user each rank imports torch by itself, so that no phase is too short to be seen.
    (jobs.folder / "python").mkdir()
    (jobs.folder / "python" / "sitecustomize.py").touch()
    job = jobs.submit(*ASKED, *freq, PYTHONPATH=str(jobs.folder / "python"))
    seen: list[dict] = []

    def look() -> dict | None:
        phase = jobs.status(job)["phase"]
        seen.extend([phase] if phase else [])
        return phase

    def await_phase(name: str, attempt: int) -> dict:
        deadline = time.monotonic() + 90
        while True:
            phase = look()
            if phase and (phase["name"], phase["attempt"]) == (name, attempt):
                return phase
            assert time.monotonic() < deadline, seen

    found = await_phase("evaluating", 0)
    assert found["step"] == 300
    names = [each["name"] for each in seen if each["name"] in STARTS]
    assert names
    assert names == sorted(names, key=STARTS.index)
    assert "evaluating at step 300, for " in jobs.gptctl("why", job).stdout
    os.kill(jobs.pid(job, 1), signal.SIGKILL)
    found = await_phase("ranks up", 1)
    assert found["after_failure"]
    assert found["ranks"] in (1, 2)
    shown = jobs.gptctl("status", job).stdout
    assert "restarting after a failure (attempt 1): " in shown or "evaluating" in shown
    jobs.gptctl("cancel", job, "--now")
    assert jobs.status(job)["phase"] is None
    written = (jobs.run_dir(job) / "output" / "events.jsonl").read_text().splitlines()
    first = [line["event"] for line in map(json.loads, written) if line["attempt"] == 0]
    assert set(first[:2]) == {"process group", "first step"}
    assert {"saving", "checkpoint", "evaluating"} <= set(first)
