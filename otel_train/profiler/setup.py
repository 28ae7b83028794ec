"""The parts of captures, put together; captures of epochs."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from otel_train.accounting.types import TRAIN, StepSource
from otel_train.aggregation.captures import CAPTURES_FOLDER
from otel_train.config.validation import words_of
from otel_train.datamodel import system_clock
from otel_train.profiler.console import BLOCK, Console
from otel_train.profiler.controller import CaptureController, Limits, Story
from otel_train.profiler.endpoint import CaptureEndpoint
from otel_train.profiler.memory_snapshot import OomSnapshots
from otel_train.profiler.requests import CaptureRequest, options_of
from otel_train.profiler.step_schedule import Rule
from otel_train.profiler.storage import ANALYZE, TOP, Place
from otel_train.profiler.torch_profiler import TorchProfiler
from otel_train.profiler.triggers import Every, Schedule, SlowSteps
from otel_train.recording.events import SourceKind

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager
    from pathlib import Path

    from otel_train.aggregation.captures import Capture
    from otel_train.aggregation.run_state import RunState
    from otel_train.config import Config
    from otel_train.profiler.controller import Loop, Training
    from otel_train.profiler.endpoint import Requests
    from otel_train.profiler.flops import FlopCount
    from otel_train.resource import RunInfo

ROOM_S = 30.0
"""Longest wait for the capture before it, which may still be written when the next epoch begins."""

_POLL_S = 0.02


class EpochCaptures:
    """Asked by the training thread, between two steps. What it asks for is armed when the call returns.

    A request that the pump takes begins up to a turn later: an epoch may be over by then.

    Args:
        desk: makes captures; None where none can be made.
        office: reads requests.
        loop: looks at the loop.
        settled: a block in which everything recorded is settled, and the pump does nothing.
    """

    def __init__(
        self, desk: CaptureController | None, office: CaptureEndpoint | None, *,
        loop: Callable[[], Loop], settled: Callable[[], AbstractContextManager[None]],
    ) -> None:  # fmt: skip
        self._desk = desk
        self._office = office
        self._loop = loop
        self._settled = settled

    def begin(self, epoch: int, request: dict[str, Any], *, output_dir: str = "") -> str:
        """Capture steps of the epoch that begins here.

        Args:
            epoch: its number.
            request: as for ``otel_train.capture``; ``wait`` counts from its first step.
            output_dir: folder that gets the trace as plain ``epoch_N.json``, in the place of one that is there.

        Returns:
            "" if it will be made, else why not.

        Raises:
            ConfigError: something in the request cannot be honoured.
        """
        if self._desk is None or self._office is None:
            return "captures are off, or there is no run directory to write to"
        plan = self._office.read(request)._replace(
            trigger="schedule", reason=f"epoch {epoch}", epoch=epoch, at_once=True, output_dir=output_dir
        )
        deadline_s = time.monotonic() + ROOM_S
        while True:
            with self._settled():
                loop = self._loop()
                self._desk.turn(loop, last=True)
                if not self._desk.busy:
                    return self._desk.begin(plan, loop)
                if self._desk.running:
                    break
            if time.monotonic() > deadline_s:
                break
            time.sleep(_POLL_S)
        return "a capture is under way: one at a time"

    def end(self) -> None:
        """The epoch is over, and so is its capture."""
        if self._desk is not None:
            self._desk.gate.over()

    def finish(self, timeout_s: float) -> None:
        """Wait until everything captured is written, looked into and told, for this long at most."""
        deadline_s = time.monotonic() + timeout_s
        while self._desk is not None and time.monotonic() < deadline_s:
            with self._settled():
                self._desk.turn(self._loop(), last=True)
                if self._desk.told:
                    return
            time.sleep(_POLL_S)


class NoEpochCaptures:
    """Where nothing is observed, nothing is captured."""

    def begin(self, *_: object, **__: object) -> str:
        """None is made."""
        return "otel_train is disabled"

    def end(self) -> None:
        """Nothing."""

    def finish(self, timeout_s: float) -> None:
        """Nothing."""


_WORK = {
    StepSource.UPDATE: SourceKind.OPTIMIZER,
    StepSource.BACKWARD: SourceKind.BACKWARD,
    StepSource.BATCH: SourceKind.DATA,
    StepSource.MANUAL: SourceKind.MARK,
}
YIELD_S = 1.0
"""A session that another thread closes waits so long for the training thread to end its capture."""


class Capturing:
    """Captures of one process.

    Args:
        config: how they are made.
        info: who we are.
        training: the account.
        rank_folder: of this rank; None where nothing can be written, and nothing be captured.
        ooms: times that a device ran out of memory.
        requests: where requests are left.

    Raises:
        ConfigError: an activity does not exist.
    """

    def __init__(
        self, config: Config, info: RunInfo, *, training: Training,
        rank_folder: Path | None, ooms: Callable[[], int], requests: Requests,
    ) -> None:  # fmt: skip
        self._training = training
        self._console = (
            Console(
                lines=config.console, block=BLOCK in words_of(config.console_blocks), top=config.capture_top
            )
            if info.rank == 0
            else None
        )
        plan = _plan_of(config)
        self.office: CaptureEndpoint | None = None
        self._desk: CaptureController | None = None
        self._snapshots: OomSnapshots | None = None
        if config.capture == "off" or rank_folder is None:
            return
        place = Place(
            rank_folder.parent / CAPTURES_FOLDER, info.rank, config.capture_max_bytes, config.capture_kept,
            config.capture_tensorboard, config.capture_output_dir,
            (*ANALYZE, f"--top={max(config.capture_top, TOP)}"),
        )  # fmt: skip
        self._desk = CaptureController(
            TorchProfiler, loop=training.loop, place=place, clock=system_clock,
            story=Story(self._over, training.active, training.number, training.unix_ns, training.epoch),
            limits=Limits(config.capture_max_s, config.capture_cooldown_s),
        )  # fmt: skip
        gate = self._desk.gate
        training.watch(lambda: gate.within_ns)
        self.office = CaptureEndpoint(self._desk, plan, info.rank, requests, loop=training.loop)
        self._snapshots = OomSnapshots(ooms, place.folder, info.rank)
        _add_triggers(self.office, config, plan, training)

    @property
    def within_ns(self) -> tuple[int, int]:
        """When the last recording began and ended; (0, 0) if there was none."""
        return self._desk.gate.within_ns if self._desk is not None else (0, 0)

    @property
    def in_a_hurry(self) -> bool:
        """Whether something waits for what only settling tells."""
        return self._desk is not None and self._desk.in_a_hurry

    @property
    def unfinished(self) -> bool:
        """Whether something was recorded, or is, that is not written and told yet."""
        return self._desk is not None and (self._desk.busy or not self._desk.told)

    def show_block(self) -> None:
        """Show captures as the block of earlier systems."""
        if self._console is not None:
            self._console = self._console._replace(block=True)

    def of_epochs(self, settled: Callable[[], AbstractContextManager[None]]) -> EpochCaptures:
        """Captures that the training thread begins. ``settled()``: everything is settled, the pump does nothing."""
        return EpochCaptures(self._desk, self.office, loop=self._training.loop, settled=settled)

    def turn(self, settle: Callable[[], None]) -> None:
        """Look for requests, and do what is due. Driven by the pump, whose ``settle`` numbers steps now."""
        if self.office is not None and self._desk is not None:
            if self._desk.in_a_hurry:
                settle()
            self.office.turn()
        if self._snapshots is not None:
            self._snapshots.look()

    def ask(self, request: dict[str, Any]) -> str:
        """The program asks. "" if it will be, else why not.

        Raises:
            ConfigError: something in the request cannot be honoured.
        """
        if self.office is None:
            return "captures are off, or there is no run directory to write to"
        return self.office.ask(request)

    def give_way_to(self, flops: FlopCount) -> None:
        """Begin nothing while a step is counted: one thing at a time stands between the thread and its ring."""
        if self._desk is not None:
            self._desk.others = lambda: flops.busy

    def stop(self) -> None:
        """Record no more: what is open ends here."""
        if self._desk is not None:
            self._desk.gate.abort("")
            self._desk.gate.wait(YIELD_S)

    def end(self, timeout_s: float) -> None:
        """Write what was recorded, after everything has been settled."""
        if self.office is not None and self._desk is not None:
            self._desk.end(timeout_s)

    def _over(self, capture: Capture) -> None:
        self._training.over(capture)
        if self._console is not None:
            self._console.tell(capture)


def rule_of(run: RunState) -> Rule | None:
    """How steps can be told apart by edges alone; None while that is not known."""
    work, leading = _WORK.get(run.step_source), run.leading
    if work is None or leading is None:
        return None
    names = run.totals.names.loaders.names
    trained = {names[loader] for loader, phase in run.totals.batches if phase == TRAIN}
    return Rule(
        work, leading.account.asks, frozenset(names[loader] for loader, _ in run.totals.batches) - trained
    )


def _add_triggers(office: CaptureEndpoint, config: Config, plan: CaptureRequest, training: Training) -> None:
    """Captures that nobody asks for: by schedule, and of slow steps."""
    every = _every_of(config)
    if every.ever:
        office.schedule = Schedule(every, plan._replace(trigger="schedule"), system_clock)
    if config.capture == "auto":
        office.slow = SlowSteps(plan._replace(trigger="slow_step"))
        office.slow_steps = training.slow_steps


def _every_of(config: Config) -> Every:
    return Every(
        config.capture_every_steps, config.capture_every_epochs, config.capture_every_min,
        config.capture_skip_first, config.capture_repeat,
        frozenset(int(epoch) for epoch in words_of(config.capture_epochs)),
    )  # fmt: skip


def _plan_of(config: Config) -> CaptureRequest:
    """What is recorded where a request says nothing."""
    options = options_of(
        config.capture_activities, record_shapes=config.capture_shapes, with_stack=config.capture_stacks,
        profile_memory=config.capture_memory, with_flops=config.capture_flops,
    )  # fmt: skip
    return CaptureRequest(
        "on_demand", config.capture_steps, config.capture_warmup, config.capture_wait, options=options
    )
