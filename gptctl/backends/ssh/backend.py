"""Machines without a scheduler. Their agents run the job; a copy of its folder on this machine tells how it stands."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from typing import TYPE_CHECKING, Any

from gptctl.backends import State
from gptctl.engine.files import replacing
from gptctl.engine.launch_plan import LaunchPlan
from gptctl.engine.processes import is_alive, is_here
from gptctl.engine.run_folder import CANCELLED, LOST, PENDING, RUNNING, UNKNOWN, RunFolder
from gptctl.jobs.store import JobRecord, private_files
from gptctl.remote.connection import HostError, at_once
from gptctl.remote.log_sync import Mirror
from trainer.errors import OUT_OF_REACH, UserError

if TYPE_CHECKING:
    from gptctl.backends.ssh.launcher import Launch

MOST_JOBS = 4  # that are asked for at once: sshd lets only few come in at the same time
END_PATIENCE = 120.0  # seconds that a host has to end a job

MIRRORS: dict[
    str, Mirror
] = {}  # of every job that this process has asked for, with open connections


def mirror_of(record: JobRecord) -> Mirror:
    if record.id not in MIRRORS:
        MIRRORS[record.id] = Mirror(record)
    return MIRRORS[record.id]


def start(plan: LaunchPlan, record: JobRecord) -> dict[str, Any]:
    from gptctl.backends.ssh.launcher import Launch

    folder = RunFolder(record.run_dir)
    launch = Launch(plan, record)
    try:
        _arm(launch, folder)
        folder.in_doubt.touch(mode=0o600)
        answer = launch.commit()
    finally:
        launch.close()
    host, port = answer["endpoint"]
    handle = {**answer["committed"], "host": host}
    with private_files():
        folder.take(handle)
        folder.attempt(0).mkdir()
        with replacing(folder.attempt(0) / "endpoint.json") as stream:
            stream.write(json.dumps({"host": host, "port": port}).encode())
    return handle


def _arm(launch: Launch, folder: RunFolder) -> None:
    try:
        launch.arm()
    except (
        BaseException
    ):  # an interruption, too: nothing runs anywhere; where we cannot, the agents take it back
        folder.take({"abandoned": True})
        launch.take_back()
        raise


def expect(records: Sequence[JobRecord]) -> None:
    started = [record for record in records if record.handle]
    with (
        private_files()
    ):  # around all threads: a umask is the whole process's, and each would restore what it found
        at_once(lambda record: mirror_of(record).refresh(), started, MOST_JOBS)


def state(record: JobRecord) -> State:
    if not record.handle:
        return _half_submitted(record)
    try:
        mirror = mirror_of(record)
    except UserError as error:  # its folder here, or the user's ssh config
        return State(UNKNOWN, error.message)
    mirror.refresh()
    away = mirror.out_of_reach()
    if result := RunFolder(record.run_dir).result():
        return State(result.state, result.reason)
    head = mirror.hosts[0]
    if head.fault:
        return State(UNKNOWN, "; ".join(away))
    return _as_seen(head.way.name, head.seen, record, away)


def _half_submitted(record: JobRecord) -> State:
    if not is_here(record.submitter):
        return State(
            UNKNOWN, f"it is being submitted on {record.submitter.get('host')}, or was: ask there"
        )
    alive = is_alive(record.submitter)
    if not alive and RunFolder(record.run_dir).in_doubt.exists():
        return State(
            UNKNOWN, "whether it was started is not known: its first host was lost at that moment"
        )
    return (
        State(PENDING, "being submitted")
        if alive
        else State(LOST, "gptctl ended before the job was started")
    )


def _as_seen(
    name: str, seen: Mapping[str, Any] | None, record: JobRecord, away: Sequence[str]
) -> State:
    """By what its first host says."""
    if seen is None:
        return State(LOST, f"its folder on {name} is gone")
    if seen["agents"]:
        folder = RunFolder(record.run_dir)
        begun = folder.attempts() and folder.rank_events(folder.attempts() - 1)
        return State(RUNNING, "; ".join([*([] if begun else ["starting"]), *away]))
    if seen["result"]:  # which is not here yet: another gptctl writes the copy
        return State(*seen["result"][:2])
    if seen["processes"]:
        return State(
            RUNNING, f"its agent on {name} is gone: nobody restarts it or keeps the time limit"
        )
    is_same_boot = seen["boot"] == record.handle.get("boot")
    return State(
        LOST, f"its agent on {name} was killed" if is_same_boot else f"{name} was restarted"
    )


def cancel(record: JobRecord, now: bool) -> None:
    """The first host lets all ranks save and says how the job ended; then every host ends what is left there."""
    mirror = mirror_of(record)
    RunFolder(record.run_dir).cancel(now)
    if not now:
        with suppress(HostError):
            mirror.hosts[0].ask("end", "gently", patience=END_PATIENCE)
    answers = at_once(lambda host: host.ask("end", "now", patience=END_PATIENCE), mirror.hosts)
    wrong = [answer for answer in answers if isinstance(answer, HostError)]
    wrong += [
        HostError(host.way.name, f"processes {answer['left']} cannot be ended", "are they yours?")
        for host, answer in zip(mirror.hosts, answers)
        if isinstance(answer, dict) and answer["left"]
    ]
    mirror.refresh(0.0)
    _note(record, wrong)
    if wrong:
        message = (
            f"{record.id} is not ended everywhere: {'; '.join(error.message for error in wrong)}"
        )
        raise UserError(
            message,
            f"cancel it again when they can be reached: gptctl cancel {record.id}",
            OUT_OF_REACH,
        )
    if not RunFolder(record.run_dir).result():
        with private_files():
            RunFolder(record.run_dir).finish(CANCELLED, "cancelled")


def _note(record: JobRecord, wrong: Sequence[HostError]) -> None:
    """Where it still has to be ended, though the first host may have said how it ended."""
    file = RunFolder(record.run_dir).not_ended
    if wrong:
        file.write_text("\n".join(error.host for error in wrong), encoding="utf-8")
    else:
        file.unlink(missing_ok=True)


def abandon(record: JobRecord) -> bool:
    """What the first host says counts: once its agent has the claim, the job exists."""
    if (RunFolder(record.run_dir).claimed_by() or {}).get("abandoned"):
        return True
    mirror = mirror_of(record)
    head, *others = mirror.hosts
    claim = (head.ask("abandon") or {}).get("claim") or {"abandoned": True}
    if not claim.get("abandoned"):
        RunFolder(record.run_dir).take({**claim, "host": head.way.name})
        return False
    for result in at_once(lambda host: host.ask("abandon"), others):
        if isinstance(result, Exception):
            raise result
    return True


def output(record: JobRecord) -> tuple[str, list[str]]:
    mirror = mirror_of(record)
    return mirror.plan.output_dir, mirror.hosts[0].names_in(mirror.plan.output_dir)


def catch_up(record: JobRecord) -> list[str]:
    folder = RunFolder(record.run_dir)
    if not record.handle or (folder.result() and not folder.not_copied.exists()):
        return []
    mirror = mirror_of(record)
    mirror.refresh()
    away = mirror.out_of_reach()
    return [f"{words}; its logs here are not complete" for words in away]


def following(record: JobRecord) -> AbstractContextManager[None]:
    return mirror_of(record).kept_fresh()
