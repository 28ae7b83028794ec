"""Rows into an MLflow run, written with the client."""

from __future__ import annotations

import sys
import time
from importlib import import_module
from typing import TYPE_CHECKING, Any

from otel_train.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from otel_train.aggregate.flat import FlatRow

MS_PER_S = 1e3
_KNOWN = ("tracking_uri", "experiment_name", "run_name")


class MlflowOutlet:
    """Logs to the run that is active on the training thread, to one that was given, or to one of our own.

    MLflow's active run belongs to a thread; this is called on another. So the run is found by the training
    thread's identity, and written to by its id.

    Args:
        thread: ident of the training thread.
        run: where to log; None for the one that the program opens.
        settings: how to open one; None to open none.

    Raises:
        ConfigError: ``settings`` has something else in it.
    """

    name = "MLflow"

    def __init__(self, thread: int, run: Any = None, settings: Mapping[str, Any] | None = None) -> None:
        unknown = sorted(set(settings or ()) - set(_KNOWN))
        if unknown:
            raise ConfigError(
                f"mlflow={dict(settings or {})!r}: expected a dict of {', '.join(_KNOWN)}. Leave out {', '.join(unknown)}"
            )
        self._thread = thread
        self._given = run.info.run_id if run is not None else ""
        self._settings = settings
        self._own = ""
        self._client: Any = None

    def wanted(self) -> bool:
        """Whether there may be somebody to log to."""
        return bool(self._given) or self._settings is not None or "mlflow" in sys.modules

    def write(self, row: FlatRow) -> None:
        """Log one row."""
        mlflow: Any = import_module("mlflow")
        if self._settings is not None and not self._own:
            self._open(mlflow, self._settings)
        run_id = self._own or self._given or self._active(mlflow)
        if not run_id:
            return
        if self._client is None:
            self._client = mlflow.MlflowClient()
        metric: Any = import_module("mlflow.entities").Metric
        now_ms = int(time.time() * MS_PER_S)
        metrics = [metric(key, value, now_ms, row.step) for key, value in row.values.items()]
        self._client.log_batch(run_id, metrics=metrics)

    def close(self) -> None:
        """End the run if it is ours."""
        if self._own:
            self._client.set_terminated(self._own)

    def _open(self, mlflow: Any, settings: Mapping[str, Any]) -> None:
        self._client = mlflow.MlflowClient(tracking_uri=settings.get("tracking_uri"))
        name = settings.get("experiment_name", "Default")
        experiment = self._client.get_experiment_by_name(name)
        identity = experiment.experiment_id if experiment else self._client.create_experiment(name)
        self._own = self._client.create_run(identity, run_name=settings.get("run_name")).info.run_id

    def _active(self, mlflow: Any) -> str:
        """Id of the innermost run that is active on the training thread; "" for none."""
        # There is no public way to ask about another thread.
        stacks = mlflow.tracking.fluent._active_run_stack.get_all_thread_values()  # noqa: SLF001 - see above
        stack = stacks.get(self._thread)
        return str(stack[-1].info.run_id) if stack else ""
