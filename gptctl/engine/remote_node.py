"""A node on another host, controlled from the first host through its agent (`peer_agent.py`)."""

from __future__ import annotations

import time
from typing import Any

from gptctl.engine.admission import NeverStarts
from gptctl.engine.cause import HOST_LOST, Cause, cause_in_message, on_clock_of_receiver
from gptctl.engine.file_reading import is_time, is_whole
from gptctl.engine.job_result import FAILED, Result
from gptctl.engine.messages import (
    INVALID_MESSAGE,
    MAX_BURST,
    ConnectionLost,
    MessageStream,
)
from gptctl.engine.node import TICK, NodeExit

HEARTBEAT = 2.0  # seconds after which an agent that has nothing else to send sends a heartbeat
HEARTBEAT_TIMEOUT = 90.0  # seconds without any message after which a host counts as lost
PEER_KILL_TIMEOUT = 3.0  # seconds in which another host must kill its ranks
MAX_STARTS = 1 << 31  # of one node
MAX_EXIT = 1 << 16  # an exit code; a shell's has 8 bits
MAX_REASON = 300  # characters of what a host says that the job waits for


class RemoteNode:
    """A node on another host, controlled from the first one. `node.py` describes each method.

    It is also the job's place on that host (`admission.py`), where its agent waits in the queue.
    """

    def __init__(
        self, number: int, stream: MessageStream, machine: str = "", queues: bool = False
    ) -> None:
        self.number, self.machine = number, machine
        # What the agent waits for; empty once its host is free, or if the job does not queue.
        self._waits_for = f"waits for node {number}" if queues else ""
        self._is_queued, self._refusal = False, ""
        self._stream = stream
        # Counts starts, so that a late message about an earlier start is not taken for this one's.
        self._start_number = 0
        self._exit: NodeExit | None = NodeExit(0)
        self._has_ranks = self._stop_is_requested = False
        # Counts kills for the same reason.
        self._kill_number, self._killed_number = 0, 0
        self._kill_timeout = PEER_KILL_TIMEOUT
        self._killing_since: float | None = None  # when it was asked to kill its ranks
        self._lost = ""  # why the host is lost

    def poll(self) -> str:
        if self._waits_for and not self._is_queued:
            self._is_queued = True
            self._send(queue=True)
        self.keep_alive()
        return self._waits_for

    def keep_alive(self) -> None:
        self._receive()
        if fault := self._refusal or self._lost:
            raise NeverStarts(Result(FAILED, f"node {self.number}: {fault}"))

    def release(self) -> None:
        return  # its agent does so when it is shut down

    def announce(self) -> None:
        """Tell the agent that the job exists: from now on it keeps the job's folder."""
        self._send(exists=True)

    def start(self, attempt: int, host: str, port: int) -> None:
        self._start_number += 1
        self._exit, self._has_ranks, self._stop_is_requested = None, False, False
        self._send(start=self._start_number, attempt=attempt, host=host, port=port)

    def exited(self) -> NodeExit | None:
        self._receive()
        return self._exit

    def has_ranks(self) -> bool:
        self._receive()
        return self._has_ranks

    def can_stop_gracefully(self) -> bool:
        return self.has_ranks()

    def is_lost(self) -> bool:
        self._receive()
        return bool(self._lost)

    def output(self) -> str:
        return ""  # its log is on its host

    def request_stop(self) -> None:
        if not self._stop_is_requested:
            self._stop_is_requested = True
            self._send(request_stop=True)

    def begin_kill(self) -> None:
        self._kill_number, self._killing_since = self._kill_number + 1, time.monotonic()
        self._send(kill=self._kill_number)

    @property
    def _is_killed(self) -> bool:
        return self._killed_number == self._kill_number

    def kill(self) -> bool:
        if self._killing_since is None:
            self.begin_kill()
        # Wait for the confirmation: ranks of two attempts must not run at the same time. Count
        # from the request, so that many hosts without an answer take as long as one.
        deadline = (self._killing_since or 0.0) + self._kill_timeout
        self._receive()
        while not self._is_killed and not self._lost and time.monotonic() < deadline:
            self._receive(TICK)
        self._killing_since = None
        # Do not wait again for a host that did not answer.
        self._kill_timeout = PEER_KILL_TIMEOUT if self._is_killed else 0.0
        return self._is_killed

    def shut_down(self) -> None:
        self._send(shut_down=True)

    def _send(self, **message: Any) -> None:
        if not self._lost:
            try:
                self._stream.send(**message)
            except ConnectionLost as lost:
                self._mark_lost(str(lost))
        elif "start" in message:
            # A new attempt has reset the exit, and this node cannot take part in it.
            self._mark_lost(self._lost)

    def _receive(self, timeout: float = 0.0) -> None:
        # The peer stops its ranks if it receives nothing for too long.
        if time.monotonic() - self._stream.last_sent > HEARTBEAT:
            self._send(heartbeat=True)
        try:
            for _ in range(MAX_BURST):
                if self._lost or not (message := self._stream.receive(timeout)):
                    break
                self._handle(message)
        except ConnectionLost as lost:
            self._mark_lost(str(lost))
        if time.monotonic() - self._stream.last_received > HEARTBEAT_TIMEOUT:
            self._mark_lost(f"no message from it for {HEARTBEAT_TIMEOUT:.0f} s")

    def _handle(self, message: dict[str, Any]) -> None:
        if is_whole(killed := message.get("killed"), 1, MAX_STARTS):
            self._killed_number = killed
        if isinstance(reason := message.get("waits_for"), str):
            self._waits_for = f"{reason[:MAX_REASON]} on node {self.number}" if reason else ""
        if isinstance(fault := message.get("cannot_queue"), str):
            self._refusal = fault[:MAX_REASON]
        # Not only equal: 1.0 and true equal 1, but are not valid start numbers.
        if is_whole(start := message.get("start"), 1, MAX_STARTS) and start == self._start_number:
            self._has_ranks |= "ranks" in message
            if "exit" in message:
                self._exit = _exit_of(message["exit"], self.number)

    def _mark_lost(self, why: str) -> None:
        self._lost = why
        self._exit = self._exit or NodeExit(255, Cause(f"{HOST_LOST}{why}", self.number))


def _exit_of(fields: Any, node: int) -> NodeExit:
    match fields:
        case [int(code), cause, bool(), moment, bool(), bool()]:
            if is_whole(code, 0, MAX_EXIT) and is_time(moment):
                if found := cause_in_message(cause):
                    # It reports on itself: a broken host must not blame another one.
                    found = on_clock_of_receiver(found, time.monotonic())._replace(node=node)
                return NodeExit(*fields)._replace(cause=found)
    # The agent there is broken, or is not ours: this must not end the job's supervisor.
    raise ConnectionLost(INVALID_MESSAGE)
