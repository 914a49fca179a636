"""Find the first failure among the ranks and nodes of an attempt, from records and logs here."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

from gptctl.engine.cause import Cause
from gptctl.engine.error_text import about_itself, describe_exit, is_consequence
from gptctl.engine.file_reading import read_tail
from gptctl.engine.rank_runs import RankRun, failed_runs, rank_runs
from gptctl.engine.run_folder import RunFolder

TAIL = 1 << 16  # bytes at the end of a log that are searched
MOST_READ = 64  # logs that are read: of a thousand ranks almost all only report a lost connection
SIGNAL_BASE = 128  # a shell reports a program killed by signal N as 128 + N


def cause_on_nodes(
    folder: RunFolder,
    attempt: int,
    log_dir: str,
    codes: dict[int, int],
    first: int,
    is_shared: bool = False,
) -> Cause | None:
    """Find the first failure on these nodes, whose files this machine can read.

    `codes`: exit codes of their launch scripts; `first`: the node that failed first, as far as the
    caller knows. It is named if no rank explains the failure. `is_shared`: the nodes wrote these
    files themselves, to a file system that has one clock; they are not copies.
    """
    if not any(codes.values()):
        return None
    logs = Path(log_dir) / f"attempt-{attempt}"
    killed_nodes = {node for node, code in codes.items() if code > SIGNAL_BASE}
    records = folder.records(attempt, codes)
    changed = folder.change_times(attempt, records) if is_shared else {}
    runs = [run for run in rank_runs(records, changed) if run.node in codes]
    # If torchrun was killed, the kernel killed its ranks with it: they are not the cause.
    failed = [run for run in failed_runs(runs) if not (run.was_killed and run.node in killed_nodes)]
    cause = first_of_ranks(failed, lambda run: _log_of(logs, run))
    if cause and not cause.is_consequence:
        return cause
    cause = _left_early(runs, cause) or cause
    # Ranks that only lost a connection do not explain a node that was killed.
    if cause and not killed_nodes:
        return cause
    node = first if first in killed_nodes or not killed_nodes else min(killed_nodes)
    of_node = cause_of_node(node, codes[node], tail(logs / f"node.{node}.log"))
    return cause if cause and of_node.is_consequence else of_node


def first_of_ranks(failed: Iterable[RankRun], log_of: Callable[[RankRun], str]) -> Cause | None:
    """Find the first failure that is not a consequence of another; the earliest if all are."""
    earliest = None
    for number, run in enumerate(failed):
        cause = _cause_of_rank(run, log_of(run) if number < MOST_READ else "")
        if not cause.is_consequence:
            return cause
        earliest = earliest or cause
    return earliest


def _left_early(runs: Iterable[RankRun], cause: Cause | None) -> Cause | None:
    """Find a rank that exited with 0 before others lost the connection to it."""
    if cause is None or cause.time is None:
        return None
    # Only the last process of each rank: torchrun restarted the earlier ones.
    ended = [run for run in {run.rank: run for run in runs}.values() if run.exit == 0]
    earlier = [run for run in ended if run.ended is not None and run.ended <= cause.time]
    if not earlier:
        return None
    run = min(earlier, key=lambda each: (each.ended, each.rank))
    text = "exited with code 0 while other ranks were running"
    # A failure on another node explains more.
    known = Cause(text, run.node or 0, run.rank, run.host, exit=0, time=run.ended)
    return known._replace(is_consequence=True, clock=run.clock)


def _cause_of_rank(run: RankRun, log: str) -> Cause:
    if run.exit is None and run.signal is None:
        text = "killed by signal 9 (SIGKILL) together with its watcher; possibly out of memory"
    else:
        text = describe_exit(run.exit, run.signal, log, run.oom)
    follows = run.is_victim or is_consequence(text, run.rank)
    own = about_itself(text, run.rank)
    node = 0 if run.node is None else run.node
    how = run.exit, run.signal, run.ended
    return Cause(own, node, run.rank, run.host, *how, is_consequence=follows, clock=run.clock)


def cause_of_node(node: int, code: int, log: str, time: float | None = None) -> Cause:
    """Describe a node whose launch script failed, from its log."""
    killer = code - SIGNAL_BASE if SIGNAL_BASE < code < SIGNAL_BASE + 65 else None
    text = describe_exit(None if killer else code, killer, log)
    text = f"torchrun {text}" if killer else text
    return Cause(text, node, None, "", code, killer, time, is_consequence(text))


def _log_of(logs: Path, run: RankRun) -> str:
    return tail(logs / f"workerlog.{run.rank}", run.log_start)


def tail(file: Path, start: int = 0) -> str:
    """Read the end of a log, from `start` on at the earliest; empty if it cannot be read."""
    return read_tail(file, TAIL, start).decode("utf-8", "replace")
