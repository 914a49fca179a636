"""Traces are brought home from hosts without a shared disk. Oracle: what is on the hosts."""

from __future__ import annotations

import json

import pytest

from tests.chrome_traces import event, step
from tests.integration.ssh.desk import Desk

FOLDER = "{output}/profiler_log/{job}/attempt-0"


def text_of(took: int) -> str:
    return json.dumps({"traceEvents": [step(1, 0, 100), event("aten::mm", 0, took)]})


@pytest.mark.long
def test_traces_of_all_hosts_are_copied_and_nothing_else(desk: Desk) -> None:
    """Each host has the trace of its own rank; what a host says about another rank is not believed."""
    keys = ("Global.global_batch_size=6", "Profiler.enable=True")
    words = desk.train("--nodes", "3", "--gpus-per-node", "1", "--json", keys=keys)
    submitted = desk.run(*("quick" if word == "hosts" else word for word in words))
    job = json.loads(submitted.stdout)["job"]
    desk.wait(job, "COMPLETED", "FAILED")
    output = json.loads(desk.on("ssh1", f"cat {desk.run_root}/{job}/plan.json"))["output_dir"]
    folder = FOLDER.format(output=output, job=job)

    def record(host: str, rank: int, took: int) -> None:
        desk.on(host, f"mkdir -p {folder} {output}/step_5; echo {{}} > {output}/step_5/manifest.json")
        desk.on(host, f"cat > {folder}/rank_{rank}.steps_1-1.json <<'END'\n{text_of(took)}\nEND")

    done = desk.run("trace", job)
    assert done.returncode == 1
    assert f"error: {job} has no traces in" in done.stderr

    for rank, (host, took) in enumerate({"ssh1": 50, "ssh2": 60, "private1": 90}.items()):
        record(host, rank, took)
    record("ssh2", 2, 10)  # a lie
    facts = desk.json("trace", job)
    here = desk.folder / "home" / "runs" / job / FOLDER.format(output="output", job=job)
    assert [rank["file"] for rank in facts["ranks"]] == [str(here / f"rank_{rank}.steps_1-1.json") for rank in range(3)]
    assert [round(rank["shares"]["matrix_products"], 2) for rank in facts["ranks"]] == [0.5, 0.6, 0.9]
    assert not (desk.folder / "home" / "runs" / job / "output" / "step_5").exists()

    # A host that cannot be reached: what was copied before is shown, and that it may be old.
    desk.lab.cut("ssh2")
    done = desk.run("trace", job)
    assert done.returncode == 0, done.stderr
    assert "these are the traces that were copied before" in done.stderr
    assert "steps 1 to 1, 3 ranks" in done.stdout
