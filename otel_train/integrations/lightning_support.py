"""Loggers, epochs and the run id of Lightning."""

from __future__ import annotations

import logging
import math
import os
import time
from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from typing import TYPE_CHECKING, Any

from otel_train.distributed.store import JobStore, connect
from otel_train.errors import ConfigError
from otel_train.integrations.shared_session import without_containers
from otel_train.profiler.requests import activities
from otel_train.resource import LAUNCH_RUN, find_job, given_run_id, run_id_of_start
from otel_train.safety import Guard

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from otel_train.config import Config


def _mlflow_run(logger: Any) -> Any:
    # The logger's run is active on no thread, so MLflow's active run cannot be used.
    return logger.experiment.get_run(logger.run_id)


def _experiment(logger: Any) -> Any:
    return logger.experiment


_KINDS: Mapping[str, tuple[str, Callable[[Any], Any]]] = {
    "MLFlowLogger": ("mlflow", _mlflow_run),
    "TensorBoardLogger": ("tensorboard", _experiment),
    "WandbLogger": ("wandb", _experiment),
}
"""Setting and function to get the tracker's object, by the class name of the logger, which is equal in both packages."""


def trackers_of(trainer: Any, config: Config) -> dict[str, Any]:
    """Returns runs and writers of a Trainer's loggers by setting, for settings that are ``auto``."""
    found = {}
    for logger in trainer.loggers if trainer.is_global_zero else ():
        for kind in type(logger).__mro__:
            setting, run_of = _KINDS.get(kind.__name__, ("", _experiment))
            if setting and getattr(config, setting) == "auto" and setting not in found:
                found[setting] = run_of(logger)
    return found


_log = logging.getLogger("otel_train")

PATIENCE_S = 30.0
"""Longest wait of a rank for rank 0, which may still be importing."""

_POLL_S = 0.05


def common_run_id(
    number: int,
    *,
    environ: Mapping[str, str] | None = None,
    ranks: Callable[[], tuple[int, int] | None] = find_job,
    store: Callable[[], JobStore | None] = connect,
    patience_s: float = PATIENCE_S,
) -> str:
    """Returns a run id shared by all ranks of this job; "" if they have one already, or have no common store.

    It is not a collective operation: only rank 0 can delay the others, by ``patience_s`` at most.
    """
    environ = os.environ if environ is None else environ
    place = ranks()
    if place is None or given_run_id(environ) or environ.get(LAUNCH_RUN):
        return ""
    with Guard("the run id of all ranks"):
        common = store()
        return "" if common is None else _shared_id(common, f"otel_train/run/{number}", place[0], patience_s)
    return ""


def _shared_id(store: JobStore, key: str, rank: int, patience_s: float) -> str:
    if rank == 0:
        run_id = run_id_of_start(time.time_ns(), os.urandom(3))
        store.put(key, run_id)
        return run_id
    deadline_s = time.monotonic() + patience_s
    while time.monotonic() < deadline_s:
        found = store.read([key])
        if found:
            return found[key]
        time.sleep(_POLL_S)
    _log.warning("rank 0 named no run within %g s: this rank's metrics belong to a different run", patience_s)
    return ""


SKIP_FIRST_STEPS, WAIT_STEPS = 10, 5
"""Of a profiled epoch: ``skip_first`` and ``wait`` of ``torch.profiler.schedule`` in the callback that this one replaces."""


def fitted_schedule(steps: int | None, warmup: int, active: int) -> tuple[int, int, int]:
    """Returns numbers of steps to skip, to warm up and to record in an epoch of ``steps``, which is None if unknown."""
    wait = SKIP_FIRST_STEPS + WAIT_STEPS
    if steps is None:
        return wait, warmup, active
    warmup = min(warmup, steps // 2)
    wait = max(0, min(wait, steps - warmup - active))
    return wait, warmup, max(1, min(active, steps - wait - warmup))


def steps_per_epoch(batches: float, accumulated: int) -> int | None:
    """Returns the number of steps of an epoch with gradient accumulation; None if the epoch has no end."""
    return math.ceil(batches / max(accumulated, 1)) if math.isfinite(batches) else None


def chosen(given: Any) -> frozenset[int]:  # Any: the user's own
    """Returns epochs from a number or a sequence of numbers; the first epoch for None or an empty sequence."""
    several = given if isinstance(given, Sequence) and not isinstance(given, str) else [given]
    if given is None or not several:
        return frozenset({1})
    for epoch in several:
        if isinstance(epoch, bool) or not hasattr(epoch, "__index__") or epoch.__index__() < 1:
            remedy = "They count from 1: for the first write [1]"
            raise ConfigError(
                f"profile_epochs={without_containers(given)!r}: {epoch!r} is not an epoch. {remedy}"
            )
    return frozenset(epoch.__index__() for epoch in several)


def activities_of(given: Any) -> tuple[str, ...]:  # Any: text, or some texts or ProfilerActivity
    """Returns the names of activities."""
    words = given.split(",") if isinstance(given, str) else given
    several = list(words) if isinstance(words, (Sequence, AbstractSet)) else [words]
    return activities([str(word).rpartition(".")[2] for word in several])
