"""Run a job: start its nodes, restart failed attempts, stop on request, and record the result.

All backends use this supervisor. It sees nodes through a `NodeGroup`, and a scheduler, if there
is one, through `Scheduler`; it does not know on which machines they run.
With all nodes on this machine: engine.pyz supervisor RUN_DIR
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from gptctl.engine.admission import Admission, NeverStarts
from gptctl.engine.atomic_files import replacing
from gptctl.engine.attempt_outcome import (
    failed_attempt,
    outcome_of,
    record_outcome,
    without_nodes,
    without_progress,
)
from gptctl.engine.chain import chain_result
from gptctl.engine.contract import READY_VARIABLE, STOP_SIGNALS
from gptctl.engine.error_text import is_killed_for_memory
from gptctl.engine.events import ATTEMPT, END, FAILURE, REQUEUE, SIGNAL, EventLog
from gptctl.engine.job_result import CANCELLED, COMPLETED, FAILED, STOPPED, TIMEOUT, Result
from gptctl.engine.launch_plan import LaunchPlan, seconds_of
from gptctl.engine.log import os_error_text, say
from gptctl.engine.machine_queue import MachinePlace
from gptctl.engine.node import TICK, Node, NodeExit
from gptctl.engine.node_group import NodeGroup, NodeHandle
from gptctl.engine.ports import free_port
from gptctl.engine.processes import adopt_orphans, disregard, this_process
from gptctl.engine.run_folder import RunFolder, newest_checkpoint, read_plan
from gptctl.engine.scheduler import Scheduler
from gptctl.engine.spare_space import free_space, keep_space, with_spare_space

if TYPE_CHECKING:
    from gptctl.engine.notifier import Notifier

# Seconds between asking a job to stop and killing it; torchrun gives its ranks the same time.
GRACE = 30.0
REQUEUE_TIMEOUT = 300.0  # seconds that a scheduler may take to stop a job that it has requeued
# Seconds that the engine stays to send its last messages. Other machines may be billed for them.
LAST_WORD, LAST_WORD_HERE, LAST_WORD_CANCELLED = 5.0, 30.0, 2.0
PORT_TRIES = 3
MAX_STALLED = 3  # consecutive attempts without a new checkpoint
FAILURES_PER_ALLOCATION = 2


class StopRequested(Exception):
    """The job must stop, for this reason."""

    def __init__(self, state: str, reason: str, *details: Any) -> None:
        super().__init__(reason)
        self.result = Result(state, reason, *details)


class Supervisor:
    """Keeps all nodes of a job in the same attempt: if one fails, the others are stopped."""

    def __init__(
        self,
        plan: LaunchPlan,
        nodes: Sequence[NodeHandle],
        host: str = "",
        hosts: Sequence[str] = (),
        scheduler: Scheduler | None = None,
        log: str = "supervisor.log",
        admission: Admission | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        """`environment`: where notifications find their addresses; empty: that of this process."""
        self.folder, self.plan = RunFolder(plan.remote_dir), plan
        self.nodes, self.events = NodeGroup(nodes), EventLog(self.folder.path)
        self.host = host or plan.master_addr
        self.hosts = hosts or plan.hosts
        self.scheduler, self.log, self.admission = scheduler, log, admission
        self.notifier = notifier_for(plan, environment) if plan.notify else None
        self.scheduler_state = ""  # the last one other than running
        self.number = -1  # of the current attempt
        self.port: int | None = None  # chosen, but not used yet
        self.stop_request: StopRequested | None = None
        self.deadline: float | None = None

    def run(
        self, on_ready: Callable[[], None] = lambda: None, early: Sequence[signal.Signals] = ()
    ) -> int:
        """Run the job; call `on_ready` once it exists; return the engine's exit code.

        `early`: signals that arrived before, while another handler collected them.
        """
        for number in STOP_SIGNALS:
            signal.signal(number, self.on_signal)
        # An agent of an ssh host has held them since it claimed the job.
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
        for number in early:
            self.on_signal(number)
        result: Result | None = Result(FAILED, f"the supervisor failed: see {self.log}")
        if self.notifier:
            self.notifier.start()
        try:
            if self.admission:
                self.admission.wait(self._check_stop, on_ready)
            if over := chain_result(self.plan):
                raise StopRequested(over.state, over.reason)
            self._set_deadline()
            self._record_start()
            keep_space(self.folder.path)
            # Before gptctl learns that the job exists: it prints the endpoint.
            self._begin_attempt()
            on_ready()
            result = self._run_attempts()
        except (StopRequested, NeverStarts) as stop:
            result = stop.result
        except OSError as error:
            result = Result(FAILED, os_error_text(error))
        finally:
            not_ended = self.nodes.kill()
            free_space(self.folder.path)
            self._record(result, not_ended)
            reason = result.reason if result else self.scheduler_state
            self.events.add(END, state=result.state if result else None, reason=reason)
            if self.admission:
                self.admission.release()
            # A job that failed at once exists, too.
            on_ready()
            # Last: the job has ended, and its result is known.
            if self.notifier:
                self.notifier.close(self._last_word(result))
        return 0 if result and result.state == COMPLETED else 1

    def _last_word(self, result: Result | None) -> float:
        # `gptctl cancel` waits for this process, and whoever typed it knows how the job ended.
        if result and result.state == CANCELLED:
            return LAST_WORD_CANCELLED
        return LAST_WORD_HERE if self.plan.is_one_machine else LAST_WORD

    def _set_deadline(self) -> None:
        # A scheduler enforces the limit itself.
        if self.plan.time_limit and not self.scheduler:
            self.deadline = time.monotonic() + seconds_of(self.plan.time_limit)

    def _record_start(self) -> None:
        # Before the attempt begins: its number counts from here on.
        self.events.attempt = self.folder.attempts()
        facts = {"nodes": len(self.hosts) or self.plan.nodes, "per_node": self.plan.per_node}
        scheduler = {"scheduler_id": os.environ.get("SLURM_JOB_ID")} if self.scheduler else {}
        self.events.started(**facts, **scheduler)

    def on_signal(self, number: int, frame: object = None) -> None:
        if self.folder.is_cancelled():
            self.stop_request = StopRequested(CANCELLED, "")
        elif self.scheduler:
            self.stop_request = StopRequested(STOPPED, "the scheduler asked the job to stop")
        else:
            name = signal.Signals(number).name
            self.stop_request = StopRequested(STOPPED, f"the supervisor received {name}")

    def _record(self, result: Result | None, not_ended: Sequence[int]) -> None:
        """Record how the job ended, unless the scheduler is stopping it."""
        # The scheduler's signal may have reached the ranks before it reached the supervisor.
        if result is None or (
            result.state == FAILED and self._scheduler_is_ending_job(result.reason)
        ):
            return
        say(f"{result.state}: {result.reason}" if result.reason else result.state)
        # A disk that is full must not turn a completed job into a failed one: a scheduler still
        # gets the exit code.
        try:
            self.folder.finish(result.state, result.reason, result.failure, not_ended)
        except OSError as error:
            say(f"cannot record the result: {os_error_text(error)}")

    def _scheduler_is_ending_job(self, reason: str) -> bool:
        """Whether the scheduler is stopping the job: then it reports how the job ended."""
        state = self.scheduler.ending() if self.scheduler else ""
        if state:
            self.scheduler_state = state
            say(f"{reason}; scheduler: {state}")
        return bool(state)

    # Attempts

    def _begin_attempt(self) -> None:
        """Create the next attempt, numbered across requeues, and choose its endpoint."""
        self._stop_if_cancelled()
        self.number = self.events.attempt = self.folder.begin_attempt()
        self.events.add(ATTEMPT)
        folder = self.folder.attempt(self.number)
        if self.scheduler:
            self.scheduler.begin_attempt(self.number)
        if self.hosts:
            (folder / "hosts").write_text("\n".join(self.hosts) + "\n", encoding="utf-8")
        self._choose_port()
        if self.plan.output_dir:
            self.folder.record_start(self.number, newest_checkpoint(self.plan.output_dir))
            # Also checked here: a scheduler may requeue the job without asking the supervisor.
            if self._stalled() > MAX_STALLED:
                last = outcome_of(self.folder, self.number - 1)
                raise StopRequested(*without_progress(last))

    def _choose_port(self) -> None:
        """Choose the endpoint of the attempt, and write it to endpoint.json."""
        # On one machine the ranks use exactly this address. Elsewhere the name by which others
        # know this host does not tell the interface: choose a port that is free on all of them.
        probed = self.host if self.plan.is_one_machine else ""
        self.port = self.plan.master_port or free_port(probed)
        with replacing(self.folder.attempt(self.number) / "endpoint.json") as stream:
            stream.write(json.dumps({"host": self.host, "port": self.port}).encode())

    def _run_attempts(self) -> Result | None:
        """Start attempts until the job completes, or another attempt is useless or not allowed.

        Return None if the scheduler will report how the job ended.
        """
        failures_here = 0
        while True:
            # The signal may arrive while nothing runs: then there is nothing to save.
            if self.scheduler and self.stop_request:
                self._stop_if_cancelled()
                if self._scheduler_is_ending_job(self.stop_request.result.reason):
                    return None
                return self._stopped(self.stop_request.result)
            result, exits = self._run_attempt()
            self._record_outcome(result, exits)
            if result.state == COMPLETED:
                return result
            self.events.add(FAILURE, state=result.state, reason=result.reason)
            self._stop_if_cancelled()
            if self._scheduler_is_ending_job(result.reason):
                return None
            if self._stalled() >= MAX_STALLED:
                return without_progress(result)
            if self._can_requeue() and self.plan.output_dir and _nothing_started(exits):
                # After a node was unreachable for a moment, Slurm may believe that it is still
                # running the last step, and start no other one.
                return self._requeue(result, "the scheduler started no node of this attempt")
            if result.state == STOPPED:
                return self._stopped(result)
            if final := self._last_failure(result):
                return final
            say(f"attempt {self.number}: {result.reason}")
            failures_here += 1
            # First try again on the same nodes, then let the scheduler choose other ones.
            if self._can_requeue() and failures_here >= FAILURES_PER_ALLOCATION:
                return self._requeue(result, "two attempts on these nodes failed")
            self._begin_attempt()

    def _stopped(self, result: Result) -> Result | None:
        if self._can_requeue():
            return self._requeue(result, result.reason)
        # Without a checkpoint there is nothing to resume from.
        is_known = self.plan.output_dir and newest_checkpoint(self.plan.output_dir) < 0
        how = "nothing was saved" if is_known else "resume it from its last checkpoint"
        return result._replace(reason=f"{result.reason}; {how}")

    def _last_failure(self, result: Result) -> Result | None:
        """Count the failure; return the result if the job may not be started again."""
        self.folder.record_failure(self.number)
        # A rank that needed too much memory before it saved anything will need it again.
        if is_killed_for_memory(result.reason) and self._stalled():
            self.folder.mark_unrecoverable(self.number)
        if self.folder.is_unrecoverable(self.number):
            return result._replace(reason=f"{result.reason}; a restart would fail in the same way")
        is_last = self.folder.num_failures() >= self.plan.attempts
        return result if is_last else without_nodes(result, self.nodes.lost(), self.hosts)

    def _record_outcome(self, result: Result, exits: dict[int, NodeExit]) -> None:
        # A full disk must not end the job: this record is for people.
        try:
            with with_spare_space(self.folder.path):
                record_outcome(self.folder, self.number, result, exits)
            if self.folder.has_stopped_on_purpose(self.number, self.plan.output_dir):
                self.folder.record_clean_stop(self.number)
        except OSError as error:
            say(f"cannot record how attempt {self.number} ended: {os_error_text(error)}")

    def _stalled(self) -> int:
        """Count the attempts, backwards from the current one, that saved no new checkpoint.

        Only checkpoints of the bundled trainer are known; for other programs return 0.
        """
        # A container may see the folder under another path than this process.
        is_hidden = self.plan.is_in_container and not os.path.isdir(self.plan.output_dir)
        if not self.plan.output_dir or is_hidden:
            return 0
        return self.folder.num_stalled(self.number, newest_checkpoint(self.plan.output_dir))

    def _stop_if_cancelled(self) -> None:
        if self.folder.is_cancelled():
            raise StopRequested(CANCELLED, "")

    # Requeueing

    def _can_requeue(self) -> bool:
        return self.scheduler is not None and self.scheduler.can_requeue

    def _requeue(self, result: Result, why: str) -> Result | None:
        """Requeue the job: the scheduler stops this engine, and starts it again later."""
        self._stop_if_cancelled()
        assert self.scheduler
        self.events.add(REQUEUE, reason=why)
        say(f"requeueing: {why}" if why == result.reason else f"requeueing: {why}: {result.reason}")
        # Only a signal that arrives from now on belongs to the requeue.
        self.stop_request = None
        if self.scheduler.requeue():
            self._await_signal(REQUEUE_TIMEOUT)
            return None
        # The answer may have been lost although the scheduler accepted the request.
        if self._scheduler_is_ending_job(why):
            return None
        return result._replace(reason=f"{result.reason}; it could not be requeued")

    def _await_signal(self, timeout: float) -> None:
        deadline = time.monotonic() + timeout
        while not self.stop_request and time.monotonic() < deadline:
            self.events.show_alive()
            time.sleep(TICK)

    # One attempt

    def _run_attempt(self) -> tuple[Result, dict[int, NodeExit]]:
        """Run one attempt; start it again if another program took its port meanwhile."""
        for _ in range(PORT_TRIES):
            exits = self._start_and_wait()
            has_failed = any(end.code for end in exits.values())
            if not has_failed or self.stop_request or not self._port_was_taken():
                break
        # A node on another machine cannot write to this folder.
        if any(end.is_unrecoverable for end in exits.values()):
            self.folder.mark_unrecoverable(self.number)
        return self._attempt_result(exits), exits

    def _attempt_result(self, exits: dict[int, NodeExit]) -> Result:
        codes = {node: end.code for node, end in exits.items()}
        result = self.folder.attempt_result(
            self.number, codes, self.plan.nnodes, self.plan.output_dir
        )
        if result.state == COMPLETED:
            return result
        first = next(iter(exits))
        if self.scheduler and (
            self.stop_request or self.folder.stop_was_requested(self.number, first)
        ):
            return Result(STOPPED, "the scheduler asked the job to stop")
        if result.state != FAILED:
            return result
        return failed_attempt(exits.values(), tuple(self.hosts), self.plan) or result

    def _start_and_wait(self) -> dict[int, NodeExit]:
        self._stop_if_cancelled()
        # With a scheduler, the nodes are started and asked to stop at once: then it can requeue.
        if self.stop_request and not self.scheduler:
            raise self.stop_request
        if self.port is None:
            self._choose_port()
        assert self.port
        port, self.port = self.port, None
        self.nodes.start(self.number, self.host, port)
        try:
            return self.nodes.wait(self._check_stop, not self.plan.is_elastic)
        except StopRequested as stop:
            self._stop_nodes(stop.result.state)
            if stop.result.state != STOPPED or not self.scheduler:
                raise
            # The job may have completed nevertheless, or can be requeued.
            return self.nodes.exits()

    def _check_stop(self) -> None:
        if self.number >= 0:
            self.events.show_alive()
        if self.stop_request:
            # Not by the handler: it may interrupt the writing of another event.
            self.events.add(SIGNAL, state=self.stop_request.result.state)
            raise self.stop_request
        if self.deadline and time.monotonic() > self.deadline:
            raise StopRequested(TIMEOUT, f"the time limit of {self.plan.time_limit} is exceeded")

    def _stop_nodes(self, state: str) -> None:
        """Give the ranks time to save, unless the job was cancelled with --now."""
        # A scheduler that stops the job enforces its own limit.
        is_open_ended = self.scheduler is not None and state == STOPPED
        self.nodes.stop(float("inf") if is_open_ended else GRACE, self._must_hurry)

    def _must_hurry(self) -> bool:
        self.events.show_alive()
        return self.folder.is_cancelled_now()

    def _port_was_taken(self) -> bool:
        """Whether another program took the port before torchrun did: then no rank started."""
        if self.plan.master_port or self.nodes.have_ranks():
            return False
        log = self.nodes.output()
        return "EADDRINUSE" in log or "address already in use" in log.lower()


def notifier_for(plan: LaunchPlan, environment: Mapping[str, str] | None) -> Notifier:
    # Imported late: most jobs notify nobody.
    from gptctl.engine.notifier import Notifier, View

    found = os.environ if environment is None else environment
    return Notifier(plan, View(RunFolder(plan.remote_dir).path, plan.output_dir), found)


def _nothing_started(exits: dict[int, NodeExit]) -> bool:
    return all(end.never_started for end in exits.values())


def tell_gptctl(answer: bytes) -> None:
    """Tell gptctl, once, whether this supervisor runs the job."""
    ready = os.environ.pop(READY_VARIABLE, "")
    if ready:
        # gptctl may have been killed; the job exists nevertheless.
        with suppress(BrokenPipeError):
            os.write(int(ready), answer)
        os.close(int(ready))


def main() -> None:
    run_dir = sys.argv[1]
    folder = RunFolder(run_dir)
    os.umask(0o077)
    disregard(signal.SIGHUP, signal.SIGINT)  # signals of a terminal
    adopt_orphans()
    plan = read_plan(folder.path)
    environment = {name: value for name, value in os.environ.items() if name != READY_VARIABLE}
    nodes = [Node(plan, number, environment) for number in range(plan.nodes)]
    admission = Admission(plan, [MachinePlace(plan, nodes)])
    # Whoever takes the claim first decides: gptctl may have abandoned the job meanwhile.
    if folder.try_claim(this_process()):
        Supervisor(plan, nodes, admission=admission).run(on_ready=lambda: tell_gptctl(b"1"))
    else:
        tell_gptctl(b"0")


if __name__ == "__main__":
    main()
