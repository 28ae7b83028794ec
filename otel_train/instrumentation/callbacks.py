"""Calls functions of the program before and after stages."""

from __future__ import annotations

import logging
import re
from _thread import get_ident
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from otel_train.errors import ConfigError, near, text, wrong_argument
from otel_train.fast_classes import FastNamedTuple
from otel_train.instrumentation.stages import known_stages
from otel_train.recording.events import (
    CLOSURE_BITS,
    OP_MASK,
    SOURCE_MASK,
    SOURCE_SHIFT,
    STAGE_OF_KIND,
    START_BITS,
    Op,
    SourceKind,
)
from otel_train.safety import Guard, Handle

if TYPE_CHECKING:
    from otel_train.recording.events import Instrumented
    from otel_train.recording.recorder import Recorder
    from otel_train.recording.ring_buffer import EdgeBatch, Ring

DEEPEST = 64
"""Most nested stages that are tracked per thread."""

MOST_SUSPENDED = 4096
"""Most suspended calls that are tracked per thread; beyond that the oldest counts as a new call when it runs again."""

STAGES = tuple(dict.fromkeys(stage for kind, stage in STAGE_OF_KIND.items() if kind is not SourceKind.MARK))
"""Built-in stages."""

_WORD = "h2d|[a-z]+"
_LEAST_SIMILARITY = 0.85
"""Least similarity, up to 1, of a name to a built-in stage that counts as a misspelling."""

_log = logging.getLogger("otel_train")

_BACKWARD = frozenset({SourceKind.BACKWARD, SourceKind.GRAD})
_STAYS_IN_BACKWARD = _BACKWARD | {SourceKind.FORWARD, SourceKind.H2D}


class _Callback(FastNamedTuple):
    before: Callable[[], object] | None
    after: Callable[[], object] | None
    guard: Guard


class _Open(FastNamedTuple):
    number: int  # of the source
    source: Instrumented
    called: bool  # its callbacks are called
    closure: bool = False  # an optimizer step that was given a closure


class StageCallbacks:
    """Callbacks by stage and thread. A thread without callbacks has no overhead."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._threads: list[_ThreadCallbacks] = []
        self._stages: dict[str, None] = {}
        recorder.when_silenced.append(self.end)

    def add(
        self, stage: str, before: Callable[[], object] | None, after: Callable[[], object] | None
    ) -> Handle:
        """Calls these around every run of ``stage`` on the calling thread.

        Raises:
            ConfigError: there is no callable, or the stage is misspelt.
        """
        self._check(stage)
        given = [each for each in (before, after) if each is not None]
        if not given or not all(map(callable, given)):
            raise ConfigError(
                f"on({stage!r}, before={before!r}, after={after!r}): expected a callable for one of them, or both. "
                "Write on('forward', before=my_function)"
            )
        thread = self._of_calling_thread()
        hook = _Callback(before, after, Guard(f"a function given to on({stage!r})"))
        self._stages[stage] = None
        thread.add(stage, hook)
        return Handle(lambda: thread.remove(stage, hook))

    def _check(self, stage: str) -> None:
        remedy = "Write on('forward', before=my_function)"
        name = text("on({})", stage, remedy)
        # A user-defined stage may be created later, so only a misspelt built-in stage is refused.
        plain = name.strip().lower()
        own = name in known_stages or any(source.stage == name for source in self._recorder.sources)
        words = re.findall(_WORD, plain)
        own |= plain not in STAGES and not set(STAGES).isdisjoint(words)  # "forward_teacher"
        close = "" if own or name in STAGES else near(plain, STAGES, cutoff=_LEAST_SIMILARITY)
        if close:
            rule = f"{', '.join(STAGES)}, or a user-defined stage"
            raise wrong_argument(f"on({name!r})", rule, f"Did you mean {close!r}?")

    @property
    def faults(self) -> int:
        """Number of calls that raised."""
        return sum(thread.faults for thread in list(self._threads))

    def log_absent(self) -> None:
        """Logs the user-defined stages that have callbacks and did not run: the name may be misspelt."""
        present = {source.stage for source in self._recorder.sources if source.kind is not SourceKind.MARK}
        listed = ", ".join([*filter(present.__contains__, STAGES), *sorted(present.difference(STAGES))])
        for stage in self._stages:
            if stage not in present and stage not in STAGES:
                _log.warning(
                    "on(%r): no such stage ran; its functions were not called. Stages: %s", stage, listed
                )

    def end(self) -> None:
        """Removes all callbacks."""
        for thread in self._threads:
            thread.over = True

    def _of_calling_thread(self) -> _ThreadCallbacks:
        thread = self._recorder.calling_thread()
        ring = self._recorder.main.ring if thread is None else thread.ring
        known = next((each for each in self._threads if each.ring is ring), None)
        if known is None:
            known = _ThreadCallbacks(ring, self._recorder.sources)
            self._threads.append(known)
        return known


class _ThreadCallbacks:
    """Intercepts the events of one thread and calls its callbacks."""

    def __init__(self, ring: Ring, sources: Sequence[Instrumented]) -> None:
        self.ring = ring
        self.over = False
        self.faults = 0
        self._sources = sources
        self._hooks: dict[str, tuple[_Callback, ...]] = {}
        self._open: list[_Open] = []
        self._suspended: dict[int, bool] = {}  # ``_Open.called`` by event word without its op
        self._busy = False
        self._failed = False
        self._asked_by_loop: set[int] = set()
        self._asked_by_closures: set[int] = set()
        self._backward_seen = False

    def add(self, stage: str, hook: _Callback) -> None:
        is_attached = bool(self._hooks)
        self._hooks[stage] = (*self._hooks.get(stage, ()), hook)
        if not is_attached:
            self._open.clear()
            self._suspended.clear()
            self.ring.intercept_first(self._on_edge)

    def remove(self, stage: str, hook: _Callback) -> None:
        left = tuple(each for each in self._hooks.get(stage, ()) if each is not hook)
        if left:
            self._hooks[stage] = left
        else:
            self._hooks.pop(stage, None)
        if get_ident() == self.ring.owner:
            self._detach()

    def _detach(self) -> None:
        """Detaches from the ring buffer. Called on its owner only: a removal on another thread takes effect at the next event."""
        if not self._hooks and not self.over:
            self.ring.intercept_first(None)

    def _on_edge(self, code: int, write: Callable[[int], None]) -> None:
        op, number = code & OP_MASK, code >> SOURCE_SHIFT & SOURCE_MASK
        if self.over:
            return
        if self._busy or op > Op.SUSPEND or code & START_BITS:
            write(code)
        elif op < Op.END:
            self._call_after(self._raised(number))
            self._failed = False
            source, resumed = self._sources[number], self._suspended.pop(code ^ op, None)
            is_new = resumed is None
            called = source.stage in self._hooks and self._is_own_run(source) if is_new else resumed
            if len(self._open) < DEEPEST:
                self._open.append(_Open(number, source, bool(called), bool(code & CLOSURE_BITS)))
            if called and is_new:
                self._call(source.stage, before=True)
            write(code)
        else:
            ended = self._suspends(number, code ^ op) if op == Op.SUSPEND else self._ends(number)
            self._failed = op == Op.FAIL
            write(code)
            self._call_after(ended)
        if not self._hooks:
            self._detach()

    def _is_own_run(self, source: Instrumented) -> bool:
        """Returns whether a stage that begins counts as a run of its own, not as part of an open one."""
        kind, inside = source.kind, {each.source.kind for each in self._open}
        self._backward_seen |= kind is SourceKind.BACKWARD
        return (
            not (kind in _STAYS_IN_BACKWARD and inside & _BACKWARD)
            and not (kind is SourceKind.H2D and SourceKind.DATA in inside)
            and not (kind is SourceKind.GRAD and self._backward_seen)
            and all(each.source.stage != source.stage for each in self._open)
        )

    def _ends(self, number: int) -> list[str]:
        """Ends a stage, and stages inside it that an exception left open; returns those with callbacks to call."""
        if not any(each.number == number for each in self._open):
            return []
        ended: list[str] = []
        while True:
            last = self._open.pop()
            ended += [last.source.stage] if last.called else []
            if last.number == number:
                return ended

    def _suspends(self, number: int, key: int) -> list[str]:
        """Suspends a call, and ends stages inside it that are open; returns those with callbacks to call."""
        called = next((each.called for each in reversed(self._open) if each.number == number), False)
        ended = self._ends(number)
        if len(self._suspended) >= MOST_SUSPENDED:
            del self._suspended[next(iter(self._suspended))]
        self._suspended[key] = called
        return ended[:-1] if called else ended

    def _raised(self, number: int) -> list[str]:
        """Ends an optimizer step that raised, at the next batch request; returns the stages with callbacks to call.

        torch calls no hook when ``step`` raises. A closure may request batches too, of a loader that the loop does not iterate.
        ``accounting.nesting.Lookahead`` also looks at later events, which are not known here.
        """
        if self._sources[number].kind is not SourceKind.DATA:
            return []
        optimizers = [each for each in self._open if each.source.kind is SourceKind.OPTIMIZER]
        loop, closures = self._asked_by_loop, self._asked_by_closures
        failed = self._failed and bool(optimizers) and optimizers[-1] is self._open[-1]
        known = number in loop or (bool(loop) and number not in closures)
        ended: list[str] = []
        if optimizers and (known or failed or not optimizers[-1].closure):
            ended, optimizers = self._ends(optimizers[0].number), []
        (closures if optimizers else loop).add(number)
        return ended

    def _call_after(self, stages: Sequence[str]) -> None:
        for stage in stages:
            self._call(stage, before=False)

    def _call(self, stage: str, *, before: bool) -> None:
        hooks = self._hooks.get(stage, ())
        self._busy = True
        try:
            for hook in hooks if before else reversed(hooks):
                call = hook.before if before else hook.after
                if call is not None and not hook.guard.closed:
                    known = hook.guard.faults
                    with hook.guard:
                        call()
                    self.faults += hook.guard.faults - known
        finally:
            self._busy = False


_NS_PER_MS = 1e6
_NUMPY_FROM = 512
"""Number of events from which numpy is faster than Python."""


class LastBatch:
    """Loader and fetch time of a thread's last batch, read from its ring on demand; each event is read once."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._ring: Ring | None = None
        self._begin(None)

    def _begin(self, ring: Ring | None) -> None:
        self._ring = ring
        self._read_until = 0
        self._open: dict[int, int] = {}
        self._source = -1
        self._fetch_ns: int | None = None

    @property
    def loader(self) -> str | None:
        """Name of the loader; None if the calling thread has fetched no batch."""
        self._read_ring()
        return self._recorder.sources[self._source].name if self._source >= 0 else None

    @property
    def fetch_ms(self) -> float | None:
        """Milliseconds that the calling thread waited for the batch; None if that is not known."""
        self._read_ring()
        return self._fetch_ns / _NS_PER_MS if self._fetch_ns is not None else None

    def _read_ring(self) -> None:
        thread = self._recorder.calling_thread()
        ring = thread.ring if thread is not None else None
        if ring is not self._ring:
            self._begin(ring)
        if ring is None or ring.written == self._read_until:
            return
        new = ring.peek(self._read_until)
        self._read_until += new.missed + len(new.codes)
        if new.missed:
            self._open.clear()
        sources = self._recorder.sources
        for word, at_ns in zip(*self._loader_events(new), strict=True):
            op, source = word & OP_MASK, word >> SOURCE_SHIFT & SOURCE_MASK
            if sources[source].kind is not SourceKind.DATA or word & START_BITS:
                continue
            if op == Op.BEGIN:
                self._open[source] = at_ns
                continue
            begun_ns = self._open.pop(source, None)
            if op == Op.END:
                self._source = source
                self._fetch_ns = at_ns - begun_ns if begun_ns is not None else None

    def _loader_events(self, new: EdgeBatch) -> tuple[list[int], list[int]]:
        """Returns codes and times of ``new``; if these are many, of the events of loaders only."""
        codes, times = new.codes, new.times
        if len(codes) > _NUMPY_FROM:
            data = [n for n, source in enumerate(self._recorder.sources) if source.kind is SourceKind.DATA]
            mine = np.isin(codes >> SOURCE_SHIFT & SOURCE_MASK, data)
            codes, times = codes[mine], times[mine]
        return codes.tolist(), times.tolist()
