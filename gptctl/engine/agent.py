"""The agent of one host of an ssh job; it runs detached from ssh, as a child of `guard.py`.

Prepare: the agents of the other hosts join the agent of the first host; nothing of the job runs.
Commit:  gptctl sends one message to the first host. From then on the agent there controls all
         hosts (`supervisor.py`), and gptctl is no longer needed.
Lease:   an agent that gptctl does not commit in time removes everything it has created.
"""

from __future__ import annotations

import json
import os
import signal
from contextlib import suppress
from pathlib import Path

from gptctl.engine.atomic_files import replacing
from gptctl.engine.contract import STOP_SIGNALS
from gptctl.engine.head_agent import HeadAgent
from gptctl.engine.host_agent import HostRefused, roll_back
from gptctl.engine.log import os_error_text
from gptctl.engine.messages import ConnectionLost, MessageStream
from gptctl.engine.peer_agent import PeerAgent
from gptctl.engine.processes import adopt_orphans, disregard, identity, this_process
from gptctl.engine.run_folder import read_plan


def detach(log_file: str) -> None:
    """Survive the end of the ssh connection, and keep its pipes from the ranks."""
    disregard(signal.SIGHUP, signal.SIGINT, signal.SIGPIPE)
    adopt_orphans()
    log = os.open(log_file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    nothing = os.open(os.devnull, os.O_RDONLY)
    # sshd keeps the connection open as long as any process has one of its pipes.
    for descriptor, target in ((nothing, 0), (log, 1), (log, 2)):
        os.dup2(descriptor, target)


def refuse(number: int, frame: object) -> None:
    raise HostRefused(f"its agent received {signal.Signals(number).name}")


def main(run_dir: str, number: int, guard: int) -> None:
    """Run the job on this host; tell the guard, through this descriptor, that the job exists."""
    gptctl = MessageStream(os.dup(0), os.dup(1))
    try:
        # Before the commit a signal must undo what was done; later it stops the job gently.
        for stop in STOP_SIGNALS:
            signal.signal(stop, refuse)
        detach(os.path.join(run_dir, f"agent.{number}.log"))
        plan = read_plan(Path(run_dir))
        # By this file gptctl finds the agent again, to stop it.
        with replacing(Path(run_dir) / f"agent.{number}.json") as stream:
            own = {**this_process(), "guard": identity(os.getppid())}
            stream.write(json.dumps(own).encode())
        host = (PeerAgent if number else HeadAgent)(plan, number, gptctl, guard)
        host.prepare()
    # Whatever fails before the commit, nothing may be left on this host.
    except Exception as error:
        is_expected = isinstance(error, (HostRefused, ConnectionLost, OSError))
        reason = os_error_text(error) if isinstance(error, OSError) else str(error)
        with suppress(ConnectionLost):
            gptctl.send(refused=reason if is_expected else f"its agent failed: {error!r}")
        roll_back(run_dir)
        return
    host.run()
