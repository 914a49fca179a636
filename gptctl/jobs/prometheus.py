"""Jobs as metrics of Prometheus, in a file for node_exporter. Pure but for `write`."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from gptctl.engine.atomic_files import replacing
from gptctl.engine.job_result import FINAL, PENDING, RUNNING, UNKNOWN
from gptctl.logs.metric_rows import is_number
from gptctl.text import clean
from trainer.errors import OUT_OF_REACH, UserError

Labels = Mapping[str, str]


class Gauge(NamedTuple):
    name: str
    help: str
    samples: Sequence[tuple[Labels, float]]


def textfile(
    rows: Sequence[Mapping[str, Any]], goodput: Mapping[str, float | None], user: str, now: float
) -> str:
    """`rows` are those of `gptctl list --json`; `goodput` has the running jobs."""
    metrics = [_states(rows, user), *_running(rows, goodput, user)]
    metrics.append(Gauge("gptctl_updated_seconds", "When this was written.", [({}, now)]))
    return "".join(line for metric in metrics for line in _lines(metric, user))


def _states(rows: Sequence[Mapping[str, Any]], user: str) -> Gauge:
    """Also states without jobs: an alert needs to see the zero before the one."""
    clusters = sorted({str(row["cluster"]) for row in rows})
    counts = Counter((str(row["cluster"]), str(row["state"])) for row in rows)
    states = dict.fromkeys((PENDING, RUNNING, UNKNOWN, *FINAL))
    samples = [
        ({"cluster": cluster, "state": state}, float(counts[cluster, state]))
        for cluster in clusters
        for state in states
    ]
    return Gauge("gptctl_jobs", "Jobs by cluster and state.", samples)


def _running(
    rows: Sequence[Mapping[str, Any]], goodput: Mapping[str, float | None], user: str
) -> Iterator[Gauge]:
    running = [row for row in rows if row["state"] == RUNNING]

    def metric(name: str, text: str, values: Iterable[object]) -> Gauge:
        labels = [{"job": str(row["job"]), "cluster": str(row["cluster"])} for row in running]
        known = [(each, value) for each, value in zip(labels, values) if is_number(value)]
        return Gauge(name, f"{text} of running jobs.", [(e, float(v)) for e, v in known])

    progress = [row.get("progress") or {} for row in running]
    yield metric("gptctl_job_ranks", "Ranks", [row["world_size"] for row in running])
    yield metric("gptctl_job_step", "Last step", [each.get("step") for each in progress])
    yield metric("gptctl_job_loss", "Loss", [each.get("loss") for each in progress])
    rates = [each.get("tokens_per_second") for each in progress]
    yield metric("gptctl_job_tokens_per_second", "Tokens per second", rates)
    shares = [goodput.get(str(row["job"])) for row in running]
    yield metric("gptctl_job_goodput", "Share of new compute in the GPU time", shares)


def _lines(metric: Gauge, user: str) -> Iterator[str]:
    yield f"# HELP {metric.name} {metric.help}\n# TYPE {metric.name} gauge\n"
    for labels, value in metric.samples:
        # Several users of a machine write a file each: no two samples may be the same.
        named = {**labels, "user": user}
        text = ",".join(f'{name}="{_escaped(each)}"' for name, each in named.items())
        yield f"{metric.name}{{{text}}} {value!r}\n"


def _escaped(text: str) -> str:
    return clean(text).replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")


def write(folder: Path, text: str, user: str) -> Path:
    """Replace the file of this user; whoever reads it sees the old or the new one."""
    name = "".join(letter if letter.isalnum() else "_" for letter in user)
    file = folder / f"gptctl-{name}.prom"
    try:
        with replacing(file) as stream:
            stream.write(text.encode())
            # node_exporter runs as another user.
            os.fchmod(stream.fileno(), 0o644)
    except OSError as error:
        message = f"cannot write {error.filename or file}: {error.strerror}"
        hint = "use the folder of node_exporter's --collector.textfile.directory"
        raise UserError(message, hint, OUT_OF_REACH) from None
    return file
