"""Takes capture requests from all sources, prints results, writes memory snapshots after an out-of-memory error."""

from __future__ import annotations

import json
import logging
import pickle
import shlex
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from otel_train.config.settings import PROFILER_OPTIONS, ProfilerEvery
from otel_train.config.validation import MIB, read_parts, words_of
from otel_train.datamodel import CAPTURES_FOLDER, NS_PER_S, Capture, system_clock
from otel_train.errors import ConfigError
from otel_train.profiler import requests
from otel_train.profiler.controller import CaptureController, TrainingState
from otel_train.profiler.requests import (
    NEXT,
    UNDER_WAY,
    CaptureRequest,
    Options,
    Schedule,
    SlowSteps,
    activities,
)
from otel_train.profiler.storage import ANALYZE, TOP, CaptureStore
from otel_train.profiler.torch_profiler import TorchProfiler
from otel_train.safety import DaemonThread, Guard, printable

if TYPE_CHECKING:
    from contextlib import AbstractContextManager
    from pathlib import Path

    from otel_train.config import Config
    from otel_train.profiler.flops import FlopCount
    from otel_train.resource import RunInfo

_log = logging.getLogger("otel_train")

MARGIN_S, MARGIN_STEPS = 8.0, 10
"""Lead time of a capture of several ranks: the service thread of each must poll its request before the first step."""

TOO_EARLY = (
    "the pace of the run is not known yet, so no step can be named for several ranks: ask a little later"
)

PREVIOUS_CAPTURE_WAIT_S = 30.0
"""Longest wait of the training thread, at the start of an epoch, for previous captures that are still being written."""

YIELD_S = 1.0
"""Longest wait of a session that another thread closes for the training thread to end its capture."""

MOST_SNAPSHOTS = 3
"""Memory snapshots per process. A loop that catches the error and retries would fill the disk."""

_POLL_S = 0.02
_NAME_COLUMNS = 44  # of an operator on the console
_MS = 1e3  # of a second


class Requests(Protocol):
    """Access to the request files of a rank."""

    def waiting(self) -> object:
        """Returns the waiting request, or text that says why it cannot be read; None if there is none."""

    def done(self) -> None:
        """Removes the waiting request."""

    def pass_on(self, ranks: Sequence[int], request: dict[str, Any]) -> str:
        """Leaves a request for other ranks of this run, all or none; returns the reason if that is not possible."""


class CaptureEndpoint:
    """Takes requests from the program, a file, HTTP, a signal, the schedule, slow steps and alerts, and fills in ``defaults``."""

    def __init__(
        self,
        controller: CaptureController,
        defaults: CaptureRequest,
        rank: int,
        requests: Requests,
        *,
        training: TrainingState,
    ) -> None:
        self.triggers: list[Schedule | SlowSteps] = []  # sources of automatic requests
        self.controller = controller
        self._training = training
        self._defaults = defaults
        self._rank = rank
        self._requests = requests

    def poll(self) -> None:
        """Takes waiting requests, then runs the controller. Runs on the service thread."""
        self._take_file()
        for trigger in self.triggers:
            trigger.request_if_due(self._training.loop, self.controller.ask)
        self.controller.poll()

    def ask(self, document: dict[str, Any]) -> str:
        """Queues a request of the program. Returns "", or the reason if it is refused; raises ConfigError if it is invalid."""
        return self.controller.ask(self.read(document))

    def ask_by_alert(self, name: str) -> str:
        """Queues a capture for a firing alert. Returns "", or the reason if it is refused."""
        return self.controller.ask(self._defaults._replace(trigger="alert", alert=name, reason=name))

    def ask_by_signal(self) -> None:
        """Queues a capture for SIGUSR2; logs why if it is refused."""
        refusal = self.controller.ask(self._defaults._replace(trigger="signal", reason="SIGUSR2"))
        if refusal:
            _log.warning("No capture (SIGUSR2): %s", refusal)

    def read(self, document: dict[str, Any]) -> CaptureRequest:
        """Parses a request of the program; raises ConfigError if it is invalid."""
        return requests.read(document, self._defaults)[0]

    def post(self, body: bytes) -> tuple[int, dict[str, Any]]:
        """Handles the body of ``POST /capture``: JSON, or nothing for the settings' capture. Returns HTTP status and response."""
        try:
            return self._arm(json.loads(body) if body.strip() else {})
        except (ValueError, RecursionError, ConfigError) as error:
            return 400, {"error": str(error)[:500]}

    def _arm(self, document: object) -> tuple[int, dict[str, Any]]:
        (request, ranks), rank = requests.read(document, self._defaults), self._rank
        others = [each for each in ranks or () if each != rank]
        if others and request.at_step == NEXT:
            loop = self._training.loop
            if not loop.median_ns:
                return 409, {"error": TOO_EARLY}
            ahead = max(MARGIN_STEPS, int(MARGIN_S * NS_PER_S / loop.median_ns))
            request = request._replace(at_step=loop.step + request.warmup + ahead)
        passed_on = {
            "steps": request.steps, "warmup": request.warmup, "at_step": request.at_step, "reason": request.reason,
            "request_id": request.request_id, "pinned": request.pinned, **request.options._asdict(),
        }  # fmt: skip
        own = ranks is None or rank in ranks
        problem = self.controller.refusal(request) if own else ""  # before other ranks are asked
        if others:
            problem = problem or self._requests.pass_on(others, passed_on)
        if own:
            problem = problem or self.controller.ask(request)
        if problem:
            return 409, {"error": problem}
        at_step = request.at_step if request.at_step != NEXT else "next"
        return 202, {"armed": True, "at_step": at_step, "steps": request.steps}

    def _take_file(self) -> None:
        document = self._requests.waiting()
        if document is None:
            return
        try:
            refusal = str(self._arm(document)[1].get("error", ""))
        except (ConfigError, OSError) as error:
            refusal = str(error)
        if refusal == TOO_EARLY:
            return  # the request stays until the pace is known
        self._requests.done()
        if refusal:
            _log.warning("%s: %s", requests.REQUEST_FILE, document if isinstance(document, str) else refusal)


class EpochCaptures:
    """Captures requested by the training thread between two steps. They are armed at once, since an epoch may be short.

    ``accounted`` is a context in which all events are accounted and the service thread is paused.
    """

    def __init__(
        self, endpoint: CaptureEndpoint, accounted: Callable[[], AbstractContextManager[None]]
    ) -> None:
        self._endpoint = endpoint
        self._controller = endpoint.controller
        self._accounted = accounted

    def begin(self, epoch: int, request: dict[str, Any], *, output_dir: str = "") -> str:
        """Captures steps of the epoch that begins here. Returns "" if the capture was armed, else why not.

        Args:
            epoch: number of the epoch.
            request: as for ``otel_train.capture``; ``wait`` counts from its first step.
            output_dir: folder for an uncompressed copy ``epoch_N.json``, which is overwritten.

        Raises:
            ConfigError: the request is invalid.
        """
        wanted = self._endpoint.read(request)._replace(
            trigger="schedule", reason=f"epoch {epoch}", epoch=epoch, at_once=True, output_dir=output_dir
        )
        deadline_s = time.monotonic() + PREVIOUS_CAPTURE_WAIT_S
        while True:
            with self._accounted():
                self._controller.end_others()  # the next step is the first of the capture
                self._controller.poll(last=True)
                if not self._controller.busy:
                    return self._controller.begin(wanted)
                if self._controller.running or self._controller.others():
                    return UNDER_WAY
            if time.monotonic() > deadline_s:
                return UNDER_WAY
            time.sleep(_POLL_S)

    def end(self) -> None:
        """Ends the capture of the epoch."""
        self._controller.scheduler.over()

    def finish(self, timeout_s: float) -> None:
        """Waits until all captures are written, analysed and reported, at most ``timeout_s``."""
        deadline_s = time.monotonic() + timeout_s
        while time.monotonic() < deadline_s:
            with self._accounted():
                self._controller.poll(last=True)
                if self._controller.finished:
                    return
            time.sleep(_POLL_S)


class NoEpochCaptures:
    """Null object of ``EpochCaptures``, for disabled captures."""

    def __init__(self, reason: str) -> None:
        self._reason = reason

    def begin(self, *_: object, **__: object) -> str:
        """Returns the reason."""
        return self._reason

    def end(self) -> None:
        """Does nothing."""

    def finish(self, timeout_s: float) -> None:
        """Does nothing."""


class Capturing(CaptureEndpoint):
    """Captures of one process, by its settings. Raises ConfigError for an unknown activity."""

    def __init__(
        self, config: Config, info: RunInfo, *, training: TrainingState,
        rank_folder: Path, ooms: Callable[[], int], requests: Requests,
    ) -> None:  # fmt: skip
        block = "profiler" in words_of(config.console_metrics)
        console = Console(lines=config.console, block=block, top=config.profiler_top)
        self._console = console if info.rank == 0 else None
        defaults = _defaults_of(config)
        store = CaptureStore(
            rank_folder.parent / CAPTURES_FOLDER, info.rank, config.profiler_max_bytes, config.profiler_kept,
            config.profiler_tensorboard, config.profiler_output_dir,
            (*ANALYZE, f"--top={max(config.profiler_top, TOP)}"),
        )  # fmt: skip
        controller = CaptureController(
            TorchProfiler, training=training, done=self._done, place=store, clock=system_clock,
            tuning=config.tuned(),
        )  # fmt: skip
        super().__init__(controller, defaults, info.rank, requests, training=training)
        self.snapshots = OomSnapshots(ooms, store.folder, info.rank)
        every, schedule = read_parts(ProfilerEvery, config.profiler_every), config.schedule()
        if any(every):
            scheduled = Schedule(
                every, defaults._replace(trigger="schedule"), system_clock,
                skip_first=schedule.skip_first, most=schedule.repeat,
            )  # fmt: skip
            self.triggers.append(scheduled)
        if config.profiler == "auto":
            self.triggers.append(SlowSteps(defaults._replace(trigger="slow_step")))

    @property
    def within_ns(self) -> tuple[int, int]:
        """Start and end of the last recording; (0, 0) without one."""
        return self.controller.scheduler.within_ns

    def show_block(self) -> None:
        """Prints captures as the block ``[Profiler]`` from now on."""
        if self._console is not None:
            self._console = self._console._replace(block=True)

    def poll(self) -> None:
        """Takes requests, runs the controller, writes memory snapshots. Runs on the service thread."""
        super().poll()
        self.snapshots.write_if_due()

    def end(self, timeout_s: float) -> None:
        """Writes what was recorded, after all events are accounted, and waits for a memory snapshot: ``timeout_s`` each."""
        self.controller.end(timeout_s)
        self.snapshots.end(timeout_s)

    def give_way_to(self, flops: FlopCount) -> None:
        """Starts no capture while a step's FLOP are counted: both intercept the events of the training thread.

        Only the capture of an epoch, which cannot wait, ends the count.
        """
        self.controller.others = lambda: flops.busy
        self.controller.end_others = flops.end

    def stop(self) -> None:
        """Ends the open recording."""
        self.controller.scheduler.abort("")
        self.controller.scheduler.wait(YIELD_S)

    def _done(self, capture: Capture) -> None:
        self._training.over(capture)
        if self._console is not None:
            self._console.show(capture)


def _defaults_of(config: Config) -> CaptureRequest:
    """Returns the request that the settings describe; others override its fields."""
    enabled, schedule = words_of(config.profiler_options), config.schedule()
    switches = {name: name in enabled for name in PROFILER_OPTIONS}
    options = Options(activities(config.profiler_activities), **switches)
    return CaptureRequest("on_demand", schedule.active, schedule.warmup, schedule.wait, options=options)


class Console(NamedTuple):
    """Prints captures on standard error, so that the program's own output is unchanged."""

    lines: bool  # with the prefix ``otel_train:``, unless printed as a block
    block: bool  # ``[Profiler]``
    top: int  # operators, and kernels, to list; with 0 no lines are printed

    def show(self, capture: Capture) -> None:
        """Prints a capture that has a file, in one write."""
        shown: Iterable[str] = ()
        if self.block:
            shown = _block(capture, self.top)
        elif self.lines and self.top:
            shown = (f"otel_train: {line}" for line in _lines(capture, self.top))
        if capture.file and sys.stderr is not None:
            sys.stderr.write("".join(f"{line}\n" for line in shown))
            sys.stderr.flush()


def _analyze(capture: Capture) -> str:
    return f"otel-train analyze {shlex.quote(printable(capture.file))}"


def _block(capture: Capture, top: int) -> Iterator[str]:
    record = capture.metadata
    yield f"[Profiler] Epoch {record.get('epoch')}: {printable(capture.file)}"
    if not capture.finding:
        yield f"  not analysed yet: {_analyze(capture)}"
        return
    for key, what in (("top_cpu_ops", "CPU operations"), ("top_cuda_ops", "CUDA kernels")):
        rows = (record.get(key) or ())[:top]
        if rows:
            yield f"  Top {len(rows)} {what}:"
        for number, row in enumerate(rows, 1):
            yield f"    {number}. {printable(row['name'])}: {row['seconds'] * _MS:.2f} ms ({row['share'] or 0.0:.1%})"
    stages = [f"{printable(row['stage'])} {row['share']:.1%}" for row in record.get("stages") or ()]
    if stages:
        yield f"  Shares: {', '.join(stages)}"
    for peak in (record.get("memory_peaks") or ())[:1]:
        yield f"  Memory peak: {peak['bytes'] / MIB:.1f} MB on {printable(peak['device'])} at {peak['time_seconds']:.3f} s"
    yield "  Bottlenecks:"
    for finding in record.get("findings") or ():
        yield f"    {printable(finding['summary'])} {printable(finding['advice'])}"


def _lines(capture: Capture, top: int) -> Iterator[str]:
    first, last = capture.steps
    steps = f"steps {first} to {last}" if last > first else f"step {first}"
    yield f"captured {steps}: {printable(capture.file)}"
    if not capture.finding:
        yield f"  analyse it with: {_analyze(capture)}"
        return
    yield f"  {printable(capture.finding)}"
    for key, what in (("top_cpu_ops", "on the host"), ("top_cuda_ops", "on the device")):
        rows = (capture.metadata.get(key) or ())[:top]
        if rows:
            yield f"  {f'the longest {what}':{_NAME_COLUMNS}}       time   share"
        for row in rows:
            name = printable(row["name"])[:_NAME_COLUMNS]
            yield f"  {name:{_NAME_COLUMNS}} {row['seconds'] * _MS:7.2f} ms {row['share'] or 0.0:7.1%}"


def _torch_snapshot() -> object:
    """Returns a snapshot for https://pytorch.org/memory_viz; None if this torch cannot make one."""
    memory: Any = sys.modules.get("torch.cuda.memory")
    take_snapshot = getattr(memory, "_snapshot", None)
    return None if take_snapshot is None else take_snapshot()


class OomSnapshots:
    """Writes torch's memory snapshot when the allocator has reported an out-of-memory error.

    A thread of its own writes it: the service thread must not wait for a disk that hangs. The snapshot is taken up to two seconds later. It has allocation stacks only if the program has called
    ``torch.cuda.memory._record_memory_history``.

    Attributes:
        guard: of the writing thread.
    """

    def __init__(
        self, ooms: Callable[[], int], folder: Path, rank: int,
        snapshot: Callable[[], object] = _torch_snapshot,
    ) -> None:  # fmt: skip
        self._ooms = ooms
        self._folder = folder
        self._rank = rank
        self._snapshot = snapshot
        self._seen = self._made = 0
        self._writer: DaemonThread | None = None
        self.guard = Guard("memory snapshot", consequence="the snapshot is missing; training goes on")

    def write_if_due(self) -> None:
        """Takes a snapshot and starts to write it if memory has run out since the last one, unless that is still being written."""
        ooms = self._ooms()
        is_writing = self._writer is not None and self._writer.is_alive()
        if ooms <= self._seen or self._made == MOST_SNAPSHOTS or is_writing:
            return
        self._seen = ooms
        snapshot = self._snapshot()
        if snapshot is None:
            return
        self._made += 1
        path = self._folder / f"oom_{ooms}-rank{self._rank}.pickle"
        self._writer = DaemonThread(
            target=self._write, args=(path, snapshot), name="otel-train-snapshot", daemon=True
        )
        self._writer.start()

    def end(self, timeout_s: float) -> None:
        """Waits for the snapshot that is being written, at most ``timeout_s``."""
        if self._writer is not None:
            self._writer.join(timeout_s)

    def _write(self, path: Path, snapshot: object) -> None:
        with self.guard:
            self._folder.mkdir(parents=True, exist_ok=True)
            with path.open("wb") as file:
                pickle.dump(snapshot, file)
