"""This machine. A detached supervisor runs the job; it is found again by its process number, start time and boot."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from gptctl.backends import State, output_seen_here
from gptctl.engine.contract import BOOTSTRAP
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
from gptctl.engine.run_folder import (
    CANCELLED,
    LOST,
    PENDING,
    RUNNING,
    UNKNOWN,
    RunFolder,
    read_json,
)
from gptctl.jobs.store import JobRecord, private_files
from trainer.errors import OUT_OF_REACH, UserError

START_PATIENCE = 30.0
STOP_PATIENCE = 60.0  # the supervisor's own patience, and some seconds more


def start(plan: LaunchPlan, record: JobRecord) -> dict[str, Any]:
    engine = os.path.join(plan.run_dir, BOOTSTRAP)  # as frozen: an upgrade must not change a job
    reading, writing = os.pipe()
    environment = {**clean_environment(), "GPTCTL_READY": str(writing)}
    with private_files(), open(os.path.join(plan.run_dir, "supervisor.log"), "ab") as log:
        process = subprocess.Popen(
            [sys.executable, "-S", engine, "supervisor", plan.run_dir],
            cwd=plan.run_dir,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            pass_fds=(writing,),
            start_new_session=True,
        )
    os.close(writing)
    answered, _, _ = select.select([reading], [], [], START_PATIENCE)
    answer = (
        os.read(reading, 1) if answered else b""
    )  # or nothing, when it ended before it could answer
    os.close(reading)
    claim = RunFolder(plan.run_dir).claimed_by()
    if answer != b"1" or not claim:
        process.kill()
        process.wait()
        hint = f"see {plan.run_dir}/supervisor.log"
        raise UserError("the job's supervisor did not start", hint, OUT_OF_REACH)
    return claim


def expect(records: Sequence[JobRecord]) -> None:
    """Each is looked at by itself."""


def following(record: JobRecord) -> AbstractContextManager[None]:
    return nullcontext()  # its folder is here


def catch_up(record: JobRecord) -> list[str]:
    return []


def state(record: JobRecord) -> State:
    folder = RunFolder(record.run_dir)
    claim = folder.claimed_by() or dict(record.handle)
    owner = claim or record.submitter
    if not is_here(owner):
        return State(UNKNOWN, f"it runs on {owner.get('host')}: ask there")
    if not claim:
        alive = is_alive(record.submitter)
        return (
            State(PENDING, "being submitted")
            if alive
            else State(LOST, "gptctl ended before the job was started")
        )
    if not folder.path.is_dir():
        runs = is_alive(claim) or (is_same_boot(claim) and processes_of(record.run_dir))
        return State(RUNNING if runs else LOST, f"its folder {record.run_dir} is gone")
    if is_alive(claim):
        begun = folder.attempts() and folder.rank_events(folder.attempts() - 1)
        return State(RUNNING, "" if begun else "starting")
    if result := folder.result():  # written since the caller looked
        return State(result.state, result.reason)
    if is_same_boot(claim) and processes_of(record.run_dir):
        return State(RUNNING, "its supervisor is gone: nobody restarts it or keeps the time limit")
    return _from_exit_codes(record, folder, claim)


def _from_exit_codes(record: JobRecord, folder: RunFolder, claim: dict[str, Any]) -> State:
    """The supervisor is gone without a word: what the nodes of the last attempt said counts."""
    attempt = folder.attempts() - 1
    codes = folder.exit_codes(attempt, range(record.nodes))
    if len(codes) == record.nodes:
        nnodes = str((read_json(folder.path / "plan.json") or {}).get("nnodes", record.nodes))
        ended = folder.judge(attempt, codes, nnodes, record.output_dir, since=record.created)
        return State(ended.state, ended.reason)
    if folder.cancelled.exists():
        return State(CANCELLED, "cancelled")
    why = "its processes were killed" if is_same_boot(claim) else "the machine was restarted"
    return State(LOST, f"{why}; nodes that said how they ended: {len(codes)} of {record.nodes}")


def cancel(record: JobRecord, now: bool) -> None:
    folder = RunFolder(record.run_dir)
    claim = folder.claimed_by() or dict(record.handle)
    if not is_here(claim or record.submitter):
        host = (claim or record.submitter).get("host")
        raise UserError(f"{record.id} runs on {host}", "cancel it there", OUT_OF_REACH)
    has_folder = folder.path.is_dir()
    if not claim and has_folder:
        folder.take({"abandoned": True})
    if has_folder:
        folder.cancel(now)
    if is_alive(claim):
        send(claim["pid"], signal.SIGTERM)
        _wait_while(lambda: is_alive(claim), STOP_PATIENCE)
    elif not now:
        _ask_torchrun(folder)
        _wait_while(lambda: bool(processes_of(record.run_dir)), STOP_PATIENCE)
    if left := kill_all(record.run_dir):
        raise UserError(
            f"processes {left} of {record.id} cannot be ended", "are they yours?", OUT_OF_REACH
        )
    if has_folder and not folder.result():
        folder.finish(CANCELLED, "cancelled")


def _ask_torchrun(folder: RunFolder) -> None:
    """In the place of a supervisor that is gone."""
    running = processes_of(str(folder.path))
    for pid in folder.torchruns(folder.attempts() - 1).values():
        if pid in running:
            send(pid, signal.SIGTERM)


def _wait_while(holds: Callable[[], bool], patience: float) -> None:
    deadline = time.monotonic() + patience
    while holds() and time.monotonic() < deadline:
        time.sleep(0.05)


def abandon(record: JobRecord) -> bool:
    folder = RunFolder(record.run_dir)
    # Or another gptctl has abandoned it, and was killed before it could take the folder away.
    return folder.take({"abandoned": True}) or bool((folder.claimed_by() or {}).get("abandoned"))


output = output_seen_here
