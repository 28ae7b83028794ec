"""Everything by which a capture can be wanted, brought to one desk."""

from __future__ import annotations

import hmac
import json
import logging
import os
import secrets
import signal
import threading
from typing import TYPE_CHECKING, Any, Protocol

from otel_train.errors import ConfigError
from otel_train.files import replace_text
from otel_train.profiler import requests
from otel_train.profiler.requests import NEXT, CaptureRequest

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from otel_train.profiler.controller import CaptureController, Loop
    from otel_train.profiler.triggers import Schedule, SlowSteps

_log = logging.getLogger("otel_train")

KEY_FILE = "capture-token"
MARGIN_S, MARGIN_STEPS = 8.0, 10
"""How far ahead a step is that all ranks can still agree on: a turn of each one's pump, and its delay."""


TOO_EARLY = (
    "the pace of the run is not known yet, so no step can be named for several ranks: ask a little later"
)


class Requests(Protocol):
    """Where requests are left for a rank, and the token that opens HTTP."""

    @property
    def where(self) -> str:
        """Where the token is found, for people."""

    def publish(self, token: str) -> None:
        """Write the token down for who may read our files."""

    def withdraw(self) -> None:
        """Take it away."""

    def waiting(self) -> object:
        """The request that waits, or text that says why it cannot be read; None for none."""

    def done(self) -> None:
        """It has been dealt with."""

    def pass_on(self, rank: int, request: dict[str, Any]) -> str:
        """Leave a request with another rank of this run; why that is not possible."""


class RequestFolder:
    """The folder of a rank as the place where requests are left.

    Args:
        folder: of the rank; None where there is no run directory.
    """

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder

    @property
    def where(self) -> str:
        """See ``Requests``, as for what follows."""
        return str(self._folder / KEY_FILE) if self._folder else "OTEL_TRAIN_CAPTURE_TOKEN"

    def publish(self, token: str) -> None:
        """See there."""
        if self._folder is not None:
            handle = os.open(self._folder / KEY_FILE, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
            with os.fdopen(handle, "w") as file:
                file.write(token + "\n")

    def withdraw(self) -> None:
        """See there."""
        if self._folder is not None:
            (self._folder / KEY_FILE).unlink(missing_ok=True)

    def waiting(self) -> object:
        """See there."""
        if self._folder is None:
            return None
        try:
            with (self._folder / requests.REQUEST_FILE).open("rb") as file:
                return json.loads(file.read(1 << 16))
        except FileNotFoundError:
            return None
        except (OSError, ValueError, RecursionError) as error:
            return f"{self._folder / requests.REQUEST_FILE}: {error}"

    def done(self) -> None:
        """See there."""
        if self._folder is not None:
            (self._folder / requests.REQUEST_FILE).unlink(missing_ok=True)

    def pass_on(self, rank: int, request: dict[str, Any]) -> str:
        """See there."""
        if self._folder is None:
            return "without a run directory only the rank that is asked can be captured"
        folder = self._folder.parent / f"rank{rank}"
        if not folder.is_dir():
            return f"rank {rank} has no folder in {folder.parent}"
        leave(folder, request)
        return ""


class CaptureEndpoint:
    """Listens for requests: the program's, a file's, HTTP's, a signal's, the schedule's, slow steps', alerts'.

    Args:
        desk: takes them.
        plan: what is recorded where a request says nothing.
        rank: this process.
        requests: where others are left.
        loop: looks at the loop.
        token: opens HTTP; made when empty.
    """

    def __init__(
        self,
        desk: CaptureController,
        plan: CaptureRequest,
        rank: int,
        requests: Requests,
        *,
        loop: Callable[[], Loop],
        token: str,
    ) -> None:
        self.schedule: Schedule | None = None
        self.slow: SlowSteps | None = None
        self.slow_steps: Callable[[], int] = lambda: 0
        self._desk = desk
        self._plan = plan
        self._rank = rank
        self._requests = requests
        self._loop = loop
        self._token = token or secrets.token_urlsafe(24)
        self._signalled = False
        self._before: Any = None

    def open(self) -> None:
        """Write the token down for who may read our files, and listen for SIGUSR2 if nobody else does."""
        self._requests.publish(self._token)
        main = threading.current_thread() is threading.main_thread()
        if main and hasattr(signal, "SIGUSR2") and signal.getsignal(signal.SIGUSR2) is signal.SIG_DFL:
            self._before = signal.SIG_DFL
            signal.signal(signal.SIGUSR2, self._on_signal)

    def close(self) -> None:
        """Listen no more."""
        ours = self._before is not None and signal.getsignal(signal.SIGUSR2) == self._on_signal
        if ours and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGUSR2, self._before)
        self._requests.withdraw()

    def turn(self) -> None:
        """Look for requests, then let the desk work. Driven by the pump."""
        loop = self._loop()
        if self._signalled:
            self._signalled = False
            self._desk.ask(self._plan._replace(trigger="signal", reason="SIGUSR2"))
        self._take_file(loop)
        if self.schedule is not None:
            self.schedule.look(loop, lambda plan: self._desk.ask(plan, patient=True))
        if self.slow is not None:
            self.slow.look(loop.step, self.slow_steps(), lambda plan: self._desk.ask(plan, patient=False))
        self._desk.turn(loop)

    def ask(self, document: dict[str, Any]) -> str:
        """The program asks. "" if it will be, else why not.

        Raises:
            ConfigError: something in the request cannot be honoured.
        """
        return self._desk.ask(self.read(document))

    def ask_by_alert(self, name: str) -> str:
        """An alert of this name fires about this rank. "" if a capture will be made, else why not."""
        return self._desk.ask(self._plan._replace(trigger="alert", alert=name, reason=name), patient=False)

    def read(self, document: dict[str, Any]) -> CaptureRequest:
        """What a request of the program wants.

        Raises:
            ConfigError: something in it cannot be honoured.
        """
        return requests.read(document, self._plan).plan

    def post(self, body: bytes, token: str) -> tuple[int, dict[str, Any]]:
        """``POST /capture``.

        Args:
            body: JSON; empty for a capture with the settings' values.
            token: what the client brought.

        Returns:
            The HTTP status, and the answer.
        """
        if not hmac.compare_digest(token.encode(), self._token.encode()):
            where = self._requests.where
            return 401, {"error": f"the token is wrong or missing: 'Authorization: Bearer ...', see {where}"}
        try:
            document = json.loads(body) if body.strip() else {}
            wanted = requests.read(document, self._plan)
        except (ValueError, RecursionError, ConfigError) as error:
            return 400, {"error": str(error)[:500]}
        return self._arm(wanted, self._loop())

    def _arm(self, wanted: requests.ParsedRequest, loop: Loop) -> tuple[int, dict[str, Any]]:
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
            refusal = self._desk.ask(plan)
            if refusal:
                return 409, {"error": refusal}
        return 202, {
            "armed": True,
            "at_step": plan.at_step if plan.at_step != NEXT else "next",
            "steps": plan.steps,
        }

    def _pass_on(self, rank: int, plan: CaptureRequest) -> str:
        """Leave a request with another rank of this run; why that is not possible."""
        request = {
            "steps": plan.steps, "warmup": plan.warmup, "at_step": plan.at_step, "reason": plan.reason,
            "pinned": plan.pinned, **plan.options._asdict(),
        }  # fmt: skip
        return self._requests.pass_on(rank, request)

    def _take_file(self, loop: Loop) -> None:
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
        """SIGUSR2 has come."""
        self._signalled = True

    def _on_signal(self, number: int, frame: object) -> None:
        del number, frame
        self.signalled()


def _common_step(plan: CaptureRequest, loop: Loop) -> int:
    ahead = int(MARGIN_S * 1e9 / loop.median_ns) if loop.median_ns else 0
    return loop.step + plan.warmup + max(MARGIN_STEPS, ahead)


def leave(folder: Path, request: dict[str, Any]) -> None:
    """Put a request into the folder of a rank, whole.

    Raises:
        OSError: it cannot be written.
    """
    replace_text(folder / requests.REQUEST_FILE, json.dumps(request))
