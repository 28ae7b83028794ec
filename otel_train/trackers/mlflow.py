"""Logs rows to an MLflow run through the client."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from importlib import import_module
from typing import TYPE_CHECKING, Any, NamedTuple

from otel_train.trackers import TrackerKind

if TYPE_CHECKING:
    from otel_train.trackers.metrics import FlatRow

NS_PER_MS = 10**6
KEYS = ("tracking_uri", "experiment_name", "run_name")
"""What its dict may have in it."""


class MlflowRun(NamedTuple):
    """Runs of MLflow that a row may belong to; none where the run is our own.

    Attributes:
        active: when each active run began, in Unix milliseconds, and its id; the innermost first.
        ended: id of the one that ended last; "" for none.
    """

    active: tuple[tuple[int, str], ...] = ()
    ended: str = ""


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
        self._uris: dict[str, str | None] = {}  # by run
        self._lasted_ms: dict[str, tuple[int, int]] = {}  # runs that have ended: Unix time of start and end
        self._clients: dict[str | None, Any] = {}  # by store
        self._before = self._of_training("_last_active_run_id")  # ended before any row

    def wanted(self) -> bool:
        """Returns whether there may be a run to log to."""
        return bool(self._given) or self._settings is not None or "mlflow" in sys.modules

    def place(self) -> MlflowRun | None:
        """Returns the runs that are active on the training thread, and the one that ended there last."""
        if self._settings is not None:
            return MlflowRun()
        if self._given:
            place = MlflowRun(((0, self._given),))
        else:
            infos = [run.info for run in reversed(self._of_training("_active_run_stack") or ())]
            last = self._of_training("_last_active_run_id")
            active = tuple((info.start_time, info.run_id) for info in infos)
            place = MlflowRun(active, last if last and last != self._before else "")
        runs = [run_id for run_id in (*(run_id for _, run_id in place.active), place.ended) if run_id]
        for run_id in runs:
            if run_id not in self._uris:
                self._uris[run_id] = import_module("mlflow").get_tracking_uri()
        return place if runs else None

    def write(self, row: FlatRow, place: MlflowRun) -> None:
        """Logs one row."""
        at_ms = row.unix_ns // NS_PER_MS
        if self._settings is not None and not self._own:
            uri = self._settings.get("tracking_uri")
            self._own = _opened(self._client(uri), self._settings)
            self._uris[self._own] = uri
        run_id = self._own or self._run_at(place, at_ms)
        if not run_id:
            return
        metric: Any = import_module("mlflow.entities").Metric
        metrics = [metric(key, value, at_ms, row.step) for key, value in row.values.items()]
        self._client(self._uris[run_id]).log_batch(run_id, metrics=metrics)

    def _run_at(self, place: MlflowRun, at_ms: int) -> str:
        """Returns the run that was active then; "" if none was."""
        if place.ended:
            if place.ended not in self._lasted_ms:
                info = self._client(self._uris[place.ended]).get_run(place.ended).info
                self._lasted_ms[place.ended] = (info.start_time, info.end_time or at_ms)
            began_ms, ended_ms = self._lasted_ms[place.ended]
            if began_ms <= at_ms <= ended_ms:
                return place.ended
        return next((run_id for began_ms, run_id in place.active if began_ms <= at_ms), "")

    def _client(self, uri: str | None) -> Any:
        if uri not in self._clients:
            mlflow: Any = import_module("mlflow")
            self._clients[uri] = mlflow.MlflowClient(tracking_uri=uri)
        return self._clients[uri]

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


KIND = TrackerKind(
    setting="mlflow",
    imports=("mlflow", "mlflow.entities"),
    attribute="info",
    named_by="experiment_name",
    keys=KEYS,
    expected="a run of mlflow",
    make=lambda o: MlflowTracker(o.thread, o.run, o.settings),
)
