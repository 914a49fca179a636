"""Run the agent of a host, and kill what it leaves when it dies: engine.pyz guard RUN_DIR NODE

    guard ── agent ── launch.sh ── torchrun ── ranks
      └───── agent.sh kill_orphans

The guard is the agent's parent. When the agent dies, whatever killed it, its processes become the
guard's, which kills them; before the commit it also rolls back. If agent and guard are killed
together, their ends of a pipe close, and the shell at its other end kills what is marked as the
job's. An agent whose guard was killed continues. So the job's processes outlive their agent only
if all three are killed at once; then `gptctl cancel` ends them.
"""

from __future__ import annotations

import os
import signal
import sys
from contextlib import suppress

from gptctl.engine.contract import AGENT_SCRIPT
from gptctl.engine.processes import adopt_orphans, disregard, jobs_processes, kill_all

# Seconds after the death of an agent in which everything of the job on its host has exited.
# Killing takes well under a second; a loaded machine with thousands of processes gets this long.
AGENT_LEASE = 15.0
# What somebody may send to all processes of a job. The guard must outlive its agent.
_SIGNALS = (
    *(signal.SIGTERM, signal.SIGINT, signal.SIGHUP),
    *(signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2),
)


def start_orphan_killer(run_dir: str) -> tuple[int, int]:
    """Start the shell that waits for our death; return its pid and our end of its pipe."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid:
        os.close(reading)
        return pid, writing
    try:
        # Not in the session of ssh, and without the mark of the job: nobody kills it with others.
        os.setsid()
        os.chdir("/")
        _without_gptctl(reading)
        script = os.path.join(run_dir, AGENT_SCRIPT)
        path = os.environ.get("PATH", os.defpath)
        os.execvpe("bash", ["bash", "--norc", script, "kill_orphans"], {"PATH": path})
    finally:
        os._exit(127)


def _without_gptctl(stdin: int | None = None) -> None:
    """Close the pipes of ssh: the connection stays open as long as any process has one."""
    nothing = os.open(os.devnull, os.O_RDWR)
    for target in (0, 1, 2):
        os.dup2(stdin if stdin is not None and not target else nothing, target)


def watch(agent: int, run_dir: str, number: int, kept: int, orphan_killer: int) -> None:
    """Wait for the end of the agent, then make sure that nothing is left."""
    _, status = os.waitpid(agent, 0)
    # The agent writes to this pipe when the job exists: until then a failure must be undone.
    is_kept = _was_told(kept) or _is_claimed(run_dir, number)
    # An agent that rolled back has finished its work, and a job of the same id may begin here.
    if status and not is_kept:
        _end_processes(run_dir, orphan_killer)
        from gptctl.engine.host_agent import remove_folder

        remove_folder(run_dir)
    elif is_kept:
        killed = _end_processes(run_dir, orphan_killer)
        if status or killed:
            _record(run_dir, number, status, killed)


def _was_told(kept: int) -> bool:
    os.set_blocking(kept, False)
    with suppress(BlockingIOError):
        return bool(os.read(kept, 1))
    return False


def _is_claimed(run_dir: str, number: int) -> bool:
    """Whether the agent of the first host was killed after it took the claim; else take it."""
    # An agent that rolled back has removed the folder, and this engine with it.
    if number or not os.path.isdir(run_dir):
        return False
    from gptctl.engine.run_folder import ABANDONED, RunFolder

    folder = RunFolder(run_dir)
    with suppress(OSError):
        folder.try_claim(ABANDONED)
    return not (folder.claimed_by() or {}).get("abandoned")


def _end_processes(run_dir: str, orphan_killer: int) -> list[int]:
    """Kill all processes of the job here; return those that the agent had left."""
    left = found = jobs_processes(run_dir, os.getpid(), orphan_killer)
    # A process in an uninterruptible call exits later: stay as long as there is one.
    while left:
        left = kill_all(run_dir, os.getpid(), orphan_killer)
    return found


def _record(run_dir: str, number: int, status: int, killed: list[int]) -> None:
    from gptctl.engine.log import say

    is_killed = os.WIFSIGNALED(status)
    how = f"was killed by signal {os.WTERMSIG(status)}" if is_killed else "exited with an error"
    reason = f"the agent {how}" if status else "the agent has exited"
    with suppress(OSError):
        log = os.open(os.path.join(run_dir, f"agent.{number}.log"), os.O_WRONLY | os.O_APPEND)
        os.dup2(log, 1)
        say(f"{reason}; killed {len(killed)} processes that it left")


def main() -> None:
    run_dir, number = sys.argv[1], int(sys.argv[2])
    os.umask(0o077)
    adopt_orphans()
    orphan_killer, writing = start_orphan_killer(run_dir)
    kept, keep = os.pipe()
    # Before the imports of the agent: the guard stays small.
    agent = os.fork()
    if not agent:
        os.close(kept)
        from gptctl.engine import agent as program

        program.main(run_dir, number, keep)
        return
    os.close(keep)
    disregard(*_SIGNALS)
    _without_gptctl()
    try:
        watch(agent, run_dir, number, kept, orphan_killer)
    finally:
        # The orphan killer needs to do nothing.
        with suppress(OSError):
            os.write(writing, b"finished\n")


if __name__ == "__main__":
    main()
