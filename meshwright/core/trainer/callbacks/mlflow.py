"""Logs a run to MLflow. Imports mlflow when a run starts."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from meshwright.base.io import read_json, write_json
from meshwright.base.records.events import Event
from meshwright.core.trainer.callbacks.callback import RunContext
from meshwright.core.trainer.callbacks.tracker import Tracker
from meshwright.errors import MeshwrightError

STATE = "mlflow.json"
MAX_VALUE = 500
"""Characters of a parameter's value that MLflow stores."""


class MLflow(Tracker):
    """One MLflow run at a tracking URI for all attempts; its id is in `mlflow.json` of the run folder."""

    def __init__(self, uri: str, project: str = "meshwright", every: int = 10) -> None:
        super().__init__(every)
        self.uri, self.project = uri, project

    def open(self, run: RunContext, settings: Mapping[str, Any]) -> None:
        from mlflow import MlflowClient
        from mlflow.entities import Metric

        self.metric = Metric
        self.client = MlflowClient(tracking_uri=self.uri)
        state = run.path / STATE
        self.id = ""
        with suppress(MeshwrightError, OSError, KeyError, TypeError):
            self.id = str(read_json(state)["run_id"])
        if not self.id:
            experiment = self.client.get_experiment_by_name(self.project)
            number = experiment.experiment_id if experiment else self.client.create_experiment(self.project)
            self.id = self.client.create_run(
                number, run_name=run.path.name, tags={"meshwright.run": run.run_id}
            ).info.run_id
            write_json(state, {"run_id": self.id})
            for key, value in settings.items():
                self.client.log_param(self.id, key, str(value)[:MAX_VALUE])
        self.client.update_run(self.id, status="RUNNING")

    def on_incident(self, _record: Event, run: RunContext) -> None:
        """Ends the MLflow run as failed; the next attempt, if there is one, continues it."""
        from mlflow import MlflowClient

        with suppress(MeshwrightError, OSError, KeyError, TypeError):
            MlflowClient(tracking_uri=self.uri).set_terminated(str(read_json(run.path / STATE)["run_id"]), "FAILED")

    def log(self, scalars: Mapping[str, float], step: int) -> None:
        import time

        now = int(time.time() * 1000)
        self.client.log_batch(self.id, metrics=[self.metric(name, value, now, step) for name, value in scalars.items()])

    def close(self, _run: RunContext) -> None:
        self.client.set_terminated(self.id)
