"""What gptctl asks of a host of an ssh job: engine.pyz host_commands RUN_DIR VERB. Answers with one JSON object.

look     how the job stands on this host
end      ends everything of the job on this host: `end gently` gives the ranks time to save, `end now` does not
abandon  makes sure that a job that was not committed never starts here, and takes its folder away
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

from gptctl.engine.processes import boot_id, is_alive, kill_all, processes_of, send
from gptctl.engine.run_folder import RunFolder, read_json

STOP_PATIENCE = 50.0  # an agent's own, and some seconds more


def look(folder: RunFolder) -> dict[str, Any]:
    return {
        "claim": folder.claimed_by(),
        "agents": [agent for agent in agents(folder) if is_alive(agent)],
        "processes": len(processes_of(str(folder.path))),
        "boot": boot_id(),
        "result": folder.result(),
    }


def agents(folder: RunFolder) -> list[dict[str, Any]]:
    """The agents that were ever started for this job on this host."""
    found = (read_json(file) for file in sorted(folder.path.glob("agent.*.json")))
    return [agent for agent in found if agent]


def end(folder: RunFolder, now: bool) -> dict[str, Any]:
    """That of the first host lets the ranks of all hosts save, and says how the job ended."""
    folder.cancel(now)
    alive = [agent for agent in agents(folder) if is_alive(agent)]
    for agent in alive:
        send(agent["pid"], signal.SIGTERM)
    deadline = time.monotonic() + STOP_PATIENCE
    while any(map(is_alive, alive)) and time.monotonic() < deadline:
        time.sleep(0.05)
    for agent in filter(is_alive, alive):
        send(agent["pid"], signal.SIGKILL)
    return {"left": kill_all(str(folder.path))}


def abandon(folder: RunFolder) -> dict[str, Any]:
    folder.take({"abandoned": True})
    claim = folder.claimed_by() or {}
    if claim.get("abandoned"):
        end(folder, now=True)
        os.chdir("/")
        shutil.rmtree(folder.path, ignore_errors=True)
    return {"claim": claim}


def main() -> None:
    folder, verb = RunFolder(Path(sys.argv[1])), sys.argv[2]
    os.umask(0o077)
    if verb == "look":
        answer = look(folder)
    elif verb == "end":
        answer = end(folder, now=sys.argv[3] == "now")
    else:
        answer = abandon(folder)
    print(json.dumps(answer))


if __name__ == "__main__":
    main()
