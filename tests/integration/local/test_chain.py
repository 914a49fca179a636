"""`submit --chain`. Oracles: what the jobs' own processes note, and the losses of a run that nobody disturbed."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path

import pytest

from tests.integration.slurm.login import TINY

# In the place of the trainer: the second run finishes the training, or fails for good if it is told to.
STAND_IN = """#!/bin/sh
echo "$GPTCTL_JOB ${GPTCTL_CONTINUES:-0} ${GPTCTL_FIRST_JOB:-itself}" >> "$OUT/ran"
mkdir -p "$OUT/trained"
while [ -n "$HOLD" ] && [ ! -e "$OUT/go" ]; do sleep 0.05; done
[ -z "$HOPELESS" ] || : > "$GPTCTL_ATTEMPT_DIR/unrecoverable"
[ -z "$HOPELESS$HOLD" ] || exit 1
[ "$(wc -l < "$OUT/ran")" -lt 2 ] && exit 1
echo "{\\"state\\": \\"finished\\", \\"time\\": $(date +%s.%N), \\"job\\": \\"$GPTCTL_JOB\\"}" > "$OUT/trained/status.json"
"""


@pytest.fixture
def chain(jobs):
    """Submit a chain of three stand-ins; returns their ids."""
    (jobs.folder / "quick").write_text(STAND_IN)
    (jobs.folder / "config.yaml").write_text("Global: {device: cpu}\n")
    tiny = [word for key in TINY for word in ("-o", key)]

    def submit(*options: str, **env: str) -> list[str]:
        variables = [word for name, value in env.items() for word in ("--env", f"{name}={value}")]
        own = ["--env", f"OUT={jobs.folder}", "-o", f"Engine.save_load.output_dir={jobs.folder}/trained"]
        answer = jobs.gptctl(
            *("submit", "--json", "--cluster", "./quick.yaml", "--chain", "3", *tiny, *options, *own, *variables)
        )
        assert answer.returncode == 0, answer.stderr
        return json.loads(answer.stdout)["chain"]

    return submit


def ends(jobs, ids: list[str]) -> list[tuple[str, str]]:
    jobs.ended(*ids)
    results = [json.loads((jobs.run_dir(job) / "result.json").read_text()) for job in ids]
    return [(result["state"], result["reason"]) for result in results]


def test_a_chain_ends_when_the_training_is_complete(jobs, chain) -> None:
    """The first fails, the second finishes the training, and the third has nothing left to do."""
    (jobs.folder / "trained").mkdir()
    # What an earlier run finished there does not count.
    (jobs.folder / "trained" / "status.json").write_text(json.dumps({"state": "finished", "time": time.time() - 60}))
    first, second, third = chain()
    assert (second, third) == (f"{first}-2", f"{first}-3")
    states = ends(jobs, [first, second, third])
    assert [state for state, _ in states] == ["FAILED", "COMPLETED", "COMPLETED"], states
    assert states[2][1] == "training was already complete"
    assert (jobs.folder / "ran").read_text().splitlines() == [f"{first} 0 itself", f"{second} 1 {first}"]
    records = [json.loads(file.read_text()) for file in (jobs.folder / "home").rglob(f"{first}*.json")]
    assert {record["id"]: record["continues"] for record in records} == {first: "", second: first, third: second}


def test_whoever_cancels_a_job_cancels_those_after_it(jobs, chain) -> None:
    first, second, third = chain(HOLD="1")
    assert jobs.waits_for(second) == f"waits for {first} to end"
    assert jobs.gptctl("cancel", first).returncode == 0
    states = ends(jobs, [first, second, third])
    assert [state for state, _ in states] == ["CANCELLED"] * 3, states
    assert states[1][1] == f"{first}, which this job continues, was cancelled"
    assert (jobs.folder / "ran").read_text().splitlines() == [f"{first} 0 itself"]


def test_what_cannot_be_restarted_is_not_continued(jobs, chain) -> None:
    states = ends(jobs, ids := chain(HOPELESS="1"))
    assert [state for state, _ in states] == ["FAILED"] * 3, states
    assert states[2][1] == f"{ids[1]}, which this job continues, failed: this one would fail in the same way"
    assert len((jobs.folder / "ran").read_text().splitlines()) == 1


def test_what_cannot_be_a_chain(jobs) -> None:
    script = jobs.gptctl("submit", "--cluster", "./quick.yaml", "--chain", "3", "--", "x.py")
    assert script.returncode == 2
    assert "--chain: gptctl cannot resume x.py" in script.stderr
    assert jobs.left_over() == []


def test_a_failure_in_the_middle_names_what_was_submitted(jobs) -> None:
    """Oracle: the ids that exist afterwards."""
    (jobs.folder / "config.yaml").write_text("Global: {device: cpu}\n")
    launch = jobs.folder / "templates"
    launch.mkdir()
    # A template that is not a shell script for the jobs after the first.
    (launch / "launch.sh.j2").write_text("{% if continues %}( {% endif %}exit 0\n")
    tiny = [word for key in TINY for word in ("-o", key)]
    refused = jobs.gptctl("submit", "--cluster", "./quick.yaml", "--chain", "3", "--trust", *tiny)
    assert refused.returncode != 0, refused.stdout
    (first,) = [entry.name for entry in (jobs.folder / "runs").iterdir() if entry.name != "latest"]
    assert f"1 of 3 jobs were submitted: {first}" in refused.stderr
    assert f"gptctl cancel {first}" in refused.stderr


@pytest.mark.long
def test_a_chain_trains_as_one_job_would(jobs) -> None:
    """Two jobs are stopped in the middle. Oracle: the losses of one job that trains all steps."""
    assert jobs.gptctl("init").returncode == 0
    small = "Model.num_layers=1 Model.hidden_size=32 Data.Train.dataset.max_seq_len=16 Global.local_batch_size=2 "
    small += (
        "Global.micro_batch_size=2 Engine.test_iters=0 Engine.eval_freq=0 Engine.logging_freq=1 Engine.max_steps=600"
    )
    keys = ["--gpus-per-node", "1", *(word for key in small.split() for word in ("-o", key))]
    whole = jobs.submit(*keys)
    assert await_end(jobs, whole) == "COMPLETED"
    answer = jobs.gptctl("submit", "--json", "--chain", "4", *keys)
    ids = json.loads(answer.stdout)["chain"]
    metrics = jobs.run_dir(ids[0]) / "output" / "metrics.jsonl"
    for number, job in enumerate(ids[:2]):
        await_step(metrics, 200 * (number + 1))
        os.kill(json.loads((jobs.run_dir(job) / "claim.json").read_text())["pid"], signal.SIGTERM)
    assert [await_end(jobs, job) for job in ids] == ["STOPPED", "STOPPED", "COMPLETED", "COMPLETED"]
    assert jobs.status(ids[3])["reason"] == "training was already complete"
    alone, chained = losses(jobs.run_dir(whole) / "output" / "metrics.jsonl"), losses(metrics)
    assert len(chained) == 600
    assert chained == alone


def await_end(jobs, job: str, seconds: float = 300) -> str:
    deadline = time.monotonic() + seconds
    while not (jobs.run_dir(job) / "result.json").exists():
        assert time.monotonic() < deadline, jobs.status(job)
        time.sleep(0.2)
    return jobs.status(job)["state"]


def await_step(metrics: Path, step: int, seconds: float = 300) -> None:
    deadline = time.monotonic() + seconds
    while max(losses(metrics), default=0) < step:
        assert time.monotonic() < deadline
        time.sleep(0.1)


def losses(metrics: Path) -> dict[int, float]:
    lines = metrics.read_text().split("\n")[:-1] if metrics.exists() else []
    records = [json.loads(line) for line in lines]
    return {record["step"]: record["loss"] for record in records if "loss" in record}
