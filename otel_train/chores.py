"""What the pump must know before it reads edges."""

from __future__ import annotations

from typing import TYPE_CHECKING

from otel_train.export.pump import Chore
from otel_train.guard import Guard

if TYPE_CHECKING:
    from otel_train.aggregate.run import RunAccount
    from otel_train.aggregate.signals import Signals
    from otel_train.export.loaders import LoaderWatch
    from otel_train.export.pump import Breath
    from otel_train.recording import Recording


def before_reading(
    recording: Recording, run: RunAccount, *, watch: LoaderWatch, signals: Signals, breath: Breath
) -> list[Chore]:
    """What edges are not told apart without, and what must be up to date whenever they are."""

    def read_scaler() -> None:
        scaled = recording.scaled
        run.totals.tell(scaled.take())
        if scaled.scale is not None:
            signals.take("amp_scale", scaled.scale)

    return [
        Chore(lambda: run.device.tell(recording.devices.take(breath)), Guard("device time"), 0.0),
        Chore(read_scaler, Guard("gradient scaler"), 0.0),
        Chore(lambda: run.compiled(recording.compiles()), Guard("compiler"), 0.0),
        Chore(watch.read_builds, Guard("build times"), 0.0),
    ]
