"""Logs rows to an MLflow run through the client."""

from __future__ import annotations

import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any, NamedTuple

from otel_train.trackers import TrackerKind

if TYPE_CHECKING:
    from collections.abc import Mapping

    from otel_train.trackers.metrics import FlatRow

NS_PER_MS = 10**6
KEYS = ("tracking_uri", "experiment_name", "run_name")
"""What its dict may have in it."""


class MlflowRun(NamedTuple):
    """A run of MLflow: its id, "" for the one of our own, and whether it is not active any more."""

    run_id: str
    over: bool


class MlflowTracker:
    """Logs to the active run of the training thread, to a given run, or to a separate one.

    MLflow's active run belongs to a thread; this is called on another. So the run is found by the training
    thread's identity, and written to by its id. A row is written after the steps it tells of, so the run may have
    ended by then: it is the row's all the same, if it was active at the row's last step.
    """

    name = "MLflow"

    def __init__(self, thread: int, run: Any = None, settings: Mapping[str, Any] | None = None) -> None:
        self._thread = thread
        self._given = run.info.run_id if run is not None else ""
        self._settings = settings
        self._own = ""
        self._client: Any = None

    def wanted(self) -> bool:
        """Returns whether there may be a run to log to."""
        return bool(self._given) or self._settings is not None or "mlflow" in sys.modules

    def place(self) -> MlflowRun | None:
        """Returns the innermost run that is active on the training thread, else the one that was active last."""
        if self._settings is not None or self._given:
            return MlflowRun(self._given, over=False)
        fluent = sys.modules.get("mlflow.tracking.fluent")
        stack = self._of_training(fluent, "_active_run_stack")
        if stack:
            return MlflowRun(str(stack[-1].info.run_id), over=False)
        last = self._of_training(fluent, "_last_active_run_id")
        return MlflowRun(str(last), over=True) if last else None

    def write(self, row: FlatRow, place: MlflowRun) -> None:
        """Logs one row."""
        mlflow: Any = import_module("mlflow")
        if self._settings is not None and not self._own:
            self._open(mlflow, self._settings)
        if self._client is None:
            self._client = mlflow.MlflowClient()
        run_id, at_ms = self._own or place.run_id, row.unix_ns // NS_PER_MS
        if place.over and not self._lasted(run_id, at_ms):
            return
        metric: Any = import_module("mlflow.entities").Metric
        metrics = [metric(key, value, at_ms, row.step) for key, value in row.values.items()]
        self._client.log_batch(run_id, metrics=metrics)

    def close(self) -> None:
        """Ends the run if it is ours."""
        if self._own:
            self._client.set_terminated(self._own)

    def _open(self, mlflow: Any, settings: Mapping[str, Any]) -> None:
        self._client = mlflow.MlflowClient(tracking_uri=settings.get("tracking_uri"))
        name = settings.get("experiment_name", "Default")
        experiment = self._client.get_experiment_by_name(name)
        identity = experiment.experiment_id if experiment else self._client.create_experiment(name)
        self._own = self._client.create_run(identity, run_name=settings.get("run_name")).info.run_id

    def _lasted(self, run_id: str, until_ms: int) -> bool:
        """Returns whether a run that has ended was active at ``until_ms``."""
        ended_ms = self._client.get_run(run_id).info.end_time
        return ended_ms is None or bool(until_ms <= ended_ms)

    def _of_training(self, fluent: Any, name: str) -> Any:
        """Returns MLflow's value ``name`` of the training thread. There is no public function for another thread."""
        values: dict[int, Any] = getattr(getattr(fluent, name, None), "get_all_thread_values", dict)()
        return values.get(self._thread)


KIND = TrackerKind(
    setting="mlflow",
    imports=("mlflow", "mlflow.entities"),
    attribute="info",
    named_by="experiment_name",
    keys=KEYS,
    expected="a run of mlflow",
    make=lambda o: MlflowTracker(o.thread, o.run, o.settings),
)
