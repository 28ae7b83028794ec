"""Capture requests: fields, parsing, the request file, and automatic requests by a schedule or for slow steps."""

from __future__ import annotations

import json
import logging
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, NamedTuple

from otel_train.config.settings import ACTIVITIES, ProfilerEvery
from otel_train.datamodel import NS_PER_S, Clock
from otel_train.errors import ConfigError, RunDirectoryError, one_of, truth, whole
from otel_train.files import read_json, replace_text

if TYPE_CHECKING:
    from pathlib import Path

    from otel_train.recording.events import LoopState

_log = logging.getLogger("otel_train")

NEXT = -1
"""Placeholder for a step number: in a request the next step, elsewhere an unknown one."""

UNDER_WAY = "a capture is under way: one at a time"

NEAR_S = 6.0
"""Lead time, in seconds and steps, of the step scheduler before the first step: ``LoopState`` is up to 2 s old."""

NEAR_STEPS = 8


class Options(NamedTuple):
    """Options of ``torch.profiler``, under its names.

    Activities that are unavailable on this machine are left out and noted in the metadata.
    """

    activities: tuple[str, ...] = ("cpu", "cuda")
    record_shapes: bool = False
    with_stack: bool = False  # 20 to 30 % slower
    profile_memory: bool = False
    with_flops: bool = False


class CaptureRequest(NamedTuple):
    """One requested capture."""

    trigger: str  # its source, one of the catalog's ``train.profiler.trigger``
    steps: int  # to record, at least 1
    warmup: int = 1  # steps before them in which the profiler runs and its output is discarded
    wait: int = 0  # steps to skip before that
    at_step: int = NEXT  # number of the first recorded step
    options: Options = Options()
    reason: str = ""  # for readers of the metadata
    request_id: str = ""  # copied to the metadata, in which the client looks for it
    pinned: bool = False  # it is never removed by retention
    at_once: bool = False  # the training thread requests it between two steps; the next step is the first
    epoch: int = 0  # number of the epoch to capture; 0 for any
    output_dir: str = ""  # folder for an uncompressed copy ``epoch_N.json``; "" for the configured one
    alert: str = ""  # name of the alert that requested it

    @property
    def cause(self) -> str:
        """Key of the cooldown."""
        return self.alert or self.trigger

    @property
    def automatic(self) -> bool:
        """Whether neither the program nor a user requested it: it does not wait for another capture, and has a cooldown."""
        return self.trigger in ("alert", "slow_step")

    def is_near(self, loop: LoopState) -> bool:
        """Returns whether the requested steps are so near that the step scheduler should wait for them."""
        ahead = self.at_step - self.warmup - loop.step
        return ahead <= NEAR_STEPS or ahead * loop.median_ns <= NEAR_S * NS_PER_S


class Recorded(NamedTuple):
    """Result of a recording on the training thread."""

    request: CaptureRequest
    trace: Any  # argument of ``Profiler.save``; None without a trace
    steps: int  # complete ones
    begun_ns: int  # on the monotonic clock; 0 if it never began
    ended_ns: int
    problem: str = ""  # why it differs from the request
    missing: tuple[str, ...] = ()  # what this machine could not record, a sentence each
    within_ns: int = 0  # an instant in its first step; 0 if that step did no work


REQUEST_FILE = "capture-request.json"
"""Request file in the folder of a rank; read and removed by the agent."""

KEY_FILE = "capture-token"
"""In the same folder: the token of ``POST /capture``, readable for the owner only."""

MOST_STEPS = 10_000  # to record, to warm up, and to skip
MOST_REASON = 200
"""Most characters of the reason of a request, and of its id; the rest is cut off."""

_SWITCHES = Options._fields[1:]
_KNOWN = (
    "steps", "warmup", "wait", "at_step", "ranks", "activities", "reason", "request_id", "pinned", *_SWITCHES,
)  # fmt: skip


def read(document: object, defaults: CaptureRequest) -> tuple[CaptureRequest, tuple[int, ...] | None]:
    """Parses a request, an object with any of the keys ``_KNOWN``; ``defaults`` has the values of missing ones.

    The second value is the ranks to capture; None for the rank that received the request.

    Raises:
        ConfigError: a value is invalid; the message has value, rule and remedy.
    """
    if not isinstance(document, dict):
        raise ConfigError(f'capture request {document!r:.80}: expected an object, such as {{"steps": 5}}')
    for name in document:
        if name not in _KNOWN:
            one_of("capture request: {}", name, _KNOWN)
    options = defaults.options
    if "activities" in document:
        options = options._replace(activities=activities(document["activities"]))
    switches = [truth(f"{name}={{}}", document.get(name, getattr(options, name))) for name in _SWITCHES]
    request = defaults._replace(
        steps=_whole(document, "steps", defaults.steps, least=1),
        warmup=_whole(document, "warmup", defaults.warmup),
        wait=_whole(document, "wait", defaults.wait),
        at_step=_whole(document, "at_step", NEXT, least=NEXT, most=1 << 53),
        options=Options(options.activities, *switches),
        reason=str(document.get("reason", ""))[:MOST_REASON],
        request_id=str(document.get("request_id", ""))[:MOST_REASON],
        pinned=truth("pinned={}", document.get("pinned", False)),
    )
    return request, _ranks(document.get("ranks"))


def activities(names: object) -> tuple[str, ...]:
    """Parses activities from ``"cpu,cuda"`` or a list; raises ConfigError for none, or one that is unknown."""
    words = names.split(",") if isinstance(names, str) else names
    found = tuple(str(word).strip().lower() for word in words) if isinstance(words, (list, tuple)) else ()
    wrong = [name for name in found if name not in ACTIVITIES]
    if wrong or not found:
        raise ConfigError(
            f"activities={names!r:.80}: expected some of {', '.join(ACTIVITIES)}. Leave it out for cpu,cuda"
        )
    return tuple(dict.fromkeys(found))


def _whole(
    document: Mapping[str, Any], name: str, default: int, *, least: int = 0, most: int = MOST_STEPS
) -> int:
    remedy = f"Leave it out for {default}"
    return whole(f"{name}={{}}", document.get(name, default), remedy, least=least, most=most)


def _ranks(value: object) -> tuple[int, ...] | None:
    if value is None:
        return None
    given = value if isinstance(value, list) else [None]
    found = tuple(
        rank for rank in given if isinstance(rank, int) and not isinstance(rank, bool) and rank >= 0
    )
    if len(found) < len(given):
        raise ConfigError(f"ranks={value!r:.40}: expected a list of ranks, such as [0, 3]")
    return found


def leave_request(folder: Path, request: dict[str, Any]) -> None:
    """Writes a request file atomically into the folder of a rank; raises OSError if it cannot be written."""
    replace_text(folder / REQUEST_FILE, json.dumps(request))


def take_back(folder: Path, request: dict[str, Any]) -> None:
    """Removes a request file that was not read: else the next start of the run would read it."""
    with suppress(RunDirectoryError, OSError):
        if read_json(folder / REQUEST_FILE) == json.loads(json.dumps(request)):  # without tuples
            (folder / REQUEST_FILE).unlink()


SLOW_STEPS = 3
"""Slow steps among ``SLOW_AMONG`` that trigger a capture."""

SLOW_AMONG = 200


class Schedule:
    """Requests captures when they are due, none before step ``skip_first``, ``most`` in all; 0 for any number."""

    def __init__(
        self,
        every: ProfilerEvery,
        defaults: CaptureRequest,
        clock: Clock,
        *,
        skip_first: int = 0,
        most: int = 0,
    ) -> None:
        self._every = every
        self._defaults = defaults
        self._clock = clock
        self._skip_first = skip_first
        self._most = most
        self._made = 0
        self._from_step = max(1, skip_first)
        self._epoch = 0
        self._left = set(every.epoch)
        self._minutes_ns = clock()
        self._refusal = ""  # the last one that was logged

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
            if self._request(self._defaults._replace(reason=f"epoch {loop.epoch}"), ask):
                self._epoch = loop.epoch
                self._left.discard(loop.epoch)
            return
        is_due = every.minutes and self._clock() - self._minutes_ns >= every.minutes * 60 * NS_PER_S
        request = self._defaults._replace(reason=f"every {every.minutes:g} minutes")
        if is_due and self._request(request, ask):
            self._minutes_ns = self._clock()

    def _is_due(self, epoch: int) -> bool:
        epochs = self._every.epochs
        return epoch in self._every.epoch or bool(epochs and (epoch - 1) % epochs == 0)

    def _give_up_on(self, passed: Sequence[int]) -> None:
        """Warns of epochs that ended before a capture could be requested."""
        self._left.difference_update(passed)
        for epoch in passed if not self._refusal else ():
            _log.warning(
                "No capture of epoch %d: it was over before step %d (skip_first of profiler_schedule), before a poll"
                " (poll_interval_s of tuning), or while others waited to be captured", epoch, self._skip_first,
            )  # fmt: skip

    def _request_ahead(self, loop: LoopState, ask: Callable[[CaptureRequest], str]) -> None:
        request = self._defaults._replace(
            at_step=self._next(loop.step), reason=f"every {self._every.steps} steps"
        )
        # A request far ahead would block others.
        if request.is_near(loop) and self._request(request, ask):
            self._from_step = request.at_step + 1

    def _request(self, request: CaptureRequest, ask: Callable[[CaptureRequest], str]) -> bool:
        """Requests a capture; returns whether it was accepted, else it is requested again at the next poll.

        The same refusal is logged once.
        """
        refusal = ask(request)
        if refusal not in ("", UNDER_WAY, self._refusal):
            _log.warning("No capture (%s): %s", request.reason, refusal)
            self._refusal = refusal
        self._made += not refusal
        return not refusal

    def _next(self, step: int) -> int:
        """Returns the next multiple of ``every.steps`` not yet requested, which is the same on every rank."""
        least = max(step + self._defaults.warmup + 1, self._from_step)
        return -(-least // self._every.steps) * self._every.steps


class SlowSteps:
    """Requests a capture when ``SLOW_STEPS`` of the last ``SLOW_AMONG`` steps were slow."""

    def __init__(self, defaults: CaptureRequest) -> None:
        self._defaults = defaults
        self._seen: deque[tuple[int, int]] = deque()

    def request_if_due(self, loop: LoopState, ask: Callable[[CaptureRequest], str]) -> None:
        """Requests a capture if enough of the last steps were slow."""
        step, slow = loop.step, loop.slow
        # The last call is kept: a fast loop makes more than ``SLOW_AMONG`` steps between two calls.
        while len(self._seen) > 1 and self._seen[1][0] <= step - SLOW_AMONG:
            self._seen.popleft()
        since, before = self._seen[0] if self._seen else (step, slow)
        enough = slow - before >= SLOW_STEPS
        if enough and (slow - before) * SLOW_AMONG >= SLOW_STEPS * (step - since):
            reason = f"{slow - before} of the last {step - since} steps were slow"
            if not ask(self._defaults._replace(reason=reason)):
                self._seen.clear()
        if not self._seen or self._seen[-1][0] != step:  # no step may end for days
            self._seen.append((step, slow))
