"""Prepare the same job again, from the folder of its first run alone."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from gptctl.backends import Backends
from gptctl.engine.run_folder import read_json
from gptctl.jobs.store import JobRecord, Store
from gptctl.jobs.submit import Prepared, prepare
from gptctl.planning.build import Site
from gptctl.spec.check import Checked, check_config
from gptctl.spec.cluster_kinds import KINDS
from trainer.config import Override
from trainer.errors import OUT_OF_REACH, UserError


def prepare_rerun(
    record: JobRecord, store: Store, backends: Backends, overrides: Sequence[Override]
) -> Prepared:
    """Prepare the job of a record again, with its own code, config, profile and templates."""
    folder = record.run_folder
    # The user's own files may have changed: everything is read from the job's folder.
    before = _frozen_plan(folder)
    traits = KINDS.get(record.kind)
    site = Site(before["work_dir"], before["python"], str(folder / "code" / "trainer"))
    # Interpreters of other machines, or found by PATH, cannot be checked from here.
    is_here = traits is not None and traits.is_one_machine and os.path.isabs(before["python"])
    if is_here and not os.access(before["python"], os.X_OK):
        raise UserError(
            f"the interpreter of {record.id} is missing: {before['python']}",
            "submit its config again",
        )
    # A new folder: the rerun must not overwrite the checkpoints of the first run.
    kept = [Override("Engine.save_load.output_dir", "", "a folder of its own")]
    # The profile as it was: the one of that name may have changed since.
    kept += [
        Override(
            "Launch.cluster", str(folder / "cluster.json"), "the job's own profile", verbatim=True
        )
    ]
    # A script and its files were copied into one folder; the rerun copies them from there.
    if not record.output_dir:
        script = os.path.basename(before["program"][1])
        files = sorted(
            entry for entry in os.listdir(folder / "code") if entry not in (script, "rank_log.py")
        )
        kept.append(
            Override(
                "Launch.entrypoint",
                str(folder / "code" / script),
                "the job's own code",
                verbatim=True,
            )
        )
        kept.append(
            Override(
                "Launch.files",
                tuple(str(folder / "code" / file) for file in files),
                "the job's own code",
            )
        )
        site = site._replace(trainer=str(folder / "code"))
    checked = _with_first_origins(check_config(folder / "config.json", [*kept, *overrides]), folder)
    # Without overrides it is the same job, so it gets the same id with the next number.
    base = "" if overrides else re.sub(r"(-[0-9a-f]{6})-\d+$", r"\1", record.id)
    prepared = prepare(checked, store, backends, site, overrides, [folder / "templates"], base)
    # The code is that of the first run, so the state of git is too.
    return prepared._replace(git=read_json(folder / "git.json") or {})


def _frozen_plan(folder: Path) -> dict[str, Any]:
    """Read the job's plan; raise UserError if it or another part of the folder is missing."""
    before = read_json(folder / "plan.json")
    if before is not None and (folder / "code" / "rank_log.py").is_file():
        return before
    missing = folder / ("code" if before else "plan.json") if folder.is_dir() else folder
    raise UserError(f"{missing} is missing or damaged", "submit its config again", OUT_OF_REACH)


def _with_first_origins(checked: Checked, folder: Path) -> Checked:
    """Give each value of the frozen config the origin that it had in the first run."""
    config = str(folder / "config.json")
    first = (read_json(folder / "config.json") or {}).get("origins", {})

    def before(origins: Mapping[str, str]) -> dict[str, str]:
        return {
            key: first.get(key, origin) if origin.startswith(config) else origin
            for key, origin in origins.items()
        }

    resolved = checked.resolved and checked.resolved._replace(
        origins=before(checked.resolved.origins)
    )
    return checked._replace(resolved=resolved, launch_origins=before(checked.launch_origins))
