"""The answer of `gptctl why`: what a job waits for, how far it is, or why it failed, as plain data.

Reads what is on this machine; only the state, and for a pending job its place in the queue, are
asked of its backend.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from gptctl.backends import Backends, JobState
from gptctl.engine.cause import Cause
from gptctl.engine.job_result import CANCELLED, COMPLETED, PENDING, RUNNING, UNKNOWN
from gptctl.engine.run_folder import newest_checkpoint
from gptctl.jobs.attempt_failures import latest_failure
from gptctl.jobs.queue_words import in_words
from gptctl.jobs.run_pace import run_pace
from gptctl.jobs.state import state_of
from gptctl.jobs.store import JobRecord
from gptctl.logs.failed import Failure
from gptctl.logs.files import LogFiles
from gptctl.logs.local_files import LocalLogFiles
from gptctl.logs.tables import failed_before, failure_of

Facts = dict[str, Any]
RESUME, RERUN = "gptctl resume {job}", "gptctl rerun {job}"


def explain(record: JobRecord, backends: Backends) -> Facts:
    """Explain the state of a job. `explained` says whether that was possible."""
    state = state_of(record, backends)
    files = LocalLogFiles(Path(record.log_dir), record.run_folder)
    facts: Facts = {
        "job": record.id,
        "state": state.state,
        "reason": state.reason,
        "explained": True,
        "waiting": None,
        "running": None,
        "failure": None,
        "likely_cause": None,
        "recovered_from": None,
        "commands": [],
    }
    if state.state == PENDING:
        return facts | _pending(record, state, backends)
    if state.state == RUNNING:
        running = run_pace(record, files, time.time())
        verbs = (
            ["stacks {job}", "logs {job} --follow"] if running["seems_stuck"] else ["logs {job} -f"]
        )
        return facts | {
            "running": running,
            "recovered_from": _recovered(record, files),
            "commands": [f"gptctl {verb}".format(job=record.id) for verb in verbs],
        }
    if state.state == COMPLETED:
        return facts | {"recovered_from": _recovered(record, files)}
    if state.state == UNKNOWN:
        return facts | {"explained": False, "commands": [f"gptctl status {record.id}"]}
    return facts | _ended(record, state, files)


def _pending(record: JobRecord, state: JobState, backends: Backends) -> Facts:
    waiting = in_words(backends.of(record.kind).waiting(record, state))
    best = min(waiting.sooner, key=lambda each: each.start, default=None)
    again = (
        [f"gptctl cancel {record.id}", f"gptctl rerun {record.id} {best.option}"] if best else []
    )
    return {
        "waiting": waiting.as_json(),
        "explained": bool(waiting.cause),
        "commands": again,
    }


def _ended(record: JobRecord, state: JobState, files: LogFiles) -> Facts:
    """Why a job ended that did not complete."""
    found = latest_failure(record, state, files)
    signature = found.likely.signature if found.likely else None
    commands = signature.commands if signature else ("gptctl logs {job} --failed",)
    return {
        "explained": found.is_explained,
        # A job that somebody cancelled has not failed, whatever its ranks exited with.
        "failure": None
        if state.state == CANCELLED
        else _failure_json(found.attempt, found.failure, found.cause),
        "likely_cause": {
            "code": signature.code if signature else None,
            "title": signature.title if signature else None,
            "cause": signature.cause if signature else None,
            "where": found.likely.where if found.likely else None,
            "line": found.likely.line if found.likely else None,
            "fix": found.fix,
        }
        if found.is_explained
        else None,
        "commands": filled(commands, record, found.cause),
    }


def _failure_json(attempt: int, failure: Failure, cause: Cause | None) -> Facts | None:
    """The first failure, as `status --json` and `logs --failed --json` have it."""
    if cause is None and failure.first is None and failure.first_node is None:
        return None
    facts = cause.as_json() if cause else {"cause": None}
    first = failure.first
    if cause is None and first is None:
        facts |= {"node": failure.first_node}
    if cause is None and first:
        facts |= {"rank": first.rank, "node": first.node, "host": first.host, "how": first.how}
    return {"attempt": attempt, **facts, "followed": len(failure.cascade)}


def _recovered(record: JobRecord, files: LogFiles) -> Facts | None:
    """The latest attempt that failed, of a job that runs or completed after it."""
    latest = max(files.attempts(), default=0)
    attempt = failed_before(files, latest)
    if attempt is None:
        return None
    _, failure = failure_of(files, attempt)
    cause = failure.cause
    said = cause.reason() if cause else (failure.first.how if failure.first else "")
    return {"attempt": attempt, "reason": said}


def filled(commands: Sequence[str], record: JobRecord, cause: Cause | None) -> list[str]:
    """Fill the facts of a job into commands; leave out those that cannot work for it."""
    facts: Mapping[str, str] = {
        "job": record.id,
        "cluster": record.cluster,
        "host": cause.host if cause and cause.host != "?" else "",
        "node": str(cause.node) if cause else "",
        "rank": str(cause.rank) if cause and cause.rank is not None else "",
    }
    known = {name: value for name, value in facts.items() if value}
    possible = _possible(commands, record)
    needed = {each: [name for name in facts if f"{{{name}}}" in each] for each in possible}
    return [each.format(**known) for each in possible if set(needed[each]) <= set(known)]


def _possible(commands: Sequence[str], record: JobRecord) -> list[str]:
    """Resuming needs a checkpoint, keys of the config the bundled trainer, and both the folder."""
    has_folder, is_trainer = record.run_folder.is_dir(), bool(record.output_dir)
    can_resume = is_trainer and has_folder and newest_checkpoint(record.output_dir) >= 0
    found = []
    for command in commands:
        if command.startswith(RESUME) and not can_resume:
            # From the beginning, then.
            command = command.replace(RESUME, RERUN)
        if command.startswith(RERUN) and not has_folder:
            continue
        found.append(command if is_trainer else command.partition(" -o ")[0])
    # A failed training goes on from its checkpoint, whatever else helps.
    if can_resume and not any(each.startswith(RESUME) for each in found):
        found.append(RESUME)
    return list(dict.fromkeys(found))
