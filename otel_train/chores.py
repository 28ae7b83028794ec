"""What the pump must know before it reads edges."""

from __future__ import annotations

from typing import TYPE_CHECKING

from otel_train.exporters.pump import PeriodicTask
from otel_train.guard import Guard

if TYPE_CHECKING:
    from otel_train.aggregation.metrics import Signals
    from otel_train.aggregation.run_state import RunState
    from otel_train.collectors.dataloader import LoaderWatch
    from otel_train.exporters.pump import Breath
    from otel_train.instrumentation.manager import InstrumentationManager


def before_reading(
    recording: InstrumentationManager, run: RunState, *, watch: LoaderWatch, signals: Signals, breath: Breath
) -> list[PeriodicTask]:
    """What edges are not told apart without, and what must be up to date whenever they are."""

    def read_scaler() -> None:
        scaled = recording.scaled
        run.totals.tell(scaled.take())
        if scaled.scale is not None:
            signals.take("amp_scale", scaled.scale)

    return [
        PeriodicTask(lambda: run.device.tell(recording.devices.take(breath)), Guard("device time"), 0.0),
        PeriodicTask(read_scaler, Guard("gradient scaler"), 0.0),
        PeriodicTask(lambda: run.compiled(recording.compiles()), Guard("compiler"), 0.0),
        PeriodicTask(watch.read_builds, Guard("build times"), 0.0),
    ]
