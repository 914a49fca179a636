"""SwanLab. Offline unless its own settings say where to: a mode, or a key."""

from __future__ import annotations

import os
from collections.abc import Mapping

from trainer.trackers.tracked_run import PROJECT, TrackedRun


class SwanLab:
    def __init__(self, run: TrackedRun) -> None:
        import swanlab

        # From its variables, its files and its login.
        own = swanlab.Settings()
        is_chosen = "mode" in own.model_fields_set or own.api_key
        mode = own.mode if is_chosen else "offline"
        folder = str(run.folder / "swanlog")
        self._run = swanlab.init(
            id=run.id,
            name=own.experiment.name or run.id,
            project=own.project.name or PROJECT,
            log_dir=None if os.environ.get("SWANLAB_LOG_DIR") else folder,
            config=dict(run.config),
            resume="allow",
            mode=mode,
            # The output is in the job's log, and the code in its run folder.
            settings=swanlab.Settings(terminal={"proxy_type": "none"}, probe={"git": False}),
        )
        place = f"{mode} in {self._run.dir}"
        if mode == "offline":
            place += f", upload it with `swanlab sync --id {run.id}`"
        self.where = f"run {run.id}, {self._run.url if mode == 'online' else place}"

    def log(self, step: int, values: Mapping[str, float], at: float) -> None:
        self._run.log(dict(values), step=step)

    def finish(self, code: int) -> None:
        self._run.finish("crashed" if code else "success")
