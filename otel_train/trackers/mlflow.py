"""Logs rows to an MLflow run through the client."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import TYPE_CHECKING, Any, NamedTuple

from otel_train.trackers import TrackerKind

if TYPE_CHECKING:
    from otel_train.trackers.metrics import FlatRow

NS_PER_MS = 10**6
KEYS = ("tracking_uri", "experiment_name", "run_name")
"""Allowed keys of the dict that the setting ``mlflow`` takes."""


_STATUS = {"finished": "FINISHED", "failed": "FAILED"}
"""MLflow's status of a run, by end state."""


class MlflowRun(NamedTuple):
    """The program's MLflow runs to which a row may belong; empty if otel_train has opened a run of its own.

    Attributes:
        active: begin in Unix milliseconds and id of each active run, the innermost first.
        ended: id of the run that ended last; "" for none.
    """

    active: tuple[tuple[int, str], ...] = ()
    ended: str = ""


class MlflowTracker:
    """Logs to the active run of the training thread, to a given run, or to a separate one.

    MLflow keeps the active run per thread, and this runs on another thread: the run is looked up by the identifier of the
    training thread, and written to by its id. A row is written after the steps that it is about, so the run may have ended by
    then: a row belongs to the run that was active at its last step. The tracking URI is the one at the time when the run was
    first seen, because the program may set another one later.
    """

    name = "MLflow"

    def __init__(
        self,
        thread: int,
        run: Any = None,
        settings: Mapping[str, Any] | None = None,
        *,
        end_state: Callable[[], str] = lambda: "finished",
    ) -> None:
        self._thread = thread
        self._end_state = end_state
        self._given = run.info.run_id if run is not None else ""
        self._settings = settings
        self._own = ""  # id of the run that the tracker itself opened
        self._uris: dict[str, str | None] = {}  # tracking URI by run
        self._ended_runs: dict[str, tuple[int, int]] = {}  # Unix milliseconds of start and end, by run
        self._clients: dict[str | None, Any] = {}  # by tracking URI
        self._before = self._thread_value("_last_active_run_id")  # ended before any row

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
            infos = [run.info for run in reversed(self._thread_value("_active_run_stack") or ())]
            last = self._thread_value("_last_active_run_id")
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
        """Returns the id of the run that was active at this time; "" if none was."""
        if place.ended:
            if place.ended not in self._ended_runs:
                info = self._client(self._uris[place.ended]).get_run(place.ended).info
                self._ended_runs[place.ended] = (info.start_time, info.end_time or at_ms)
            began_ms, ended_ms = self._ended_runs[place.ended]
            if began_ms <= at_ms <= ended_ms:
                return place.ended
        return next((run_id for began_ms, run_id in place.active if began_ms <= at_ms), "")

    def _client(self, uri: str | None) -> Any:
        if uri not in self._clients:
            mlflow: Any = import_module("mlflow")
            self._clients[uri] = mlflow.MlflowClient(tracking_uri=uri)
        return self._clients[uri]

    def close(self) -> None:
        """Ends the run that the tracker itself opened."""
        if self._own:
            [client] = self._clients.values()
            client.set_terminated(self._own, status=_STATUS.get(self._end_state(), "KILLED"))

    def _thread_value(self, name: str) -> Any:
        """Returns MLflow's thread-local ``name`` of the training thread. MLflow has no public function for another thread."""
        fluent = sys.modules.get("mlflow.tracking.fluent")
        values: dict[int, Any] = getattr(getattr(fluent, name, None), "get_all_thread_values", dict)()
        return values.get(self._thread)


def _opened(client: Any, settings: Mapping[str, Any]) -> str:
    """Creates a run; returns its id."""
    name = settings.get("experiment_name", "Default")
    experiment = client.get_experiment_by_name(name)
    experiment_id = experiment.experiment_id if experiment else client.create_experiment(name)
    return str(client.create_run(experiment_id, run_name=settings.get("run_name")).info.run_id)


KIND = TrackerKind(
    setting="mlflow",
    imports=("mlflow", "mlflow.entities"),
    attribute="info.run_id",
    named_by="experiment_name",
    keys=KEYS,
    expected="a run of mlflow",
    make=lambda o: MlflowTracker(o.thread, o.run, o.settings, end_state=o.end_state),
)
