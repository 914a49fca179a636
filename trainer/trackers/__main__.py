"""The process of one tracker. Messages arrive on stdin, one JSON object per line; see `main`.

python -m trainer.trackers NAME
"""

from __future__ import annotations

import json
import os
import select
import signal
import sys
import threading
import time
import traceback
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

from trainer.secret_names import looks_secret
from trainer.trackers.processes import ORPHAN_SECONDS, TOLD
from trainer.trackers.tracked_run import TrackedRun, Tracker

# A rank is asked to stop by a signal, which Slurm sends to all processes of a job.
OF_RANKS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
LONGEST_REASON = 300


class Reports:
    """Tells the rank, which writes the log, in its own style."""

    def __init__(self, stream: IO[str]) -> None:
        self._stream = stream

    def send(self, level: str, text: str) -> None:
        with suppress(OSError):  # the rank has exited
            self._stream.write(json.dumps({"level": level, "text": text}) + "\n")
            self._stream.flush()


def main(arguments: list[str]) -> int:
    for number in OF_RANKS:
        signal.signal(number, signal.SIG_IGN)  # it ends with its rank, whose pipe it reads
    os.nice(5)  # the training needs the cores more
    # Packages may read stdin, and print: that goes to a file of its own.
    messages, reports = os.dup(0), Reports(os.fdopen(os.dup(1), "w"))
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.dup2(2, 1)
    threading.Thread(target=_exit_in_time, args=(messages,), daemon=True).start()
    with open(messages, "rb") as lines:
        return track(arguments[0], lines, reports)


def _exit_in_time(messages: int) -> None:
    """Exit some time after the rank has closed its pipe, whatever the tracker is waiting for."""
    poll = select.poll()
    poll.register(messages, 0)  # a hang-up is always reported
    poll.poll()
    time.sleep(ORPHAN_SECONDS)
    os._exit(1)


def track(name: str, lines: Iterable[bytes], reports: Reports) -> int:
    """Read the run, then its records, then how it ended; no end: its rank was killed."""
    lines = iter(lines)
    first = json.loads(next(lines))
    run = TrackedRun(**{**first, "folder": Path(first["folder"])})
    try:
        tracker = start(name, run)
    # SystemExit: some packages exit if their settings are wrong.
    except (Exception, SystemExit) as error:
        reports.send("warning", f"tracker {name} is off: {reason(error)}")
        traceback.print_exc()
        return TOLD
    reports.send("info", f"tracker {name}: {tracker.where}")
    code, lost = 1, 0
    for line in lines:
        message: dict[str, Any] = json.loads(line)
        if "end" in message:
            code = message["end"]
            break
        try:
            tracker.log(message["step"], message["values"], message["time"])
        except (Exception, SystemExit) as error:
            if not lost:
                traceback.print_exc()
                where = f"tracker {name} cannot record step {message['step']}"
                reports.send("warning", f"{where}: {reason(error)}")
            lost += 1
    try:
        tracker.finish(code)
    except (Exception, SystemExit) as error:
        reports.send("warning", f"tracker {name} cannot finish: {reason(error)}")
    if lost:
        reports.send("warning", f"tracker {name} lost {lost} records; metrics.jsonl has them")
    return 0


def start(name: str, run: TrackedRun) -> Tracker:
    # Imported here: each of them needs its own package only.
    if name == "tensorboard":
        # tensorboardX would import it: seconds, and hundreds of megabytes, for nothing.
        sys.modules["torch"] = None  # type: ignore[assignment]
        from trainer.trackers.tensorboard import TensorBoard

        return TensorBoard(run)
    if name == "wandb":
        from trainer.trackers.wandb import Wandb

        return Wandb(run)
    if name == "swanlab":
        from trainer.trackers.swanlab import SwanLab

        return SwanLab(run)
    from trainer.trackers.mlflow import MLflow

    return MLflow(run)


def reason(error: BaseException) -> str:
    """The first line of an error, without the values of secrets."""
    text = " ".join(str(error).split()) or type(error).__name__
    for name, value in os.environ.items():
        if len(value) >= 8 and looks_secret(name):
            text = text.replace(value, "…")
    text = "".join(character if character.isprintable() else "?" for character in text)
    return text if len(text) <= LONGEST_REASON else f"{text[:LONGEST_REASON]}…"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
