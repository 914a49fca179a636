"""The doctor's folder on a cluster behind a login host, with a copy on this machine."""

from __future__ import annotations

import re
import secrets
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from gptctl.backends.slurm.client import SlurmError
from gptctl.backends.slurm.login_access import LoginAccess
from gptctl.doctor.signals import signals_blocked
from gptctl.doctor.slurm_job import DoctorFolder
from gptctl.doctor.ssh_hosts import unpack
from gptctl.remote.archive import pack
from gptctl.remote.scripts import remote_command

# What the job writes on all its nodes; they share one folder, and one user.
FILES = re.compile(r"ended|hosts|head\.failed|no_access|(node|reduce)\.[a-z0-9.]{1,60}")
PULL_INTERVAL = 1.0  # seconds between two copies


class FolderCopy:
    """Creates the doctor's folder on the cluster, and copies what the nodes write there."""

    def __init__(self, access: LoginAccess, there: str, here: Path) -> None:
        self.access, self.there, self.here = access, there, here
        self._pulled = float("-inf")
        self._created: list[str] = []  # parent folders, deepest first

    def create(self) -> None:
        """Raise OSError if that is not possible."""
        done = self.access.run(remote_command("doctor_create.sh", self.there, ""), pack(self.here))
        if done.code:
            said = done.err.partition("\n")[0].rpartition(": ")[2] or f"exit code {done.code}"
            raise OSError(done.code, said, str(Path(self.there).parent))
        self._created = done.out.decode(errors="replace").splitlines()

    def push(self) -> None:
        self.access.run(["tar", "-xzf", "-", "-C", self.there], pack(self.here))

    def pull(self) -> None:
        if time.monotonic() - self._pulled < PULL_INTERVAL:
            return
        done = self.access.run(remote_command("doctor_files.sh", self.there))
        self._pulled = time.monotonic()
        unpack(done.out, self.here, FILES)

    def remove(self) -> None:
        # If the connection is lost for good, the folder stays there.
        with suppress(SlurmError):
            self.access.run(remote_command("doctor_remove.sh", self.there, *self._created))


@contextmanager
def login_folder(access: LoginAccess, root: str) -> Iterator[DoctorFolder]:
    """A new folder on the cluster and one here; both are removed at the end."""
    with tempfile.TemporaryDirectory(prefix="gptctl-doctor-") as place:
        copy = FolderCopy(access, f"{root}/.doctor-{secrets.token_hex(4)}", Path(place))
        try:
            copy.create()
            yield DoctorFolder(copy.here, copy.there, copy.push, copy.pull)
        finally:
            with signals_blocked():
                copy.remove()
