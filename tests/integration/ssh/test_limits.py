"""Hosts that offer too much. Oracles: what they were made to offer, and what the user's disk has afterwards."""

from __future__ import annotations

import os
import shlex
import subprocess
from pathlib import Path

from tests.integration.ssh.desk import HOSTS, Desk, await_true

ODD = bytes(code for code in range(1, 256) if code != ord("/"))
# Of 245 bytes and more, with every byte that a name can have; and one that is nothing but line ends.
NAMES = [b"x" * 245, b"y" * 255, ODD[:250], ODD[-100:], b"\n" * 30, b"-rf ..", "名".encode() * 85]


def used(folder: Path) -> int:
    return int(subprocess.run(["du", "-s", "-B1", folder], capture_output=True, check=True).stdout.split()[0])


def huge(desk: Desk, host: str, file: str) -> int:
    """Create a sparse file, as large as the file system of the host allows."""
    quoted = shlex.quote(file)
    desk.on(host, f"mkdir -p $(dirname {quoted}); truncate -s 4E {quoted} 2> /dev/null || truncate -s 8T {quoted}")
    return int(desk.on(host, f"stat -c %s {quoted}"))


def test_files_that_are_too_large(desk: Desk) -> None:
    """Logs of one host are cut, and told; the others are complete. Nothing is fetched of what does not fit."""
    job = desk.submit_quick(JOB_SECONDS="200")["job"]
    await_true(lambda: all(desk.ran(host) for host in HOSTS), 20)
    run, here = f"{desk.run_root}/{job}", desk.folder / "home" / "runs" / job
    size = huge(desk, "ssh2", f"{run}/logs/attempt-0/workerlog.1")
    assert size > 2**42
    desk.on("ssh1", f"echo I am rank 0 > {run}/logs/attempt-0/workerlog.0")
    done = desk.run("logs", job, "--max-size", "2MB")
    assert done.returncode == 0, done.stderr
    assert "I am rank 0" in done.stdout
    assert f"ssh2: its logs have {size / 10 ** (18 if size > 10**18 else 12):.1f} " in done.stderr
    assert f"only 2.0 MB of them are copied. To copy more: gptctl logs {job} --max-size" in done.stderr
    assert (here / "logs" / "attempt-0" / "workerlog.1").stat().st_size <= 2_000_000
    desk.on("ssh2", f"rm {run}/logs/attempt-0/workerlog.1")
    huge(desk, "private1", f"{run}/code/checkpoint")
    before = used(desk.folder)
    done = desk.run("fetch", job)
    assert done.returncode == 3
    assert "not copied: private1: " in done.stderr
    assert "would be copied, and the limit is 1.0 TB: " in done.stderr
    assert "code/checkpoint (" in done.stderr
    done = desk.run("fetch", job, "--max-size", "9EB")
    assert done.returncode == 3
    assert "has room for" in done.stderr
    assert not (here / "work" / "checkpoint").exists()
    assert used(desk.folder) - before < 1_000_000
    grow = "while sleep 0.05; do head -c 100000 /dev/zero >> grows; done > /dev/null 2>&1 & echo $! > ~/growing"
    desk.on("private1", f"rm {run}/code/checkpoint; cd {run}/code; {grow}")
    await_true(lambda: int(desk.on("private1", f"stat -c %s {run}/code/grows") or 0) > 1_000_000, 20)
    done = desk.run("fetch", job)
    desk.on("private1", "kill $(cat ~/growing)")
    assert done.returncode == 0, done.stderr


def test_folders_that_are_too_deep_or_too_full(desk: Desk) -> None:
    """Both are refused with their limit; below it, files of any name are fetched, and once only."""
    job = desk.submit_quick()["job"]
    desk.wait(job, "COMPLETED")
    code = f"{desk.run_root}/{job}/code"
    desk.on("ssh2", f"cd {code}; for i in $(seq 300); do mkdir d; cd d; done")
    done = desk.run("fetch", job)
    assert done.returncode == 3
    assert "ssh2: folders are nested more than 50 levels deep: " in done.stderr
    desk.on("ssh2", f"cd {code}; mv d ../away; seq -f f%g 3000 | xargs touch")
    done = desk.run("fetch", job, "--max-files", "2000")
    assert done.returncode == 3
    assert "ssh2: more than 2,000 files and folders; nothing was copied" in done.stderr
    assert "hint: try --max-files 20000" in done.stderr
    program = f"import os; [open(b'{code}/' + name, 'w').write('x') for name in {NAMES!r}]"
    desk.on("ssh1", f"python3 -c {shlex.quote(program)}")
    done = desk.run("fetch", job, "--to", "names")
    assert done.returncode == 0, done.stderr
    assert set(NAMES) <= set(os.listdir(os.fsencode(desk.folder / "names" / "work")))
    assert desk.run("fetch", job, "--to", "names").stdout.endswith("nothing new\n")
