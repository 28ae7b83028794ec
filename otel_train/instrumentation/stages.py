"""Stages, steps, epochs and checkpoints marked by the program."""

from __future__ import annotations

import functools
import inspect
import itertools
import os
import sys
import types
from collections.abc import AsyncIterator, Awaitable, Callable, Generator, Iterable, Iterator
from typing import TYPE_CHECKING, Any, Generic, Literal, NoReturn, TypeVar

from otel_train.config.validation import switch_of, variable_of
from otel_train.errors import ConfigError, callable_, shown, text
from otel_train.recording.events import (
    MAX_PAYLOAD,
    MAX_SOURCES,
    SOURCE_SHIFT,
    Op,
    SourceKind,
    begin_end_fail,
    code,
)

if TYPE_CHECKING:
    from otel_train.instrumentation.timers import Timers
    from otel_train.recording.recorder import Recorder

    Function = TypeVar("Function", bound=Callable[..., Any])


class StageRecorder:
    """Event codes of a session's manual stages.

    Args:
        before_function: called before the first call of a timed function, which may load a compiler.
    """

    def __init__(self, recorder: Recorder, before_function: Callable[[], None] = lambda: None) -> None:
        self.edge = recorder.edge
        self.codes: dict[str, tuple[int, int, int]] = {}
        self.functions: dict[tuple[SourceKind, str], tuple[int, int, int]] = {}
        self._before_function = before_function
        self._recorder = recorder
        self._tokens = itertools.count(1)
        self._mark = recorder.source(SourceKind.MARK, "step")
        self._epoch = recorder.source(SourceKind.MARK, "epoch")
        self._epochs = 0
        self._epoch_token = 0
        self.reports = 0
        self._report = recorder.source(SourceKind.MARK, "report")
        self.checkpoint = begin_end_fail(recorder.source(SourceKind.CHECKPOINT, "checkpoint"))

    def register(self, name: str) -> tuple[int, int, int]:
        """Registers a stage name; returns (begin, end, fail)."""
        # Transfers inside a manual h2d stage are not counted again.
        kind = SourceKind.H2D if name == "h2d" else SourceKind.STAGE
        codes = begin_end_fail(self._recorder.source(kind, name))
        if len(self.codes) < MAX_SOURCES:  # further names share a source
            self.codes[name] = codes
        return codes

    def register_function(self, kind: SourceKind, name: str) -> tuple[int, int, int]:
        """Registers a timed function; returns (begin, end, fail)."""
        self._before_function()
        codes = begin_end_fail(self._recorder.source(kind, name))
        if len(self.functions) < MAX_SOURCES:
            self.functions[kind, name] = codes
        return codes

    def mark(self, start: int | None = None) -> None:
        """Ends a step; the next one is number ``start`` if given."""
        self.edge(code(Op.MARK, self._mark, payload=0 if start is None else start + 1))

    def begin_epoch(self, number: int | None) -> int:
        """Begins an epoch; returns the argument of ``end_epoch``."""
        self._epochs = self._epochs + 1 if number is None else number
        self.edge(code(Op.EPOCH, self._epoch, payload=self._epochs))
        self._epoch_token += 1
        return self._epoch_token

    def end_epoch(self, token: int, *, failed: bool) -> None:
        """Ends the epoch with this token unless it has ended."""
        if token == self._epoch_token:
            self._epoch_token += 1
            self.edge(code(Op.EPOCH_END, self._epoch, payload=int(failed)))

    def report(self) -> None:
        """Requests that periodic values are logged now."""
        number = self.reports + 1
        self.edge(code(Op.REPORT, self._report, payload=number))
        self.reports = number
        self._recorder.changed()

    def token(self) -> int:
        """Returns a number for one suspendable call."""
        return next(self._tokens) & MAX_PAYLOAD


def disabled_here() -> bool:
    """Returns whether the environment disables telemetry."""
    return bool(switch_of(os.environ.get(variable_of("disabled"), "")))


class ActiveSession:
    """The session that the public functions use, if any.

    Attributes:
        disabled: the program has disabled telemetry; None before it has started a session.
        wanted: called when a session is needed and none is open; None if none starts automatically.
    """

    __slots__ = ("disabled", "stages", "timers", "wanted")

    def __init__(self) -> None:
        self.stages: StageRecorder | None = None
        self.timers: Timers | None = None
        self.wanted: Callable[[], None] | None = None
        self.disabled: bool | None = None

    def off(self) -> bool:
        """Returns whether telemetry is disabled. Then arguments are not checked."""
        return disabled_here() if self.disabled is None else self.disabled


active_session = ActiveSession()

_NO_FAULT = (None, GeneratorExit)
"""Exception types with which a block has not failed: ``break`` raises GeneratorExit inside a generator."""

MOST_KNOWN = 4096

known_stages: set[str] = set()
"""The first ``MOST_KNOWN`` names of user-defined stages that were checked."""


def stage_name(call: str, name: object) -> str:
    """Returns a stage name after a check. ``call``: the call that the program made, with ``{}`` for the name.

    Raises:
        ConfigError: it is no name, and telemetry is not disabled.
    """
    if active_session.off():
        return name if isinstance(name, str) else shown(name)
    checked = text(call, name, f"Name the stage: {call.replace('{}', repr('augment'))}")
    if len(known_stages) < MOST_KNOWN:
        known_stages.add(checked)
    return checked


class Stage:
    """A user-defined stage: ``with stage("augment"):`` or ``@stage("augment")``.

    Works on functions, methods, generators, coroutines and async generators; suspended time is not counted. Does nothing
    without a session.

    Args:
        name: its name in metrics. Use few names: each is a series.

    Raises:
        ConfigError: it is no name.
    """

    __slots__ = ("name",)

    def __init__(self, name: str) -> None:
        try:
            known = name in known_stages
        except TypeError:  # the name cannot be hashed
            known = False
        self.name = name if known else stage_name("stage({})", name)

    def __enter__(self) -> Stage:
        recorder = active_session.stages
        if recorder is not None:
            recorder.edge((recorder.codes.get(self.name) or recorder.register(self.name))[0])
        return self

    def __exit__(
        self, kind: type[BaseException] | None, _value: object = None, _traceback: object = None
    ) -> Literal[False]:
        recorder = active_session.stages
        if recorder is not None:
            codes = recorder.codes.get(self.name) or recorder.register(self.name)
            recorder.edge(codes[1 if kind in _NO_FAULT else 2])
        return False

    def __call__(self, function: Function) -> Function:
        """Decorates ``function``; its signature, name and kind do not change.

        Raises:
            ConfigError: it is no function.
        """
        if not active_session.off():
            remedy = "Write @stage(...) above a def, below @classmethod and @property"
            callable_(f"stage({self.name!r})({{}})", function, "a function", remedy)
        if inspect.isasyncgenfunction(function):
            wrapper: Any = self._async_generator(function)
        elif inspect.iscoroutinefunction(function):
            wrapper = self._coroutine(function)
        elif inspect.isgeneratorfunction(function):
            wrapper = self._generator(function)
        else:
            wrapper = self._function(function)
        return functools.wraps(function)(wrapper)  # type: ignore[return-value]  # same signature

    def _function(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            with self:
                return function(*args, **kwargs)

        return call

    def _generator(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            return (yield from _run_suspendable(function(*args, **kwargs), _Suspendable(self.name)))

        return call

    def _coroutine(self, function: Callable[..., Any]) -> Callable[..., Any]:
        async def call(*args: Any, **kwargs: Any) -> Any:
            return await _await_suspendable(function(*args, **kwargs), _Suspendable(self.name))

        return call

    def _async_generator(self, function: Callable[..., Any]) -> Callable[..., Any]:
        async def call(*args: Any, **kwargs: Any) -> AsyncIterator[Any]:
            inner = function(*args, **kwargs)
            occurrence = _Suspendable(self.name)
            try:
                step, leaves = inner.__anext__(), None
                while True:
                    try:
                        item = await _await_suspendable(step, occurrence, last=False, leaves=leaves)
                    except StopAsyncIteration:
                        return
                    leaves = None
                    try:
                        sent = yield item
                    except GeneratorExit:
                        await _await_suspendable(inner.aclose(), occurrence)
                        raise
                    except BaseException as error:  # handed to the user's generator
                        step, leaves = inner.athrow(error), error if _is_cancelled(error) else None
                    else:
                        step = inner.asend(sent)
            finally:
                await inner.aclose()

        return call


class _Suspendable:
    """Events of one call that may be suspended."""

    __slots__ = ("_recorder", "_source", "_token")

    def __init__(self, name: str) -> None:
        self._recorder = active_session.stages
        if self._recorder is not None:
            codes = self._recorder.codes.get(name) or self._recorder.register(name)
            self._source = codes[0] >> SOURCE_SHIFT
            self._token = self._recorder.token()

    def write(self, op: Op) -> None:
        if self._recorder is not None and self._recorder is active_session.stages:
            self._recorder.edge(code(op, self._source, payload=self._token))


def _is_cancelled(error: BaseException) -> bool:
    """Returns whether the task that closes an async generator is cancelled: at its end ``asyncio.run`` cancels all tasks."""
    return isinstance(error, getattr(sys.modules.get("asyncio"), "CancelledError", ()))


def _run_suspendable(
    inner: Generator[Any, Any, Any],
    occurrence: _Suspendable,
    *,
    last: bool = True,
    leaves: BaseException | None = None,
) -> Generator[Any, Any, Any]:
    """Runs a generator, or a coroutine's ``send``/``throw`` side, unchanged, with an event at each suspension.

    ``last``: its end is the end of the call. An async generator has one inner run per item. ``leaves``: an exception with
    which the call ends and has not failed.
    """
    step: Callable[[Any], Any] = inner.send
    value: Any = None
    while True:
        occurrence.write(Op.RESUME)
        try:
            item = step(value)
        except (StopIteration, StopAsyncIteration) as stop:
            occurrence.write(Op.END if last or isinstance(stop, StopAsyncIteration) else Op.SUSPEND)
            if isinstance(stop, StopAsyncIteration):
                raise
            return stop.value
        except BaseException as error:
            occurrence.write(Op.END if error is leaves else Op.FAIL)
            raise
        occurrence.write(Op.SUSPEND)
        try:
            value = yield item
            step = inner.send
        except GeneratorExit:
            inner.close()
            occurrence.write(Op.RESUME)
            occurrence.write(Op.END)
            raise
        except BaseException as error:  # handed to the user's generator
            step, value = inner.throw, error


@types.coroutine
def _await_suspendable(
    awaitable: Awaitable[Any],
    occurrence: _Suspendable,
    *,
    last: bool = True,
    leaves: BaseException | None = None,
) -> Generator[Any, Any, Any]:
    inner: Any = awaitable if hasattr(awaitable, "send") else awaitable.__await__()
    return (yield from _run_suspendable(inner, occurrence, last=last, leaves=leaves))


class Checkpoint:
    """A block that saves a checkpoint: ``with checkpoint():``. Does nothing without a session."""

    __slots__ = ()

    def __enter__(self) -> Checkpoint:
        recorder = active_session.stages
        if recorder is not None:
            recorder.edge(recorder.checkpoint[0])
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> Literal[False]:
        recorder = active_session.stages
        if recorder is not None:
            recorder.edge(recorder.checkpoint[1 if kind in _NO_FAULT else 2])
        return False


T = TypeVar("T")


class Epoch:
    """A user-defined epoch; it begins here.

    It ends when the next one begins, at the end of a with-block, or at ``end()``. Does nothing without a session.

    Args:
        number: its number in metrics; None for the next one, from 1.
    """

    __slots__ = ("_epoch_token", "_recorder")

    def __init__(self, number: int | None = None) -> None:
        self._recorder = active_session.stages
        self._epoch_token = 0 if self._recorder is None else self._recorder.begin_epoch(number)

    def end(self) -> None:
        """Ends the epoch. A second call does nothing."""
        self._close(failed=False)

    def __iter__(self) -> NoReturn:
        """Refuses to be iterated: ``epoch(3)`` marks the epoch with the number 3.

        Raises:
            ConfigError: always.
        """
        raise ConfigError(
            "epoch(N): marks one epoch, not a range of epochs. Write 'for n in epoch(range(N))'"
        )

    def __enter__(self) -> Epoch:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> Literal[False]:
        self._close(failed=kind not in _NO_FAULT)
        return False

    def _close(self, *, failed: bool) -> None:
        if self._recorder is not None and self._recorder is active_session.stages:
            self._recorder.end_epoch(self._epoch_token, failed=failed)


class Epochs(Generic[T]):
    """Iterates over items, one epoch per item."""

    def __init__(self, items: Iterable[T]) -> None:
        self._items = items

    def __iter__(self) -> Iterator[T]:
        epoch = None
        for item in self._items:
            epoch = Epoch()
            yield item
        if epoch is not None:
            epoch.end()

    def __len__(self) -> int:
        return len(self._items)  # type: ignore[arg-type]  # a TypeError of its own where it has none
