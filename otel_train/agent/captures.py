"""Captures and the FLOP count of a rank: the profiler runs in the training process, step accounting in the agent."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from otel_train.agent.messages import CAPTURES_OFF
from otel_train.agent.reports import has_automatic_captures
from otel_train.datamodel import Anchor, Capture, system_clock
from otel_train.recording.events import LoopState
from otel_train.safety import Guard

if TYPE_CHECKING:
    from otel_train.agent.client import AgentClient
    from otel_train.config.settings import Config
    from otel_train.profiler.endpoint import Capturing, EpochCaptures, NoEpochCaptures
    from otel_train.profiler.flops import FlopCount
    from otel_train.profiler.step_schedule import ProfiledThread

STOP_S = 1.0
"""A session that another thread closes waits so long for the training thread to end the count of a step."""


class RankCaptures:
    """Creates the capture components on first use and runs them on the service thread.

    Attributes:
        account: what the agent knows of the loop.
        capturing: profiler captures, once they can be made.
        flops: counts one step, where that is asked for.
    """

    def __init__(self, client: AgentClient, config: Config, anchor: Anchor) -> None:
        self.account = _RemoteAccount(client, anchor)
        self.capturing: Capturing | None = None
        self.flops: FlopCount | None = None
        self._client = client
        self._config = config
        self._setting_up, self._flops_guard = threading.Lock(), Guard("flops")

    # -- what is reported of them ------------------------------------------------------------------

    @property
    def follows(self) -> bool:
        """Whether a capture depends on the state of the loop, or the FLOP of a step are still to be counted."""
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
        """When the last capture, or count, began and ended; (0, 0) for none."""
        return max(each.within_ns if each is not None else (0, 0) for each in (self.capturing, self.flops))

    @property
    def recording(self) -> bool:
        """Whether a capture is recorded now."""
        return self.capturing is not None and self.capturing.controller.recording

    # -- what the session and the agent ask --------------------------------------------------------

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
        if not self.follows or self.account.loop.rule is None:  # what is known may be old
            with self._accounted():
                pass
        refusal = capturing.ask(request)
        self._client.recording.recorder.changed()
        return refusal

    # -- setting up --------------------------------------------------------------------------------

    def set_up(self) -> Capturing | None:
        """Returns what captures; None where there can be none."""
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
                self.capturing = capturing  # first: see count_flops
                if self.flops is not None:
                    capturing.give_way_to(self.flops)
        return self.capturing

    def set_up_now(self) -> Capturing | None:
        """Does what ``set_up`` does with the current state of the loop, which the agent does not send continuously."""
        capturing = self.set_up()
        if capturing is not None and not self.follows:
            with self._accounted():
                pass
        return capturing

    def count_flops(self) -> None:
        """Counts the FLOP of one step, unless that is done already."""
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
        if self.flops is not None:
            with self._flops_guard, client.turn():
                self.flops.poll(free=not self.recording)
        with Guard("captures"):
            capturing = self.set_up_now() if asked else self.capturing
            if capturing is not None:
                with client.turn():
                    if client.components.signal.received:
                        client.components.signal.received = 0
                        capturing.ask_by_signal()
                    # Before a step is captured.
                    if capturing.controller.wanted or self.account.request is not None:
                        client.recording.recorder.changed()
                    capturing.poll()

    def stop(self) -> None:
        """Ends what is recorded and counted now."""
        if self.flops is not None:
            self.flops.stop(STOP_S)
        if self.capturing is not None:
            self.capturing.stop()

    def end(self, timeout_s: float) -> None:
        """Writes what was recorded. Nothing is recorded any more."""
        if self.capturing is None:
            return
        if self.recording:
            self._client.ask("close_run", timeout_s=timeout_s)
        with self._client.turn():
            self.capturing.controller.end(timeout_s / 2)

    @contextmanager
    def _accounted(self) -> Iterator[None]:
        """Has all events accounted, and lets the service thread make no report until the block ends."""
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
        loop: how it goes, as the agent said last.
        request: what was left in the folder of the rank.
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

    def pass_on(self, rank: int, request: dict[str, Any]) -> str:
        refusal: str | None = self._client.ask("pass_on", rank, request)
        return "the agent did not answer; ask again" if refusal is None else refusal
