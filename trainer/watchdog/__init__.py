"""Finds the rank that all others wait for, reports it, and stops the job.

Two threads run next to the training. One checks whether this rank still makes progress
(`mesh.heartbeat`). If there is none for Distributed.timeout_minutes, it asks all ranks how far they
are, and decides which one is stuck. The other thread receives messages: it answers questions, and
exits this process if another rank has failed. This file does not know what ranks do between two
ticks, nor how messages are sent (`channel`).
"""

from __future__ import annotations

import faulthandler
import os
import re
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NoReturn

from trainer.config.sections import RunConfig
from trainer.errors import OUT_OF_REACH, UserError
from trainer.input_files import open_own
from trainer.mesh import Mesh, answer_time
from trainer.rank_log import UNRECOVERABLE
from trainer.resume import output_dir
from trainer.status import report_failure
from trainer.watchdog.channel import PAUSE, Channel, address, is_in_first_rank, with_timeout
from trainer.watchdog.network_errors import LOST, TIMED_OUT, nccl_error, network_error
from trainer.watchdog.peer import Peer
from trainer.watchdog.verdicts import Answer, Verdict, answer_in, verdict_in

# Seconds that other ranks wait for the one that fails: first for its report, then for its exit.
EXIT_DELAY = 1.1
DELIVERY = 0.5  # seconds that others get to receive a verdict; less than EXIT_DELAY
EXIT_GRACE = 5.0  # seconds that a thread leaves to another one that is already exiting
# Files in which a thread waits for other ranks: FSDP exchanges gradients during `backward`, and a
# GPU does what other ranks have a part in until an event of a stream.
WAITING = re.compile(
    r"/torch/distributed/|/torch/autograd/graph\.py$|/torch/cuda/streams\.py$"
    r"|/trainer/(mesh|shared_memory|step_times)\.py$"
)
NO_RESPONSE, NO_PROGRESS = "not respond", "not make progress"


def find_stuck_ranks(
    answers: Sequence[Answer], absent: Sequence[int], limit: float, is_late: bool
) -> tuple[Sequence[int], str]:
    """Which ranks hold up the others, and how; no ranks if nothing may be wrong.

    `is_late`: some rank has waited longer than allowed, so the job stops in any case. Otherwise,
    ranks that are all at the same point may just have a long step.
    """
    if absent:
        return absent, NO_RESPONSE
    behind = [
        answer for answer in answers if answer.ticks == min(answer.ticks for answer in answers)
    ]
    if len(behind) < len(answers):
        is_stuck = is_late or all(answer.idle >= limit for answer in behind)
        return [answer.rank for answer in behind if is_stuck], NO_PROGRESS
    # All ranks are at the same point: a rank that does not wait is the one the others wait for.
    busy = [answer.rank for answer in answers if not answer.waits]
    return (busy if is_late and len(busy) < len(answers) else []), NO_PROGRESS


class Watchdog:
    def __init__(
        self, mesh: Mesh, limit: float, output: Path, report: Callable[[UserError], None]
    ) -> None:
        self.mesh, self.limit, self.window = mesh, limit, answer_time(limit)
        self.output, self.report = output, report
        self.logs = Path(os.environ.get("GPTCTL_LOG_DIR") or output / "logs")
        self.stacks = self.logs / f"stacks.{mesh.rank}"
        self._delete_stacks()  # those of an earlier run
        self.peers = [Peer(*peer) for peer in mesh.gather(tuple(Peer.of_this_rank()))]
        # The process of rank 0 is different in every attempt, so its name separates attempts.
        name = "/".join(map(str, self.peers[0]))
        self.channel = Channel(name, mesh.rank, mesh.world, self.window)
        self.rounds, self.last_check = 0, time.monotonic()
        self.is_checking = False
        self.trace = ""  # of the training thread, after a network error
        self.must_stop = False  # a rank has waited too long: the job stops, whatever others find
        self.verdict: Verdict | None = None
        self.is_decided, self.is_over = threading.Event(), threading.Event()
        self.exiting = threading.RLock()  # held by the thread that exits this process
        self.dumping = threading.Lock()
        self.threads = [
            threading.Thread(target=act, daemon=True) for act in (self._receive, self._watch)
        ]
        for thread in self.threads:
            thread.start()

    # The end of the training thread, after success or failure.

    def leave(self) -> None:
        """Leave after success, without looking like a lost rank to the others."""
        self.is_over.set()
        with_timeout(self.window, self._sign_off)
        self._delete_stacks()

    def _sign_off(self) -> None:
        self.channel.leave()
        self.channel.send({}, to=self.mesh.rank)  # wakes the receiving thread, so that it exits
        for thread in self.threads:
            thread.join()
        # The store may run in this process: keep it until the others no longer need it.
        if self.mesh.is_first and is_in_first_rank():
            self.channel.wait_until_all_left()

    def explain(self, error: BaseException) -> BaseException:
        """Tell the other ranks that this one fails. Returns the error to show to the user.

        A network error is only a consequence: it is replaced by the failure of the other rank.
        """
        if not self.exiting.acquire(blocking=False):  # another thread is exiting this process
            time.sleep(EXIT_GRACE)
        text, nccl = network_error(error), nccl_error(error)
        if text or nccl:
            self.trace = traceback.format_exc()
            is_late = TIMED_OUT.search(text) and not LOST.search(text)
            verdict = self._verdict_on_timeout() if is_late else self._verdict_on_loss(nccl)
            self._conclude(verdict)
            self._delay_exit(verdict)
            return verdict.error
        said = (
            error.message
            if isinstance(error, UserError)
            else f"{type(error).__name__}: {error}".rstrip(": ")
        )
        reason = f"rank {self.mesh.rank} failed {self.mesh.heartbeat.where}: {said}"
        if isinstance(error, KeyboardInterrupt):
            reason = f"rank {self.mesh.rank} was interrupted {self.mesh.heartbeat.where}"
        hint = f"see the log of rank {self.mesh.rank}"
        verdict = self._publish(Verdict(reason, hint, [self.mesh.rank], code=_code(error)))
        self._conclude(verdict, said if isinstance(error, UserError) else "")
        if not isinstance(error, (UserError, KeyboardInterrupt, BrokenPipeError)):
            print(reason, file=sys.stderr)
        return error

    def _verdict_on_loss(self, nccl: str) -> Verdict:
        """The connection to a rank is lost.

        Wait for a process that has exited: it has reported its failure before, or never will. If
        there is none on this host, another rank may report, or the other thread may know more. NCCL
        also fails if all are running.
        """
        wait_until(lambda: self.is_decided.is_set() or bool(self._exited()), EXIT_DELAY)
        if self.is_checking and not self._exited():
            self.is_decided.wait(2 * self.window)
        exited = self._exited()
        names = f": {self._names(exited)}" if exited else ""
        if nccl and not exited and not self.verdict:
            reason = f"rank {self.mesh.rank} failed {self.mesh.heartbeat.where}: {nccl}"
            hint = "check the GPUs and the network of its node; NCCL_DEBUG=INFO logs more"
            return self._publish(Verdict(reason, hint, [self.mesh.rank]))
        return self.verdict or self._publish(
            Verdict(f"another rank exited unexpectedly{names}", "see the log of that rank", exited)
        )

    def _exited(self) -> list[int]:
        return [rank for rank, peer in enumerate(self.peers) if peer.has_exited]

    def _verdict_on_timeout(self) -> Verdict:
        """Ranks have waited too long. The job stops even if no rank can be blamed."""
        for _ in range(2):  # another rank may be asking already, and find nothing wrong
            if not self.is_decided.is_set():
                self._check_ranks(is_late=True)
            self.is_decided.wait(self.window)
        where = self.mesh.heartbeat.where
        reason = f"ranks waited longer than Distributed.timeout_minutes {where}"
        return self.verdict or self._publish(Verdict(reason, self._hint()))

    # The thread that checks whether this rank makes progress.

    def _watch(self) -> None:
        while not self.is_over.wait(max(0.01, self._due() - time.monotonic())):
            if self._due() <= time.monotonic() and not self.is_decided.is_set():
                self._check_ranks()

    def _due(self) -> float:
        return max(self.mesh.heartbeat.since, self.last_check) + self.limit

    def _check_ranks(self, is_late: bool = False) -> None:
        """Ask all ranks how far they are, and decide whether one is stuck.

        If the store does not respond, the rank that runs it is stuck.
        """
        self.last_check, self.is_checking = time.monotonic(), True
        self._dump_stacks()
        found = with_timeout(1.25 * self.window, lambda: self._ask(is_late))
        if found is None:
            self._exit_without_store()
        elif found[0]:
            culprits, how = find_stuck_ranks(*found, self.limit, is_late)
            if culprits or is_late:
                self._publish(self._verdict(found[0], culprits, how))
            else:
                with_timeout(self.window, lambda: self.channel.send({"continue": True}))
        self.is_checking = False

    def _ask(self, is_late: bool) -> tuple[list[Answer], list[int]]:
        """The answers of the ranks, and the ranks that should have answered.

        Both are empty if another rank is already asking.
        """
        answers = self.channel.ask(self.rounds, self.window, is_late=is_late)
        if answers is None:
            return [], []
        found = [answer_in(answer, self.mesh.world) for answer in answers]
        told = {answer.rank: answer for answer in found if answer}
        # This rank surely runs, even if its own answer came too late.
        told.setdefault(self.mesh.rank, self._here())
        missing = [rank for rank in range(self.mesh.world) if rank not in told]
        return list(told.values()), [rank for rank in missing if not self.channel.has_left(rank)]

    def _verdict(self, answers: Sequence[Answer], culprits: Sequence[int], how: str) -> Verdict:
        front = max(answers, key=lambda answer: answer.ticks).where
        if not culprits:
            return Verdict(f"all ranks wait for each other {front}", self._hint())
        where = next((f" {answer.where}" for answer in answers if answer.rank == culprits[0]), "")
        verb = "does" if len(culprits) == 1 else "do"
        reason = f"{self._names(culprits)} {verb} {how}{where}; the other ranks wait {front}"
        return Verdict(reason, self._hint(), culprits, is_silent=how == NO_RESPONSE)

    def _exit_without_store(self) -> None:
        """Exit without asking the others, who find out by themselves, some a little later."""
        verdict = Verdict(f"the store of the ranks at {address()} does not respond", self._hint())
        if is_in_first_rank() and not self.mesh.is_first:
            where = self.mesh.heartbeat.where
            reason = f"{self._names([0])} does {NO_RESPONSE}; the other ranks wait {where}"
            verdict = Verdict(reason, self._hint(), [0], is_silent=True)
        time.sleep(self.window / 2)  # no rank may exit before the others had time to find out
        self._stop(verdict)

    # The thread that receives messages.

    def _receive(self) -> None:
        with suppress(RuntimeError):  # the store has exited: code that needs it will notice
            while not self.is_over.is_set():
                message = self.channel.next_message()
                question = message.get("question")
                if type(question) is int:
                    self.rounds, self.last_check = question + 1, time.monotonic()
                    self.must_stop |= message.get("is_late") is True
                    self.channel.answer(question, self._here()._asdict())
                    self._dump_stacks()
                elif "continue" in message and not self.must_stop:  # nothing is wrong after all
                    self._delete_stacks()
                elif verdict := verdict_in(message, self.mesh.world):
                    self._stop(verdict)

    def _here(self) -> Answer:
        heartbeat = self.mesh.heartbeat
        frame = sys._current_frames().get(threading.main_thread().ident or 0)
        waits = bool(self.trace) or (
            frame is not None and bool(WAITING.search(frame.f_code.co_filename))
        )
        idle = time.monotonic() - heartbeat.since
        return Answer(self.mesh.rank, heartbeat.ticks, heartbeat.where, idle, waits)

    def _stop(self, verdict: Verdict) -> NoReturn:
        """Exit this process, unless the training thread fails by itself and exits first."""
        self.verdict = verdict = self.verdict or verdict
        self.is_decided.set()
        self._kill_silent(verdict)
        self._delay_exit(verdict)
        try:
            if self.exiting.acquire(blocking=False):
                self._conclude(verdict)
                self.report(verdict.error)
            else:
                time.sleep(EXIT_GRACE)
        finally:
            exit_now(1 if self.mesh.rank in verdict.culprits else verdict.code)

    # Used by both threads.

    def _publish(self, verdict: Verdict) -> Verdict:
        """Send a verdict to all ranks. Returns the one that counts, which may be an earlier one."""

        def publish() -> Verdict:
            ours = verdict._asdict()
            settled = self.channel.set_once("verdict", {"by": self.mesh.rank, "verdict": ours})
            if settled.get("by") == self.mesh.rank:
                self.channel.send(ours)
                # The store may exit with this process, and with it what nobody has received yet.
                if self.mesh.is_first and is_in_first_rank():
                    self.channel.wait_until_received(DELIVERY)
            told = settled.get("verdict")
            return (isinstance(told, dict) and verdict_in(told, self.mesh.world)) or verdict

        settled = with_timeout(self.window, publish)
        if settled is None:  # the store does not respond: stop at least this process
            threading.Thread(target=self._stop, args=[verdict], daemon=True).start()
        return settled or verdict

    def _conclude(self, verdict: Verdict, reason: str = "") -> None:
        self._kill_silent(verdict)
        if self.mesh.is_first or 0 in verdict.culprits:
            idle = time.monotonic() - self.mesh.heartbeat.since
            report_failure(self.output, reason or verdict.reason, idle)

    def _delay_exit(self, verdict: Verdict) -> None:
        """Let the failing ranks exit first: torchrun and Slurm react to the first exit.

        Ranks on their host see when their launcher knows of it, and tell those on other hosts.
        Without culprits there is nobody to wait for: `_verdict_on_loss` has waited already.
        """
        failing = [self.peers[rank] for rank in verdict.culprits]
        if self.mesh.rank in verdict.culprits:
            return
        if all(peer.is_here for peer in failing):
            wait_until(lambda: all(peer.exit_is_known for peer in failing), EXIT_DELAY)
            with_timeout(DELIVERY, self.channel.announce_exit)
        else:
            with_timeout(EXIT_DELAY, lambda: self.channel.wait_for_exit(EXIT_DELAY))

    def _kill_silent(self, verdict: Verdict) -> None:
        """Kill ranks that do not respond, after saving what the kernel knows about them.

        One rank on the same host does it: the one that creates the file first.
        """
        for rank in verdict.culprits if verdict.is_silent else ():
            peer, log = self.peers[rank], self.logs / f"workerlog.{rank}"
            with suppress(OSError):  # another rank has created the file, or nobody can write it
                if peer.is_here and not peer.has_exited:
                    self.logs.mkdir(parents=True, exist_ok=True)
                    with open(self.logs / f"stacks.{rank}", "x", encoding="utf-8") as stream:
                        stream.write(f"rank {rank} ({peer}) does not respond. Its threads:\n")
                        stream.writelines(peer.threads())
                    if log.exists():
                        with open(log, "a", encoding="utf-8", opener=open_own) as stream:
                            stream.write(f"error: {verdict.reason}\nhint: {verdict.hint}\n")
                    os.kill(peer.pid, signal.SIGKILL)

    def _dump_stacks(self) -> None:
        # Complete or not at all: this process may exit at any moment.
        part = self.stacks.with_name(f".{self.stacks.name}")
        with self.dumping, suppress(OSError):
            self.logs.mkdir(parents=True, exist_ok=True)
            part.unlink(missing_ok=True)
            with open(part, "x", encoding="utf-8") as stream:
                stream.write(self.trace)
                stream.flush()  # faulthandler writes to the descriptor directly
                faulthandler.dump_traceback(stream)
            os.replace(part, self.stacks)

    def _delete_stacks(self) -> None:
        with suppress(OSError):
            self.stacks.unlink()

    def _names(self, ranks: Sequence[int]) -> str:
        return " and ".join(f"rank {rank} ({self.peers[rank]})" for rank in ranks)

    def _hint(self) -> str:
        return f"see {self.logs}/stacks.* for what the ranks were doing"


@contextmanager
def watched(run: RunConfig, mesh: Mesh, report: Callable[[UserError], None]) -> Iterator[None]:
    """Run the work of one rank so that all ranks stop if one of them fails or gets stuck."""
    if mesh.world == 1:
        yield
        return
    watchdog = Watchdog(mesh, 60 * run.Distributed.timeout_minutes, output_dir(run), report)
    try:
        yield
    except BaseException as error:
        explained = watchdog.explain(error)
        if explained is error:
            raise
        raise explained from None
    watchdog.leave()


def wait_until(condition: Callable[[], bool], seconds: float) -> None:
    """Wait for what sends no message, such as the exit of another process."""
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(PAUSE)


def exit_now(code: int) -> NoReturn:
    """Exit immediately, because normal cleanup could wait for a rank that has exited."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(Exception):
            stream.flush()
    os._exit(code)


def _code(error: BaseException) -> int:
    """The exit code of the other ranks: only the failing rank knows if a restart can help."""
    is_final = isinstance(error, UserError) and error.exit_code != OUT_OF_REACH
    return UNRECOVERABLE if is_final else OUT_OF_REACH
