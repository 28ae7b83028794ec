"""Assembles the capture components of a process; captures of epochs."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from otel_train.config.settings import PROFILER_OPTIONS, ProfilerEvery
from otel_train.config.validation import read_parts, words_of
from otel_train.datamodel import CAPTURES_FOLDER, system_clock
from otel_train.profiler.console import BLOCK, Console
from otel_train.profiler.controller import CaptureController, CaptureLimits
from otel_train.profiler.endpoint import CaptureEndpoint
from otel_train.profiler.oom_snapshot import OomSnapshots
from otel_train.profiler.requests import CaptureRequest, options_of
from otel_train.profiler.storage import ANALYZE, TOP, CaptureStore
from otel_train.profiler.torch_profiler import TorchProfiler
from otel_train.profiler.triggers import Every, Schedule, SlowSteps

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager
    from pathlib import Path

    from otel_train.config import Config
    from otel_train.datamodel import Capture
    from otel_train.profiler.controller import LoopState, TrainingAccount
    from otel_train.profiler.endpoint import Requests
    from otel_train.profiler.flops import FlopCount
    from otel_train.resource import RunInfo

PREVIOUS_CAPTURE_WAIT_S = 30.0
"""Longest wait for the previous capture, which may still be being written when the next epoch begins."""

_POLL_S = 0.02


class EpochCaptures:
    """Captures requested by the training thread between two steps. A capture is armed when the call returns.

    A queued request begins up to one turn of the service thread later, when a short epoch may have ended.

    Args:
        controller: makes captures; None if captures are off.
        endpoint: parses requests.
        loop: returns the current state of the loop.
        accounted: a context in which all events are accounted and the service thread is paused.
    """

    def __init__(
        self, controller: CaptureController | None, endpoint: CaptureEndpoint | None, *,
        loop: Callable[[], LoopState], accounted: Callable[[], AbstractContextManager[None]],
    ) -> None:  # fmt: skip
        self._controller = controller
        self._endpoint = endpoint
        self._loop = loop
        self._accounted = accounted

    def begin(self, epoch: int, request: dict[str, Any], *, output_dir: str = "") -> str:
        """Captures steps of the epoch that begins here.

        Args:
            epoch: its number.
            request: as for ``otel_train.capture``; ``wait`` counts from its first step.
            output_dir: folder for an uncompressed copy ``epoch_N.json``, which is overwritten.

        Returns:
            "" if it was armed, else the reason why not.

        Raises:
            ConfigError: the request is invalid.
        """
        if self._controller is None or self._endpoint is None:
            return "captures are off, or there is no run directory to write to"
        plan = self._endpoint.read(request)._replace(
            trigger="schedule", reason=f"epoch {epoch}", epoch=epoch, at_once=True, output_dir=output_dir
        )
        deadline_s = time.monotonic() + PREVIOUS_CAPTURE_WAIT_S
        while True:
            with self._accounted():
                loop = self._loop()
                self._controller.turn(loop, last=True)
                if not self._controller.busy:
                    return self._controller.begin(plan, loop)
                if self._controller.running:
                    break
            if time.monotonic() > deadline_s:
                break
            time.sleep(_POLL_S)
        return "a capture is under way: one at a time"

    def end(self) -> None:
        """Ends the capture of the epoch."""
        if self._controller is not None:
            self._controller.scheduler.over()

    def finish(self, timeout_s: float) -> None:
        """Waits until all captures are written, analysed and reported, at most ``timeout_s``."""
        deadline_s = time.monotonic() + timeout_s
        while self._controller is not None and time.monotonic() < deadline_s:
            with self._accounted():
                self._controller.turn(self._loop(), last=True)
                if self._controller.finished:
                    return
            time.sleep(_POLL_S)


class NoEpochCaptures:
    """Null object for a disabled session."""

    def begin(self, *_: object, **__: object) -> str:
        """Refuses."""
        return "otel_train is disabled"

    def end(self) -> None:
        """Does nothing."""

    def finish(self, timeout_s: float) -> None:
        """Does nothing."""


YIELD_S = 1.0
"""How long a session closed by another thread waits for the training thread to end its capture."""


class Capturing:
    """Captures of one process.

    Args:
        config: settings of captures.
        info: identity of this rank.
        training: access to the state of the rank.
        rank_folder: folder of this rank; None turns captures off.
        ooms: returns the number of out-of-memory errors.
        requests: where requests are left.

    Raises:
        ConfigError: an activity is unknown.
    """

    def __init__(
        self, config: Config, info: RunInfo, *, training: TrainingAccount,
        rank_folder: Path | None, ooms: Callable[[], int], requests: Requests,
    ) -> None:  # fmt: skip
        self._training = training
        self._console = (
            Console(
                lines=config.console, block=BLOCK in words_of(config.console_metrics), top=config.profiler_top
            )
            if info.rank == 0
            else None
        )
        plan = _plan_of(config)
        self.endpoint: CaptureEndpoint | None = None
        self._controller: CaptureController | None = None
        self._snapshots: OomSnapshots | None = None
        if config.profiler == "off" or rank_folder is None:
            return
        place = CaptureStore(
            rank_folder.parent / CAPTURES_FOLDER, info.rank, config.profiler_max_bytes, config.profiler_kept,
            config.profiler_tensorboard, config.profiler_output_dir,
            (*ANALYZE, f"--top={max(config.profiler_top, TOP)}"),
        )  # fmt: skip
        tuned = config.tuned()
        self._controller = CaptureController(
            TorchProfiler, training=training, done=self._done, place=place, clock=system_clock,
            limits=CaptureLimits(tuned.profiler_max_s, tuned.profiler_cooldown_s),
        )  # fmt: skip
        scheduler = self._controller.scheduler
        training.watch(lambda: scheduler.within_ns)
        self.endpoint = CaptureEndpoint(self._controller, plan, info.rank, requests, loop=training.loop)
        self._snapshots = OomSnapshots(ooms, place.folder, info.rank)
        _add_triggers(self.endpoint, config, plan, training)

    @property
    def within_ns(self) -> tuple[int, int]:
        """Begin and end of the last recording; (0, 0) without one."""
        return self._controller.scheduler.within_ns if self._controller is not None else (0, 0)

    @property
    def needs_step_numbers(self) -> bool:
        """Whether a capture waits for what only accounting provides."""
        return self._controller is not None and self._controller.needs_step_numbers

    @property
    def unfinished(self) -> bool:
        """Whether a recording is under way, or not yet written and reported."""
        return self._controller is not None and (self._controller.busy or not self._controller.finished)

    @property
    def wanted(self) -> bool:
        """Whether a request waits, or a recording is unfinished."""
        return self.unfinished or (self._controller is not None and self._controller.asked)

    def show_block(self) -> None:
        """Prints captures as the block ``[Profiler]``."""
        if self._console is not None:
            self._console = self._console._replace(block=True)

    def of_epochs(self, accounted: Callable[[], AbstractContextManager[None]]) -> EpochCaptures:
        """Returns captures requested by the training thread; ``accounted`` as for ``EpochCaptures``."""
        return EpochCaptures(self._controller, self.endpoint, loop=self._training.loop, accounted=accounted)

    def turn(self, account: Callable[[], None]) -> None:
        """Takes requests and does what is due. Runs on the service thread; ``account`` accounts all events now."""
        if self.endpoint is not None and self._controller is not None:
            if self._controller.needs_step_numbers:
                account()
            self.endpoint.turn()
        if self._snapshots is not None:
            self._snapshots.look()

    def ask(self, request: dict[str, Any]) -> str:
        """Queues a request of the program. Returns "", or the reason if it is refused.

        Raises:
            ConfigError: the request is invalid.
        """
        if self.endpoint is None:
            return "captures are off, or there is no run directory to write to"
        return self.endpoint.ask(request)

    def give_way_to(self, flops: FlopCount) -> None:
        """Starts no capture while a step's FLOP are counted: both divert the events of the training thread."""
        if self._controller is not None:
            self._controller.others = lambda: flops.busy

    def stop(self) -> None:
        """Ends the open recording."""
        if self._controller is not None:
            self._controller.scheduler.abort("")
            self._controller.scheduler.wait(YIELD_S)

    def end(self, timeout_s: float) -> None:
        """Writes the recordings, after all events are accounted."""
        if self.endpoint is not None and self._controller is not None:
            self._controller.end(timeout_s)

    def _done(self, capture: Capture) -> None:
        self._training.over(capture)
        if self._console is not None:
            self._console.show(capture)


def _add_triggers(
    endpoint: CaptureEndpoint, config: Config, plan: CaptureRequest, training: TrainingAccount
) -> None:
    """Adds the schedule and slow steps."""
    every = _every_of(config)
    if every.ever:
        endpoint.schedule = Schedule(every, plan._replace(trigger="schedule"), system_clock)
    if config.profiler == "auto":
        endpoint.slow = SlowSteps(plan._replace(trigger="slow_step"))
        endpoint.slow_steps = training.slow_steps


def _every_of(config: Config) -> Every:
    every, schedule = read_parts(ProfilerEvery, config.profiler_every), config.schedule()
    return Every(
        every.steps, every.epochs, every.minutes, schedule.skip_first, schedule.repeat, frozenset(every.epoch)
    )


def _plan_of(config: Config) -> CaptureRequest:
    """Defaults for requests."""
    chosen = words_of(config.profiler_options)
    schedule = config.schedule()
    return CaptureRequest(
        "on_demand", schedule.active, schedule.warmup, schedule.wait,
        options=options_of(config.profiler_activities, **{name: name in chosen for name in PROFILER_OPTIONS}),
    )  # fmt: skip
