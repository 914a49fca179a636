"""Sends the metrics of a run to trackers, such as TensorBoard, if the config names any."""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path

from trainer.durable import replacing
from trainer.input_files import read_bytes
from trainer.resume import output_dir
from trainer.state import Training
from trainer.trackers.processes import Trackers
from trainer.trackers.tracked_run import TrackedRun

RUN_ID = "run_id"  # a file of the output folder, without a launcher
LONGEST_ID = 64


@contextmanager
def tracking(t: Training) -> Iterator[None]:
    """Send what is recorded to the trackers, on the first rank; at the end, wait for them."""
    names = t.run.Engine.trackers
    if not names or not t.mesh.is_first:
        yield
        return
    trackers = Trackers(names, _tracked_run(t), t.log)
    t.metrics.on_record = trackers.record
    try:
        yield
    except BaseException:
        # Other ranks wait to hear of the failure. The trackers end by themselves.
        trackers.close(1, seconds=0)
        raise
    t.mesh.heartbeat.tick("waiting for trackers")
    trackers.close(0)


def _tracked_run(t: Training) -> TrackedRun:
    folder, step = output_dir(t.run), t.progress.step
    checkpoint = t.run.Engine.save_load.ckpt_dir or ""
    return TrackedRun(
        _run_id(folder, step),
        step,
        folder,
        # `auto` is a checkpoint of this folder.
        "" if checkpoint == "auto" or not step else os.path.abspath(checkpoint),
        json.loads(json.dumps(asdict(t.run))),  # tuples become lists
    )


def _run_id(folder: Path, step: int) -> str:
    """The launcher's id of the run; without one, an id that the output folder keeps."""
    # The first job of those that continue one another: together they are one curve.
    job = os.environ.get("GPTCTL_FIRST_JOB") or os.environ.get("GPTCTL_JOB")
    if job:
        return job
    is_same = step > 0 or os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0"
    with suppress(OSError):
        known = read_bytes(folder / RUN_ID, LONGEST_ID).decode(errors="replace").strip()
        if is_same and known.replace("-", "").isalnum() and known.isascii():
            return known
    new = f"run-{secrets.token_hex(4)}"
    # If it cannot be written, a resumed run is another one for the trackers: not worth a failure.
    with suppress(OSError), replacing(folder / RUN_ID) as stream:
        stream.write(f"{new}\n".encode())
    return new
