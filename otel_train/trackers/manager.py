"""Opens trackers in the training process, where the program's runs are, and queues rows for them."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from importlib import import_module
from importlib.util import find_spec
from inspect import Parameter, signature
from operator import attrgetter
from typing import TYPE_CHECKING, Any

from otel_train.config.settings import CODE, DEFAULTS, Config, ResolvedConfig, in_force
from otel_train.config.validation import TRACKER_CHOICES, IgnoredSetting, switch_of, words_of
from otel_train.errors import ConfigError, by_name, near, one_of, shown, wrong_argument
from otel_train.exporters.background_queue import BackgroundQueue
from otel_train.trackers import OpeningTracker, Tracker, mlflow, tensorboard, wandb

if TYPE_CHECKING:
    from pathlib import Path

    from otel_train.trackers.metrics import FlatRow

TRACKERS = {kind.setting: kind for kind in (wandb.KIND, mlflow.KIND, tensorboard.KIND)}
"""Every tracker, by its setting. A new one needs a module with a ``KIND``, an entry here, and a setting."""


FLAT_BLOCKS = frozenset({"profiling", "throughput"})
"""Console blocks built from rows for trackers; the block ``profiler`` is printed after a capture instead."""


def split_settings(settings: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Separates runs, writers and dicts given for trackers from other settings; raises ConfigError for other objects."""
    plain, given = dict(settings), {}
    for name in TRACKERS:
        value = plain.get(name, True)
        if not isinstance(value, bool) and not _is_choice(value):
            given[name], plain[name] = _checked(name, value), "on"
    return plain, given


def without_unusable(resolved: ResolvedConfig) -> ResolvedConfig:
    """Resets trackers that the environment or a file requests and that are not installed, or have wrong arguments."""
    config, origins, given, ignored = resolved.config, resolved.origins, dict(resolved.given), []
    for name in TRACKERS:
        if origins.get(name, CODE) == CODE or getattr(config, name) != "on":
            continue
        try:
            check_installed(name)
            _checked(name, given.get(name, {}))
        except ConfigError as error:
            problem = str(error)
        except Exception as error:  # noqa: BLE001 - its import may raise anything
            problem = (
                f"{name}='on': {name} cannot be imported: {type(error).__name__}: {error}. Install it again"
            )
        else:
            continue
        ignored.append(IgnoredSetting(name, origins.pop(name), problem))
        given.pop(name, None)
        config = replace(config, **{name: DEFAULTS[name]})
    origins.ignored += in_force(ignored, config)
    return ResolvedConfig(config, origins, given)


def _is_choice(value: object) -> bool:
    return isinstance(value, str) and (value in TRACKER_CHOICES or switch_of(value) is not None)


def _checked(name: str, value: Any) -> Any:  # Any: a run, a writer, a dict
    """Returns ``value``, a run, writer or dict for a tracker; raises ConfigError if it is none, or for an unknown key."""
    if isinstance(value, dict):
        for key in value:
            known = _keys_of(name)
            if known:
                one_of(f"{name}={shown(value)}: key {{}}", key, known)
        return value
    with suppress(AttributeError):
        attrgetter(TRACKERS[name].attribute)(value)
        return value
    remedy = "Leave it out for the default, 'auto'"
    if isinstance(value, (str, os.PathLike)):
        close, key = near(str(value).lower(), TRACKER_CHOICES), TRACKERS[name].named_by
        named = f"If that is the {key}, write {name}={ {key: str(value)} }"
        remedy = f"Did you mean {close!r}?" if close else named
    rule = f"'auto', True, False, {TRACKERS[name].expected}, or a dict"
    raise wrong_argument(f"{name}={shown(value)}", rule, remedy)


def _keys_of(name: str) -> tuple[str, ...]:
    """Returns the allowed keys of the dict of a tracker; empty if all are allowed or the package is not imported yet."""
    if TRACKERS[name].keys:
        return TRACKERS[name].keys
    init = getattr(sys.modules.get(name), "init", None)
    parameters = signature(init).parameters.values() if callable(init) else ()
    anything = any(each.kind is Parameter.VAR_KEYWORD for each in parameters)
    return () if anything else tuple(each.name for each in parameters)


class Trackers:
    """The trackers of rank 0, each with a queue and a thread.

    ``folder`` is the run directory; for ``thread`` and ``before_finish`` see ``OpeningTracker``. The packages of requested
    trackers have been imported by ``check_installed``.

    Attributes:
        state: how the run ended; set before ``close``.
    """

    def __init__(
        self, config: Config, folder: Path | None, *, thread: int, before_finish: Callable[[], object]
    ) -> None:
        self.state = "finished"
        self._before_finish = before_finish
        self._config = config
        self._folder = folder
        self._awake = False
        self._thread = thread
        self._queues: dict[str, TrackerQueue] = {}
        self._replaced: list[TrackerQueue] = []  # they write the rows that they have
        self._blocks: set[str] = set()
        for name in TRACKERS:
            self._open(name, None)
        self.show(words_of(config.console_metrics))

    def attach(self, given: Mapping[str, Any]) -> None:
        """Logs to these runs or writers, or to runs opened with these arguments. Called on the training thread."""
        by_name("track({})", given, "runs and writers by name", 'Write track({"wandb": run})')
        for name, value in given.items():
            one_of("track({})", name, TRACKERS)
            self._open(name, _checked(name, value))

    def show(self, blocks: Iterable[str]) -> None:
        """Prints these console blocks as well. Called on the training thread."""
        self._blocks |= FLAT_BLOCKS.intersection(blocks)
        if self._blocks and "console_metrics" not in self._queues:
            self._queues["console_metrics"] = TrackerQueue(ConsoleTracker(self._blocks))

    @property
    def any(self) -> bool:
        """Whether there is a tracker that may have a run."""
        return bool(self._queues)

    def listened(self) -> bool:
        """Returns whether there is, or has been, a tracker to log to."""
        # A list, so that each is called: that of W&B also hooks into the program's run.
        wanted = [queue.tracker.wanted() for queue in list(self._queues.values())]
        self._awake = self._awake or any(wanted)
        return self._awake

    def put(self, rows: Iterable[FlatRow]) -> None:
        """Queues rows for each tracker that has a run now. Never waits."""
        new = list(rows)
        for queue in list(self._queues.values()) if new else ():
            place = queue.tracker.place() if queue.tracker.wanted() else None
            if place is not None:
                for row in new:
                    queue.hand((row, place))

    def emptied(self, timeout_s: float) -> bool:
        """Waits until all queued rows are written, at most ``timeout_s`` seconds. Returns whether they are."""
        deadline = time.monotonic() + timeout_s
        return all(queue.emptied(deadline - time.monotonic()) for queue in self._all_queues())

    def faults(self) -> int:
        """Sums the faults of all trackers; a dropped row counts as a fault."""
        return sum(queue.guard.faults + queue.dropped for queue in self._all_queues())

    def close(self, timeout_s: float) -> None:
        """Waits until all queued rows are written and the trackers closed, at most ``timeout_s`` seconds in all."""
        deadline = time.monotonic() + timeout_s
        queues = self._all_queues()
        for queue in queues:
            queue.end()
        for queue in queues:
            queue.close(deadline - time.monotonic())

    def _open(self, name: str, given: Any) -> None:  # Any: a run, a writer, a dict
        choice = getattr(self._config, name)
        if choice == "off" and given is None:
            return
        if given is None and choice == "on":
            given = {}
        is_dict = isinstance(given, dict)
        opening = OpeningTracker(
            run=None if is_dict else given, settings=dict(given) if is_dict else None,
            folder=self._folder and self._folder / name, thread=self._thread,
            end_state=lambda: self.state, before_finish=self._before_finish,
        )  # fmt: skip
        if name in self._queues:
            self._queues[name].end()
            self._replaced.append(self._queues[name])
        self._queues[name] = TrackerQueue(TRACKERS[name].make(opening))

    def _all_queues(self) -> list[TrackerQueue]:
        return [*self._replaced, *list(self._queues.values())]


def check_requested(config: Config, given: Mapping[str, Any]) -> None:
    """Imports the packages of requested trackers, except where a run or writer of the program is given; see ``check_installed``."""
    for name in TRACKERS:
        if getattr(config, name) == "on" and isinstance(given.get(name, {}), dict):
            check_installed(name)


def check_installed(name: str) -> None:
    """Imports the package of a requested tracker; raises ConfigError if it is not installed."""
    if find_spec(name) is None:
        raise ConfigError(
            f"{name}='on': {name} is not installed. Run: pip install 'otel-train[{name}]', or leave it out"
        )
    for module in TRACKERS[name].imports:
        import_module(module)


MOST_WAITING = 256
"""Most rows in the queue of a tracker; a row has some dozens of values."""


class TrackerQueue(BackgroundQueue["tuple[FlatRow, Any]"]):
    """Queue and thread of one tracker."""

    def __init__(self, tracker: Tracker) -> None:
        super().__init__(tracker.name, lambda item: tracker.write(*item), tracker.close, most=MOST_WAITING)
        self.tracker = tracker


# --- blocks on the console --------------------------------------------------------------------------

_PREFIX = "profiling/"


class ConsoleTracker:
    """Prints blocks of ``FLAT_BLOCKS`` on standard error."""

    name = "console blocks"

    def __init__(self, blocks: Container[str]) -> None:
        self._blocks = blocks

    def wanted(self) -> bool:
        """Returns whether the process has a standard error stream."""
        return sys.stderr is not None

    def place(self) -> bool:
        """Returns True: there is only one console."""
        return True

    def write(self, row: FlatRow, _: object) -> None:
        """Prints the block of a row in one write."""
        block, lines = ("throughput", _throughput) if row.of_epoch else ("profiling", _profiling)
        if block in self._blocks:
            sys.stderr.write("".join(f"{line}\n" for line in lines(row)))
            sys.stderr.flush()

    def close(self) -> None:
        """Does nothing: nothing was opened."""


def _profiling(row: FlatRow) -> Iterator[str]:
    yield f"--- Profiling Metrics (Step {row.step}) ---"
    for key, average in row.values.items():
        if key.startswith(_PREFIX) and key.endswith("_avg_time"):
            name = key.removeprefix(_PREFIX).removesuffix("_avg_time")
            total = row.values[f"{_PREFIX}{name}_total_time"]
            count = int(row.values[f"{_PREFIX}{name}_count"])
            yield f"{name}: avg={average:.4f}s, total={total:.2f}s, count={count}"


def _throughput(row: FlatRow) -> Iterator[str]:
    values = row.values
    yield f"[Throughput] Epoch {row.epoch}:"
    yield from _line(
        values, "", {"samples_per_second": "samples/s", "batches_per_second": "batches/s"}, "{:.1f} {}"
    )
    for what in ("load", "transform"):
        key = f"batch_{what}_time_ms"
        yield from _line(
            values, f"batch {what}: ", {f"{key}_avg": "ms", f"{key}_p95": "ms (p95)"}, "{:.2f} {}"
        )
    memories = {f"memory_{what}_mb": f"MB {what}" for what in ("dataset", "cache", "peak")}
    yield from _line(values, "memory: ", memories, "{:.1f} {}")
    yield from _line(values, "efficiency: ", {"throughput_efficiency": ""}, "{:.1%}{}")


def _line(values: Mapping[str, float], head: str, names: Mapping[str, str], form: str) -> Iterator[str]:
    """Yields one line with the values that ``names`` has units for; no line if all are missing."""
    parts = [form.format(values[key], unit) for key, unit in names.items() if key in values]
    if parts:
        yield f"  {head}{', '.join(parts)}"
