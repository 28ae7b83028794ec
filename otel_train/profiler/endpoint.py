"""Collects capture requests from all sources and passes them to the controller."""

from __future__ import annotations

import json
import logging
from typing import TYPE_CHECKING, Any, Protocol

from otel_train.errors import ConfigError
from otel_train.profiler import requests
from otel_train.profiler.requests import NEXT, CaptureRequest

if TYPE_CHECKING:
    from collections.abc import Callable

    from otel_train.profiler.controller import CaptureController, LoopState
    from otel_train.profiler.triggers import Schedule, SlowSteps

_log = logging.getLogger("otel_train")

MARGIN_S, MARGIN_STEPS = 8.0, 10
"""How far ahead a step must be for all ranks to agree on it: one turn of each rank's service thread, and its delay."""


TOO_EARLY = (
    "the pace of the run is not known yet, so no step can be named for several ranks: ask a little later"
)


class Requests(Protocol):
    """Where requests are left for a rank."""

    def waiting(self) -> object:
        """Returns the waiting request, or text that says why it cannot be read; None if there is none."""

    def done(self) -> None:
        """Removes the waiting request."""

    def pass_on(self, rank: int, request: dict[str, Any]) -> str:
        """Leaves a request for another rank of this run; returns the reason if that is not possible."""


class CaptureEndpoint:
    """Takes requests from the program, a file, HTTP, a signal, the schedule, slow steps and alerts.

    Args:
        controller: takes the requests.
        plan: defaults for requests.
        rank: rank of this process.
        requests: where requests are left.
        loop: returns the current state of the loop.
    """

    def __init__(
        self,
        controller: CaptureController,
        plan: CaptureRequest,
        rank: int,
        requests: Requests,
        *,
        loop: Callable[[], LoopState],
    ) -> None:
        self.schedule: Schedule | None = None
        self.slow: SlowSteps | None = None
        self.slow_steps: Callable[[], int] = lambda: 0
        self._controller = controller
        self._plan = plan
        self._rank = rank
        self._requests = requests
        self._loop = loop
        self._signalled = False

    def turn(self) -> None:
        """Takes waiting requests, then runs the controller. Runs on the service thread."""
        loop = self._loop()
        if self._signalled:
            self._signalled = False
            self._controller.ask(self._plan._replace(trigger="signal", reason="SIGUSR2"))
        self._take_file(loop)
        if self.schedule is not None:
            self.schedule.look(loop, lambda plan: self._controller.ask(plan, patient=True))
        if self.slow is not None:
            self.slow.look(
                loop.step, self.slow_steps(), lambda plan: self._controller.ask(plan, patient=False)
            )
        self._controller.turn(loop)

    def ask(self, document: dict[str, Any]) -> str:
        """Queues a request of the program. Returns "", or the reason if it is refused.

        Raises:
            ConfigError: the request is invalid.
        """
        return self._controller.ask(self.read(document))

    def ask_by_alert(self, name: str) -> str:
        """Queues a capture for a firing alert. Returns "", or the reason if it is refused."""
        return self._controller.ask(
            self._plan._replace(trigger="alert", alert=name, reason=name), patient=False
        )

    def read(self, document: dict[str, Any]) -> CaptureRequest:
        """Parses a request of the program.

        Raises:
            ConfigError: the request is invalid.
        """
        return requests.read(document, self._plan).plan

    def post(self, body: bytes) -> tuple[int, dict[str, Any]]:
        """``POST /capture``, from a client that has sent the token.

        Args:
            body: JSON; empty for a capture with the settings' values.

        Returns:
            The HTTP status, and the answer.
        """
        try:
            document = json.loads(body) if body.strip() else {}
            wanted = requests.read(document, self._plan)
        except (ValueError, RecursionError, ConfigError) as error:
            return 400, {"error": str(error)[:500]}
        return self._arm(wanted, self._loop())

    def _arm(self, wanted: requests.ParsedRequest, loop: LoopState) -> tuple[int, dict[str, Any]]:
        plan, rank = wanted.plan, self._rank
        others = [each for each in wanted.ranks or () if each != rank]
        if others and plan.at_step == NEXT:
            if not loop.median_ns:
                return 409, {"error": TOO_EARLY}
            plan = plan._replace(at_step=_common_step(plan, loop))
        for other in others:
            problem = self._pass_on(other, plan)
            if problem:
                return 409, {"error": problem}
        if wanted.ranks is None or rank in wanted.ranks:
            refusal = self._controller.ask(plan)
            if refusal:
                return 409, {"error": refusal}
        return 202, {
            "armed": True,
            "at_step": plan.at_step if plan.at_step != NEXT else "next",
            "steps": plan.steps,
        }

    def _pass_on(self, rank: int, plan: CaptureRequest) -> str:
        """Leaves a request for another rank; returns the reason if that is not possible."""
        request = {
            "steps": plan.steps, "warmup": plan.warmup, "at_step": plan.at_step, "reason": plan.reason,
            "pinned": plan.pinned, **plan.options._asdict(),
        }  # fmt: skip
        return self._requests.pass_on(rank, request)

    def _take_file(self, loop: LoopState) -> None:
        document = self._requests.waiting()
        if document is None:
            return
        try:
            refusal = str(self._arm(requests.read(document, self._plan), loop)[1].get("error", ""))
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
    ahead = int(MARGIN_S * 1e9 / loop.median_ns) if loop.median_ns else 0
    return loop.step + plan.warmup + max(MARGIN_STEPS, ahead)
