"""Context managers for the loop: bare, with hooks that record nothing, instrumented."""

from __future__ import annotations

import contextlib
import gc
import tempfile
from typing import TYPE_CHECKING, Any, cast

import torch
from torch.optim import optimizer as optimizers

from benchmarks.loop import warm_up_of
from otel_train.instrumentation.dataloader import DataLoaderPatch
from otel_train.instrumentation.loader_probe import LoaderProbe
from otel_train.instrumentation.module import ModuleProbe, no_open_forward
from otel_train.instrumentation.naming import Loader
from otel_train.instrumentation.optimizer import BackwardProbe, OptimizerProbe, ScaledUpdates
from otel_train.recording import ring_buffer

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from contextlib import AbstractContextManager
    from pathlib import Path

    import numpy as np

    from benchmarks.loop import Loop
    from otel_train.recording.recorder import Recorder
    from otel_train.session import Session

    Variant = Callable[[Loop], AbstractContextManager[object]]


@contextlib.contextmanager
def bare(_: Loop) -> Iterator[None]:
    """Trains without otel_train."""
    yield


class _NullRecorder:
    """A recorder that records nothing."""

    def __init__(self) -> None:
        ignored: dict[int, None] = {}
        self.edge = ignored.get  # a builtin: the least that a hook can call, in C or in Python

    def source(self, _kind: object, _name: str, _phase: str = "") -> int:
        return 0

    def changed(self) -> None:
        """Does nothing: no thread reads what has changed."""


@contextlib.contextmanager
def floor(loop: Loop) -> Iterator[None]:
    """Installs the same hooks without recording: the least that any observer of these stages costs."""
    recorder = cast("Recorder", _NullRecorder())
    probe = LoaderProbe(Loader(loop.loader, "bench"), recorder)
    with contextlib.ExitStack() as undo:
        patch = DataLoaderPatch(lambda loader: probe if loader is loop.loader else None, lambda _: None)
        undo.callback(patch.remove)
        undo.callback(ModuleProbe(loop.model, "model", recorder, no_open_forward()).remove)
        undo.callback(BackwardProbe(recorder).remove)
        undo.callback(OptimizerProbe(recorder, ScaledUpdates(None)).remove)
        yield


@contextlib.contextmanager
def prometheus_client(loop: Loop) -> Iterator[None]:
    """Observes what users write without otel_train: a labelled ``prometheus_client.Histogram``, observed four times per step."""
    from prometheus_client import CollectorRegistry, Histogram

    histogram = Histogram("stage_seconds", "Time of a stage.", ["stage"], registry=CollectorRegistry())
    loop.observe = [histogram.labels(stage).observe for stage in ("data", "forward", "backward", "optimizer")]
    try:
        yield
    finally:
        loop.observe = ()


@contextlib.contextmanager
def without_c() -> Iterator[None]:
    """Uses hooks and rings in Python, as an installation without a compiler does."""
    extension, ring_buffer.EXTENSION = ring_buffer.EXTENSION, None
    try:
        yield
    finally:
        ring_buffer.EXTENSION = extension


@contextlib.contextmanager
def without_global_hooks() -> Iterator[None]:
    """Removes the process-wide hooks of backward and optimizers, which apply to every loop."""
    tables = optimizers._global_optimizer_pre_hooks, optimizers._global_optimizer_post_hooks  # noqa: SLF001 - no other way
    kept = [dict(table) for table in tables]
    entry = torch.autograd._engine_run_backward  # noqa: SLF001 - as above
    torch.autograd._engine_run_backward = torch.autograd.graph._engine_run_backward  # noqa: SLF001 - as above
    for table in tables:
        table.clear()
    try:
        yield
    finally:
        torch.autograd._engine_run_backward = entry  # noqa: SLF001 - as above
        for table, hooks in zip(tables, kept, strict=True):
            table.update(hooks)


class Instrumented:
    """Opens a real session with everything exported; ``OTEL_EXPORTER_OTLP_ENDPOINT`` says where to.

    Args:
        folder: run directories are made, and removed, in here.
        settings: beyond those that every benchmark needs.
    """

    def __init__(self, folder: Path, **settings: Any) -> None:
        self._folder = folder
        self._settings = settings

    @contextlib.contextmanager
    def __call__(self, loop: Loop) -> Iterator[Session]:
        """Opens a session on ``loop``, closed at the end."""
        import otel_train

        # The agent may still write there when the session is closed.
        with tempfile.TemporaryDirectory(dir=self._folder, ignore_cleanup_errors=True) as runs:
            session = otel_train.instrument(
                loop.model,
                {"bench": loop.loader},
                run_dir=runs,
                otlp="on",
                prometheus_address="127.0.0.1:0",
                console=False,
                **self._settings,
            )
            try:
                yield session
            finally:
                session.close()


@contextlib.contextmanager
def no_garbage_collection() -> Iterator[None]:
    """Stops garbage collection: one collection in the wrong block would outweigh everything measured here."""
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        gc.unfreeze()


def interleaved(
    loop: Loop, variants: dict[str, Variant], *, steps: int, rounds: int
) -> dict[str, list[np.ndarray]]:
    """Measures blocks of ``steps`` steps of the variants in turn; each round starts with another variant.

    Returns:
        Per variant, one array of step durations (ns) per round.
    """
    blocks: dict[str, list[np.ndarray]] = {name: [] for name in variants}
    names = list(variants)
    for turn in range(rounds):
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            with variants[name](loop), no_garbage_collection():
                blocks[name].append(loop.run(steps, warm_up=warm_up_of(steps)))
    return blocks
