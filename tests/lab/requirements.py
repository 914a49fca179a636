"""Check whether a lab can start on this machine."""

from __future__ import annotations

import os
import shutil
import subprocess

from tests.lab.machines import SYSTEM_PATH

PROGRAMS = """
unshare nsenter setpriv ip ss pkill munged slurmctld slurmd sbatch srun slurmdbd mariadbd mariadb-install-db sshd ssh-keygen
"""
# What machine.sh needs: namespaces of all kinds, a tmpfs, and an overlay on top of it.
TRIAL = """
ip link add lab0 type bridge && ip link add lab1 type veth && mount -t tmpfs lab /mnt && mkdir /mnt/a /mnt/b &&
mount -t overlay -o lowerdir=/usr/bin,upperdir=/mnt/a,workdir=/mnt/b lab /usr/bin
"""


def missing() -> str:
    """Return what a lab needs and this machine lacks, in one line; empty if nothing."""
    if os.name != "posix" or os.geteuid():
        return "the lab makes namespaces: it needs Linux and root"
    absent = [name for name in PROGRAMS.split() if not shutil.which(name, path=SYSTEM_PATH)]
    if absent:
        return f"not installed: {', '.join(absent)} (`make tools` does it as root on Debian)"
    spaces = ["--net", "--uts", "--ipc", "--mount", "--pid", "--fork", "--mount-proc", "--propagation", "private"]
    trial = subprocess.run(["unshare", *spaces, "sh", "-c", TRIAL], capture_output=True, text=True)
    return f"namespaces cannot be made here: {' '.join(trial.stderr.split())}" if trial.returncode else ""
