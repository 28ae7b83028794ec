"""Callbacks for Lightning's Trainer, of ``lightning`` and of ``pytorch_lightning``."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Mapping
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from otel_train import api
from otel_train.config.settings import MOST_TOP
from otel_train.errors import MissingExtraError, require, shown, truth, whole, wrong_argument
from otel_train.instrumentation.naming import named_loaders, named_models
from otel_train.integrations.lightning_support import (
    activities_of,
    chosen,
    common_run_id,
    fitted_schedule,
    steps_per_epoch,
    trackers_of,
)
from otel_train.integrations.shared_session import checked, merged, resolved, shared
from otel_train.safety import Guard

if TYPE_CHECKING:
    from otel_train.instrumentation.stages import Epoch

_log = logging.getLogger("otel_train")

CAPTURE_MAX_S = 3600.0
"""Longest recording of ``ProfilerCallback``, whose length is given in steps, which may be slow."""

FINISH_S = 60.0
"""Longest wait at the end of training for captures of ``ProfilerCallback`` to be written and analysed."""

_PACKAGES = ("lightning.pytorch", "pytorch_lightning")


def _callback_class() -> type:
    """Returns a base class for the Callback of each package that the program has imported, else of one that is installed."""
    present = [name for name in _PACKAGES if name in sys.modules]
    if not present:
        present = [name for name in _PACKAGES if find_spec(name.partition(".")[0]) is not None][:1]
    if not present:
        raise MissingExtraError(
            "neither lightning nor pytorch_lightning is installed. Run: pip install 'otel-train[lightning]'",
            name="lightning",
        )
    return type("Callback", tuple(require(name, extra="lightning").Callback for name in present), {})


_Callback: Any = _callback_class()


class _TrainerCallback(_Callback):
    """Base class of the callbacks. Of several in one Trainer, the first marks the epochs."""

    def __init__(
        self, *, enabled: bool, settings: Mapping[str, Any], model: Any = None, loaders: Any = None
    ) -> None:
        super().__init__()
        self.enabled = truth("enabled={}", enabled)
        self.settings = checked(settings)
        named_models(model)
        named_loaders(loaders)
        self._given = (model, loaders)
        self._guard = Guard(f"{type(self).__name__}")
        self._epoch: Epoch | None = None
        self._number = 0

    # -- what the Trainer calls --------------------------------------------------------------------

    def setup(self, trainer: Any, *_: Any, **__: Any) -> None:
        """Opens or joins the session."""
        if not self.enabled:
            return
        enabled = _enabled_in(trainer)
        settings = merged([each.settings for each in enabled])
        needs_no_id = trainer.world_size == 1 or api.current() is not None or _started_by_launcher(trainer)
        run_id = "" if needs_no_id or resolved(settings).config.run_id else common_run_id(shared.opened)
        if run_id:
            settings["run_id"] = run_id
        session = shared.join(self, settings, *self._given)
        if enabled[0] is self:
            with self._guard:
                session.track(trackers_of(trainer, session.config))

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Begins the epoch of a run that resumes within an epoch."""
        self.on_train_epoch_start(trainer, pl_module)

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        """Begins an epoch: the Trainer counts from 0, the session from 1."""
        number = trainer.current_epoch + 1
        if self.enabled and number != self._number and not self._guard.closed:
            self._number = number
            with self._guard:
                if _enabled_in(trainer)[0] is self:
                    self._epoch = api.epoch(number)
                self._epoch_begins(number, trainer, pl_module)

    def on_train_epoch_end(self, *_: Any) -> None:
        """Ends the epoch, evaluation included."""
        if self.enabled:
            with self._guard:
                self._epoch_ends()
                if self._epoch is not None:
                    self._epoch.end()

    def on_exception(self, _trainer: Any, _pl_module: Any, exception: BaseException) -> None:
        """Closes the session after a failure: the Trainer then calls no teardown."""
        if self._epoch is not None:
            self._epoch.__exit__(type(exception), exception, None)
        self._leave(exception)

    def teardown(self, *_: Any, **__: Any) -> None:
        """Closes the session if this callback opened it and no other uses it."""
        self._leave(None)

    # -- what differs ------------------------------------------------------------------------------

    def _epoch_begins(self, number: int, trainer: Any, pl_module: Any) -> None:
        """Does nothing; subclasses override it."""

    def _epoch_ends(self) -> None:
        """Does nothing; subclasses override it."""

    def _leave(self, error: BaseException | None) -> None:
        self._epoch, self._number = None, 0
        with self._guard:
            shared.leave(self, error)


class OtelTrainCallback(_TrainerCallback):
    """Observes what a Trainer does: ``Trainer(callbacks=[OtelTrainCallback(run_name="baseline")])``.

    Models are found when they are called; loaders are named ``train``, ``val``, ``test`` and ``predict``, or by the
    keys of a dict; epochs count from 1. The session closes with ``fit``, ``validate``, ``test`` or ``predict``; one
    that was open before stays open.

    Args:
        model: as for ``otel_train.instrument``; None to find them.
        loaders: the same.
        **settings: as for ``otel_train.instrument``.

    Raises:
        ConfigError: a setting is invalid; the message has value, rule and remedy.
    """

    def __init__(self, model: Any = None, loaders: Any = None, **settings: Any) -> None:
        super().__init__(enabled=True, settings=settings, model=model, loaders=loaders)


class ProfilerCallback(_TrainerCallback):
    """Records steps of chosen epochs with ``torch.profiler``: skip 10, wait 5, warm up, record, once per epoch.

    In an epoch that is too short for that, recording begins earlier. The training thread waits up to 30 s at the start
    of an epoch if earlier captures are still being written, and up to a minute at the end of ``fit``.

    Args:
        enabled: False, the default, records nothing and opens no session.
        profile_epochs: a number or a sequence of numbers, from 1; None for the first.
        profile_steps: steps to record in each.
        warmup_steps: steps before those, whose recording is discarded.
        activities: of ``cpu``, ``cuda``, ``xpu`` and ``mtia``; None for cpu and cuda. Those that the machine lacks are
            left out and reported.
        record_shapes: record the shapes of operations' inputs.
        with_stack: record where operations were called; recorded steps are 20 to 30 % slower.
        output_dir: folder that gets each trace as ``epoch_N.json`` (other ranks' as ``epoch_N-rankR.json``), beside
            the compressed one in the run directory.
        export_chrome_trace: False writes no files to ``output_dir``.
        log_top_k_ops: operations that are printed after each capture, up to 100; 0 prints nothing.
        profile_memory: record every allocation.

    Raises:
        ConfigError: an epoch, a number or an activity is invalid; the message has value, rule and remedy.
    """

    def __init__(  # noqa: PLR0913 - the keywords of the callback that this replaces
        self,
        *,
        enabled: bool = False,
        profile_epochs: Any = None,
        profile_steps: int = 100,
        warmup_steps: int = 5,
        activities: Any = None,
        record_shapes: bool = True,
        with_stack: bool = False,
        output_dir: str | os.PathLike[str] | None = None,
        export_chrome_trace: bool = True,
        log_top_k_ops: int = 10,
        profile_memory: bool = False,
    ) -> None:
        self.profile_epochs = chosen(profile_epochs)
        self.profile_steps = whole("profile_steps={}", profile_steps, "Leave it out for 100", least=1)
        self.warmup_steps = whole("warmup_steps={}", warmup_steps, "Leave it out for 5")
        exported = truth("export_chrome_trace={}", export_chrome_trace)
        self.output_dir = _folder(output_dir) if exported else ""
        self._request: dict[str, Any] = {
            "record_shapes": truth("record_shapes={}", record_shapes),
            "with_stack": truth("with_stack={}", with_stack),
            "profile_memory": truth("profile_memory={}", profile_memory),
        }
        if activities is not None:
            self._request["activities"] = activities_of(activities)
        top = whole("log_top_k_ops={}", log_top_k_ops, "Leave it out for 10", most=MOST_TOP)
        self._profiled = False
        super().__init__(enabled=enabled, settings=_console(top))

    def _epoch_begins(self, number: int, trainer: Any, pl_module: Any) -> None:
        session = api.current()
        if number not in self.profile_epochs or session is None:
            return
        manual = not getattr(pl_module, "automatic_optimization", True)
        accumulated = 1 if manual else trainer.accumulate_grad_batches
        steps = steps_per_epoch(trainer.num_training_batches, accumulated)
        wait, warmup, active = fitted_schedule(steps, self.warmup_steps, self.profile_steps)
        request = {**self._request, "wait": wait, "warmup": warmup, "steps": active}
        refusal = session.epoch_captures().begin(number, request, output_dir=self.output_dir)
        if refusal:
            _log.warning("epoch %d is not profiled: %s", number, refusal)
        else:
            self._profiled = True

    def _epoch_ends(self) -> None:
        session = api.current()
        if self._number in self.profile_epochs and session is not None:
            session.epoch_captures().end()

    def _leave(self, error: BaseException | None) -> None:
        session, profiled = api.current(), self._profiled
        self._profiled = False
        if profiled and error is None and session is not None:
            with self._guard:
                session.epoch_captures().finish(FINISH_S)
        super()._leave(error)


class ThroughputMonitorCallback(_TrainerCallback):
    """Prints samples/s, batch times, memory and efficiency of each epoch, and logs them to the tracker in use.

    Args:
        enabled: False does nothing.
        log_interval: epochs between two blocks.
        track_memory: include memory of dataset, caches and process.
        track_timing: include times to load and to transform a batch.

    Raises:
        ConfigError: an argument is invalid; the message has value, rule and remedy.
    """

    def __init__(
        self,
        *,
        enabled: bool = True,
        log_interval: int = 1,
        track_memory: bool = True,
        track_timing: bool = True,
    ) -> None:
        timing, memory = truth("track_timing={}", track_timing), truth("track_memory={}", track_memory)
        parts = ["timing"] * timing + ["memory"] * memory
        settings = {
            "console_metrics": ["throughput"],
            "log_every_epochs": whole("log_interval={}", log_interval, "Leave it out for 1", least=1),
            "throughput_metrics": ",".join(parts or ["none"]),
        }
        super().__init__(enabled=enabled, settings=settings)


def _enabled_in(trainer: Any) -> list[_TrainerCallback]:
    return [each for each in trainer.callbacks if isinstance(each, _TrainerCallback) and each.enabled]


def _started_by_launcher(trainer: Any) -> bool:
    """Returns whether an external launcher started the ranks, which then have a common run id."""
    # ``creates_processes_externally`` does not tell: in the processes that Lightning itself starts it is true, too.
    environment = getattr(trainer.strategy, "cluster_environment", None)
    return type(environment).__name__ != "LightningEnvironment"


def _folder(given: Any) -> str:  # Any: the user's own
    if given is None or isinstance(given, (str, os.PathLike)):
        return str(os.fspath(given or ""))
    raise wrong_argument(f"output_dir={shown(given)}", "the path of a folder", "Leave it out for none")


def _console(top: int) -> dict[str, Any]:
    settings: dict[str, Any] = {"profiler_top": top}
    if not os.environ.keys() & {"OTEL_TRAIN_TUNING", "OTEL_TRAIN_CAPTURE_MAX_S"}:
        settings["tuning"] = {"profiler_max_s": CAPTURE_MAX_S}
    if top:
        settings["console_metrics"] = ["profiler"]
    return settings
