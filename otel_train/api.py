"""The functions that a training script calls."""

from __future__ import annotations

import errno
import logging
import os
import threading
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import cache, cached_property
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar, cast, overload

from otel_train.errors import ConfigError, kind_of, whole
from otel_train.exit_hook import ExitHook
from otel_train.instrumentation.naming import named_loaders, named_models
from otel_train.instrumentation.stages import Checkpoint, Epoch, Epochs, Stage, active_session, disabled_here
from otel_train.instrumentation.timers import Token
from otel_train.safety import (
    Handle,
    collection_deferred,
    free_in_forks,
    is_importing_main,
    is_of_signal_handler,
    sigchld_deferred,
)

if TYPE_CHECKING:
    import torch

    from otel_train.config.settings import Config, ResolvedConfig
    from otel_train.profiler.endpoint import NoEpochCaptures
    from otel_train.resource import RunInfo
    from otel_train.session import Session


class DisabledSession:
    """No-op ``Session``, for disabled telemetry.

    Args:
        config: the settings; after a failed start only those that the caller passed as ``config``, else ``disabled``.
        loaders: as for ``instrument``.
    """

    closed = False
    run_directory = None
    metrics_url = None
    last_loader_name = None
    last_batch_fetch_ms = None

    def __init__(self, config: Config | None, loaders: Any) -> None:  # Any: the user's own
        from otel_train.config.settings import Config

        self.config = config or Config(disabled=True)
        self.loaders: dict[str, Any] = {}
        self.add(loaders=loaders)

    @cached_property
    def info(self) -> RunInfo:
        """Identity of the process in the job; no run has this id."""
        from otel_train.resource import detect

        return detect(self.config)

    def add(self, model: Any = None, loaders: Any = None) -> None:  # Any: see ``instrument``
        """Adds the loaders to ``self.loaders`` by name, unwrapped; ignores the model."""
        del model
        with suppress(Exception):  # wrong arguments are ignored
            self.loaders.update({entry.name: entry.loader for entry in named_loaders(loaders)})

    def instrumentation_gaps(self) -> list[dict[str, str]]:
        """Returns none: nothing is instrumented."""
        return []

    unobserved = instrumentation_gaps

    def watch(self, iterable: Any, **_: str) -> Any:  # Any: any iterable
        """Returns ``iterable`` itself."""
        return iterable

    def _nothing(self, *_: Any, **__: Any) -> None:
        """Accepts the arguments of the method of ``Session``; does nothing."""

    log = event = end = report = track = provide = find_models = show_blocks = _nothing
    let_go_in_fork = reset_window = _nothing

    def close(self, *_: Any) -> None:  # Any: see ``Session.close``
        """Sets ``closed``."""
        self.closed = True

    __exit__ = close

    def begin(self, name: str) -> Token:
        """Times nothing."""
        return Token(name)

    def on(self, *_: Any, **__: Any) -> Handle:
        """Registers no callback."""
        return Handle()

    cache = on

    def capture(self, **_: Any) -> str:  # Any: see ``otel_train.capture``
        """Makes no capture."""
        return "otel_train is disabled"

    def epoch_captures(self) -> NoEpochCaptures:
        """Makes no capture."""
        from otel_train.profiler.endpoint import NoEpochCaptures

        return NoEpochCaptures("otel_train is disabled")

    def summary(self) -> dict[str, Any]:
        """Returns an empty summary: nothing is known."""
        return {}

    def __enter__(self) -> DisabledSession:
        return self


T = TypeVar("T")

_log = logging.getLogger("otel_train")

_starting = free_in_forks(threading.RLock())
"""Held during ``instrument()``: two threads that call it at once share one session."""

_COULD_NOT_START = "instrument() could not start: %s. Training continues without instrumentation"

_LIMIT_ERRNOS = {errno.EAGAIN, errno.EMFILE, errno.ENFILE, errno.ENOMEM}
_RAISE_LIMITS = "; raise the limit of memory (ulimit -v, ulimit -d), threads (ulimit -u, pids.max) or open files (ulimit -n) that it has met"

_sessions: list[Session] = []

when_started: list[Callable[[Session | None], None]] = []
"""Called with every session that starts, and with None for one that is switched off: see ``otel_train.autoinstrument``."""


def instrument(
    model: torch.nn.Module | Sequence[torch.nn.Module] | Mapping[str, torch.nn.Module] | None = None,
    loaders: Any = None,  # Any: one iterable, a sequence of them, or a mapping name -> iterable
    *others: NoReturn,
    config: Config | None = None,
    config_file: str | os.PathLike[str] | None = None,
    meter_provider: Any = None,  # Any: of opentelemetry-sdk
    tracer_provider: Any = None,
    **settings: Any,  # Any: the fields of Config
) -> Session:
    """Instruments a training loop. The loop does not change.

    Args:
        model: what the loop calls: a Module, a sequence or a mapping of them.
        loaders: where batches come from: one, a sequence, or a mapping name -> DataLoader or any iterable. A
            ``DataLoader``, and an object of a class with ``__iter__`` in Python, is instrumented in place; any other iterable
            comes back wrapped in ``session.loaders[name]``.
            ``Loader(loader, name=..., phase=...)`` says more about one. DataLoaders that are not given are
            found when they are iterated.
        *others: none: optimizers are found by themselves.
        config: settings as an object.
        config_file: a YAML file with settings; else ``OTEL_TRAIN_CONFIG`` names one.
        meter_provider: a ``MeterProvider`` of the SDK whose readers are to collect our metrics with the program's own.
        tracer_provider: a ``TracerProvider`` of the SDK that is to process our spans as well.
        **settings: settings by name; they win over ``config``, that over ``OTEL_TRAIN_*`` variables, those over the
            YAML file, and that over ``[tool.otel_train]`` in ``pyproject.toml``. ``wandb``, ``mlflow`` and
            ``tensorboard`` also take a run, a writer or a dict.

    Returns:
        The session. A second call while one is open extends it, and never watches anything twice; a warning names its
        settings without effect, which are all except ``console_metrics`` and objects for trackers. A session that
        does nothing where ``multiprocessing`` imports the script to make a child ready, and where this process has
        no threads or descriptors left: then a warning says so, and training continues without instrumentation.

    Raises:
        ConfigError: an argument is not what it should be; says value, rule and remedy. Not where telemetry is disabled.
            What is wrong in the environment or in a settings file is warned of once and ignored.
    """
    # torch's SIGCHLD handler raises when a DataLoader worker has died: it is called at the end of the block.
    with _starting, sigchld_deferred(), collection_deferred():
        try:
            resolved, trackers = _resolved(config, settings, config_file)
            if resolved.config.disabled or resolved.config.agent == "off":
                if not _is_extending(resolved):
                    active_session.disabled = True
                    _notify_started(None)
                return _inert(resolved.config, loaders)
            if is_importing_main():
                return _inert(resolved.config, loaders)
            _refuse(others)
            providers = {"meters": meter_provider, "tracers": tracer_provider}
            return _begun(model, loaders, resolved, trackers=trackers, providers=providers)
        except ConfigError:
            raise
        except Exception as error:  # a fault of otel_train does not reach the program
            if is_of_signal_handler(error):
                raise
            _log_no_start(error.with_traceback(None) if isinstance(error, MemoryError) else error)
            return _inert(config, loaders)


def _log_no_start(error: Exception) -> None:
    reason = str(error)
    if isinstance(error, MemoryError):
        reason = f"{reason or 'no memory is left'}{_RAISE_LIMITS}"
    elif getattr(error, "errno", None) in _LIMIT_ERRNOS or "start new thread" in reason:
        reason += _RAISE_LIMITS
    # Errors of the system have no traceback in the log: they are no faults of the code.
    logged_error = None if isinstance(error, (OSError, RuntimeError, MemoryError)) else error
    with suppress(MemoryError):
        _log.warning(_COULD_NOT_START, reason, exc_info=logged_error)


def _refuse(others: Sequence[object]) -> None:
    for other in others:
        raise ConfigError(
            f"instrument(): the third argument is {kind_of(other)}: expected a model and loaders. Optimizers are found "
            "by themselves: leave it out. Settings are given by name, such as run_name='baseline'"
        )


def _begun(
    model: Any,  # Any: see ``instrument``
    loaders: Any,
    resolved: ResolvedConfig,
    *,
    trackers: Mapping[str, Any],
    providers: Mapping[str, Any],
) -> Session:
    """Opens a session, or takes the open one, and adds models and loaders; closes a new session if that raises."""
    from otel_train.session import Session

    is_new = not _is_extending(resolved, {"console_metrics", *trackers})
    session = current()
    if session is None:
        forget_in_fork()  # else hooks of the parent process' session stay below those of this one
        named_models(model)  # wrong arguments raise before anything is set up
        named_loaders(loaders)
        _check_trackers(resolved.config, trackers)
        active_session.disabled = False
        session = Session(resolved.config, origins=resolved.origins)
        _sessions[:] = [session]
        _warn_no_effect.cache_clear()
        trackers = {**resolved.given, **trackers}
    try:
        session.add(model, loaders)
        session.track(trackers)
        if resolved.config.console_metrics not in ("", session.config.console_metrics):
            session.show_blocks(resolved.config.console_metrics)
        session.provide(**providers)
        if is_new:
            _notify_started(session)
    except BaseException as error:
        if is_new:
            session.close(ExitHook.of(error))
        raise
    return session


def _resolved(
    config: Config | None, settings: Mapping[str, Any], config_file: str | os.PathLike[str] | None
) -> tuple[ResolvedConfig, dict[str, Any]]:
    """Resolves the settings, and separates tracker objects from them. Errors are ignored if telemetry is disabled."""
    from inspect import Parameter, signature

    from otel_train.config.settings import TRACKERS, warn
    from otel_train.config.sources import resolve

    parameters = [
        name
        for name, each in signature(instrument).parameters.items()
        if each.kind not in (Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD)
    ]
    try:
        plain: Mapping[str, Any] = settings
        trackers: dict[str, Any] = {}
        if not settings.keys().isdisjoint(TRACKERS):
            from otel_train.trackers.manager import split_settings

            plain, trackers = split_settings(settings)
        resolved = resolve(
            config, plain, config_file=config_file, environ=os.environ, parameters=parameters
        )  # fmt: skip
        if any(getattr(resolved.config, name) == "on" for name in TRACKERS):
            from otel_train.trackers.manager import without_unusable

            resolved = without_unusable(resolved)
    except ConfigError:
        if not settings.get("disabled", getattr(config, "disabled", False) or disabled_here()):
            raise
        return resolve(settings={"disabled": True}, environ={}), {}
    warn(resolved.origins.ignored, resolved.origins.deprecated)
    return resolved, trackers


def _is_extending(resolved: ResolvedConfig, applied: Container[str] = ()) -> bool:
    """Returns whether a session is open; logs which settings of this call have no effect on it, all but ``applied``."""
    from otel_train.config.settings import CODE

    session = current()
    if session is None:
        return False
    ignored = [
        name
        for name, origin in resolved.origins.items()
        if origin == CODE
        and name not in applied
        and getattr(resolved.config, name) != getattr(session.config, name)
    ]
    if ignored:
        _warn_no_effect(", ".join(sorted(ignored)))
    return True


@cache
def _warn_no_effect(names: str) -> None:
    _log.warning(
        "instrument(): a session is open; it keeps its settings, and those of this call have no effect (%s). "
        "Set them in the first call, or close the session before",
        names,
    )


def _check_trackers(config: Config, given: Mapping[str, Any]) -> None:
    from otel_train.config.settings import TRACKERS

    if any(getattr(config, name) == "on" for name in TRACKERS):
        from otel_train.trackers.manager import check_requested

        check_requested(config, given)


def _inert(config: Config | None, loaders: Any) -> Session:  # Any: the user's own
    return cast("Session", DisabledSession(config, loaders))  # it has the public members of Session


def _notify_started(session: Session | None) -> None:
    for notify in when_started:
        notify(session)


def current() -> Session | None:
    """Returns the open session of this process, if there is one. A forked child has none."""
    session = next(iter(_sessions), None)  # one step: another thread may begin a session
    return session if session is not None and not session.closed and session.info.pid == os.getpid() else None


def forget_in_fork() -> None:
    """Drops the parent's session in a forked child; it continues in the parent."""
    for session in _sessions:
        session.let_go_in_fork()
    _sessions.clear()


def stage(name: str) -> Stage:
    """Returns a user-defined stage, as a with-block or a decorator; see ``Stage``."""
    return Stage(name)


def begin(name: str) -> Token:
    """Begins to time an operation; ``end(token)`` ends it, in whatever order and thread.

    Unlike a stage it belongs to no step and takes no time from one: it may overlap others, and stages.

    Args:
        name: label of the metrics. Use few names: each is a series.

    Returns:
        The token of this one run of it.

    Raises:
        ConfigError: it is not a name.
    """
    timers = active_session.timers
    return Token(name) if timers is None else timers.begin(name)


def end(token: Token) -> None:
    """Ends the operation that ``begin`` started. A token that has ended, or is of another session, is logged and ignored.

    Raises:
        ConfigError: it is not a token.
    """
    timers = active_session.timers
    if timers is not None:
        timers.end(token)


def checkpoint() -> Checkpoint:
    """Returns a block in which a checkpoint is saved: timed apart from the steps."""
    return Checkpoint()


def step(*, start: int | None = None) -> None:
    """Marks the end of a step; with ``start``, only sets the number of the next step.

    In a run with marked steps, only the marks count as steps.

    Raises:
        ConfigError: ``start`` is not a whole number from 0 on.
    """
    recorder = active_session.stages
    if recorder is not None:
        if start is not None:
            start = whole("step(start={})", start, "Pass the number that the next step has, or leave it out")
        recorder.mark(start)


@overload
def epoch(of: int | None = None) -> Epoch: ...
@overload
def epoch(of: Iterable[T]) -> Epochs[T]: ...
def epoch(of: Any = None) -> Epoch | Epochs[Any]:  # Any: see the overloads
    """Marks epochs: as a with-block, around an iterable, or by a call at the start of each.

    Where epochs are marked they are counted by the marks and by nothing else; without marks an epoch is a pass of
    the training loader. One ends when the next begins, at the end of its block, or at ``end()`` of what this
    returns. A block that raises is not counted as an epoch.

    Args:
        of: number of the epoch that begins here, as metrics show it; None to continue counting, from 1; or
            what the loop iterates, one item per epoch.

    Raises:
        ConfigError: it is neither.
    """
    if of is None:
        return Epoch()
    # Text is iterable, and a tensor of one number has ``__iter__``; neither is a sequence of epochs.
    if hasattr(of, "__iter__") and not isinstance(of, (str, bytes)) and getattr(of, "ndim", None) != 0:
        return Epochs(of)
    if active_session.off():
        return Epoch()
    remedy = "Leave it out to have epochs counted"
    return Epoch(whole("epoch({})", of, remedy, other=", or something to go over"))


def watch(iterable: Any, *, name: str = "watched", phase: str = "") -> Any:  # Any: any iterable
    """Returns ``iterable``, with the time to get each item recorded as stage ``data``.

    Args:
        iterable: anything a loop can go over.
        name: label of the loader in metrics.
        phase: ``train``, ``eval``, ``test`` or ``predict``; "" to find out.

    Raises:
        ConfigError: it cannot be iterated, or name or phase is none.
    """
    if active_session.stages is None and active_session.wanted is not None:
        active_session.wanted()
    session = current()
    return iterable if session is None else session.watch(iterable, name=name, phase=phase)


def log(
    values: Mapping[str, Any] | None = None, /, **named: Any
) -> None:  # Any: numbers, or tensors of one element
    """Hands over values: ``log(loss=loss, lr=rate)`` or ``log({"train/loss": loss})``.

    Tensors are read later; nothing waits for the device.

    Raises:
        ConfigError: a value has no name.
    """
    session = current()
    if session is not None:
        session.log(values, **named)


def event(
    name: str, attributes: Mapping[str, Any] | None = None, **named: Any
) -> None:  # Any: text, numbers, truth values; else their text
    """Records an event with attributes: ``event("curriculum", stage=2)`` or ``event("curriculum", {"data.stage": 2})``.

    Raises:
        ConfigError: ``name`` or the name of an attribute is not a name.
    """
    session = current()
    if session is not None:
        session.event(name, attributes, **named)


def capture(**request: Any) -> str:  # Any: see below
    """Captures the next steps with ``torch.profiler``: ``capture(steps=5)``.

    Args:
        **request: any of ``steps``, ``warmup``, ``wait``, ``at_step``, ``activities``, ``record_shapes``,
            ``with_stack``, ``profile_memory``, ``with_flops``, ``reason``, ``pinned``; else the settings hold.

    Returns:
        "" if it will be made, else why not: one is under way, or captures are off.

    Raises:
        ConfigError: something in the request cannot be honoured.
    """
    session = current()
    return "no session is open" if session is None else session.capture(**request)


def summary() -> dict[str, Any]:
    """Returns the summary up to now; empty without a session."""
    session = current()
    return {} if session is None else session.summary()


def reset_window() -> None:
    """Lets ``summary()`` start from now."""
    session = current()
    if session is not None:
        session.reset_window()
