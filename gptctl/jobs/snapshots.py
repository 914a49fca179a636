"""Read what minGPT's snapshot says about itself: which job wrote it, and how far it had trained.

Without torch, and without executing anything: the file is a zip archive, whose pickle is only
searched for two texts and a number.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from itertools import pairwise
from typing import Any

from gptctl.engine.file_reading import load_value, open_at_once
from gptctl.planning.build import Site
from gptctl.spec.check import Checked
from trainer.named_tuple import NamedTuple

SNAPSHOT_PATH = "Engine.save_load.snapshot_path"
MAX_PICKLE = 64 << 20  # bytes; it has names and shapes, the tensors are other entries


class Snapshot(NamedTuple):
    """What a snapshot says about itself."""

    file: str
    epoch: int  # that is finished
    step: int
    job: str = ""  # that wrote it; empty: no job of gptctl, or one of an older version

    def __str__(self) -> str:
        return f"epoch {self.epoch:,} (step {self.step:,})"


def read_snapshot(file: str) -> Snapshot | None:
    """Return what a snapshot says; None if there is none, or another program wrote it."""
    if not os.path.isfile(file):
        return None
    # Imported here: few jobs have a snapshot, and every submit would pay for it.
    import zipfile

    try:
        with (
            open(file, "rb", opener=open_at_once) as stream,
            zipfile.ZipFile(stream) as archive,
        ):
            name = next(each for each in archive.namelist() if each.endswith("/data.pkl"))
            if archive.getinfo(name).file_size > MAX_PICKLE:
                return None
            found = _values(archive.read(name))
        facts = load_value(found["facts"])
        return Snapshot(file, int(found["finished_epoch"]), int(facts["step"]), _job(facts))
    except Exception:  # damaged and foreign files make zipfile and pickletools raise anything
        return None


def _values(pickled: bytes) -> dict[str, Any]:
    """Find the values that follow the keys of interest. Nothing is unpickled."""
    import pickletools  # nosec B403  # it disassembles, and loads nothing

    ops = [
        (op.name, value)
        for op, value, _ in pickletools.genops(pickled)
        if "PUT" not in op.name and op.name != "MEMOIZE"
    ]
    return {
        key: value for (_, key), (_, value) in pairwise(ops) if key in ("facts", "finished_epoch")
    }


def _job(facts: Mapping[str, Any]) -> str:
    job = facts.get("job")
    return job if isinstance(job, str) else ""


def snapshot_file(checked: Checked, site: Site) -> str:
    """The snapshot that a job starts from, if this machine can see it; empty: none."""
    if checked.launch.entrypoint != "trainer" or checked.resolved is None:
        return ""
    path = checked.resolved.run.Engine.save_load.snapshot_path
    return site.absolute(path) if path and checked.cluster.sees_files else ""
