"""Scripts of `gptctl render`, queued by hand on a real Slurm. Oracle: the lines of the ranks, and exit codes."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.integration.slurm.login import Login, await_true
from tests.integration.slurm.test_jobs import DUMP
from tests.lab import Lab

pytestmark = pytest.mark.long
ENDED = ("COMPLETED", "FAILED")


@pytest.fixture
def login(lab: Lab) -> Login:
    login = Login(lab)
    (login.folder / "dump.py").write_text(DUMP)
    return login


def rendered(login: Login, style: str) -> Path:
    asked = ["render", "--cluster", "lab", "--nodes", "2", "--gpus-per-node", "1", "--style", style]
    done = login.run(*asked, "--", "dump.py")
    assert done.returncode == 0, done.stderr
    script = login.folder / "script.sh"
    script.write_text(done.stdout)
    script.chmod(0o755)
    return script


def batch(login: Login, script: Path) -> tuple[str, str]:
    number = login.slurm("sbatch", "--parsable", f"--chdir={login.folder}", str(script)).strip()

    def state() -> str:
        return login.slurm("squeue", "-h", "-t", "all", "-j", number, "-o", "%T").strip()

    await_true(lambda: state() in ENDED, 60)
    return state(), (login.folder / f"slurm-{number}.out").read_text()


def test_srun_script(login: Login) -> None:
    script = rendered(login, "srun-script")
    done = login.lab.run("head", "srun", "--nodes=2", "--gpus-per-node=1", str(script), cwd=str(login.folder))
    assert done.returncode == 0, done.stderr
    assert sorted(line.split('"host"')[1] for line in done.stdout.splitlines() if "env {" in line) == [
        ': "node1"}',
        ': "node2"}',
    ]


@pytest.mark.parametrize("style", ["sbatch", "loop"])
def test_batch_scripts(login: Login, style: str) -> None:
    """The first four lines name node, hosts, head and their number."""
    state, said = batch(login, rendered(login, style))
    assert state == "COMPLETED", said
    assert said.splitlines()[:4] == ["0", "node1 node2", "node1", "2"]
    assert said.count("env {") == 2


@pytest.mark.parametrize("style", ["sbatch", "loop"])
def test_a_node_that_fails_fails_the_job(login: Login, style: str) -> None:
    (login.folder / "dump.py").write_text(
        DUMP + "\nimport sys, time\nsys.exit(3) if os.environ['RANK'] == '1' else time.sleep(60)\n"
    )
    state, said = batch(login, rendered(login, style))
    assert state == "FAILED", said


def test_an_elastic_job(login: Login) -> None:
    """As many nodes as Slurm gives it; they meet over c10d, which waits half a minute for more."""
    asked = ["submit", "--cluster", "lab", "--nodes", "1:2", "--gpus-per-node", "1", "--wait", "--", "dump.py"]
    done = login.run(*asked)
    assert done.returncode == 0, done.stdout + done.stderr
    facts = login.json("status")
    assert facts["state"] == "COMPLETED"
    log = (Path(facts["log_dir"]) / "attempt-0/workerlog.0").read_text()
    assert f'"WORLD_SIZE": "{len(facts["hosts"])}"' in log


def test_rerun(login: Login) -> None:
    job = login.submit_quick("--nodes", "2")
    login.wait(job["job"], "COMPLETED")
    done = login.run("rerun", job["job"], "--wait")
    assert done.returncode == 0, done.stderr
    assert login.json("status")["job"] != job["job"]
