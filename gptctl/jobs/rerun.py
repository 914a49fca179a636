"""The same job again, from nothing but its folder."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

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
    """The same job again, from nothing but its folder."""
    folder = record.run_folder
    before = read_json(folder / "plan.json")
    if before is None:
        raise UserError(f"{folder} has no plan any more", "submit its config again", OUT_OF_REACH)
    if not (folder / "code" / "rank_log.py").is_file():
        raise UserError(
            f"{folder}/code is gone or damaged", "submit its config again", OUT_OF_REACH
        )
    traits = KINDS.get(record.kind)
    site = Site(before["work_dir"], before["python"], str(folder / "code" / "trainer"))
    is_here = traits is not None and traits.is_one_machine and os.path.isabs(before["python"])
    if is_here and not os.access(before["python"], os.X_OK):
        raise UserError(
            f"the interpreter of {record.id} is gone: {before['python']}", "submit its config again"
        )
    kept = [Override("Engine.save_load.output_dir", "", "a folder of its own")]
    kept += [
        Override(
            "Launch.cluster", str(folder / "cluster.json"), "the job's own profile", verbatim=True
        )
    ]
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
    # The same job again: another number of the same name.
    base = "" if overrides else re.sub(r"(-[0-9a-f]{6})-\d+$", r"\1", record.id)
    prepared = prepare(checked, store, backends, site, overrides, [folder / "templates"], base)
    return prepared._replace(git=read_json(folder / "git.json") or {})


def _with_first_origins(checked: Checked, folder: Path) -> Checked:
    """Values of a frozen config came from where they came from when it was frozen."""
    config, first = (
        str(folder / "config.json"),
        (read_json(folder / "config.json") or {}).get("origins", {}),
    )

    def before(origins: Mapping[str, str]) -> dict[str, str]:
        return {
            key: first.get(key, origin) if origin.startswith(config) else origin
            for key, origin in origins.items()
        }

    resolved = checked.resolved and checked.resolved._replace(
        origins=before(checked.resolved.origins)
    )
    return checked._replace(resolved=resolved, launch_origins=before(checked.launch_origins))
