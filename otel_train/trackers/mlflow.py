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
    """A run of MLflow: its id, "" for the one of our own; its store; and whether it is not active any more."""

    run_id: str
    uri: str | None
    over: bool


class MlflowTracker:
    """Logs to the active run of the training thread, to a given run, or to a separate one.

    MLflow's active run belongs to a thread; this is called on another. So the run is found by the training
    thread's identity, and written to by its id. A row is written after the steps it tells of, so the run may have
    ended by then: it is the row's all the same, if it was active at the row's last step. The store is the one that
    was in force when the run was first seen, because the program may turn to another one.
    """

    name = "MLflow"

    def __init__(self, thread: int, run: Any = None, settings: Mapping[str, Any] | None = None) -> None:
        self._thread = thread
        self._given = run.info.run_id if run is not None else ""
        self._settings = settings
        self._own = ""
        self._uris: dict[str, str] = {}  # by run
        self._clients: dict[str | None, Any] = {}  # by store
        self._before = self._of_training("_last_active_run_id")  # ended before any row

    def wanted(self) -> bool:
        """Returns whether there may be a run to log to."""
        return bool(self._given) or self._settings is not None or "mlflow" in sys.modules

    def place(self) -> MlflowRun | None:
        """Returns the innermost run that is active on the training thread, else the one that was active last."""
        if self._settings is not None:
            return MlflowRun("", self._settings.get("tracking_uri"), over=False)
        stack, last = self._of_training("_active_run_stack"), self._of_training("_last_active_run_id")
        active = self._given or (str(stack[-1].info.run_id) if stack else "")
        run_id = active or (str(last) if last and last != self._before else "")
        if not run_id:
            return None
        mlflow: Any = import_module("mlflow")
        uri = self._uris.get(run_id) or self._uris.setdefault(run_id, mlflow.get_tracking_uri())
        return MlflowRun(run_id, uri, over=not active)

    def write(self, row: FlatRow, place: MlflowRun) -> None:
        """Logs one row."""
        mlflow: Any = import_module("mlflow")
        client = self._clients.get(place.uri)
        if client is None:
            client = self._clients[place.uri] = mlflow.MlflowClient(tracking_uri=place.uri)
        if self._settings is not None and not self._own:
            self._own = _opened(client, self._settings)
        run_id, at_ms = self._own or place.run_id, row.unix_ns // NS_PER_MS
        if place.over and not _lasted(client, run_id, at_ms):
            return
        metric: Any = import_module("mlflow.entities").Metric
        metrics = [metric(key, value, at_ms, row.step) for key, value in row.values.items()]
        client.log_batch(run_id, metrics=metrics)

    def close(self) -> None:
        """Ends the run if it is ours."""
        if self._own:
            [client] = self._clients.values()
            client.set_terminated(self._own)

    def _of_training(self, name: str) -> Any:
        """Returns MLflow's value ``name`` of the training thread. There is no public function for another thread."""
        fluent = sys.modules.get("mlflow.tracking.fluent")
        values: dict[int, Any] = getattr(getattr(fluent, name, None), "get_all_thread_values", dict)()
        return values.get(self._thread)


def _opened(client: Any, settings: Mapping[str, Any]) -> str:
    """Creates a run of our own; returns its id."""
    name = settings.get("experiment_name", "Default")
    experiment = client.get_experiment_by_name(name)
    identity = experiment.experiment_id if experiment else client.create_experiment(name)
    return str(client.create_run(identity, run_name=settings.get("run_name")).info.run_id)


def _lasted(client: Any, run_id: str, until_ms: int) -> bool:
    """Returns whether a run that has ended was active at ``until_ms``."""
    ended_ms = client.get_run(run_id).info.end_time
    return ended_ms is None or bool(until_ms <= ended_ms)


KIND = TrackerKind(
    setting="mlflow",
    imports=("mlflow", "mlflow.entities"),
    attribute="info",
    named_by="experiment_name",
    keys=KEYS,
    expected="a run of mlflow",
    make=lambda o: MlflowTracker(o.thread, o.run, o.settings),
)
