"""`gptctl rm` on hosts without a shared folder. Oracle: what is left on each host."""

from __future__ import annotations

from tests.integration.ssh.desk import HOSTS, Desk


def test_rm_removes_the_folder_of_every_host(desk: Desk) -> None:
    """A host where something of the job still runs is named, and nothing is removed here until it is free, too."""
    job = desk.submit_quick()["job"]
    desk.wait(job, "COMPLETED")
    folder, here = f"{desk.run_root}/{job}", desk.folder / "home" / "runs" / job
    desk.on("ssh2", f"GPTCTL_RUN_DIR={folder} sleep 60 > /dev/null 2>&1 & echo $! > /tmp/{job}")
    for host in HOSTS:
        desk.on(host, f"mkdir {desk.run_root}/other && ln -s {desk.run_root}/other {folder}/link")
    refused = desk.run("rm", job, "--yes")
    assert refused.returncode == 3
    assert "ssh2: processes of the job are running there" in refused.stderr
    assert "ssh1" not in refused.stderr
    assert here.is_dir()
    assert "removed" not in desk.json("status", job)["reason"]
    desk.on("ssh2", f"kill $(cat /tmp/{job})")
    assert desk.run("rm", job, "--yes").returncode == 0
    assert [desk.on(host, f"ls -A {desk.run_root}").split() for host in HOSTS] == [["other"]] * 3
    assert not here.exists()
    status = desk.json("status", job)
    assert status["state"] == "COMPLETED"
    assert "run folder removed 2" in status["reason"]
