"""Reaches nodes by one short job of Slurm, which never stays behind: it is cancelled in the end whatever happens, and
should gptctl be killed, Slurm itself drops it at its deadline."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable
from pathlib import Path

from gptctl.backends.slurm import client
from gptctl.backends.slurm.client import SlurmError
from gptctl.backends.slurm.queue import GOING, WAITING, Seen, with_token
from gptctl.doctor.probe import BATCH_SCRIPT, MINUTES, Sightings
from gptctl.doctor.rows import Row, ok, wrong
from gptctl.doctor.signals import undisturbed
from gptctl.engine.run_folder import read_text

Say = Callable[[str], None]

EVERY = 2.0  # seconds between two questions to Slurm
SETTLE = 5.0  # seconds after which a request on its way, or a file of a node, has arrived
SILENCE, PATIENCE = 15.0, 60.0
NO_FOLDER = 73  # exit code of the batch script
NOT_SHARED = "it must be one folder that every node and this machine see"


def run_on_nodes(folder: Path, nodes: int, timeout: float, sightings: Sightings, say: Say) -> Row:
    """What became of the job; what the nodes told is in the folder."""
    name = f"gptctl-doctor-{secrets.token_hex(4)}"
    job = ShortJob(name, folder, timeout, sightings, say)
    say(f"asking Slurm for {nodes} node{'s' * (nodes > 1)} …")
    try:
        with undisturbed():  # a client that dies of Ctrl-C could leave a job that nobody knows
            job.submit()
        return job.watch()
    finally:
        with undisturbed():
            job.remove()


class ShortJob:
    def __init__(
        self, name: str, folder: Path, timeout: float, sightings: Sightings, say: Say
    ) -> None:
        self.name, self.folder, self.timeout = name, folder, timeout
        self.sightings, self.say = sightings, say
        self.doubt: SlurmError | None = None  # what sbatch said when it got no answer
        self._sent = self._since = self._answered = time.monotonic()
        self._said = ""

    def submit(self) -> None:
        # Long after it was given up; what a profile says of the rest is in the script, which these win over.
        deadline = int(self.timeout) + 2 * 60 * MINUTES
        own = [
            f"--job-name={self.name}",
            f"--comment={self.name}",
            f"--deadline=now+{deadline}",
            "--no-requeue",
        ]
        self.sightings.not_yet()
        try:
            client.run("sbatch", "--parsable", *own, str(self.folder / BATCH_SCRIPT))
        except SlurmError as error:
            if not error.is_doubtful:
                raise
            self.doubt = error
        self._sent = self._since = self._answered = time.monotonic()

    def seen(self) -> Seen | None:
        jobs = with_token(self.name, str(self.folder))
        if not jobs:
            return None
        self.doubt = None
        return max(jobs, key=lambda job: int(job.id))

    def watch(self) -> Row:
        """Looks into the folder all the time, and asks Slurm now and then."""
        asked = float("-inf")
        while True:
            self.sightings.look()
            self._tell()
            if (self.folder / "ended").exists():
                return self._came_to_an_end()
            if time.monotonic() - asked > EVERY:
                asked, before = time.monotonic(), time.time()
                if row := self._ask(before):
                    return row
            time.sleep(0.1)

    def _ask(self, now: float) -> Row | None:
        try:
            job = self.seen()
        except SlurmError as error:
            if not error.is_doubtful or time.monotonic() - self._answered > SILENCE:
                raise
            self._say(f"Slurm does not answer: {error.said}")
            return None
        self._answered = time.monotonic()
        if job and job.state in WAITING:
            self.sightings.earliest, self._since = now, time.monotonic()
        return self._judge(job)

    def _tell(self) -> None:
        if (self.folder / "measuring").exists():
            self._say("measuring an all-reduce …")
        elif hosts := read_text(self.folder / "hosts").split():
            self._say(f"looking at {', '.join(hosts)} …")

    def _say(self, text: str) -> None:
        if text != self._said:
            self.say(text)
            self._said = text

    def _judge(self, job: Seen | None) -> Row | None:
        """A verdict that Slurm's answer makes final."""
        waited = time.monotonic() - self._sent
        if job is None:
            if waited < SETTLE:
                return None
            raise self.doubt or SlurmError(
                f"it does not know job {self.name} any more", is_doubtful=True
            )
        if job.state in WAITING:
            reason = "" if job.reason in ("", "None") else f": {job.reason}"
            if waited > 1:
                self._say(f"job {job.id} waits{reason}")
            if waited <= self.timeout:
                return None
            fix = f"squeue and sinfo -R say more; to wait longer: --timeout {max(600, 2 * int(self.timeout))}"
            return wrong(
                "job", f"job {job.id} waited for more than {self.timeout:g} s{reason}", fix
            )
        if job.state in GOING and time.monotonic() - self._since < 60 * MINUTES + PATIENCE:
            return None
        return self._settled(job)

    def _settled(self, job: Seen) -> Row:
        """It has ended; its last files may still be on their way."""
        deadline = time.monotonic() + SETTLE
        while time.monotonic() < deadline:
            self.sightings.look()
            if (self.folder / "ended").exists():
                return self._came_to_an_end()
            if reason := read_text(self.folder / "head.failed").strip():
                return wrong(
                    "job",
                    reason,
                    "set master_interface in the profile, or mend the names of the nodes",
                )
            if job.exit_code >> 8 == NO_FOLDER:
                return wrong(
                    "run_root", f"{self.folder.parent} is not there", NOT_SHARED, job.nodes
                )
            time.sleep(0.2)
        if job.state == "COMPLETED":
            return wrong(
                "run_root", "what nodes write there is not seen here", NOT_SHARED, job.nodes
            )
        return wrong(
            "job",
            f"job {job.id} on {job.nodes or 'no node'} ended as {job.state}",
            "sinfo -R; sacct; try again",
        )

    def _came_to_an_end(self) -> Row:
        waited = self._since - self._sent
        return ok(
            "job", f"it started {'at once' if waited < 2 * EVERY else f'after {waited:.0f} s'}"
        )

    def remove(self) -> None:
        """Returns when it is gone from the queue."""
        deadline = time.monotonic() + PATIENCE
        if self.doubt:  # it may still arrive
            time.sleep(SETTLE)
        while True:
            try:
                job = self.seen()
                if job is None or job.state not in (*WAITING, *GOING):
                    return
                if job.state != "COMPLETING" and not (self.folder / "ended").exists():
                    self._say(f"cancelling job {job.id} …")
                    if job.state in GOING:
                        client.run("scancel", "--full", "--signal=KILL", job.id)
                    client.run("scancel", f"--name={self.name}", job.id)
            except SlurmError as error:
                if time.monotonic() > deadline:
                    self.say(
                        f"warning: {error.said}: see to it yourself: scancel --name={self.name}"
                    )
                    return
            if time.monotonic() > deadline:
                self.say(
                    f"warning: job {self.name} is still in the queue: scancel --name={self.name}"
                )
                return
            time.sleep(0.3)
