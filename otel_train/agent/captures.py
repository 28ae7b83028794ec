"""Captures and the FLOP count of a rank: the profiler runs in the training process, step accounting in the agent."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from otel_train.agent.messages import CAPTURES_OFF
from otel_train.agent.reports import has_automatic_captures
from otel_train.datamodel import Anchor, Capture, system_clock
from otel_train.recording.events import LoopState

if TYPE_CHECKING:
    from otel_train.agent.client import AgentClient
    from otel_train.config.settings import Config
    from otel_train.profiler.endpoint import Capturing, EpochCaptures, NoEpochCaptures
    from otel_train.profiler.flops import FlopCount
    from otel_train.profiler.step_schedule import ProfiledThread

_log = logging.getLogger("otel_train")

STOP_S = 1.0
"""Longest wait for the training thread to end a running FLOP count, if another thread closes the session."""


class RankCaptures:
    """Creates the capture components on first use and runs them on the service thread.

    Attributes:
        account: state of the training loop and requests, by messages to the agent.
        capturing: profiler captures; None until they are set up.
        flops: counts the FLOP of one step; None unless that is requested.
    """

    def __init__(self, client: AgentClient, config: Config, anchor: Anchor) -> None:
        self.account = _RemoteAccount(client, anchor)
        self.capturing: Capturing | None = None
        self.flops: FlopCount | None = None
        self._client = client
        self._config = config
        self._setting_up = threading.Lock()

    # -- state for reports -------------------------------------------------------------------------

    @property
    def follows(self) -> bool:
        """Whether the rank needs the state of the loop continuously, for captures or for a FLOP count that is not done."""
        flops, capturing = self.flops, self.capturing
        counts = flops is not None and not (flops.flops or flops.refusal)
        return counts or (
            capturing is not None and (has_automatic_captures(self._config) or capturing.controller.wanted)
        )

    @property
    def needs_step_numbers(self) -> bool:
        """Whether a capture waits for step numbers."""
        return self.capturing is not None and self.capturing.controller.needs_step_numbers

    @property
    def within_ns(self) -> tuple[int, int]:
        """Monotonic nanoseconds at which the last capture, or FLOP count, began and ended; (0, 0) for none."""
        return max(each.within_ns if each is not None else (0, 0) for each in (self.capturing, self.flops))

    @property
    def recording(self) -> bool:
        """Whether a capture is recorded now."""
        return self.capturing is not None and self.capturing.controller.recording

    @property
    def snapshot_faults(self) -> int:
        """Number of faults of memory snapshots."""
        return self.capturing.snapshots.guard.faults if self.capturing is not None else 0

    # -- requests of the session and the agent -----------------------------------------------------

    def of_epochs(self) -> EpochCaptures | NoEpochCaptures:
        """See ``Session.epoch_captures``."""
        from otel_train.profiler.endpoint import EpochCaptures, NoEpochCaptures

        capturing = self.set_up()
        return (
            NoEpochCaptures(CAPTURES_OFF) if capturing is None else EpochCaptures(capturing, self._accounted)
        )

    def capture(self, request: dict[str, Any]) -> str:
        """See ``Session.capture``."""
        capturing = self.set_up()
        if capturing is None:
            return CAPTURES_OFF
        if not self.follows or self.account.loop.rule is None:  # the last known state may be out of date
            with self._accounted():
                pass
        refusal = capturing.ask(request)
        self._client.recording.recorder.changed()
        return refusal

    # -- setting up --------------------------------------------------------------------------------

    def set_up(self) -> Capturing | None:
        """Returns the capture components, made on first use; None if there can be no captures, or faults switched them off."""
        if self._client.components.guards["captures"].closed:
            return None
        opened = self._client.opened
        if self.capturing is not None or opened is None or not opened.run_directory:
            return self.capturing
        if self._config.profiler == "off":
            return None
        from otel_train.profiler.endpoint import Capturing

        with self._setting_up:
            if self.capturing is None:
                capturing = Capturing(
                    self._config, opened.info, training=self.account,
                    rank_folder=Path(opened.run_directory) / f"rank{opened.info.rank}",
                    ooms=self._client.recording.devices.ooms, requests=self.account
                )  # fmt: skip
                # `count_flops` assigns `flops` and then reads `capturing`, so one of the two calls `give_way_to`.
                self.capturing = capturing
                if self.flops is not None:
                    capturing.give_way_to(self.flops)
        return self.capturing

    def set_up_now(self) -> Capturing | None:
        """Does what ``set_up`` does, and requests the state of the loop if the agent does not send it continuously."""
        capturing = self.set_up()
        if capturing is not None and not self.follows:
            with self._accounted():
                pass
        return capturing

    def count_flops(self) -> None:
        """Makes the FLOP count of one step, unless there is one."""
        if self.flops is None:
            from otel_train.profiler.flops import FlopCount

            self.flops = FlopCount(
                self.account,
                event=self._client.recording.values.event,
                max_s=self._config.tuned().profiler_max_s,
                shared=self._config.tensor_parallel * self._config.pipeline_parallel > 1,
            )
            if self.capturing is not None:
                self.capturing.give_way_to(self.flops)

    # -- the service thread ------------------------------------------------------------------------

    def poll(self, *, asked: bool) -> None:
        """Runs one iteration. ``asked``: a capture was requested."""
        client = self._client
        guards = client.components.guards
        if self.flops is not None and not guards["flops"].closed:
            with guards["flops"], client.turn():
                self.flops.poll(free=not self.recording)
        if guards["captures"].closed:
            if self.recording:  # it would not end before the run
                self.stop()
            return
        with guards["captures"]:
            capturing = self.set_up_now() if asked else self.capturing
            if capturing is not None:
                with client.turn():
                    if client.components.signal.received:
                        client.components.signal.received = 0
                        capturing.ask_by_signal()
                    # Before a step is captured, so that the agent waits for a report.
                    if capturing.controller.wanted or self.account.request is not None:
                        client.recording.recorder.changed()
                    capturing.poll()

    def stop(self) -> None:
        """Ends a running capture and a running FLOP count."""
        if self.flops is not None:
            self.flops.stop(STOP_S)
        if self.capturing is not None:
            self.capturing.stop()

    def end(self, timeout_s: float) -> None:
        """Writes the last capture, after recording has ended."""
        if self.capturing is None:
            return
        if self.recording:
            self._client.ask("close_run", timeout_s=timeout_s)
        with self._client.turn(timeout_s / 2) as is_free:
            if is_free:
                self.capturing.end(timeout_s / 2)
            else:
                _log.warning(
                    "captures: the thread that runs them has not finished in %g s at the end; the last capture may be "
                    "missing; exit_timeout_s sets how long the end waits",
                    timeout_s / 2,
                )

    @contextmanager
    def _accounted(self) -> Iterator[None]:
        """Has the agent account all events and update the state of the loop; no other thread reports until the block ends."""
        client = self._client
        with client.turn():
            client.report(fresh=True)
            loop = client.ask("account")
            if loop is not None:
                self.account.loop = loop
            try:
                yield
            finally:  # a capture may have begun
                client.recording.recorder.changed()


class _RemoteAccount:
    """Implements ``profiler.controller.TrainingState`` and ``profiler.endpoint.Requests`` by messages to the agent.

    Attributes:
        loop: state of the training loop, as received last.
        request: content of the request file in the folder of the rank; None without a file.
    """

    def __init__(self, client: AgentClient, anchor: Anchor) -> None:
        self.loop = LoopState()
        self.request: object = None
        self._anchor = anchor
        self._client = client

    def thread(self) -> ProfiledThread:
        from otel_train.profiler.step_schedule import ProfiledThread

        recorder = self._client.recording.recorder
        ring = {ring.slot: ring for ring in list(recorder.threads)}.get(self.loop.ring, recorder.main)
        return ProfiledThread(ring.ident, recorder.sources, ring.ring.intercept)

    def number(self, at_ns: int) -> int:
        answer = self._client.ask("number", at_ns)
        return self.loop.step if answer is None else int(answer)

    def epoch(self, at_ns: int) -> int:
        answer = self._client.ask("epoch", at_ns)
        return self.loop.epoch if answer is None else int(answer)

    def unix_ns(self, clock_ns: int) -> int:
        return self._anchor.renewed(system_clock()).unix(clock_ns)

    def over(self, capture: Capture) -> None:
        self._client.ask("captured", capture)

    def active(self, *, active: bool) -> None:
        self._client.tell("active", active)

    def waiting(self) -> object:
        return self.request

    def done(self) -> None:
        self.request = None
        self._client.tell("request_done")

    def pass_on(self, ranks: Sequence[int], request: dict[str, Any]) -> str:
        refusal: str | None = self._client.ask("pass_on", ranks, request)
        return "the agent did not answer; ask again" if refusal is None else refusal
