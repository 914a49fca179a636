"""This machine. A detached supervisor runs the job.

gptctl finds it again by process id, start time and boot id, so that a reused id is noticed.
"""

from __future__ import annotations

import errno
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar

from gptctl.backends import Backend, JobState, cause_in_folder, half_submitted, recorded_state
from gptctl.deadline import Deadline
from gptctl.engine.atomic_files import private_files
from gptctl.engine.contract import ENGINE_FILE, READY_VARIABLE
from gptctl.engine.error_text import one_line
from gptctl.engine.file_reading import DamagedFile
from gptctl.engine.job_result import CANCELLED, COMPLETED, FAILED, LOST, PENDING, RUNNING, UNKNOWN
from gptctl.engine.launch_plan import LaunchPlan
from gptctl.engine.processes import (
    clean_environment,
    is_alive,
    is_here,
    is_same_boot,
    kill_all,
    processes_of,
    send,
)
from gptctl.engine.run_folder import ABANDONED, RunFolder, read_plan
from gptctl.jobs.store import JobRecord
from gptctl.planning.build import JobIdentity, PlanDefaults, Site
from gptctl.reporting import Say
from gptctl.spec.check import Checked
from gptctl.spec.launch import Rendezvous, is_variable, split_endpoint
from gptctl.spec.launch_rules import is_loopback
from trainer.errors import OUT_OF_REACH, Finding, Rule, UserError

PORT_FREE = Rule(
    "S004", "the rendezvous endpoint of a job on this machine must be a free port of this machine"
)

LOOPBACK = "127.0.0.1"
# Seconds until the supervisor must have answered. It may have to wait for an nvidia-smi that hangs.
START_TIMEOUT = 120.0
STOP_TIMEOUT = 60.0  # seconds; longer than the supervisor itself waits for its ranks


class LocalBackend(Backend):
    nodes_are_here: ClassVar[bool] = True

    def __init__(self, say: Say, limit: Deadline | None = None) -> None:
        pass

    def plan_defaults(self, checked: Checked, site: Site, identity: JobIdentity) -> PlanDefaults:
        # A command that is printed with another endpoint is for several machines.
        endpoint = checked.launch.rdzv.endpoint
        host = split_endpoint(endpoint)[0] if endpoint else LOOPBACK
        spans = not identity.remote_dir and checked.machines.nodes > 1 and not is_loopback(host)
        return PlanDefaults(
            host=LOOPBACK,
            rdzv_id=checked.launch.job_name,
            env={} if spans else {"GLOO_SOCKET_IFNAME": "lo"},
            spans_machines=spans,
        )

    def preflight(self, checked: Checked, plan: LaunchPlan) -> Iterator[Finding]:
        # A port that gptctl chooses itself is checked when the job starts.
        port = plan.master_port
        is_chosen = port or plan.master_addr != LOOPBACK
        if not is_chosen or plan.form == "standalone" or is_variable(plan.master_addr):
            return
        # Imported here: it loads `socket`, which few commands need.
        from gptctl.engine.ports import listen_error

        if fault := listen_error(plan.master_addr, port or 0):
            yield _endpoint_finding(checked.launch.rdzv, plan.master_addr, port, fault)

    def watched_folder(self, record: JobRecord, checked: Checked) -> str | None:
        is_seen = record.kind == checked.cluster.kind and is_here(record.handle)
        return record.local_dir if is_seen else None

    def start(self, plan: LaunchPlan, record: JobRecord) -> dict[str, Any]:
        # Through this pipe the supervisor answers when it has the claim, and the job exists.
        reading, writing = os.pipe()
        process = _start_supervisor(plan.remote_dir, writing)
        os.close(writing)
        answered, _, _ = select.select([reading], [], [], START_TIMEOUT)
        # Empty if the supervisor exited before it could answer.
        answer = os.read(reading, 1) if answered else b""
        os.close(reading)
        claim = RunFolder(plan.remote_dir).claimed_by()
        if answer != b"1" or not claim:
            from gptctl.engine.first_failure import tail

            # Without the claim it cannot start anything, but it must not take it later either.
            process.kill()
            process.wait()
            log = tail(RunFolder(plan.remote_dir).path / "supervisor.log").splitlines()
            # The folder and its log are removed with the job.
            hint = f"its log ends with: {one_line(log[-1])}" if log else "submit again"
            raise UserError("the job's supervisor did not start", hint, OUT_OF_REACH)
        return claim

    def abandon(self, record: JobRecord) -> bool:
        folder = RunFolder(record.local_dir)
        if folder.try_claim(ABANDONED):
            return True
        # Another gptctl may have abandoned it, and was killed before it could remove the folder.
        claim = folder.claimed_by() or {}
        return bool(claim.get("abandoned")) or _was_killed_before_it_began(folder, claim)

    def state(self, record: JobRecord) -> JobState:
        folder = RunFolder(record.local_dir)
        claim = folder.claimed_by() or dict(record.handle)
        owner = claim or record.submitter
        if not is_here(owner):
            return JobState(UNKNOWN, f"it runs on {owner.get('host')}; run gptctl on that machine")
        if not claim:
            return half_submitted(record)
        if not folder.path.is_dir():
            runs = is_alive(claim) or (is_same_boot(claim) and processes_of(record.local_dir))
            return JobState(RUNNING if runs else LOST, f"its folder {record.local_dir} is missing")
        if is_alive(claim):
            if reason := folder.waiting_for():
                return JobState(PENDING, reason)
            begun = folder.has_ranks(folder.attempts() - 1)
            return JobState(RUNNING, "" if begun else "starting")
        # The supervisor may have exited between the caller's check and this one.
        if result := folder.result():
            return recorded_state(result)
        if is_same_boot(claim) and processes_of(record.local_dir):
            reason = "its supervisor was killed: no restarts, and no time limit"
            return JobState(RUNNING, reason)
        return _from_exit_codes(record, folder, claim)

    def node_command(
        self, record: JobRecord, node: int, words: Sequence[str], has_terminal: bool
    ) -> list[str]:
        module, *arguments = words
        engine = [sys.executable, "-E", "-S", os.path.join(record.local_dir, ENGINE_FILE)]
        return [*engine, module, record.local_dir, *arguments]

    def may_answer_later(self, record: JobRecord) -> bool:
        return False  # only another machine can know it

    def cancel(self, record: JobRecord, now: bool) -> None:
        folder = RunFolder(record.local_dir)
        claim = folder.claimed_by() or dict(record.handle)
        if not is_here(claim or record.submitter):
            host = (claim or record.submitter).get("host")
            raise UserError(f"{record.id} runs on {host}", "cancel it there", OUT_OF_REACH)
        has_folder = folder.path.is_dir()
        # A supervisor that is just starting must not get the claim any more.
        if not claim and has_folder:
            folder.try_claim(ABANDONED)
        if has_folder:
            folder.cancel(now)
        _stop(record, folder, claim, now)
        if left := kill_all(record.local_dir):
            message = f"processes {left} of {record.id} cannot be killed"
            raise UserError(message, "check who owns these processes", OUT_OF_REACH)
        if has_folder and not folder.result():
            folder.finish(CANCELLED, "")


def _endpoint_finding(rdzv: Rendezvous, host: str, port: int | None, fault: OSError) -> Finding:
    """Say what is wrong with the endpoint, and which key it comes from."""
    import socket

    key = "Launch.rdzv.endpoint" if rdzv.endpoint else "Launch.rdzv.port"
    value = rdzv.endpoint or port
    if isinstance(fault, socket.gaierror):
        hint = f"use this machine's name or address, or delete the key: gptctl uses {LOOPBACK}"
        return PORT_FREE.found(key, value, f"cannot resolve host name {host}", hint)
    if fault.errno == errno.EADDRNOTAVAIL:
        hint = f"use an address of this machine, or delete the key: gptctl uses {LOOPBACK}"
        return PORT_FREE.found(key, value, f"{host} is not an address of this machine", hint)
    message = f"the rendezvous endpoint {host}:{port} cannot be used: {fault.strerror or fault}"
    return PORT_FREE.found(key, value, message, "delete the key: gptctl chooses a free port")


def _was_killed_before_it_began(folder: RunFolder, claim: dict[str, Any]) -> bool:
    has_begun = folder.attempts() > 0 or folder.result() is not None
    return is_here(claim) and not is_alive(claim) and not has_begun


def _start_supervisor(run_dir: str, ready: int) -> subprocess.Popen[bytes]:
    """Start the engine that was frozen with the job."""
    # An upgrade of gptctl must not change a job that was submitted before it.
    with private_files(), open(os.path.join(run_dir, "supervisor.log"), "ab") as log:
        return subprocess.Popen(
            [sys.executable, "-E", "-S", os.path.join(run_dir, ENGINE_FILE), "supervisor", run_dir],
            cwd=run_dir,
            env={**clean_environment(), READY_VARIABLE: str(ready)},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            pass_fds=(ready,),
            start_new_session=True,
        )


def _from_exit_codes(record: JobRecord, folder: RunFolder, claim: dict[str, Any]) -> JobState:
    """Derive the state from what the nodes of the last attempt recorded; the supervisor is dead."""
    attempt = folder.attempts() - 1
    codes = folder.exit_codes(attempt, range(record.nodes))
    if len(codes) == record.nodes:
        nnodes = _nnodes(record, folder)
        result = folder.attempt_result(
            attempt, codes, nnodes, record.output_dir, since=record.created
        )
        # Ranks that were asked to stop exit with 0, too.
        if result.state == COMPLETED and folder.is_cancelled():
            return JobState(CANCELLED)
        cause = cause_in_folder(record, folder) if result.state == FAILED else None
        return JobState(result.state, cause.reason() if cause else result.reason, cause)
    if folder.is_cancelled():
        return JobState(CANCELLED)
    why = "its processes exited without recording a result"
    if not is_same_boot(claim):
        why = "the machine was restarted"
    if folder.waiting_for():
        return JobState(LOST, f"{why}, while it was waiting to start")
    known = f"{len(codes)} of {record.nodes} nodes recorded an exit code"
    return JobState(LOST, f"{why}; {known}")


def _nnodes(record: JobRecord, folder: RunFolder) -> str:
    try:
        return read_plan(folder.path).nnodes
    except DamagedFile:
        return str(record.nodes)


def _stop(record: JobRecord, folder: RunFolder, claim: dict[str, Any], now: bool) -> None:
    if is_alive(claim):
        send(claim["pid"], signal.SIGTERM)
        # Somebody may have suspended it.
        send(claim["pid"], signal.SIGCONT)
        _wait_while(lambda: is_alive(claim))
        # As long as it lives, it keeps its place in the queue.
        if is_alive(claim):
            send(claim["pid"], signal.SIGKILL)
    # Without torchrun nobody asks the ranks to save: there is nothing to wait for.
    elif not now and _ask_torchrun(folder):
        _wait_while(lambda: bool(processes_of(record.local_dir)))


def _ask_torchrun(folder: RunFolder) -> bool:
    """Ask torchrun to stop, as the supervisor would; return whether there is one to ask."""
    # A recorded pid may belong to another process by now.
    running = processes_of(str(folder.path))
    asked = [pid for pid in folder.torchruns(folder.attempts() - 1).values() if pid in running]
    for pid in asked:
        send(pid, signal.SIGTERM)
    return bool(asked)


def _wait_while(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + STOP_TIMEOUT
    while holds() and time.monotonic() < deadline:
        time.sleep(0.05)
