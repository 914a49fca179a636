"""Hosts that damage what is theirs or offer what is not. Oracles: what each host has, and which processes run there."""

from __future__ import annotations

import subprocess
import time
from pathlib import Path

import pytest

from tests.integration.ssh.desk import HOSTS, Desk, await_true

TIME = 1_700_000_000
pytestmark = pytest.mark.long


def completed(desk: Desk) -> tuple[str, str]:
    """A job that has ended, and the folder of its script on every host."""
    job = desk.submit_quick()["job"]
    desk.wait(job, "COMPLETED")
    return job, f"{desk.run_root}/{job}/code"


def running(desk: Desk, *options: str) -> str:
    job = desk.submit_quick(*options, JOB_SECONDS="200")["job"]
    used = desk.json("status", job)["nodes"]
    await_true(lambda: all(desk.on(host, f"ls {desk.run_root}/{job}/ran") for host in HOSTS[:used]), 20)
    return str(job)


def left(desk: Desk) -> list[str]:
    return [line for host in HOSTS for line in desk.left(host)]


def fetched(desk: Desk, *words: str) -> subprocess.CompletedProcess[str]:
    done: subprocess.CompletedProcess[str] = desk.run("fetch", *words)
    assert done.returncode == 0, done.stderr
    return done


def test_no_byte_of_a_host_gets_into_a_file_of_another(desk: Desk) -> None:
    """ssh2 offers what earlier versions took for an unfinished copy, and files of others in a folder like a checkpoint's."""
    job, code = completed(desk)
    desk.on("ssh2", f"cd {code}; for name in one two; do printf EVIL > $name.{TIME}.part; done")
    desk.on(
        "private1", f"cd {code}; printf 'of private1' > one; touch -d @{TIME} one; mkdir step_5; echo 3 > step_5/shard2"
    )
    desk.on("ssh1", f"mkdir {code}/step_5; echo 1 > {code}/step_5/shard0")
    fetched(desk, job, "--checkpoints")
    work = desk.folder / "home" / "runs" / job / "work"
    assert (work / "one").read_text() == "of private1"
    desk.on("ssh1", f"cd {code}; printf 'all of ssh1' > two; touch -d @{TIME} two")
    desk.on("ssh2", f"mkdir {code}/step_5; echo EVIL > {code}/step_5/shard2")
    fetched(desk, job, "--checkpoints")
    assert (work / "two").read_text() == "all of ssh1"
    assert (work / "step_5/shard2").read_text() == "3\n"
    assert (work.parent / "hosts/ssh2/work/step_5/shard2").read_text() == "EVIL\n"
    assert not (work.parent / ".fetching").exists()


def test_a_file_in_the_place_of_a_folder_stops_no_fetch(desk: Desk) -> None:
    job, code = completed(desk)
    desk.on("ssh1", f"echo one > {code}/a; echo last > {code}/z")
    desk.on("ssh2", f"mkdir {code}/a; echo b > {code}/a/b; ln -s x '{code}/link\nhint: run this'")
    for _ in range(2):
        said = fetched(desk, job, "--to", "copy").stderr
        assert "since a file and a folder cannot have the same name" in said
        assert "\nhint: run this" not in said
    assert (desk.folder / "copy/work/a").read_text() == "one\n"
    assert (desk.folder / "copy/work/z").read_text() == "last\n"


def test_files_of_a_script_are_updated(desk: Desk) -> None:
    """Whatever their names are: those of gptctl's own files, too."""
    job, code = completed(desk)
    names = ("metrics.jsonl", "hosts", "status.json", "workerlog.0")
    for text in ("first", "first and second"):
        desk.on("ssh1", f"cd {code}; for name in {' '.join(names)}; do echo {text} > $name; done")
        fetched(desk, job)
        work = desk.folder / "home" / "runs" / job / "work"
        assert {(work / name).read_text() for name in names} == {f"{text}\n"}


@pytest.mark.parametrize("damage", [": > .token", "chmod 000 .token", "rm .token; mkdir .token", "rm .token"])
def test_a_damaged_token_keeps_no_job_running(desk: Desk, damage: str) -> None:
    job = running(desk)
    desk.on("ssh1", f"cd {desk.run_root}/{job}; {damage}")
    assert desk.json("status", job)["state"] in ("UNKNOWN", "RUNNING", "LOST")
    assert desk.run("cancel", "--now", job).returncode == 0
    await_true(lambda: not left(desk), 15, lambda: str(left(desk)))


@pytest.mark.parametrize("shell", ["exit 0", "exit 66", "exec true"])
def test_a_login_shell_that_runs_nothing_confirms_nothing(desk: Desk, shell: str) -> None:
    """Neither that a job has stopped, nor that its folder is removed."""
    ended, _ = completed(desk)
    job = running(desk)
    desk.on("ssh1", f"echo '{shell}' > ~/.bashrc")
    try:
        for words in (("cancel", "--now", job), ("rm", "--yes", ended)):
            done = desk.run(*words)
            assert done.returncode == 3
            assert "ssh1: its login shell did not run the command" in done.stderr
        assert desk.json("status", job)["state"] in ("UNKNOWN", "CANCELLED")
        assert desk.on("private1", "true") == ""
    finally:
        desk.lab.run("ssh1", "rm", "/home/gpt/.bashrc", check=True)
    assert desk.run("cancel", "--now", job).returncode == 0
    assert not left(desk)
    assert desk.run("rm", "--yes", ended).returncode == 0
    assert not any(desk.on(host, f"ls -d {desk.run_root}/{ended}") for host in HOSTS)


@pytest.mark.parametrize("stopped", ["agent", "guard"])
def test_what_somebody_stopped_is_cancelled(desk: Desk, stopped: str) -> None:
    """kill -STOP: it is continued, so that it can exit."""
    job = running(desk)
    find = f"pgrep -f 'engine.pyz guard {desk.run_root}/{job}'"
    guard, agent = sorted(int(pid) for pid in desk.on("ssh2", find).split()[:2])
    desk.on("ssh2", f"kill -STOP {agent if stopped == 'agent' else guard}")
    began = time.monotonic()
    done = desk.run("cancel", "--now", job)
    assert done.returncode == 0, done.stderr
    assert time.monotonic() - began < 10
    await_true(lambda: not left(desk), 15, lambda: str(left(desk)))


def test_a_full_disk_here_does_not_keep_a_job_running(desk: Desk) -> None:
    """The folder of records is on a file system without a free byte."""
    home = Path(desk.env["GPTCTL_HOME"])
    job = running(desk)
    desk.lab.run("head", "sh", "-c", f"cp -a {home} {home}.kept && mount -t tmpfs -o size=4m tmpfs {home}", check=True)
    try:
        desk.lab.run("head", "sh", "-c", f"cp -a {home}.kept/. {home} && chown gpt {home}", check=True)
        desk.lab.run("head", "dd", "if=/dev/zero", f"of={home}/full", "bs=4k", check=False)
        done = desk.run("cancel", "--now", job)
        assert "Traceback" not in done.stderr
        assert done.returncode in (0, 2, 3), done.stderr
        await_true(lambda: not left(desk), 15, lambda: str(left(desk)))
    finally:
        desk.lab.run("head", "umount", str(home), check=True)


def test_a_host_that_hangs_delays_no_other_command(desk: Desk) -> None:
    """gptctl was killed while it started a job, and the next one cannot ask a host what became of it."""
    desk.write_profile("quick", python=str(desk.stand_in), start_timeout=3)
    desk.on("ssh1", "printf 'echo gptctl begins\\nsleep 1000\\n' > ~/.bashrc")
    try:
        process = desk.start(*desk.quick())
        time.sleep(2)
        desk.lab.signal(process, 9)
        process.wait()
        began = time.monotonic()
        assert desk.run("list").returncode == 0
        assert time.monotonic() - began < 3 + 3
        began = time.monotonic()
        desk.run("status")
        assert time.monotonic() - began < 3 + 5 + 3
    finally:
        desk.lab.run("ssh1", "rm", "/home/gpt/.bashrc", check=True)
        desk.lab.run("ssh1", "pkill", "-xf", "sleep 1000", check=False)
    desk.run("cancel", "--now")
    desk.run("list")
    await_true(lambda: not left(desk), 20, lambda: str(left(desk)))
