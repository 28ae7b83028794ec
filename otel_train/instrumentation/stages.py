"""Stages, steps, epochs and checkpoints that the program marks itself."""

from __future__ import annotations

import functools
import inspect
import itertools
import os
import types
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from otel_train.config.validation import PREFIX, switch_of
from otel_train.errors import callable_, shown, text
from otel_train.recording.events import MAX_PAYLOAD, Op, SourceKind, code

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Generator, Iterable, Iterator
    from typing import Literal

    from otel_train.instrumentation.timers import Timers
    from otel_train.recording.recorder import Recorder

    Function = TypeVar("Function", bound=Callable[..., Any])


class StageRecorder:
    """Codes of the stages a session knows by name.

    Args:
        recorder: takes the edges.
        look: called before the first call of a function that is timed, which may be what loads a compiler.
    """

    def __init__(self, recorder: Recorder, look: Callable[[], None] = lambda: None) -> None:
        self.edge = recorder.edge
        self.codes: dict[str, tuple[int, int, int]] = {}
        self.functions: dict[tuple[SourceKind, str], tuple[int, int, int]] = {}
        self._look = look
        self._recorder = recorder
        self._tokens = itertools.count(1)
        mark = recorder.source(SourceKind.MARK, "step")
        self._mark = mark
        self._epoch = recorder.source(SourceKind.MARK, "epoch")
        self._epochs = 0
        self._turn = 0
        self.reports = 0
        self._report = recorder.source(SourceKind.MARK, "report")
        checkpoint = recorder.source(SourceKind.CHECKPOINT, "checkpoint")
        self.checkpoint = _begin_end_fail(checkpoint)

    def join(self, name: str) -> tuple[int, int, int]:
        """First use of a stage name: (begin, end, fail)."""
        # A transfer by hand is the transfer: what is moved inside it is not counted again.
        kind = SourceKind.H2D if name == "h2d" else SourceKind.STAGE
        codes = self.codes[name] = _begin_end_fail(self._recorder.source(kind, name))
        return codes

    def join_function(self, kind: SourceKind, name: str) -> tuple[int, int, int]:
        """First call of a function that is timed: (begin, end, fail)."""
        self._look()
        codes = self.functions[kind, name] = _begin_end_fail(self._recorder.source(kind, name))
        return codes

    def mark(self, start: int | None = None) -> None:
        """A step ends here; the next one is number ``start`` if given."""
        self.edge(code(Op.MARK, self._mark, payload=0 if start is None else start + 1))

    def begin_epoch(self, number: int | None) -> int:
        """An epoch begins here; what to end it with."""
        self._epochs = self._epochs + 1 if number is None else number
        self.edge(code(Op.EPOCH, self._epoch, payload=self._epochs))
        self._turn += 1
        return self._turn

    def end_epoch(self, turn: int, *, failed: bool) -> None:
        """That epoch ends here, unless it is over."""
        if turn == self._turn:
            self._turn += 1
            self.edge(code(Op.EPOCH_END, self._epoch, payload=int(failed)))

    def report(self) -> None:
        """What is logged every so often is to be logged now."""
        number = self.reports + 1
        self.edge(code(Op.REPORT, self._report, payload=number))
        self.reports = number

    def token(self) -> int:
        """A number for one occurrence that runs in pieces."""
        return next(self._tokens) & MAX_PAYLOAD


def _begin_end_fail(source: int) -> tuple[int, int, int]:
    return code(Op.BEGIN, source), code(Op.END, source), code(Op.FAIL, source)


def disabled_here() -> bool:
    """Whether the environment disables telemetry."""
    return bool(switch_of(os.environ.get(f"{PREFIX}DISABLED", "")))


class ActiveSession:
    """Which session the functions at the top of the package talk to, if any.

    Attributes:
        hand: takes stages and marks.
        timers: time operations.
        disabled: the program has asked for no telemetry; None while it has not asked for a session.
        wanted: called when one is needed and none is open; None where nothing starts one by itself.
    """

    __slots__ = ("disabled", "hand", "timers", "wanted")

    def __init__(self) -> None:
        self.hand: StageRecorder | None = None
        self.timers: Timers | None = None
        self.wanted: Callable[[], None] | None = None
        self.disabled: bool | None = None

    def off(self) -> bool:
        """Whether telemetry is disabled: then a wrong argument is left alone, as everything is."""
        return disabled_here() if self.disabled is None else self.disabled


switch = ActiveSession()

MOST_KNOWN = 4096

known_stages: set[str] = set()
"""Names of stages that the program has made, checked; the first ``MOST_KNOWN`` of them."""


def stage_name(call: str, name: object) -> str:
    """``name``, which names a stage.

    Args:
        call: the call in which it stands, with ``{}`` for the name.
        name: what was passed.

    Raises:
        ConfigError: it is no name, and telemetry is not disabled.
    """
    if switch.off():
        return name if isinstance(name, str) else shown(name)
    checked = text(call, name, f"Name the stage: {call.replace('{}', repr('augment'))}")
    if len(known_stages) < MOST_KNOWN:
        known_stages.add(checked)
    return checked


class Stage:
    """A stage of the user's own: ``with stage("augment"):`` or ``@stage("augment")``.

    Works on functions, methods, generators, coroutines and async generators; what is suspended counts only
    while it runs. Without a session it does nothing.

    Args:
        name: as it reads in every figure. Few names: each is a series.

    Raises:
        ConfigError: it is no name.
    """

    __slots__ = ("name",)

    def __init__(self, name: str) -> None:
        try:
            known = name in known_stages
        except TypeError:  # of what cannot be hashed
            known = False
        self.name = name if known else stage_name("stage({})", name)

    def __enter__(self) -> Stage:
        hand = switch.hand
        if hand is not None:
            hand.edge((hand.codes.get(self.name) or hand.join(self.name))[0])
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> Literal[False]:
        hand = switch.hand
        if hand is not None:
            hand.edge((hand.codes.get(self.name) or hand.join(self.name))[1 if kind is None else 2])
        return False

    def __call__(self, function: Function) -> Function:
        """Decorate ``function``; its signature, name and kind stay as they are.

        Raises:
            ConfigError: it is no function.
        """
        if not switch.off():
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
            return (yield from _in_pieces(function(*args, **kwargs), _Pieces(self.name)))

        return call

    def _coroutine(self, function: Callable[..., Any]) -> Callable[..., Any]:
        async def call(*args: Any, **kwargs: Any) -> Any:
            return await _await_in_pieces(function(*args, **kwargs), _Pieces(self.name))

        return call

    def _async_generator(self, function: Callable[..., Any]) -> Callable[..., Any]:
        async def call(*args: Any, **kwargs: Any) -> AsyncIterator[Any]:
            inner = function(*args, **kwargs)
            pieces = _Pieces(self.name)
            try:
                step = inner.__anext__()
                while True:
                    try:
                        item = await _await_in_pieces(step, pieces, last=False)
                    except StopAsyncIteration:
                        return
                    try:
                        sent = yield item
                    except GeneratorExit:
                        raise
                    except BaseException as error:  # noqa: BLE001  # handed to the user's generator
                        step = inner.athrow(error)
                    else:
                        step = inner.asend(sent)
            finally:
                await inner.aclose()

        return call


class _Pieces:
    """The edges of one occurrence that runs in pieces."""

    __slots__ = ("_hand", "_source_codes", "_token")

    def __init__(self, name: str) -> None:
        self._hand = switch.hand
        if self._hand is not None:
            self._source_codes = self._hand.codes.get(name) or self._hand.join(name)
            self._token = self._hand.token()

    def write(self, op: Op) -> None:
        if self._hand is not None and self._hand is switch.hand:
            source = (self._source_codes[0] & ~0xF) >> 4
            self._hand.edge(code(op, source, payload=self._token))


def _in_pieces(
    inner: Generator[Any, Any, Any], pieces: _Pieces, *, last: bool = True
) -> Generator[Any, Any, Any]:
    """Run ``inner`` as if it ran alone, with an edge at each suspension.

    Args:
        inner: a generator, or a coroutine's ``send``/``throw`` side.
        pieces: where the edges go.
        last: its end is the end of the occurrence (an async generator has one inner run per item).
    """
    step: Callable[[Any], Any] = inner.send
    value: Any = None
    while True:
        pieces.write(Op.RESUME)
        try:
            item = step(value)
        except (StopIteration, StopAsyncIteration) as stop:
            pieces.write(Op.END if last or isinstance(stop, StopAsyncIteration) else Op.SUSPEND)
            if isinstance(stop, StopAsyncIteration):
                raise
            return stop.value
        except BaseException:
            pieces.write(Op.FAIL)
            raise
        pieces.write(Op.SUSPEND)
        try:
            value = yield item
            step = inner.send
        except GeneratorExit:
            inner.close()
            pieces.write(Op.RESUME)
            pieces.write(Op.END)
            raise
        except BaseException as error:  # noqa: BLE001  # handed to the user's generator
            step, value = inner.throw, error


@types.coroutine
def _await_in_pieces(
    awaitable: Awaitable[Any], pieces: _Pieces, *, last: bool = True
) -> Generator[Any, Any, Any]:
    inner: Any = awaitable if hasattr(awaitable, "send") else awaitable.__await__()
    return (yield from _in_pieces(inner, pieces, last=last))


class Checkpoint:
    """A block in which a checkpoint is saved: ``with checkpoint():``. Without a session it does nothing."""

    __slots__ = ()

    def __enter__(self) -> Checkpoint:
        hand = switch.hand
        if hand is not None:
            hand.edge(hand.checkpoint[0])
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> Literal[False]:
        hand = switch.hand
        if hand is not None:
            hand.edge(hand.checkpoint[1 if kind is None else 2])
        return False


T = TypeVar("T")


class Epoch:
    """An epoch of the user's own: it begins here.

    It is over when the next one begins, at the end of the block where it is a with-block, or at ``end()``. Without
    a session it does nothing.

    Args:
        number: as it reads in every figure; None to go on counting, from 1.
    """

    __slots__ = ("_hand", "_turn")

    def __init__(self, number: int | None = None) -> None:
        self._hand = switch.hand
        self._turn = 0 if self._hand is None else self._hand.begin_epoch(number)

    def end(self) -> None:
        """It is over. A second call does nothing."""
        self._close(failed=False)

    def __enter__(self) -> Epoch:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> Literal[False]:
        self._close(failed=kind is not None)
        return False

    def _close(self, *, failed: bool) -> None:
        if self._hand is not None and self._hand is switch.hand:
            self._hand.end_epoch(self._turn, failed=failed)


class Epochs(Generic[T]):
    """Goes over something, one epoch an item.

    Args:
        items: what the loop would have gone over.
    """

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
