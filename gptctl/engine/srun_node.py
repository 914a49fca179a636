"""The nodes of a Slurm allocation: one step of `srun` runs launch.sh on all of them.

job.sbatch starts this module on the first node of the allocation:
engine.pyz srun_node RUN_DIR [stop-requested]     the scheduler has already asked the job to stop
"""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from itertools import pairwise
from pathlib import Path

from gptctl.engine.cause import Cause
from gptctl.engine.contract import BATCH_ENVIRONMENT_VARIABLE, LAUNCH_SCRIPT, STOP_SIGNALS
from gptctl.engine.file_reading import read_text, size_of
from gptctl.engine.first_failure import cause_on_nodes, tail
from gptctl.engine.job_result import FAILED
from gptctl.engine.launch_plan import LaunchPlan
from gptctl.engine.log import say, write_log
from gptctl.engine.node import NodeExit, node_log
from gptctl.engine.processes import disregard
from gptctl.engine.run_folder import RunFolder, read_plan
from gptctl.engine.supervisor import Supervisor

START_TIMEOUT = 60  # seconds for which srun may wait for the nodes of its own allocation
KILL_TIMEOUT = 40.0  # seconds; Slurm itself usually waits 30 between SIGTERM and SIGKILL
ASK_AGAIN = 5.0  # seconds after which a signal that no node has noted is sent again
ANSWER_TIMEOUT = 60.0  # seconds that one command of Slurm may take
CONTROLLER_TRIES, CONTROLLER_PAUSE = 60, 5.0  # a controller may be down for minutes


class UnusableAllocation(Exception):
    """The job cannot run on the nodes that Slurm gave it."""


class Step:
    """One `srun` for all nodes of an attempt."""

    def __init__(self, plan: LaunchPlan, nodes: int, environment: Mapping[str, str]) -> None:
        self.plan, self.nodes = plan, nodes
        self.folder = RunFolder(plan.remote_dir)
        self.attempt = -1
        self._environment = dict(environment)
        self._process: subprocess.Popen[bytes] | None = None
        self._requested_at, self._log_start = float("-inf"), 0
        self._exits: dict[int, NodeExit] = {}

    def start(self, attempt: int, host: str, port: int) -> None:
        self.attempt, self._requested_at, self._exits = attempt, float("-inf"), {}
        # Files of an earlier start of this attempt would be read as those of this one.
        for number in range(self.nodes):
            self.folder.forget_node(attempt, number)
        logs = node_log(self.plan, attempt, 0).parent
        logs.mkdir(parents=True, exist_ok=True)
        self._log_start = size_of(node_log(self.plan, attempt, 0))
        # As words: variables of a container's image would override those of srun.
        own = f"MASTER_ADDR={host}", f"MASTER_PORT={port}", f"GPTCTL_ATTEMPT={attempt}"
        script = os.path.join(self.plan.remote_dir, LAUNCH_SCRIPT)
        self._process = subprocess.Popen(
            [
                "srun",
                f"--nodes={self.nodes}",
                "--ntasks-per-node=1",
                # torchrun itself survives the loss of nodes in an elastic job.
                *([] if self.plan.is_elastic else ["--kill-on-bad-exit=1"]),
                "--unbuffered",
                f"--immediate={START_TIMEOUT}",
                f"--output={str(logs).replace('%', '%%')}/node.%n.log",  # % begins a pattern
                "--open-mode=append",
                *self.plan.srun_container,
                *("bash", "-c", 'GPTCTL_NODE=$SLURM_NODEID exec env "$@"', "node"),
                *(*own, "bash", script),
            ],
            cwd=self.plan.remote_dir,
            env=self._environment,
            stdin=subprocess.DEVNULL,
        )

    def exits(self) -> dict[int, NodeExit] | None:
        """Return how all nodes exited, or None while the step runs."""
        code = self._process.poll() if self._process else 0
        if code is None:
            return None
        if self._process and not self._exits:
            self._exits = self._read_exits(code if code >= 0 else 128 - code)
        return self._exits or {number: NodeExit(0) for number in range(self.nodes)}

    def _read_exits(self, step_code: int) -> dict[int, NodeExit]:
        codes = self.folder.exit_codes(self.attempt, range(self.nodes))
        exits = {
            number: self._exit_of(number, codes.get(number), step_code)
            for number in range(self.nodes)
        }
        # srun itself failed, although every node that it started succeeded.
        if step_code and not any(end.code for end in exits.values()):
            exits[0] = NodeExit(step_code, Cause(f"srun exited with code {step_code}", 0))
        # All nodes at once: of thousands of logs only a few must be read.
        failed = sorted((end.time, number) for number, end in exits.items() if codes.get(number))
        if failed:
            log_dir, first = self.plan.log_dir, failed[0][1]
            # A rank of a node that srun stopped, because of another one, may have failed before.
            asked = {number: 1 for number in exits if self._was_asked(number)}
            where = self.folder, self.attempt, log_dir
            cause = cause_on_nodes(*where, asked | codes, first, is_shared=True)
            number = cause.node if cause and cause.node in exits else first
            # What a node prints while srun stops it, because of another one, is not the cause.
            if cause and cause.rank is None and self._was_asked(number):
                cause = cause._replace(is_consequence=True)
            exits[number] = exits[number]._replace(cause=cause)
        return exits

    def _exit_of(self, number: int, code: int | None, step_code: int) -> NodeExit:
        log = node_log(self.plan, self.attempt, number)
        if code is None:
            # A node that recorded nothing was killed or lost, and the others failed because of it:
            # report it as the first failure. Not if it was asked to stop: then srun killed it
            # because of another one. An elastic job continues without it.
            was_asked = self._was_asked(number)
            text = f"no exit code recorded: srun exited with code {step_code}"
            return NodeExit(
                step_code or 1,
                Cause(text, number, is_consequence=was_asked or self.plan.is_elastic),
                time=float("inf") if was_asked or self.plan.is_elastic else -1.0,
                never_started=not log.exists(),
            )
        is_unrecoverable = self.folder.is_unrecoverable(self.attempt)
        exit_time = self.folder.exit_time(self.attempt, number)
        return NodeExit(code, None, is_unrecoverable, exit_time)

    def _was_asked(self, number: int) -> bool:
        return self.folder.stop_was_requested(self.attempt, number)

    def has_ranks(self) -> bool:
        return self.folder.has_ranks(self.attempt)

    def output(self) -> str:
        """Return what node 0 has printed since this start."""
        return tail(node_log(self.plan, self.attempt, 0), self._log_start)

    def request_stop(self) -> None:
        """Send SIGUSR1 to srun, which passes it to launch.sh and torchrun on every node."""
        # srun may drop the signal before the step has started, so repeat it until a node has noted
        # it. Not longer: a second signal would interrupt a torchrun that is stopping its ranks.
        if not self._process or time.monotonic() - self._requested_at < ASK_AGAIN:
            return
        self._requested_at = time.monotonic()
        if not any(
            self.folder.stop_was_requested(self.attempt, number) for number in range(self.nodes)
        ):
            self._process.send_signal(signal.SIGUSR1)

    def kill(self) -> None:
        """Send SIGTERM to srun, which kills the step. Slurm kills the rest when the job ends."""
        if not self._process or self._process.poll() is not None:
            return
        self._process.terminate()
        try:
            self._process.wait(KILL_TIMEOUT)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


class SrunNode:
    """A node of the step. Node 0 starts, stops and kills the step for all nodes."""

    def __init__(self, number: int, step: Step) -> None:
        self.number, self._step = number, step

    def start(self, attempt: int, host: str, port: int) -> None:
        if self.number == 0:
            self._step.start(attempt, host, port)

    def exited(self) -> NodeExit | None:
        exits = self._step.exits()
        return exits[self.number] if exits else None

    def has_ranks(self) -> bool:
        # Asked for each node of perhaps a thousand: one answer for the step is enough.
        return self.number == 0 and self._step.has_ranks()

    def can_stop_gracefully(self) -> bool:
        return True  # the signal stops launch.sh in any phase

    def request_stop(self) -> None:
        if self.number == 0:
            self._step.request_stop()

    def begin_kill(self) -> None:
        return  # one srun kills all nodes at the same time

    def kill(self) -> bool:
        if self.number == 0:
            self._step.kill()
        return True  # Slurm ends what is left when the job ends

    def is_lost(self) -> bool:
        return False  # Slurm replaces a node by a requeue

    def output(self) -> str:
        return self._step.output() if self.number == 0 else ""


class SlurmJob:
    """Slurm, as seen by the job that it runs."""

    def __init__(self, plan: LaunchPlan, job: str, hosts: Sequence[str]) -> None:
        self.can_requeue = "requeue" in plan.sbatch
        self._plan, self._job, self._hosts = plan, job, hosts

    def begin_attempt(self, number: int) -> None:
        """Redirect the output of this process, and of Slurm, to the folder of the attempt."""
        logs = Path(self._plan.log_dir)
        own = logs / f"attempt-{number}" / "batch.log"
        own.parent.mkdir(parents=True, exist_ok=True)
        # Slurm has the file open, and continues to write to it under its new name.
        with suppress(OSError):
            os.replace(logs / "batch.log", own)
        log = os.open(own, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        for stream in (1, 2):
            os.dup2(log, stream)
        os.close(log)
        say(f"attempt {number}, Slurm job {self._job}")
        self._report_lost_nodes(number - 1)
        # As the scripts of the tutorials print it: node id, hosts, head node, number of nodes.
        node = os.environ.get("SLURM_NODEID", "0")
        write_log(node, " ".join(self._hosts), self._hosts[0], str(len(self._hosts)))

    def _report_lost_nodes(self, attempt: int) -> None:
        """Print nodes of the last attempt that are down: they may explain this attempt."""
        hosts = read_text(RunFolder(self._plan.remote_dir).attempt(attempt) / "hosts").split()
        if hosts:
            states = ("--states=down,fail,unknown", "--format=%N of the last attempt is %T: %E")
            done = run("sinfo", "--noheader", "--Node", f"--nodes={','.join(hosts)}", *states)
            write_log(*sorted(set(done.stdout.splitlines())))

    def ending(self) -> str:
        # Ask Slurm itself: its signal may not have arrived here yet.
        query = ("--noheader", "--states=all", f"--jobs={self._job}", "--format=%T")
        done = patiently("squeue", *query)
        if done.returncode == NOT_INSTALLED:
            return ""
        # The cluster may print a notice before the answer.
        states = [line for line in done.stdout.split("\n") if STATE.fullmatch(line)]
        state = states[-1] if states else "Slurm does not answer"
        return "" if state == "RUNNING" else state

    def requeue(self) -> bool:
        return patiently("scontrol", "requeue", self._job).returncode == 0


NOT_INSTALLED = 127
STATE = re.compile(r"[A-Z_]+")


def run(*command: str) -> subprocess.CompletedProcess[str]:
    """Run a command of Slurm, once more if a signal has killed it."""
    # `scancel` sends its signal to every process of the job, but what the command would say
    # decides how the job ends.
    done = _run(*command)
    return _run(*command) if done.returncode < 0 else done


def _run(*command: str) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(
            command,
            stdout=subprocess.PIPE,
            stdin=subprocess.DEVNULL,
            text=True,
            errors="replace",
            timeout=ANSWER_TIMEOUT,
        )
    except FileNotFoundError:
        return subprocess.CompletedProcess(command, NOT_INSTALLED, "")
    except subprocess.TimeoutExpired:
        return subprocess.CompletedProcess(command, 124, "")


def patiently(*command: str) -> subprocess.CompletedProcess[str]:
    """Repeat a command until the controller answers; if it is up, a failure is its answer."""
    for _ in range(CONTROLLER_TRIES):
        done = run(*command)
        if done.returncode in (0, NOT_INSTALLED):
            break
        # The controller may have come up only after the command failed: run it once more.
        if run("scontrol", "ping").returncode == 0:
            return run(*command)
        time.sleep(CONTROLLER_PAUSE)
    return done


def hosts_of_allocation() -> list[str]:
    listed = os.environ.get("SLURM_JOB_NODELIST", "")
    hosts = run("scontrol", "show", "hostnames", listed).stdout.split()
    if not hosts:
        raise UnusableAllocation(f"scontrol cannot list the hosts of {listed}")
    return hosts


def head_address(plan: LaunchPlan, head: str) -> str:
    """Return the rendezvous address. No fallback: with localhost each node would train alone."""
    if plan.master_addr:
        return plan.master_addr
    if plan.master_interface:
        command = ("ip", "-4", "-o", "address", "show", "dev", plan.master_interface)
        shown = run(*command).stdout.split()
        addresses = [after.partition("/")[0] for word, after in pairwise(shown) if word == "inet"]
        problem = f"{head} has no IPv4 address on master_interface {plan.master_interface}"
    else:
        addresses = _addresses_of(head)
        problem = (
            f"cannot resolve {head} to an address that other nodes can reach: check DNS and "
            "/etc/hosts there, or set master_interface in the profile"
        )
    if not addresses:
        raise UnusableAllocation(problem)
    return addresses[0]


def _addresses_of(host: str) -> list[str]:
    try:
        found = socket.getaddrinfo(host, None, socket.AF_INET, socket.SOCK_STREAM)
    except OSError:
        return []
    return [str(place[0]) for *_, place in found if not str(place[0]).startswith("127.")]


def batch_environment() -> dict[str, str]:
    """Return the environment in which Slurm started the batch script."""
    descriptor = os.environ.get(BATCH_ENVIRONMENT_VARIABLE)
    if not descriptor:
        return dict(os.environ)
    # The script has run the setup to find this interpreter; the ranks must not run it twice.
    with open(int(descriptor), errors="surrogateescape") as stream:
        pairs = [line.partition("=") for line in stream.read().split("\0") if line]
    return {name: value for name, _, value in pairs}


def environment_of_step() -> dict[str, str]:
    """Return the environment that srun passes on to the ranks."""
    kept = batch_environment()
    # SLURM_EXPORT_ENV restricts what srun passes on: it may be set by sbatch --export.
    kept.pop("SLURM_EXPORT_ENV", None)
    if cpus := kept.get("SLURM_CPUS_PER_TASK"):
        # Since Slurm 22.05 srun does not read SLURM_CPUS_PER_TASK.
        kept["SRUN_CPUS_PER_TASK"] = cpus
    return kept


def main() -> None:
    folder = RunFolder(sys.argv[1])
    os.umask(0o077)
    disregard(signal.SIGHUP, signal.SIGINT)
    # The supervisor handles these later; what arrives before that must not be lost.
    early = [signal.SIGUSR1] if "stop-requested" in sys.argv[2:] else []
    for number in STOP_SIGNALS:
        signal.signal(number, lambda number, frame: early.append(signal.Signals(number)))
    plan = read_plan(folder.path)
    try:
        hosts = hosts_of_allocation()
        address = head_address(plan, hosts[0])
    except UnusableAllocation as problem:
        say(f"{FAILED}: {problem}")
        folder.finish(FAILED, str(problem))
        raise SystemExit(1) from None
    step = Step(plan, len(hosts), environment_of_step())
    nodes = [SrunNode(number, step) for number in range(len(hosts))]
    # A convenience for `gptctl shell`: a full disk must not stop the job.
    with suppress(OSError):
        folder.slurm_job_file.write_text(os.environ["SLURM_JOB_ID"], encoding="utf-8")
    scheduler = SlurmJob(plan, os.environ["SLURM_JOB_ID"], hosts)
    log = f"{plan.log_dir}/attempt-*/batch.log"
    code = Supervisor(plan, nodes, address, hosts, scheduler, log).run(early=early)
    # Not SystemExit: if the disk is full, flushing stdout would change the exit code.
    os._exit(code)


if __name__ == "__main__":
    main()
