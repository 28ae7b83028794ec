"""Adapter to ``torch.profiler``."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from otel_train.safety import replace

if TYPE_CHECKING:
    from pathlib import Path

    from otel_train.profiler.requests import Options

STEP_PREFIX = "ProfilerStep#"
"""Steps are ranges with this prefix and a number, as in torch's own schedule: other tools look for it."""

YIELD_S = 10.0
"""Longest wait of another thread that starts a profiler of the program for the capture to end."""

_POLL_S = 0.01
_PREPARE = "_prepare_trace"  # of ``torch.autograd.profiler.profile``: called whenever a profiler starts
_PROFILE = "_KinetoProfile"  # torch's documented low-level interface: no schedule, no step of its own


class Profiler:
    """Records a capture; called on the training thread, except ``save``. This base class records nothing.

    If ``prepare`` or ``start`` raises, nothing of the capture is left: there is nothing to stop.
    """

    def unavailable(self) -> str:
        """Returns why nothing can be recorded in this program; "" if it can."""
        return ""

    def busy(self) -> bool:
        """Returns whether another profiler runs in this process, on any thread."""
        return False

    def prepare(self, options: Options) -> list[str]:
        """Starts the warm-up; returns a sentence for each activity that cannot be recorded."""
        del options
        return []

    def start(self) -> None:
        """Starts recording."""

    def stop(self) -> Any:
        """Stops recording; returns the trace."""

    def range(self, name: str) -> Callable[[], object]:
        """Opens a named range; returns a function that closes it."""
        del name
        return bool

    def save(self, trace: Any, path: Path) -> None:
        """Writes a trace as Chrome JSON. Called on the writer's thread."""


class TorchProfiler(Profiler):
    """Records with ``torch.profiler``.

    Two profilers at once crash the process or leave the program's without events. When the program starts one,
    ``give_way`` is called, which must end this one on the training thread.
    """

    def __init__(self, give_way: Callable[[], None]) -> None:
        self._give_way = give_way
        self._profile: Any = None
        self._owner = 0
        self._in_own_call = False
        self._undo: Callable[[], None] | None = None

    def unavailable(self) -> str:
        """See ``Profiler``."""
        if "torch" in sys.modules:
            return ""
        return (
            "torch.profiler records captures, and this program has not imported torch. "
            "jax.profiler.trace(folder) records a program of JAX"
        )

    def busy(self) -> bool:
        """See ``Profiler``."""
        import torch.autograd.profiler as torch_profiler

        return bool(getattr(torch_profiler, "_is_profiler_enabled", False))

    def prepare(self, options: Options) -> list[str]:
        """See ``Profiler``."""
        from torch import profiler

        wanted, missing = _activities(options.activities)
        self._owner = threading.get_ident()
        self._detect_other_profilers()
        try:
            self._profile = getattr(profiler, _PROFILE)(**{**options._asdict(), "activities": wanted})
            self._as_own_call(self._profile.prepare_trace)
        except BaseException:
            self._release()
            raise
        return missing

    def start(self) -> None:
        """See ``Profiler``."""
        try:
            self._as_own_call(self._profile.start_trace)
        except BaseException:
            try:
                if self.busy():  # it failed after the profiler was enabled
                    self._as_own_call(self._profile.stop_trace)
            finally:
                self._release()
            raise

    def stop(self) -> Any:
        """See ``Profiler``."""
        profile = self._profile
        try:
            self._as_own_call(profile.stop_trace)
        finally:
            self._release()
        return profile

    def range(self, name: str) -> Callable[[], object]:
        """See ``Profiler``."""
        from torch.profiler import record_function

        opened = record_function(name)
        opened.__enter__()
        return lambda: opened.__exit__(None, None, None)

    def save(self, trace: Any, path: Path) -> None:
        """See ``Profiler``."""
        trace.export_chrome_trace(str(path))

    def _as_own_call(self, do: Callable[[], None]) -> None:
        self._in_own_call = True
        try:
            do()
        finally:
            self._in_own_call = False

    def _release(self) -> None:
        """Removes the profiler and the patch."""
        self._profile = None
        undo, self._undo = self._undo, None
        if undo is not None:
            undo()

    def _detect_other_profilers(self) -> None:
        """Patches ``_prepare_trace``: a call outside of ``_as_own_call`` is by a profiler of the program."""
        import torch.autograd.profiler as torch_profiler

        def with_detection(prepare: Callable[..., None]) -> Callable[..., None]:
            def detect_and_prepare(theirs: Any) -> None:
                if not (self._in_own_call and threading.get_ident() == self._owner):
                    self._yield_profiler()
                prepare(theirs)

            return detect_and_prepare

        self._undo = replace(torch_profiler.profile, _PREPARE, with_detection)

    def _yield_profiler(self) -> None:
        on_training_thread = threading.get_ident() == self._owner
        self._give_way()
        deadline = time.monotonic() + YIELD_S
        while not on_training_thread and self._profile is not None and time.monotonic() < deadline:
            time.sleep(_POLL_S)


def _activities(names: tuple[str, ...]) -> tuple[list[Any], list[str]]:
    """Returns the activities that torch supports on this machine, and a sentence for each of the others."""
    from torch import profiler

    supported = {activity.name.lower(): activity for activity in profiler.supported_activities()}
    why = dict.fromkeys(names, "torch does not support it on this machine")
    if "cuda" in supported and not _cuda_in_use():
        del supported["cuda"]
        why["cuda"] = "this process has not initialised CUDA"
    found = [supported[name] for name in names if name in supported]
    missing = [f"no {name} activity: {why[name]}" for name in names if name not in supported]
    return found or [supported["cpu"]], missing


def _cuda_in_use() -> bool:
    """Returns whether CUDA is initialised. Does not initialise it."""
    cuda: Any = sys.modules.get("torch.cuda")
    return cuda is not None and bool(cuda.is_initialized())
