"""Commands that gptctl runs on a host of an ssh job: engine.pyz host_commands RUN_DIR COMMAND

Each prints one JSON object.
status   report the state of the job on this host
end      stop all processes of the job on this host: `end gently` lets the ranks save first,
         `end now` does not
abandon  make sure that an uncommitted job never starts here, and remove its folder
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
import time
from pathlib import Path
from typing import Any

from gptctl.engine.file_reading import read_json
from gptctl.engine.guard import AGENT_LEASE
from gptctl.engine.processes import boot_id, is_alive, kill_all, processes_of, send
from gptctl.engine.remote_node import PEER_KILL_TIMEOUT
from gptctl.engine.run_folder import ABANDONED, RunFolder

STOP_TIMEOUT = 50.0  # seconds; longer than an agent itself needs to stop its ranks
# Seconds for an agent whose ranks do not save: the one of the first host waits for silent peers,
# and must still be able to record the result.
NOW_TIMEOUT = PEER_KILL_TIMEOUT + 1.5


def status(folder: RunFolder) -> dict[str, Any]:
    """Report what gptctl needs to derive the job's state."""
    return {
        "claim": folder.claimed_by(),
        "agents": [agent for agent in agents(folder) if is_alive(agent)],
        "processes": len(processes_of(str(folder.path))),
        # A new boot id explains why the processes disappeared.
        "boot": boot_id(),
        "result": folder.result(),
        "waiting": folder.waiting_for(),
    }


def agents(folder: RunFolder) -> list[dict[str, Any]]:
    """List the agents that were ever started for this job on this host."""
    found = (read_json(file) for file in sorted(folder.path.glob("agent.*.json")))
    return [agent for agent in found if agent]


def end(folder: RunFolder, now: bool) -> dict[str, Any]:
    """Stop the job on this host.

    On the first host the agent lets the ranks of all hosts save, and records the result.
    """
    # First forbid new attempts: an agent may be about to start one.
    folder.cancel(now)
    found = agents(folder)
    alive = [agent for agent in found if is_alive(agent)]
    for agent in alive:
        send(agent["pid"], signal.SIGTERM)
        send(agent["pid"], signal.SIGCONT)  # somebody may have stopped it
    # An agent that hangs must not start anything after its ranks were killed.
    for agent in _outlasting(alive, NOW_TIMEOUT if now else STOP_TIMEOUT):
        send(agent["pid"], signal.SIGKILL)
    # Guards also find processes that have lost the mark of the job.
    guards = [agent["guard"] for agent in found if is_guarded(agent)]
    for guard in guards:
        send(guard["pid"], signal.SIGCONT)
    _outlasting(guards, AGENT_LEASE)
    return {"left": kill_all(str(folder.path))}


def is_guarded(agent: dict[str, Any]) -> bool:
    # An agent of an older gptctl has no guard.
    return isinstance(agent.get("guard"), dict) and is_alive(agent["guard"])


def _outlasting(processes: list[dict[str, Any]], timeout: float) -> list[dict[str, Any]]:
    """Wait for these processes; return those that are alive after `timeout` seconds."""
    deadline = time.monotonic() + timeout
    while any(map(is_alive, processes)) and time.monotonic() < deadline:
        time.sleep(0.05)
    return [process for process in processes if is_alive(process)]


def abandon(folder: RunFolder) -> dict[str, Any]:
    """Take the claim so that no agent can; remove the folder unless an agent was faster."""
    folder.try_claim(ABANDONED)
    claim = folder.claimed_by() or {}
    if claim.get("abandoned"):
        end(folder, now=True)
        # agent.sh started this process in the folder that is removed now.
        os.chdir("/")
        shutil.rmtree(folder.path, ignore_errors=True)
    return {"claim": claim}


def main() -> None:
    folder, command = RunFolder(Path(sys.argv[1])), sys.argv[2]
    os.umask(0o077)
    if command == "status":
        answer = status(folder)
    elif command == "end":
        answer = end(folder, now=sys.argv[3] == "now")
    elif command == "abandon":
        answer = abandon(folder)
    # Never guess: `abandon` can remove a job.
    else:
        sys.exit(f"error: unknown command: {command}")
    print(json.dumps(answer))


if __name__ == "__main__":
    main()
