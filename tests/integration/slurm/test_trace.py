"""A profile of a Slurm job, brought home through the login host. Oracle: the files on the cluster."""

from __future__ import annotations

import pytest

from tests.integration.slurm.laptop import Laptop
from tests.lab import Lab


@pytest.mark.long
def test_a_profile_comes_home_also_from_outside_of_the_output_folder(lab: Lab) -> None:
    laptop = Laptop(lab)
    folder = f"{laptop.run_root}.traces"
    keys = ("Engine.max_steps=5", "Profiler.enable=True", "Profiler.scheduler=[2,4]", f"Profiler.profiler_log={folder}")
    job = laptop.json(*laptop.train("--nodes", "2", keys=keys))["job"]
    facts = laptop.wait(job, "COMPLETED", "FAILED")
    assert facts["state"] == "COMPLETED", facts
    summary = laptop.json("trace", job)
    assert [each["step"] for each in summary["ranks"][1]["steps"]] == [2, 3]
    here = f"{facts['run_dir']}/profiler_log/{job}/attempt-0"
    assert summary["folder"] == here
    sums = "sha256sum rank_0.steps_2-3.json rank_1.steps_2-3.json"
    there = laptop.on("head", f"cd {folder}/{job}/attempt-0 && {sums}")
    assert len(there.splitlines()) == 2
    assert laptop.on("laptop", f"cd {here} && {sums}") == there
