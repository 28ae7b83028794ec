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
"""The x-axis of our charts. W&B's own, ``_step``, counts the program's rows."""


class WandbTracker:
    """Logs to the run that the program opens, to a given run, or to a separate one.

    A row in a run that the program made is left uncommitted: it goes out with the next row that the program commits, so the
    program's rows stay as many as they were, under the same ``_step``.

    What is not written when the program finishes its run has no place any more: so it asks for it just before.
    """

    name = "W&B"

    def __init__(
        self,
        run: Any = None,  # Any: wandb's Run
        settings: Mapping[str, Any] | None = None,
        *,
        before_finish: Callable[[], object] = lambda: None,
    ) -> None:
        self._before_finish = before_finish
        self._hooks: list[Any] = []  # of the run that is attended
        self._hook: Any = None
        self._given = run
        self._settings = settings
        self._own: Any = None
        self._defined: tuple[Any, set[str]] = (None, set())

    def wanted(self) -> bool:
        """Returns whether there may be a run to log to."""
        self._attend(self._open_run())
        return self._given is not None or self._settings is not None or "wandb" in sys.modules

    def place(self) -> Any:
        """Returns the run to log to: open now, or, of our own, opened with the first row."""
        if self._settings is not None:
            return "own"
        return self._open_run()

    def write(self, row: FlatRow, place: Any) -> None:
        """Logs one row."""
        if self._settings is not None and self._own is None:
            # "create_new" leaves the run that the program may have, and wandb.log, alone.
            with signals_unblocked():
                self._own = import_module("wandb").init(**{"reinit": "create_new", **self._settings})
        run = self._own or place
        if place is not self._given and row.unix_ns < getattr(place, "start_time", 0) * NS_PER_S:
            return  # of an earlier run of the program, or of none
        self._define(run, row.values)
        values = {AXIS: row.step, "otel_train/epoch": row.epoch, **row.values}
        run.log(values, commit=self._own is not None)

    def close(self) -> None:
        """Finishes the run if it is ours, and leaves the program's alone."""
        if self._hook in self._hooks:
            self._hooks.remove(self._hook)
        if self._own is not None:
            self._own.finish()

    def _open_run(self) -> Any:
        return self._given or getattr(sys.modules.get("wandb"), "run", None)

    def _attend(self, run: Any) -> None:
        """Registers a callback that W&B calls before ``run`` is finished. W&B versions without such a list do not call it."""
        hooks = getattr(run, "_teardown_hooks", None)
        module = sys.modules.get("wandb.sdk.wandb_run")
        make, stage = getattr(module, "TeardownHook", None), getattr(module, "TeardownStage", None)
        if self._settings is None and hooks is not None and hooks is not self._hooks and make and stage:
            self._hooks, self._hook = hooks, make(self._before_finish, stage.EARLY)
            hooks.append(self._hook)

    def _define(self, run: Any, keys: Mapping[str, float]) -> None:
        """Defines new names on the axis ``otel_train/step``, once per run."""
        if self._defined[0] is not run:
            run.define_metric(AXIS, hidden=True)
            self._defined = (run, set())
        known = self._defined[1]
        for pattern in dict.fromkeys(_pattern(key) for key in keys):
            if pattern not in known:
                known.add(pattern)
                run.define_metric(pattern, step_metric=AXIS)


def _pattern(key: str) -> str:
    """Returns a pattern for a family of names: one definition costs more than one value."""
    family, slash, _ = key.partition("/")
    return f"{family}/*" if slash else key


KIND = TrackerKind(
    setting="wandb",
    imports=("wandb",),
    attribute="log",
    named_by="project",
    expected="a run of wandb",
    make=lambda o: WandbTracker(o.run, o.settings, before_finish=o.before_finish),
)
