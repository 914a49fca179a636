"""MLflow. In files of the output folder unless MLFLOW_TRACKING_URI says where to.

MLflow chooses the ids of runs itself: a tag finds the run of earlier attempts and jobs.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from itertools import islice
from urllib.parse import urlsplit

from trainer.trackers.tracked_run import PROJECT, TrackedRun

TAG = "gptctl.run"
MOST_PARAMETERS = 100  # that a server accepts in one request
LONGEST_VALUE = 500  # that all versions accept


class MLflow:
    def __init__(self, run: TrackedRun) -> None:
        # It would report its use to another service, wherever the runs are.
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
        uri = os.environ.get("MLFLOW_TRACKING_URI") or (run.folder / "mlruns").absolute().as_uri()
        if urlsplit(uri).scheme in ("", "file"):  # newer versions ask whether that is meant
            os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
        from mlflow.entities import Param
        from mlflow.tracking import MlflowClient

        self._client = MlflowClient(uri)
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME") or PROJECT
        found = self._client.get_experiment_by_name(name)
        experiment = found.experiment_id if found else self._client.create_experiment(name)
        earlier = self._client.search_runs([experiment], f"tags.`{TAG}` = '{run.id}'")
        if earlier:
            self._id = earlier[0].info.run_id
            self._client.update_run(self._id, status="RUNNING")
        else:
            created = self._client.create_run(experiment, tags={TAG: run.id}, run_name=run.id)
            self._id = created.info.run_id
            # Only once: MLflow refuses to change a parameter.
            values = ((key, str(value)[:LONGEST_VALUE]) for key, value in run.flat_config())
            while some := [Param(*pair) for pair in islice(values, MOST_PARAMETERS)]:
                self._client.log_batch(self._id, params=some)
        place = urlsplit(uri)._replace(netloc=urlsplit(uri).netloc.rpartition("@")[2]).geturl()
        self.where = f"run {run.id}, in experiment {name} of {place}"

    def log(self, step: int, values: Mapping[str, float], at: float) -> None:
        from mlflow.entities import Metric

        stamp = int(1000 * at)
        metrics = [Metric(name, value, stamp, step) for name, value in values.items()]
        self._client.log_batch(self._id, metrics=metrics)

    def finish(self, code: int) -> None:
        self._client.set_terminated(self._id, "FAILED" if code else "FINISHED")
