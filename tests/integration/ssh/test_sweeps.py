"""A sweep on ssh hosts. Oracles: the clock of the hosts' own processes, and what is left there."""

from __future__ import annotations

import json

import pytest

from tests.integration.slurm.login import TINY
from tests.integration.ssh.desk import Desk, await_true

SWEEP = "parameters: {Engine.max_steps: [2, 3, 4, 5]}\nparallel: 2\n"
# In the place of Python: as torchrun it saves a checkpoint, waits, and notes when it ran and a loss of its own.
STAND_IN = """#!/bin/bash
case "$1 $2" in
"-m torch.distributed.run") ;;
*) exec {python} "$@" ;;
esac
cd "$GPTCTL_RUN_DIR"
echo $$ > stand-in.pid
date +%s.%N > began
mkdir -p output/step_1
steps=$(sed -n 's/.*"max_steps": \\([0-9]*\\),.*/\\1/p' config.json | head -1)
note() {{
  [ "$GPTCTL_NODE" != 0 ] ||
    echo "{{\\"event\\": \\"train\\", \\"step\\": $1, \\"loss\\": $1.5, \\"attempt\\": 0}}" >> output/metrics.jsonl
}}
note 1
while [ -e {hold} ]; do sleep 0.1; done
sleep 0.5
note "$steps"
date +%s.%N > ended
"""


def most_at_once(desk: Desk, host: str, jobs: list[str]) -> int:
    """By the notes of the jobs on a host: how many of them ran there at the same time."""
    events = []
    for job in jobs:
        began, ended = desk.on(host, f"cd {desk.run_root}/{job} && cat began ended").split()
        events += [(float(began), 1), (float(ended), -1)]
    events.sort()
    return max(sum(change for _, change in events[: number + 1]) for number in range(len(events)))


@pytest.mark.long
def test_four_runs_two_at_once_one_killed_and_resumed(desk: Desk) -> None:
    """Every run needs both hosts, which have a queue each: two runs at once on either, and no deadlock."""
    hold = desk.stand_in.with_name(f"{desk.stand_in.name}.hold")
    hold.touch()
    real = desk.stand_in.read_text().split("exec ")[1].split(" ")[0]
    desk.stand_in.write_text(STAND_IN.format(python=real, hold=hold))
    (desk.folder / "sweep.yaml").write_text(SWEEP)
    overrides = [word for key in TINY for word in ("-o", key)]
    machines = ("--cluster", "quick", "--nodes", "2", "--gpus-per-node", "1", "--max-restarts", "0")
    answer = desk.json("sweep", "submit", "sweep.yaml", *machines, *overrides)
    name, jobs = answer["sweep"], [each["job"] for each in answer["jobs"]]
    assert len(jobs) == 4, answer

    def states() -> dict[str, str]:
        return {row["job"]: row["state"] for row in desk.json("sweep", "show", name)["runs"]}

    await_true(lambda: list(states().values()).count("RUNNING") == 2, 30, lambda: str(states()))
    assert states() == dict(zip(jobs, ["RUNNING", "RUNNING", "PENDING", "PENDING"]))
    began = f"{desk.run_root}/{jobs[0]}/stand-in.pid"
    await_true(lambda: desk.on("ssh2", f"cat {began}") != "", 20)
    desk.on("ssh2", f"kill -9 $(cat {began})")
    # What a run has measured so far counts, too.
    second = next(row for row in desk.json("sweep", "show", name)["runs"] if row["run"] == 1)
    assert (second["step"], second["value"]) == (1, 1.5)
    # Its place is free for the third, while the fourth still waits.
    await_true(lambda: states()[jobs[2]] == "RUNNING", 30, lambda: str(states()))
    assert states() == dict(zip(jobs, ["FAILED", "RUNNING", "RUNNING", "PENDING"]))
    again = desk.json("sweep", "resume", name)
    (resumed,) = again["jobs"]
    assert (resumed["run"], again["problems"]) == (0, [])
    assert desk.json("status", resumed["job"])["continues"] == jobs[0]
    assert states()[resumed["job"]] == "PENDING"
    hold.unlink()
    await_true(lambda: set(states().values()) == {"COMPLETED"}, 60, lambda: str(states()))
    shown = desk.json("sweep", "show", name)
    assert {row["run"]: (row["step"], row["value"]) for row in shown["runs"]} == {
        number: (number + 2, number + 2.5) for number in range(4)
    }
    assert (shown["best"]["run"], shown["best"]["job"]) == (0, resumed["job"])
    assert "best loss: 2.5, run 0" in desk.run("sweep", "show", name).stderr
    for host in ("ssh1", "ssh2"):
        assert most_at_once(desk, host, [*jobs[1:], resumed["job"]]) == 2
        await_true(lambda host=host: desk.left(host) == [], 10)
        assert desk.on(host, "ls ~/.local/state/gptctl/queue/*/*.ticket 2> /dev/null") == ""
    assert json.loads(desk.run("sweep", "resume", name, "--json").stdout)["jobs"] == []
