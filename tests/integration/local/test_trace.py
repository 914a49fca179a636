"""Jobs with a profile, from submit to `gptctl trace`, with the real torchrun and gloo. Oracle: the chrome trace format."""

from __future__ import annotations

import json

from tests.chrome_traces import assert_is_chrome_trace, event, step, write
from tests.integration.local.test_jobs import SMALL

PROFILE = ("-o", "Profiler.enable=True", "-o", "Profiler.scheduler=[2,4]")


def test_a_job_of_two_ranks_is_recorded_and_summarised(jobs) -> None:
    jobs.gptctl("init")
    sizes = ("--gpus-per-node", "2", *SMALL, "-o", "Engine.max_steps=5")
    job = jobs.submit(*sizes, *PROFILE)
    assert jobs.wait(job) == "COMPLETED", jobs.log(job, 0)
    folder = jobs.run_dir(job) / "output" / "profiler_log" / job / "attempt-0"
    files = sorted(folder.iterdir())
    assert [file.name for file in files] == ["rank_0.steps_2-3.json", "rank_1.steps_2-3.json"]
    traces = [assert_is_chrome_trace(file.read_text()) for file in files]
    assert [trace["distributedInfo"]["rank"] for trace in traces] == [0, 1]

    done = jobs.gptctl("trace", "--json", "--output", "all.json")
    facts = json.loads(done.stdout)
    assert done.stderr.startswith(f"job {job}\n")
    assert [rank["file"] for rank in facts["ranks"]] == [str(file) for file in files]
    assert [each["step"] for each in facts["ranks"][1]["steps"]] == [2, 3]
    assert abs(sum(facts["shares"].values()) - 1) < 1e-9
    assert facts["shares"]["communication"] > 0
    merged = assert_is_chrome_trace((jobs.folder / "all.json").read_text())
    assert len(merged["traceEvents"]) == sum(len(trace["traceEvents"]) for trace in traces)
    assert "steps 2 to 3, 2 ranks" in jobs.gptctl("trace", job).stdout


def test_what_a_job_without_traces_lacks_is_said(jobs) -> None:
    """Jobs of the stand-in, which write nothing."""
    jobs.gptctl("init")
    plain = jobs.submit("--cluster", "./quick.yaml", *SMALL)
    silent = jobs.submit("--cluster", "./quick.yaml", *SMALL, *PROFILE, "-o", "Profiler.profiler_log=/tmp/../tmp/none")
    script = jobs.quick()
    assert jobs.ended(plain, silent, script) == ["COMPLETED"] * 3
    done = jobs.gptctl("trace", plain)
    assert done.returncode == 1
    assert f"error: {plain} was submitted without a profile" in done.stderr
    assert f"hint: record some steps: gptctl rerun {plain} -o Profiler.enable=True" in done.stderr
    done = jobs.gptctl("trace", silent)
    assert done.returncode == 1
    assert f"error: {silent} has no traces in /tmp/none/{silent}" in done.stderr
    assert "hint: they are written when step 3 is done" in done.stderr
    done = jobs.gptctl("trace", script)
    assert done.returncode == 2
    assert "runs a script of yours" in done.stderr


def test_a_relative_folder_stays_below_the_output_folder_of_each_job(jobs) -> None:
    """Frozen as it was written: neither the current folder of submit nor that of rerun becomes a part of it."""
    jobs.gptctl("init")
    first = jobs.submit("--cluster", "./quick.yaml", *SMALL, *PROFILE, "-o", "Profiler.profiler_log=mine")
    again = json.loads(jobs.gptctl("rerun", first, "-o", "Profiler.profiler_log=other", "--json").stdout)["job"]
    for job, name in ((first, "mine"), (again, "other")):
        file = jobs.run_dir(job) / "output" / name / job / "attempt-0" / "rank_0.steps_1-1.json"
        write(file, [step(1, 0, 10), event("aten::mm", 0, 10)])
        done = jobs.gptctl("trace", job)
        assert f"rank_0.steps_1-1.json, in {file.parent}\n" in done.stdout, done.stderr
