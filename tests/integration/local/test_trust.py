"""A folder whose author is not the user: nothing of it runs unless the user trusts it. Oracle: a file that its commands
would create, and the jobs that exist."""

from __future__ import annotations

import json
import os
import shlex
from pathlib import Path

import pytest

HELLO = ("--", "x.py")


@pytest.fixture
def clone(jobs):
    """A cloned repository with a profile that takes the place of the bundled `local`."""
    folder = jobs.folder
    (folder / "clusters").mkdir()
    (folder / "clusters" / "local.yaml").write_text(
        f"kind: local\npython: {folder}/quick\nrun_root: ./runs\nsetup: ['touch {folder}/ran']\n"
    )
    (folder / "run.yaml").write_text("Launch: {entrypoint: x.py, cluster: ./quick.yaml}\n")
    return jobs


def ran(jobs) -> bool:
    return (jobs.folder / "ran").exists()


def command_in(text: str) -> list[str]:
    """The command that a hint tells to type, as the shell would read it."""
    return shlex.split(text.split("then run: ")[1].splitlines()[0])


def memories(jobs) -> list[Path]:
    return sorted((jobs.folder / "home/.local/state/gptctl/trusted").glob("*"))


def test_a_profile_that_replaces_a_bundled_one_needs_trust_once(clone) -> None:
    refused = clone.gptctl("submit", "--wait", *HELLO)
    assert refused.returncode == 2, refused.stderr
    assert "clusters/local.yaml replaces the bundled profile local" in refused.stderr
    assert not ran(clone)
    assert not (clone.folder / "runs").exists()
    assert json.loads(clone.gptctl("list", "--json").stdout) == []
    # The command of the hint, word by word.
    words = command_in(refused.stderr.replace("\n", " "))
    assert words == ["gptctl", "submit", "--wait", "--trust", *HELLO]
    assert clone.gptctl(*words[1:]).returncode == 0
    assert ran(clone)
    (clone.folder / "ran").unlink()
    again = clone.gptctl("submit", "--wait", *HELLO)
    assert again.returncode == 0
    assert f"cluster profile: {clone.folder}/clusters/local.yaml" in again.stderr
    assert ran(clone)
    assert {file.stat().st_mode & 0o777 for file in memories(clone)} == {0o600}
    # A changed file needs it again; also one that is changed back, since only the last is remembered.
    with open(clone.folder / "clusters/local.yaml", "a") as file:
        file.write("# one more line\n")
    (clone.folder / "ran").unlink()
    assert clone.gptctl("submit", "--wait", *HELLO).returncode == 2
    assert not ran(clone)


def test_doctor_needs_it_too(clone) -> None:
    refused = clone.gptctl("doctor", "--json")
    assert refused.returncode == 2
    assert not ran(clone)
    assert command_in(json.loads(refused.stdout)["hint"]) == ["gptctl", "doctor", "--json", "--trust"]
    trusted = clone.gptctl("doctor", "--json", "--trust")
    assert trusted.returncode in (0, 1), trusted.stderr
    assert ran(clone)


def test_what_runs_nothing_needs_no_trust(clone) -> None:
    (clone.folder / "templates").mkdir()
    (clone.folder / "templates/launch.sh.j2").write_text(f"touch {clone.folder}/ran\n")
    for words in (
        ("validate", "run.yaml", "--cluster", "local"),
        ("submit", "run.yaml", "--cluster", "local", "--dry-run"),
        ("render", "run.yaml", "--cluster", "local"),
        *(("clusters", verb, "local") for verb in ("show", "check")),
        ("clusters", "list"),
    ):
        answer = clone.gptctl(*words)
        assert answer.returncode == 0, (words, answer.stdout, answer.stderr)
    assert not ran(clone)
    dry = clone.gptctl("submit", "run.yaml", "--cluster", "local", "--dry-run").stderr
    assert "clusters/local.yaml replaces the bundled profile local: to submit it, add --trust" in dry
    assert "templates/launch.sh.j2 replaces the bundled template launch.sh.j2" in dry
    assert memories(clone) == []


def test_templates_beside_the_config_need_it(clone) -> None:
    """All of them, in one answer; what the job has frozen is used by a rerun without asking."""
    (clone.folder / "templates").mkdir()
    own = clone.folder / "templates/environment.sh.j2"
    own.write_text(f"touch {clone.folder}/ran\n")
    refused = clone.gptctl("submit", "run.yaml")
    assert refused.returncode == 2
    assert "templates/environment.sh.j2 replaces the bundled template environment.sh.j2" in refused.stderr
    job = clone.submit("run.yaml", "--trust", "--wait")
    assert ran(clone)
    (clone.folder / "ran").unlink()
    own.write_text("exit 1\n")
    assert clone.gptctl("rerun", job, "--wait").returncode == 0
    assert ran(clone)
    # Named on the command line, it takes nobody's place behind the user's back.
    own.write_text("true\n")
    typed = clone.gptctl("submit", "--cluster", "./quick.yaml", "--template", "templates", *HELLO)
    assert typed.returncode == 0, typed.stderr
    assert f"template: {own}" in typed.stderr


def test_own_and_bundled_files_need_none(clone) -> None:
    """A profile under another name, one in the user's config folder, and the bundled one in a checkout."""
    local = (clone.folder / "clusters/local.yaml").read_text()
    (clone.folder / "clusters/local.yaml").rename(clone.folder / "clusters/a800.yaml")
    answer = clone.gptctl("submit", "--wait", "--cluster", "a800", *HELLO)
    assert answer.returncode == 0, answer.stderr
    assert f"cluster profile: {clone.folder}/clusters/a800.yaml" in answer.stderr
    own = clone.folder / "home/.config/gptctl/clusters"
    own.mkdir(parents=True)
    (own / "local.yaml").write_text(local)
    answer = clone.gptctl("submit", "--wait", *HELLO)
    assert (answer.returncode, "cluster profile" in answer.stderr) == (0, False), answer.stderr
    from gptctl.spec.resources import named_files

    (clone.folder / "clusters/local.yaml").write_bytes(named_files("clusters")["local"].read_bytes())
    answer = clone.gptctl("submit", "--dry-run", *HELLO)
    assert (answer.returncode, "--trust" in answer.stderr) == (0, False), answer.stderr


def test_a_sweep_needs_it(clone) -> None:
    (clone.folder / "config.yaml").write_text("Launch: {entrypoint: x.py}\n")
    (clone.folder / "sweep.yaml").write_text("method: list\nruns: [{Launch.job_name: a}, {Launch.job_name: b}]\n")
    refused = clone.gptctl("sweep", "submit", "sweep.yaml")
    assert refused.returncode == 2, refused.stderr
    assert not ran(clone)
    assert json.loads(clone.gptctl("sweep", "list", "--json").stdout) == []
    words = command_in(refused.stderr.replace("\n", " "))
    assert words == ["gptctl", "sweep", "submit", "sweep.yaml", "--trust"]
    done = clone.gptctl(*words[1:], "--json")
    assert done.returncode == 0, done.stdout
    assert clone.ended(*[each["job"] for each in json.loads(done.stdout)["jobs"]]) == ["COMPLETED", "COMPLETED"]


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give a file to another user")
def test_a_config_of_another_user_needs_it_with_its_bases(clone) -> None:
    (clone.folder / "base.yaml").write_text("Launch: {entrypoint: x.py, cluster: ./quick.yaml}\n")
    (clone.folder / "config.yaml").write_text("_base_: base.yaml\n")
    os.chown(clone.folder / "base.yaml", 65534, -1)
    refused = clone.gptctl("submit")
    assert refused.returncode == 2
    assert "run config base.yaml belongs to user nobody" in refused.stderr
    assert clone.gptctl("submit", "--wait", "--trust").returncode == 0
    assert clone.gptctl("submit", "--wait").returncode == 0
