"""Where the traces of the profiler are, and what their names tell. Torch-free: gptctl finds them.

<profiler_log>/<job>/attempt-<k>/rank_<r>.steps_<first>-<last>.json            a chrome trace
<profiler_log>/<job>/attempt-<k>/rank_<r>.steps_<first>-<last>.memory.pickle   GPU memory
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

TRACE, MEMORY = ".json", ".memory.pickle"
# Names may come from other machines: at most 7 digits for a rank, as in the names of logs.
_NAME = re.compile(
    r"rank_(0|[1-9]\d{0,6})\.steps_(0|[1-9]\d{0,11})-(0|[1-9]\d{0,11})(\.json(?:\.gz)?|\.memory\.pickle)",
    re.ASCII,
)
_JOB = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*", re.ASCII)


class TraceName(NamedTuple):
    """What the name of a file of the profiler tells."""

    rank: int
    first: int  # steps, counted from 1
    last: int
    kind: str = TRACE

    def __str__(self) -> str:
        return f"rank_{self.rank}.steps_{self.first}-{self.last}{self.kind}"


def parse_trace_name(name: str) -> TraceName | None:
    """Read the name of a file; None if the profiler does not write such names."""
    found = _NAME.fullmatch(name)
    if not found:
        return None
    rank, first, last = (int(number) for number in found.groups()[:3])
    return TraceName(rank, first, last, found[4])


def profiler_folder(output_dir: str, profiler_log: str) -> str:
    """The folder of all traces: a relative one is below the output folder."""
    return os.path.normpath(os.path.join(output_dir, os.path.expanduser(profiler_log)))


def attempt_folder(folder: Path, environ: Mapping[str, str]) -> Path:
    """The folder of this attempt: jobs may share an output folder, and a job has attempts."""
    job, attempt = environ.get("GPTCTL_JOB", ""), environ.get("GPTCTL_ATTEMPT", "")
    if not _JOB.fullmatch(job) or not attempt.isdecimal():
        # Without gptctl, torchrun counts its restarts.
        attempt = environ.get("TORCHELASTIC_RESTART_COUNT", "")
        return folder / f"attempt-{attempt if attempt.isdecimal() else 0}"
    return folder / job / f"attempt-{attempt}"
