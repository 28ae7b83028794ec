"""Logs rows to a W&B run without adding rows or steps to the program's own run."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import TYPE_CHECKING, Any

from otel_train.datamodel import NS_PER_S
from otel_train.safety import signals_unblocked
from otel_train.trackers import TrackerKind

if TYPE_CHECKING:
    from otel_train.trackers.metrics import FlatRow

AXIS = "otel_train/step"
"""Metric that is the x-axis of all values of otel_train. W&B's own ``_step`` counts the rows of the program."""


class WandbTracker:
    """Logs to the run that the program opens, to a given run, or to a separate one.

    Rows in a run of the program are logged with ``commit=False``: W&B sends them with the next row that the program commits, so
    that the number and the ``_step`` of the program's rows do not change. A finished run accepts no rows: before W&B finishes it,
    ``before_finish`` is called, which writes the rows that are due.
    """

    name = "W&B"

    def __init__(
        self,
        run: Any = None,  # Any: wandb's Run
        settings: Mapping[str, Any] | None = None,
        *,
        end_state: Callable[[], str] = lambda: "finished",
        before_finish: Callable[[], object] = lambda: None,
    ) -> None:
        self._end_state = end_state
        self._before_finish = before_finish
        self._hooks: list[Any] = []  # teardown hooks of the last run that was hooked into
        self._hook: Any = None  # the one added to them
        self._given = run
        self._settings = settings
        self._own: Any = None
        self._defined: tuple[Any, set[str]] = (None, set())

    def wanted(self) -> bool:
        """Returns whether there may be a run to log to."""
        self._hook_teardown(self._open_run())
        return self._given is not None or self._settings is not None or "wandb" in sys.modules

    def place(self) -> Any:
        """Returns the run that is open now; "own" for a separate run, which the first row opens."""
        if self._settings is not None:
            return "own"
        return self._open_run()

    def write(self, row: FlatRow, place: Any) -> None:
        """Logs one row."""
        if self._settings is not None and self._own is None:
            # "create_new" opens a second run; the program's run, to which wandb.log writes, stays as it is.
            with signals_unblocked():
                self._own = import_module("wandb").init(**{"reinit": "create_new", **self._settings})
        run = self._own or place
        if place is not self._given and row.unix_ns < getattr(place, "start_time", 0) * NS_PER_S:
            return  # the row is older than this run
        self._define(run, row.values)
        values = {AXIS: row.step, "otel_train/epoch": row.epoch, **row.values}
        run.log(values, commit=self._own is not None)

    def close(self) -> None:
        """Finishes the separate run; a run of the program stays open."""
        if self._hook in self._hooks:
            self._hooks.remove(self._hook)
        if self._own is not None:
            self._own.finish(exit_code=int(self._end_state() != "finished"))

    def _open_run(self) -> Any:
        return self._given or getattr(sys.modules.get("wandb"), "run", None)

    def _hook_teardown(self, run: Any) -> None:
        """Registers ``before_finish`` for W&B to call before it finishes ``run``; not in versions without ``_teardown_hooks``."""
        hooks = getattr(run, "_teardown_hooks", None)
        module = sys.modules.get("wandb.sdk.wandb_run")
        make, stage = getattr(module, "TeardownHook", None), getattr(module, "TeardownStage", None)
        if self._settings is None and hooks is not None and hooks is not self._hooks and make and stage:
            self._hooks, self._hook = hooks, make(self._before_finish, stage.EARLY)
            hooks.append(self._hook)

    def _define(self, run: Any, keys: Mapping[str, float]) -> None:
        """Sets the x-axis of new names to ``otel_train/step``, once per run."""
        if self._defined[0] is not run:
            run.define_metric(AXIS, hidden=True)
            self._defined = (run, set())
        known = self._defined[1]
        for pattern in dict.fromkeys(_pattern(key) for key in keys):
            if pattern not in known:
                known.add(pattern)
                run.define_metric(pattern, step_metric=AXIS)


def _pattern(key: str) -> str:
    """Returns a glob pattern for all names with the same first part, as each ``define_metric`` costs more than a value."""
    family, slash, _ = key.partition("/")
    return f"{family}/*" if slash else key


KIND = TrackerKind(
    setting="wandb",
    imports=("wandb",),
    attribute="define_metric",
    named_by="project",
    expected="a run of wandb",
    make=lambda o: WandbTracker(o.run, o.settings, end_state=o.end_state, before_finish=o.before_finish),
)
