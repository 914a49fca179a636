"""The agent of any other host of an ssh job: it runs what the first host's agent tells it."""

from __future__ import annotations

import re
import signal
import time
from collections.abc import Mapping
from typing import Any, NamedTuple

from gptctl.engine.cause import Cause, relative_to_now
from gptctl.engine.contract import CANNOT_CREATE, STOP_SIGNALS
from gptctl.engine.file_reading import is_whole
from gptctl.engine.handshake import join
from gptctl.engine.host_agent import HostAgent, HostRefused, roll_back
from gptctl.engine.launch_plan import LaunchPlan
from gptctl.engine.log import os_error_text
from gptctl.engine.machine_queue import machine_name
from gptctl.engine.messages import INVALID_MESSAGE, ConnectionLost, MessageStream
from gptctl.engine.node import TICK, NodeExit
from gptctl.engine.processes import this_process
from gptctl.engine.remote_node import HEARTBEAT, HEARTBEAT_TIMEOUT, MAX_STARTS

HOST = re.compile(r"[A-Za-z0-9_.:%-]{1,255}")  # a host name or an address


class Start(NamedTuple):
    """The first host tells this one to start an attempt."""

    number: int
    attempt: int
    host: str
    port: int


def start_in(message: Mapping[str, Any]) -> Start:
    match message:
        case {"start": int(number), "attempt": int(attempt), "host": str(host), "port": int(port)}:
            are_numbers = is_whole(number, 1, MAX_STARTS) and is_whole(attempt, 0, MAX_STARTS)
            if are_numbers and HOST.fullmatch(host) and is_whole(port, 1, 1 << 16):
                return Start(number, attempt, host, port)
    # The agent there is broken: end the job here, but never with a traceback.
    raise ConnectionLost(INVALID_MESSAGE)


def endpoint_in(place: Any) -> tuple[str, int]:
    """Read the address and the port of the first host's agent."""
    match place:
        case [str(address), int(port)] if HOST.fullmatch(address) and is_whole(port, 1, 1 << 16):
            return address, port
    raise HostRefused("gptctl sent an invalid address of the first host")


class PeerAgent(HostAgent):
    """The agent of any other host: it only does what the first host tells it."""

    def __init__(
        self, plan: LaunchPlan, number: int, gptctl: MessageStream, guard: int | None = None
    ) -> None:
        super().__init__(plan, number, gptctl, guard)
        self.timeout = self.lease  # seconds without any message from the first host
        self.start_number = 0  # see RemoteNode
        self.is_running = self.has_ranks = self.is_stopped = False
        self.is_queued = self.job_exists = False
        self.waits_for: str | None = None  # what the first host knows of it

    def prepare(self) -> None:
        # gptctl knows the address of the first host only after the agent there has started.
        message = self.gptctl.receive(self.lease)
        while message and "join" not in message:
            message = self.gptctl.receive(self.lease)
        if not message:
            raise HostRefused("gptctl did not send the address of the first host in time")
        address, port = endpoint_in(message["join"])
        try:
            self.head = join(
                address, port, self.number, self.key, HEARTBEAT_TIMEOUT, patience=self.lease
            )
        except ConnectionLost as lost:
            raise HostRefused(f"the first host cannot be reached from here: {lost}") from None
        self.hold_signals()
        self.gptctl.send(prepared=this_process())

    def run(self) -> None:
        """Obey the first host until it shuts this agent down or sends nothing for too long.

        That is a lease before the first host has confirmed the commit, and longer afterwards.
        """
        for number in STOP_SIGNALS:
            signal.signal(number, self._on_signal)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
        try:
            while not self.is_stopped and self._head_is_alive():
                self._handle(self.head.receive(TICK) or {})
                self._report()
        except ConnectionLost as lost:
            print(f"lost the connection to the first host: {lost}", flush=True)
        finally:
            # Whatever the reason: without the first host no rank may run here.
            self.node.kill()
            self.place.release()
        # The job was never started: remove what gptctl sent here.
        if not self.job_exists:
            roll_back(self.plan.remote_dir)

    def _head_is_alive(self) -> bool:
        return time.monotonic() - self.head.last_received < self.timeout

    def _on_signal(self, number: int, frame: object) -> None:
        self.is_stopped = True

    def _handle(self, message: dict[str, Any]) -> None:
        # The commit: from now on wait longer than a lease, since the first host will start the job.
        if "ready" in message:
            self.timeout = HEARTBEAT_TIMEOUT
            self.head.send(ready=True, machine=machine_name())
        if "exists" in message or "start" in message:
            self.job_exists = True
            self.keep_folder()
        self.is_queued |= "queue" in message
        if "start" in message:
            start = start_in(message)
            self.start_number = start.number
            self.is_running, self.has_ranks = True, False
            self._begin(start.attempt, start.host, start.port)
        if "request_stop" in message:
            self.node.request_stop()
        if "kill" in message and self.node.kill():
            self.head.send(killed=message["kill"])
        self.is_stopped |= "shut_down" in message

    def _begin(self, attempt: int, host: str, port: int) -> None:
        try:
            # A job that did not queue counts, too: those that do wait for it.
            if not self.is_queued:
                self.place.poll()
            self.folder.attempt(attempt).mkdir(exist_ok=True)
            self.node.start(attempt, host, port)
        # A full disk, or a folder without write permission: only this node fails, not its agent.
        except OSError as error:
            self.is_running = False
            cause = Cause(os_error_text(error), self.number, exit=CANNOT_CREATE)
            exit_ = NodeExit(CANNOT_CREATE, cause)
            self.head.send(start=self.start_number, exit=exit_)

    def _report(self) -> None:
        """Tell the first host what is new; each message names the start that it is about."""
        if self.is_queued and self.waits_for != "":
            self._report_place()
        if self.is_running and not self.has_ranks and self.node.has_ranks():
            self.has_ranks = True
            self.head.send(start=self.start_number, ranks=True)
        if self.is_running and (exit_ := self.node.exited()):
            self.is_running = False
            # Two hosts have no clock in common: tell how long ago it was.
            cause = exit_.cause and relative_to_now(exit_.cause, time.monotonic())
            self.head.send(start=self.start_number, exit=exit_._replace(cause=cause))
        if time.monotonic() - self.head.last_sent > HEARTBEAT:
            self.head.send(heartbeat=True)

    def _report_place(self) -> None:
        """Tell the first host what the job waits for here; an empty text: the place is free."""
        try:
            waits_for = self.place.poll()
        except OSError as error:
            self.is_queued = False
            self.head.send(cannot_queue=f"cannot queue: {os_error_text(error)}")
            return
        if waits_for != self.waits_for:
            self.waits_for = waits_for
            self.head.send(waits_for=waits_for)
