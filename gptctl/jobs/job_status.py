"""Describe jobs for people and programs: state, hosts, endpoint, ranks and config.

The verbs `list`, `status`, `show` and `submit` print what these functions return.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from gptctl.backends import Backend, Backends, JobState
from gptctl.deadline import Deadline
from gptctl.engine.atomic_files import private_files
from gptctl.engine.file_reading import read_json, read_text
from gptctl.engine.job_result import FINAL, RUNNING, UNKNOWN
from gptctl.engine.rank_runs import rank_runs
from gptctl.engine.run_folder import RunFolder
from gptctl.jobs.history import History, facts_of
from gptctl.jobs.job_phase import phase_of
from gptctl.jobs.labels import LabelStore, tags_text
from gptctl.jobs.last_state import last_state
from gptctl.jobs.progress_text import status_pairs
from gptctl.jobs.resume import Lineage
from gptctl.jobs.state import needs_backend, state_of
from gptctl.jobs.store import JobRecord
from gptctl.jobs.training_progress import progress_facts
from gptctl.logs.local_files import LocalLogFiles
from gptctl.remote.parallel import in_parallel, successful
from gptctl.text import clock_time, count


def states_of(
    records: Sequence[JobRecord], backends: Backends, deadline: Deadline | None
) -> list[JobState]:
    """Ask for the states of all jobs at once. At the deadline, nobody is waited for any longer."""
    groups = _groups(records, backends)

    def ask(group: Sequence[JobRecord]) -> dict[str, JobState]:
        backends.of(group[0].kind).prefetch_states(group)
        return {record.id: state_of(record, backends) for record in group}

    # Around all threads: the umask belongs to the process, not to a thread.
    with private_files():
        answers = in_parallel(ask, groups, deadline=deadline)
    known: dict[str, JobState] = {}
    for group, answer in zip(groups, answers):
        if isinstance(answer, TimeoutError):
            late = JobState(UNKNOWN, "no answer about its state in time")
            known |= {record.id: late for record in group}
        elif isinstance(answer, Exception):
            raise answer
        else:
            known |= answer
    return [known.get(record.id) or state_of(record, backends) for record in records]


def known_states(
    records: Sequence[JobRecord], backends: Backends, deadline: Deadline | None = None
) -> dict[str, JobState]:
    """The states of jobs by their ids."""
    found = states_of(records, backends, deadline)
    return {record.id: state for record, state in zip(records, found)}


def _groups(records: Sequence[JobRecord], backends: Backends) -> list[list[JobRecord]]:
    """The unfinished jobs, grouped by whom to ask."""
    unfinished = [
        record for record in records if backends.knows(record.kind) and needs_backend(record)
    ]
    return [
        group
        for kind in dict.fromkeys(record.kind for record in unfinished)
        for group in backends.of(kind).asked_together(
            [record for record in unfinished if record.kind == kind]
        )
    ]


def prefetch_states(records: Sequence[JobRecord], backends: Backends) -> None:
    """Give each backend all its unfinished jobs, to answer with one request for all."""
    with private_files():
        answers = in_parallel(
            lambda group: backends.of(group[0].kind).prefetch_states(group),
            _groups(records, backends),
        )
    successful(answers)


def row(record: JobRecord, backends: Backends) -> dict[str, Any]:
    return row_in_state(record, state_of(record, backends))


def row_in_state(record: JobRecord, state: JobState) -> dict[str, Any]:
    """One row of `gptctl list`."""
    now = time.time()
    # What was known last, and how many seconds ago.
    last = last_state(record) if state.state == UNKNOWN else None
    # Of a removed folder the history tells what is left.
    kept = {} if record.run_folder.is_dir() else History().facts(record)
    has_kept = "progress" in kept and "duration" in kept
    return {
        "job": record.id,
        "state": state.state,
        "last_state": last.state if last else None,
        "age": round(last.age, 1) if last else None,
        "reason": state.reason,
        "failure": failure_json(state, record),
        "cluster": record.cluster,
        "nodes": record.nodes,
        "world_size": record.world,
        "continues": record.continues or None,
        "sweep": record.sweep or None,
        "scheduler_id": record.handle.get("scheduler_id"),
        "created": record.created,
        **LabelStore().of(record).as_json(),
        **(
            {name: kept[name] for name in ("duration", "progress")}
            if has_kept
            else progress_facts(record, last.state if last else state.state, now)
        ),
        "removed": History().removed(record),
        "run_dir": record.local_dir,  # JSON keys are stable: scripts read them
    }


def failure_json(state: JobState, record: JobRecord) -> dict[str, Any] | None:
    """The first failure of a job as JSON, with what usually helps."""
    if state.failure is None:
        return None
    # Imported here: its catalogue costs time, and most jobs have not failed.
    from gptctl.jobs.hints import hint_of

    # Only the bundled trainer has an output folder in its record.
    hint = hint_of(state.failure, bool(record.output_dir))
    return {**state.failure.as_json(), "hint": hint or None}


def submitted(record: JobRecord, endpoint: str) -> dict[str, Any]:
    """The answer of `gptctl submit`."""
    return {
        "job": record.id,
        "cluster": record.cluster,
        "nodes": record.nodes,
        "gpus_per_node": record.per_node,
        "world_size": record.world,
        "continues": record.continues or None,
        "endpoint": endpoint,
        "scheduler_id": record.handle.get("scheduler_id"),
        "run_dir": record.local_dir,
        "log_dir": record.log_dir,
        "follow": f"gptctl logs {record.id} --follow",
    }


def status(record: JobRecord, backends: Backends) -> dict[str, Any]:
    """The answer of `gptctl status`: the state of a job in full."""
    folder = RunFolder(record.local_dir)
    attempt = folder.attempts() - 1  # the latest; -1 before the first has started
    facts = row(record, backends)
    # Of a removed folder the history tells what is left.
    known = facts_of(record) | ({} if folder.path.is_dir() else History().facts(record))
    is_complete = folder.is_complete(facts["state"])
    logged = (facts["progress"] or {}).get("updated")
    return {
        **facts,
        "phase": phase_of(record, time.time(), logged) if facts["state"] == RUNNING else None,
        "gpus_per_node": record.per_node,
        **known,
        "ranks": rank_rows(record, attempt, is_complete) if attempt >= 0 else [],
        "log_dir": record.log_dir,
        "config": record.config,
    }


def attempts_text(attempts: int, state: str) -> str:
    if attempts:
        return str(attempts)
    return "none: it ended before the first attempt" if state in FINAL else "none yet"


def exit_text(facts: dict[str, Any]) -> str:
    # Their exit code is not the reason why the job failed.
    stopped = dict.fromkeys(facts.get("stopped_nodes", ()), " (stopped by gptctl)")
    codes = facts["exit_codes"].items()
    return ", ".join(f"node {node}: {code}{stopped.get(int(node), '')}" for node, code in codes)


def rank_rows(record: JobRecord, attempt: int, is_over: bool) -> list[dict[str, Any]]:
    """The latest process of every rank of an attempt, and how it ended."""
    runs = rank_runs(LocalLogFiles(Path(record.log_dir), record.run_folder).records(attempt))
    # A killed rank writes no last record. No rank outlives its job, so it was killed.
    runs = [
        run._replace(was_killed=run.was_killed or (is_over and not run.is_over)) for run in runs
    ]
    # torchrun may restart ranks within an attempt: the last process of a rank counts.
    latest = {run.rank: {**run._asdict(), "how": run.how} for run in runs}
    return list(latest.values())


def endings(ranks: list[dict[str, Any]]) -> str:
    """Count how ranks ended: `3 running, 1 SIGKILL`."""
    counts = Counter(rank["how"] for rank in ranks)
    return ", ".join(f"{number} {how}" for how, number in counts.items())


def lineage_facts(found: Lineage) -> dict[str, Any]:
    """The jobs of a run as JSON: those of this line in order, and the others."""
    branches = [{"job": job, "continues": before} for job, before in found.branches]
    return {"lineage": found.line, "branches": branches}


def lineage_pairs(facts: dict[str, Any]) -> list[tuple[str, str]]:
    """The jobs of a run in order; empty for a run of one job, and where nobody asked for it."""
    jobs, branches = facts.get("lineage", ()), facts.get("branches", ())
    also = "also " if len(jobs) > 1 else ""
    others = ", ".join(f"{each['job']} (from {each['continues']})" for each in branches)
    return [
        ("lineage", " → ".join(jobs) if also else ""),
        (f"{also}continued by", others),
    ]


def pairs(facts: dict[str, Any]) -> list[tuple[str, str]]:
    """Format `gptctl status` for people; empty values are left out."""
    # One line per fact; a value that is not known yet has no line.
    reason = f": {facts['reason']}" if facts["reason"] else ""
    lines = [
        ("state", f"{facts['state']}{reason}"),
        (
            "world",
            f"{count(facts['world_size'], 'rank')}: "
            f"{facts['nodes']} × {facts['gpus_per_node']} on {facts['cluster']}",
        ),
        ("scheduler", f"job {facts['scheduler_id']}" if facts["scheduler_id"] else ""),
        ("hosts", " ".join(facts["hosts"])),
        ("continues", facts["continues"] or ""),
        *lineage_pairs(facts),
        ("sweep", facts["sweep"] or ""),
        ("tags", tags_text(facts["tags"])),
        ("note", facts["note"] or ""),
        # On lines of their own: a narrow window must not break a time.
        ("created", clock_time(facts["created"])),
        ("ended", clock_time(facts["ended"]) if facts["ended"] else ""),
        *status_pairs(facts, time.time()),
        ("hint", (facts["failure"] or {}).get("hint") or ""),
        ("attempts", attempts_text(facts["attempts"], facts["state"])),
        ("endpoint", facts["endpoint"]),
        ("ranks", endings(facts["ranks"])),
        ("exit codes", exit_text(facts)),
        ("not stopped", " ".join(facts["not_ended"])),
        ("trainer", str((facts["trainer"] or {}).get("state", ""))),
        ("folder", facts["run_dir"]),
        ("removed", clock_time(facts["removed"]) if facts["removed"] else ""),
        ("logs", facts["log_dir"]),
    ]
    return [(name, text) for name, text in lines if text]


def origins(record: JobRecord, prefix: str) -> list[tuple[str, Any, str]]:
    """Key, value and origin of every key in the frozen config that starts with a prefix."""
    # A damaged or missing file gives an empty list instead of an error.
    config = read_json(record.run_folder / "config.json") or {}
    values, named = (_mapping(config, name) for name in ("resolved", "origins"))
    found = list(_values(values, "", named))
    # The plan has the whole environment, including what gptctl and the profile set.
    plan = read_json(record.run_folder / "plan.json") or {}
    variables, named = (_mapping(plan, name) for name in ("env", "env_origins"))
    # Each variable gets a row of its own, with its own origin.
    found = [row for row in found if row[0] != "Launch.env" or not named]
    for name, origin in named.items():
        found.append((f"Launch.env.{name}", variables.get(name), str(origin)))
    return [row for row in found if row[0].lower().startswith(prefix.lower())]


def _mapping(values: dict[str, Any], name: str) -> dict[str, Any]:
    found = values.get(name)
    return found if isinstance(found, dict) else {}


def _values(
    section: dict[str, Any], path: str, origins: dict[str, str]
) -> Iterator[tuple[str, Any, str]]:
    for name, value in section.items():
        full = f"{path}.{name}" if path else name
        # A mapping with an origin of its own (env, extra) is a value, not a section.
        if isinstance(value, dict) and full not in origins:
            yield from _values(value, full, origins)
        else:
            yield full, value, str(origins.get(full, ""))


def still_running(record: JobRecord) -> str:
    """The message for a user who interrupts gptctl: the job itself is not interrupted."""
    return (
        f"\n{record.id} is still running. Follow it: gptctl logs {record.id} -f. "
        f"Stop it: gptctl cancel {record.id}."
    )


def start_problem(record: JobRecord, problem: str) -> str:
    """The message for a problem after the job has started."""
    # A warning: an error would make scripts submit the job again.
    return f"warning: {record.id} was started, but there was a problem: {problem}"


def scripts(record: JobRecord, backend: Backend) -> list[str]:
    """The scripts of a job, in the order in which they run."""
    return [read_text(record.run_folder / name) for name in backend.scripts]
