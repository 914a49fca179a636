"""A host that rewrites what belongs to others. Oracles: what each host wrote about itself, and the job's real state."""

from __future__ import annotations

import json
import shlex

from tests.integration.ssh.desk import HOSTS, Desk, await_true

FORGED = "forged by ssh2"
RESULT = json.dumps({"state": "COMPLETED", "reason": FORGED, "ended": 1.0, "failure": None})
# Everything that gptctl copies from hosts, of others: `$run` is the job's folder there.
OTHERS = (
    *("attempt-0/ranks.0.jsonl", "attempt-0/ranks.2.jsonl", "attempt-0/node.0.exit", "attempt-0/node.2.pid"),
    *("attempt-0/endpoint.json", "attempt-0/hosts", "attempt-0/outcome.json", "attempt-0/unrecoverable"),
    *("logs/attempt-0/workerlog.0", "logs/attempt-0/workerlog.2", "logs/attempt-0/workerlog.77"),
    *("logs/attempt-0/node.0.log", "logs/attempt-0/node.2.log", "logs/batch.log"),
    *("attempt-7/ranks.1.jsonl", "logs/attempt-7/workerlog.1"),
)


def write(desk: Desk, host: str, job: str, files: dict[str, str]) -> None:
    run = f"{desk.run_root}/{job}"
    for name, text in files.items():
        path = shlex.quote(f"{run}/{name}")
        desk.on(host, f"mkdir -p $(dirname {path}); printf %s {shlex.quote(text)} > {path}")


def test_a_host_that_rewrites_the_files_of_others(desk: Desk) -> None:
    """From each host come only its own files, in every order; what it forged is named once and changes nothing."""
    job = desk.submit_quick(JOB_SECONDS="200")["job"]
    await_true(lambda: all(desk.ran(host) for host in HOSTS), 20)
    here = desk.folder / "home" / "runs" / job
    write(desk, "ssh2", job, {**dict.fromkeys(OTHERS, f"{FORGED}\n" * 50), "result.json": RESULT})
    # The forged files are seen before the real ones exist.
    done = desk.run("status", job, "--json")
    assert json.loads(done.stdout)["state"] == "RUNNING"
    assert "ssh2 has files that belong to other hosts" in done.stderr
    assert "attempt-0/endpoint.json" in done.stderr
    write(desk, "ssh1", job, {"logs/attempt-0/workerlog.0": "I am rank 0\n"})
    write(desk, "ssh2", job, {"logs/attempt-0/workerlog.1": "I am rank 1\n"})
    write(desk, "private1", job, {"logs/attempt-0/workerlog.2": "I am rank 2\n"})
    done = desk.run("logs", job)
    assert done.returncode == 0, done.stderr
    assert [f"I am rank {rank}" in done.stdout for rank in range(3)] == [True] * 3
    assert FORGED not in done.stdout + done.stderr
    found = [str(file) for file in here.rglob("*") if file.is_file() and FORGED in file.read_text(errors="replace")]
    assert found == []
    assert not (here / "attempt-7").exists()
    assert "belong to other hosts" not in done.stderr
    status = desk.json("status", job)
    assert (status["state"], status["reason"]) == ("RUNNING", "starting")  # no rank has started
    home = desk.folder / "mine"
    done = desk.run("fetch", job, "--to", str(home))
    assert done.returncode == 0, done.stderr
    usual = [file for file in home.rglob("*") if file.is_file() and "hosts" not in file.relative_to(home).parts]
    assert [file for file in usual if FORGED in file.read_text(errors="replace")] == []
    assert (home / "logs" / "attempt-0" / "workerlog.2").read_text() == "I am rank 2\n"
    assert desk.run("cancel", "--now", job).returncode == 0
    assert desk.json("status", job)["state"] == "CANCELLED"
