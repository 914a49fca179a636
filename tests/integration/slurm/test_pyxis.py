"""Jobs in a pyxis container. Oracle: a wrapper of srun that takes the options of pyxis, as its README describes them.

It is not pyxis: it checks the form of the options, runs the command without a container, and sets what enroot's hook
for PyTorch images sets, because variables of the image override those of srun.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.integration.slurm.login import Login, await_true, ran
from tests.lab import Lab

WRAPPER = """#!/usr/bin/env python3
import json, os, re, sys
given, own = sys.argv[1:], []
if "--help" in given:
    print("--container-image=[USER@][REGISTRY#]IMAGE[:TAG]|PATH --container-mounts=SRC:DST --container-workdir=PATH")
    sys.exit()
while given and given[0].startswith("-"):
    own.append(given.pop(0))
pyxis = dict(word[2:].split("=", 1) for word in own if word.startswith("--container-"))
mounts = [mount for mount in pyxis.get("container-mounts", "").split(",") if mount]
assert all(re.fullmatch(r"[^:\\s]+:[^:\\s]+(:[a-z+]+)?", mount) for mount in mounts), mounts
if pyxis:
    with open(os.environ["SEEN"], "a") as stream:
        stream.write(json.dumps(pyxis) + "\\n")
    given = ["env", "MASTER_ADDR=hook", "MASTER_PORT=1", "RANK=7", *given]
rest = [word for word in own if not word.startswith("--container-")]
os.execv("/usr/bin/srun", ["srun", *rest, *given])
"""


@pytest.fixture
def login(lab: Lab) -> Login:
    login = Login(lab, container={"runtime": "pyxis", "image": "reg#a b$(x)", "binds": ["/tmp:/tmp:ro"]})
    (login.folder / "bin").mkdir()
    wrapper = login.folder / "bin" / "srun"
    wrapper.write_text(WRAPPER)
    wrapper.chmod(0o755)
    path = lab.run("head", "bash", "-c", "echo $PATH").stdout.strip()
    login.env |= {"PATH": f"{login.folder / 'bin'}:{path}", "SEEN": str(login.folder / "seen")}
    return login


def seen(login: Login) -> list[dict[str, str]]:
    return [json.loads(line) for line in (login.folder / "seen").read_text().splitlines()]


def test_a_job_and_a_shell_run_in_the_container(login: Login) -> None:
    """One srun with these options starts launch.sh on both nodes, with the endpoint of this attempt."""
    job = login.submit_quick("--nodes", "2", JOB_SECONDS="100")
    await_true(lambda: len(ran(job)) == 2, 60)
    # A shell gets a container of its own, like those of the ranks.
    shell = login.run("shell", job["job"], "--node", "1", "--", "sh", "-c", "pwd; echo $JOB_SECONDS $(hostname)")
    assert shell.stdout.splitlines() == [job["run_dir"], f"100 {login.json('status', job['job'])['hosts'][1]}"]
    assert seen(login)[0] == seen(login).pop()
    for node in ("0", "1"):
        login.run("shell", job["job"], "--node", node, "--", "pkill", "-f", "sleep 10[0]")
    login.wait(job["job"], "COMPLETED")
    assert seen(login)[:1] == [
        {
            "container-image": "reg#a b$(x)",
            "container-mounts": f"/tmp:/tmp:ro,{job['run_dir']}:{job['run_dir']},{login.folder}:{login.folder}",
        }
    ]
    assert len(ran(job)) == 2
    endpoint = json.loads((Path(job["run_dir"]) / "attempt-0/endpoint.json").read_text())
    assert all(f"--master-addr={endpoint['host']}" in line for line in ran(job)), ran(job)


@pytest.mark.long
def test_doctor_checks_the_container(login: Login) -> None:
    """Its two steps run in it, and it says that srun knows the options."""
    done = login.run("doctor", "--cluster", "lab", "--json")
    rows = json.loads(done.stdout)
    assert [row["state"] for row in rows if row["check"] == "pyxis"] == ["notice"], done.stdout
    assert len(seen(login)) == 2, done.stdout
    assert any(row["check"] == "all-reduce" and row["state"] == "ok" for row in rows), done.stdout
