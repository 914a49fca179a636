"""Finds the rank for which all others wait, says which one it is and where, and ends the job.

Two threads beside the training. One looks whether this rank still ticks (`mesh.pulse`); when it has not for as long as
Distributed.timeout_minutes allows, it asks all ranks how far they are, and judges. The other hears what ranks say: it
answers, and ends this process when one of them has failed. What this file does not know: what the ranks do between two
ticks, and how words travel (`line`).
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
from typing import NamedTuple, NoReturn

import trainer.mesh
from trainer.config.sections import RunConfig
from trainer.errors import ANSWER_IS_NO, OUT_OF_REACH, UserError
from trainer.mesh import Mesh, answer_time
from trainer.rank_log import CANNOT_BE_HELPED
from trainer.resume import output_dir
from trainer.status import tell_failure
from trainer.watchdog.line import Line, address, is_in_first_rank, within
from trainer.watchdog.peer import Peer

LOST = re.compile(r"(closed|reset) by peer|Broken pipe|pair closure")
TIMED_OUT = re.compile(r"Timed out waiting")
LINGER = 1.1  # seconds for which ranks outlive the one that failed: torchrun knows the first by whole seconds
LAST_WORDS = 5.0  # seconds after which a process that is about to end is ended
# Where a thread is that waits for other ranks; copies of a model exchange their gradients inside of `backward`.
WAITING = re.compile(
    rf"/torch/distributed/|/torch/autograd/graph\.py$|^{re.escape(trainer.mesh.__file__)}$"
)


class Answer(NamedTuple):
    """How far a rank is."""

    rank: int
    ticks: int
    where: str
    idle: float  # seconds since the last tick
    waits: bool  # for other ranks, as far as its stack can tell


class Word(NamedTuple):
    """Why the job ends. The first one that is said counts, on all ranks."""

    reason: str
    hint: str
    culprits: Sequence[int] = ()
    is_silent: bool = False  # the culprits do not answer, somebody else has to look after them
    code: int = OUT_OF_REACH  # with which ranks end that hear it

    @property
    def error(self) -> UserError:
        return UserError(
            self.reason, self.hint, OUT_OF_REACH if self.code == OUT_OF_REACH else ANSWER_IS_NO
        )


def judge(
    answers: Sequence[Answer], absent: Sequence[int], limit: float, is_late: bool
) -> tuple[Sequence[int], str]:
    """Who holds the others up, and how that shows; nobody where there may be no harm.

    `is_late`: some rank has waited for others for longer than it may, so that the job ends in any case. Without that,
    ranks that are all at the same place may just have much to do there.
    """
    if absent:
        return absent, "not answer"
    behind = [
        answer for answer in answers if answer.ticks == min(answer.ticks for answer in answers)
    ]
    if len(behind) < len(answers):
        is_stuck = is_late or all(answer.idle >= limit for answer in behind)
        return [answer.rank for answer in behind if is_stuck], "not go on"
    busy = [answer.rank for answer in answers if not answer.waits]
    return (busy if is_late and len(busy) < len(answers) else []), "not go on"


class Watchdog:
    def __init__(
        self, mesh: Mesh, limit: float, output: Path, report: Callable[[UserError], None]
    ) -> None:
        self.mesh, self.limit, self.window = mesh, limit, answer_time(limit)
        self.output, self.report = output, report
        self.logs = Path(os.environ.get("GPTCTL_LOG_DIR") or output / "logs")
        self._forget_stacks()  # of an earlier run
        self.peers = [Peer(*peer) for peer in mesh.gather(tuple(Peer.of_this_rank()))]
        self.line = Line("/".join(map(str, self.peers[0])), mesh.rank, mesh.world, self.window)
        self.rounds, self.looked = 0, time.monotonic()
        self.is_looking, self.trace = (
            False,
            "",
        )  # the trace of the training thread, once it has waited in vain
        self.has_to_end = False  # whatever a rank finds that still sees no harm
        self.word: Word | None = None
        self.heard, self.is_over, self.ending = (
            threading.Event(),
            threading.Event(),
            threading.RLock(),
        )
        self.threads = [
            threading.Thread(target=act, daemon=True) for act in (self._listen, self._watch)
        ]
        for thread in self.threads:
            thread.start()

    # The end of the training thread, good or bad.

    def leave(self) -> None:
        """After a good end. The others must miss neither this rank, nor the store that may live in the first."""
        self.is_over.set()
        within(self.window, self._say_goodbye)
        self._forget_stacks()

    def _say_goodbye(self) -> None:
        self.line.leave()
        self.line.send({}, to=self.mesh.rank)  # wakes the thread that listens
        for thread in self.threads:
            thread.join()
        if self.mesh.is_first and is_in_first_rank():
            self.line.wait_for_leave()

    def explain(self, error: BaseException) -> BaseException:
        """Tells the others that this rank fails. What the user is to see: not what only follows from another's end."""
        if not self.ending.acquire(blocking=False):  # a thread is about to end this process
            time.sleep(LAST_WORDS)
        text = _network_error(error)
        if text:
            self.trace = traceback.format_exc()
            word = self._word_of_loss() if LOST.search(text) else self._word_of_delay()
            self._settle(word)
            self._linger(word)
            return word.error
        said = (
            error.message
            if isinstance(error, UserError)
            else f"{type(error).__name__}: {error}".rstrip(": ")
        )
        reason = f"rank {self.mesh.rank} failed {self.mesh.pulse.where}: {said}"
        if isinstance(error, KeyboardInterrupt):
            reason = f"rank {self.mesh.rank} was interrupted {self.mesh.pulse.where}"
        hint = f"the log of rank {self.mesh.rank} says more"
        word = self._spread(Word(reason, hint, [self.mesh.rank], code=_code(error)))
        self._settle(word, said if isinstance(error, UserError) else "")
        if not isinstance(error, (UserError, KeyboardInterrupt, BrokenPipeError)):
            print(reason, file=sys.stderr)
        return error

    def _word_of_loss(self) -> Word:
        """A rank is gone. It may have left word, or the other thread knows more; else it is looked for."""
        self.heard.wait(LINGER)
        if self.is_looking:
            self.heard.wait(2 * self.window)
        gone = [rank for rank, peer in enumerate(self.peers) if peer.is_gone]
        names = f": {self._names(gone)}" if gone else ""
        return self.word or self._spread(
            Word(f"another rank is gone{names}", "its own log says why", gone)
        )

    def _word_of_delay(self) -> Word:
        """Ranks have waited for others for too long. Even if nobody can be named, that much is certain."""
        for _ in range(2):  # another rank may be asking already, and find no harm
            if not self.heard.is_set():
                self._look(is_late=True)
            self.heard.wait(self.window)
        reason = f"ranks waited {self.mesh.pulse.where} for longer than Distributed.timeout_minutes allows"
        return self.word or self._spread(Word(reason, self._hint()))

    # The thread that looks whether this rank goes on.

    def _watch(self) -> None:
        while not self.is_over.wait(max(0.01, self._due() - time.monotonic())):
            if self._due() <= time.monotonic():
                self._look()

    def _due(self) -> float:
        return max(self.mesh.pulse.since, self.looked) + self.limit

    def _look(self, is_late: bool = False) -> None:
        """Asks all ranks how far they are, and judges. A store that does not answer is silent with its rank."""
        self.looked, self.is_looking = time.monotonic(), True
        self._dump_stacks()
        found = within(1.25 * self.window, lambda: self._ask(is_late))
        if found is None:
            self._end_without_store()
        elif found[0]:
            culprits, how = judge(*found, self.limit, is_late)
            if culprits or is_late:
                self._spread(self._verdict(found[0], culprits, how))
            else:
                within(self.window, lambda: self.line.send({"go_on": True}))
        self.is_looking = False

    def _ask(self, is_late: bool) -> tuple[list[Answer], list[int]]:
        """What the ranks answer, and who does not though it should; nothing where another rank asks them already."""
        answers = self.line.ask(self.rounds, self.window, is_late=is_late)
        if answers is None:
            return [], []
        answers.setdefault(self.mesh.rank, self._here()._asdict())
        missing = [rank for rank in range(self.mesh.world) if rank not in answers]
        told = [Answer(**answer) for answer in answers.values()]
        return told, [rank for rank in missing if not self.line.has_left(rank)]

    def _verdict(self, answers: Sequence[Answer], culprits: Sequence[int], how: str) -> Word:
        front = max(answers, key=lambda answer: answer.ticks).where
        if not culprits:
            return Word(f"all ranks wait for each other {front}", self._hint())
        where = next((f" {answer.where}" for answer in answers if answer.rank == culprits[0]), "")
        verb = "does" if len(culprits) == 1 else "do"
        reason = f"{self._names(culprits)} {verb} {how}{where}; the others wait {front}"
        return Word(reason, self._hint(), culprits, is_silent=how == "not answer")

    def _end_without_store(self) -> None:
        """Every rank comes to this end by itself, some a little later: none leaves before they have had the time."""
        word = Word(f"the store of the ranks at {address()} does not answer", self._hint())
        if is_in_first_rank() and not self.mesh.is_first:
            reason = f"{self._names([0])} does not answer; the others wait {self.mesh.pulse.where}"
            word = Word(reason, self._hint(), [0], is_silent=True)
        time.sleep(self.window / 2)
        self._hear(word)

    # The thread that hears the others.

    def _listen(self) -> None:
        with suppress(RuntimeError):  # the store is gone: whoever needs it will notice
            while not self.is_over.is_set():
                message = self.line.next_message()
                if "question" in message:
                    self.rounds, self.looked = message["question"] + 1, time.monotonic()
                    self.has_to_end |= message["is_late"]
                    self.line.answer(message["question"], self._here()._asdict())
                    self._dump_stacks()
                elif "go_on" in message and not self.has_to_end:
                    self._forget_stacks()
                elif "reason" in message:
                    self._hear(Word(**message))

    def _here(self) -> Answer:
        pulse, frame = (
            self.mesh.pulse,
            sys._current_frames().get(threading.main_thread().ident or 0),
        )
        waits = bool(self.trace) or (
            frame is not None and bool(WAITING.search(frame.f_code.co_filename))
        )
        return Answer(
            self.mesh.rank, pulse.ticks, pulse.where, time.monotonic() - pulse.since, waits
        )

    def _hear(self, word: Word) -> NoReturn:
        """The end of this process, unless the training thread notices before and ends it."""
        self.word = word = self.word or word
        self.heard.set()
        self._look_after_silent(word)
        self._linger(word)
        try:
            if self.ending.acquire(blocking=False):
                self._settle(word)
                self.report(word.error)
            else:
                time.sleep(LAST_WORDS)
        finally:
            end_process(1 if self.mesh.rank in word.culprits else word.code)

    # What they have in common.

    def _spread(self, word: Word) -> Word:
        """Says it to all ranks, unless something has been said before: then that is the reason."""

        def say() -> Word:
            first, said = self.line.settle("word", [self.mesh.rank, word._asdict()])
            if first == self.mesh.rank:
                self.line.send(said)
            return Word(**said)

        said = within(self.window, say)
        if said is None:
            threading.Thread(target=self._hear, args=[word], daemon=True).start()
        return said or word

    def _settle(self, word: Word, reason: str = "") -> None:
        self._look_after_silent(word)
        if self.mesh.is_first or 0 in word.culprits:
            tell_failure(self.output, reason or word.reason)

    def _linger(self, word: Word) -> None:
        if self.mesh.rank not in word.culprits:
            time.sleep(LINGER)

    def _look_after_silent(self, word: Word) -> None:
        """One rank of its host keeps what the kernel knows of a silent one, and ends it."""
        for rank in word.culprits if word.is_silent else ():
            peer, log = self.peers[rank], self.logs / f"workerlog.{rank}"
            with suppress(OSError):  # another rank has begun with it, or cannot write either
                if peer.is_here and not peer.is_gone:
                    self.logs.mkdir(parents=True, exist_ok=True)
                    with open(self.logs / f"stacks.{rank}", "x", encoding="utf-8") as stream:
                        stream.writelines(
                            [
                                f"rank {rank} ({peer}) does not answer. Its threads:\n",
                                *peer.threads(),
                            ]
                        )
                    if log.exists():
                        with open(log, "a", encoding="utf-8") as stream:
                            stream.write(f"error: {word.reason}\nhint: {word.hint}\n")
                    os.kill(peer.pid, signal.SIGKILL)

    def _dump_stacks(self) -> None:
        with suppress(OSError):
            self.logs.mkdir(parents=True, exist_ok=True)
            with open(self.logs / f"stacks.{self.mesh.rank}", "w", encoding="utf-8") as stream:
                stream.write(self.trace)
                stream.flush()
                faulthandler.dump_traceback(stream)

    def _forget_stacks(self) -> None:
        with suppress(OSError):
            (self.logs / f"stacks.{self.mesh.rank}").unlink()

    def _names(self, ranks: Sequence[int]) -> str:
        return " and ".join(f"rank {rank} ({self.peers[rank]})" for rank in ranks)

    def _hint(self) -> str:
        return f"{self.logs}/stacks.* show what the ranks were doing"


@contextmanager
def watched(run: RunConfig, mesh: Mesh, report: Callable[[UserError], None]) -> Iterator[None]:
    """The work of a rank among others: it ends when one of them cannot go on, and they end when it cannot."""
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


def end_process(code: int) -> NoReturn:
    """At once: to tidy up could mean to wait for a rank that is gone."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(Exception):
            stream.flush()
    os._exit(code)


def _network_error(error: BaseException | None) -> str:
    """What gloo said, if that is behind it: the pipeline wraps it into an error of its own."""
    while error is not None:
        if isinstance(error, RuntimeError) and (
            LOST.search(str(error)) or TIMED_OUT.search(str(error))
        ):
            return str(error)
        error = error.__cause__
    return ""


def _code(error: BaseException) -> int:
    """With which the other ranks end: whether starting again can help is for the one to say that fails."""
    is_final = isinstance(error, UserError) and error.exit_code != OUT_OF_REACH
    return CANNOT_BE_HELPED if is_final else OUT_OF_REACH
