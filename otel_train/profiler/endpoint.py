"""Collects capture requests from all sources and passes them to the controller; makes those by schedule and of slow steps."""

from __future__ import annotations

import json
import logging
from collections import deque
from typing import TYPE_CHECKING, Any, Protocol

from otel_train.datamodel import NS_PER_S
from otel_train.errors import ConfigError
from otel_train.profiler import requests
from otel_train.profiler.requests import NEXT, CaptureRequest

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from otel_train.config.settings import ProfilerEvery
    from otel_train.datamodel import Clock
    from otel_train.profiler.controller import CaptureController, LoopState

_log = logging.getLogger("otel_train")

MARGIN_S, MARGIN_STEPS = 8.0, 10
"""How far ahead a step must be for all ranks to agree on it: one poll of each rank's service thread, and its delay."""


TOO_EARLY = (
    "the pace of the run is not known yet, so no step can be named for several ranks: ask a little later"
)


class Requests(Protocol):
    """Access to the request files of a rank."""

    def waiting(self) -> object:
        """Returns the waiting request, or text that says why it cannot be read; None if there is none."""

    def done(self) -> None:
        """Removes the waiting request."""

    def pass_on(self, rank: int, request: dict[str, Any]) -> str:
        """Leaves a request for another rank of this run; returns the reason if that is not possible."""


SLOW_STEPS = 3
"""Slow steps among ``SLOW_AMONG`` that trigger a capture."""

SLOW_AMONG = 200


class Schedule:
    """Requests captures when they are due, none before step ``skip_first``, ``most`` in all; 0 for any number."""

    def __init__(
        self, every: ProfilerEvery, plan: CaptureRequest, clock: Clock, *, skip_first: int = 0, most: int = 0
    ) -> None:
        self._every = every
        self._plan = plan
        self._clock = clock
        self._skip_first = skip_first
        self._most = most
        self._made = 0
        self._from_step = max(1, skip_first)
        self._epoch = 0
        self._left = set(every.epoch)
        self._minutes_ns = clock()

    def request_if_due(self, loop: LoopState, ask: Callable[[CaptureRequest], str]) -> None:
        """Requests a capture if one is due."""
        every = self._every
        if self._most and self._made >= self._most:
            return
        self._give_up_on(sorted(epoch for epoch in self._left if epoch < loop.epoch))
        if every.steps:
            self._request_ahead(loop, ask)
        if loop.step < self._skip_first:
            return
        if loop.epoch != self._epoch and self._is_due(loop.epoch):
            self._ask(ask, f"epoch {loop.epoch}")
            self._epoch = loop.epoch
            self._left.discard(loop.epoch)
        elif every.minutes and self._clock() - self._minutes_ns >= every.minutes * 60 * NS_PER_S:
            self._ask(ask, f"every {every.minutes:g} minutes")
            self._minutes_ns = self._clock()

    def _is_due(self, epoch: int) -> bool:
        epochs = self._every.epochs
        return epoch in self._every.epoch or bool(epochs and (epoch - 1) % epochs == 0)

    def _give_up_on(self, passed: Sequence[int]) -> None:
        """Warns of epochs that ended before a capture could be requested."""
        self._left.difference_update(passed)
        for epoch in passed:
            _log.warning(
                "No capture of epoch %d: it was over before step %d (skip_first of profiler_schedule) or before a poll"
                " (poll_interval_s of tuning)", epoch, self._skip_first,
            )  # fmt: skip

    def _request_ahead(self, loop: LoopState, ask: Callable[[CaptureRequest], str]) -> None:
        plan = self._plan._replace(at_step=self._next(loop.step), reason=f"every {self._every.steps} steps")
        # A request far ahead would block others.
        if loop.near(plan) and not ask(plan):
            self._made += 1
            self._from_step = plan.at_step + 1

    def _ask(self, ask: Callable[[CaptureRequest], str], reason: str) -> None:
        if not ask(self._plan._replace(reason=reason)):
            self._made += 1

    def _next(self, step: int) -> int:
        """The next multiple not yet requested: a number that every rank computes by itself."""
        least = max(step + self._plan.warmup + 1, self._from_step)
        return -(-least // self._every.steps) * self._every.steps


class SlowSteps:
    """Requests a capture when steps have become slow."""

    def __init__(self, plan: CaptureRequest, slow_steps: Callable[[], int]) -> None:
        self._plan = plan
        self._slow_steps = slow_steps
        self._seen: deque[tuple[int, int]] = deque()

    def request_if_due(self, loop: LoopState, ask: Callable[[CaptureRequest], str]) -> None:
        """Requests a capture if enough of the last steps were slow."""
        step, slow = loop.step, self._slow_steps()
        # A fast loop makes more steps than that between two calls, so the last call always counts.
        while len(self._seen) > 1 and self._seen[1][0] <= step - SLOW_AMONG:
            self._seen.popleft()
        since, before = self._seen[0] if self._seen else (step, slow)
        enough = slow - before >= SLOW_STEPS
        if enough and (slow - before) * SLOW_AMONG >= SLOW_STEPS * (step - since):
            reason = f"{slow - before} of the last {step - since} steps were slow"
            if not ask(self._plan._replace(reason=reason)):
                self._seen.clear()
        self._seen.append((step, slow))


class CaptureEndpoint:
    """Takes requests from the program, a file, HTTP, a signal, the schedule, slow steps and alerts; ``plan`` has defaults."""

    def __init__(
        self,
        controller: CaptureController,
        plan: CaptureRequest,
        rank: int,
        requests: Requests,
        *,
        loop: Callable[[], LoopState],
    ) -> None:
        self.triggers: list[Schedule | SlowSteps] = []  # make requests by themselves
        self.controller = controller
        self.loop = loop
        self._plan = plan
        self._rank = rank
        self._requests = requests
        self._signalled = False

    def poll(self) -> None:
        """Takes waiting requests, then runs the controller. Runs on the service thread."""
        loop = self.loop()
        if self._signalled:
            self._signalled = False
            self.controller.ask(self._plan._replace(trigger="signal", reason="SIGUSR2"))
        self._take_file(loop)
        for trigger in self.triggers:
            trigger.request_if_due(loop, self.controller.ask)
        self.controller.poll(loop)

    def ask(self, document: dict[str, Any]) -> str:
        """Queues a request of the program. Returns "", or the reason if it is refused; a ConfigError if it is invalid."""
        return self.controller.ask(self.read(document))

    def ask_by_alert(self, name: str) -> str:
        """Queues a capture for a firing alert. Returns "", or the reason if it is refused."""
        return self.controller.ask(self._plan._replace(trigger="alert", alert=name, reason=name))

    def read(self, document: dict[str, Any]) -> CaptureRequest:
        """Parses a request of the program; a ConfigError if it is invalid."""
        return requests.read(document, self._plan)[0]

    def post(self, body: bytes) -> tuple[int, dict[str, Any]]:
        """``POST /capture`` of JSON, or of nothing for a capture as set, with the token: the HTTP status, and the answer."""
        try:
            return self._arm(json.loads(body) if body.strip() else {}, self.loop())
        except (ValueError, RecursionError, ConfigError) as error:
            return 400, {"error": str(error)[:500]}

    def _arm(self, document: object, loop: LoopState) -> tuple[int, dict[str, Any]]:
        (plan, ranks), rank = requests.read(document, self._plan), self._rank
        others = [each for each in ranks or () if each != rank]
        if others and plan.at_step == NEXT:
            if not loop.median_ns:
                return 409, {"error": TOO_EARLY}
            plan = plan._replace(at_step=_common_step(plan, loop))
        request = {
            "steps": plan.steps, "warmup": plan.warmup, "at_step": plan.at_step, "reason": plan.reason,
            "pinned": plan.pinned, **plan.options._asdict(),
        }  # fmt: skip
        for other in others:
            problem = self._requests.pass_on(other, request)
            if problem:
                return 409, {"error": problem}
        if ranks is None or rank in ranks:
            refusal = self.controller.ask(plan)
            if refusal:
                return 409, {"error": refusal}
        at_step = plan.at_step if plan.at_step != NEXT else "next"
        return 202, {"armed": True, "at_step": at_step, "steps": plan.steps}

    def _take_file(self, loop: LoopState) -> None:
        document = self._requests.waiting()
        if document is None:
            return
        try:
            refusal = str(self._arm(document, loop)[1].get("error", ""))
        except (ConfigError, OSError) as error:
            refusal = str(error)
        if refusal == TOO_EARLY:
            return  # it lies there until it can be done
        self._requests.done()
        if refusal:
            _log.warning("%s: %s", requests.REQUEST_FILE, document if isinstance(document, str) else refusal)

    def signalled(self) -> None:
        """Records that SIGUSR2 was received."""
        self._signalled = True


def _common_step(plan: CaptureRequest, loop: LoopState) -> int:
    ahead = int(MARGIN_S * NS_PER_S / loop.median_ns)
    return loop.step + plan.warmup + max(MARGIN_STEPS, ahead)
