"""What the agents of all hosts of an ssh job have in common (`agent.py`)."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, NamedTuple

from gptctl.engine.contract import ROLL_BACK_VARIABLE, STOP_SIGNALS
from gptctl.engine.launch_plan import LaunchPlan, has_data
from gptctl.engine.machine_queue import MachinePlace
from gptctl.engine.messages import HANDSHAKE_TIMEOUT, MessageStream
from gptctl.engine.node import Node
from gptctl.engine.processes import clean_environment, kill_all
from gptctl.engine.run_folder import RunFolder

LONGEST_LEASE = 1e9  # seconds
KEY = re.compile(r"[0-9a-f]{64}")
# A value is sent as the hex digits of its bytes: it need not be valid UTF-8.
HEX = re.compile(r"(?!(?:..)*00)(?:[0-9a-f]{2})*")
VARIABLE = re.compile(r"[^=\0]+")


class HostRefused(Exception):
    """The job cannot run on this host, for this reason."""


class StartMessage(NamedTuple):
    """What gptctl sends first. Key and secrets must not be in a file or in `ps`."""

    key: bytes
    lease: float
    address: str
    secrets: dict[str, str]


def start_message(message: Mapping[str, Any]) -> StartMessage:
    match message:
        case {
            "key": str(key),
            "lease": float() | int() as lease,
            "address": str() | None as address,
            "secrets": dict(secrets),
        }:
            if KEY.fullmatch(key) and 0 < lease < LONGEST_LEASE and is_environment(secrets):
                return StartMessage(bytes.fromhex(key), lease, address or "", decoded(secrets))
    raise HostRefused("gptctl sent an invalid start message")


def is_environment(secrets: Mapping[str, Any]) -> bool:
    return all(
        VARIABLE.fullmatch(name) and isinstance(value, str) and HEX.fullmatch(value)
        for name, value in secrets.items()
    )


def decoded(secrets: Mapping[str, str]) -> dict[str, str]:
    return {name: os.fsdecode(bytes.fromhex(value)) for name, value in secrets.items()}


class HostAgent:
    """What the agents of all hosts have in common."""

    def __init__(
        self, plan: LaunchPlan, number: int, gptctl: MessageStream, guard: int | None = None
    ) -> None:
        self.plan, self.number, self.gptctl = plan, number, gptctl
        self._guard = guard  # the file descriptor on which its guard listens
        self.folder = RunFolder(plan.remote_dir)
        hello = gptctl.receive(HANDSHAKE_TIMEOUT)
        if not hello:
            raise HostRefused("gptctl sent no start message")
        start = start_message(hello)
        self.key, self.lease = start.key, start.lease
        self.address = start.address or address_here()
        self.environment = {**clean_environment(), **start.secrets}
        self.node = Node(plan, number, self.environment)
        self.place = MachinePlace(plan, [self.node])
        self._check_inputs()

    def hold_signals(self) -> None:
        """Keep signals until run() handles them: from now on they stop the job, not its start."""
        signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)

    def keep_folder(self) -> None:
        """Tell the guard that the job exists: from now on it removes nothing."""
        # The guard may have been killed; the job runs nevertheless.
        with suppress(OSError):
            if self._guard is not None:
                os.write(self._guard, b"k")
                os.close(self._guard)
        self._guard = None

    def _check_inputs(self) -> None:
        """Refuse the job now, instead of after it has started on all hosts."""
        secrets = [source["file"] for source in self.plan.secrets.values() if "file" in source]
        # Which files a container sees is not known here.
        needed = [*secrets, *(() if self.plan.container else self.plan.inputs)]
        if missing := [path for path in needed if not has_data(path)]:
            names = ", ".join(missing)
            raise HostRefused(f"cannot read {names}: data and secrets must be on every host")


def roll_back(run_dir: str) -> None:
    """Kill all processes of the job here, and remove its folder."""
    kill_all(run_dir, os.getpid())
    remove_folder(run_dir)


def remove_folder(run_dir: str) -> None:
    """Remove what gptctl sent here. If hosts share the folder, only the first host does so."""
    if os.environ.get(ROLL_BACK_VARIABLE):
        import shutil

        shutil.rmtree(run_dir, ignore_errors=True)


def address_here() -> str:
    """Return the address at which ssh reached this host: other hosts should reach it there, too."""
    words = [*os.environ.get("SSH_CONNECTION", "").split(), "", "", ""]
    # sshd may see an IPv4 address through an IPv6 socket.
    return words[2].removeprefix("::ffff:")
