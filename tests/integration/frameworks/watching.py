"""What watches an example of a library: nothing, a counter of calls, or a session."""

from __future__ import annotations

import hashlib
import json
import os
import sys
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from types import FrameType

HOW = "TEST_INSTRUMENTED_BY"
"""Environment: ``nothing`` (also under the launcher), ``profile`` or ``session``."""

WHERE = "TEST_RESULT"
"""Environment: the file for what there is to say at the end."""


class CallCounter:
    """Counts calls by ``sys.setprofile``: by the code that runs, so nothing that is wrapped or hooked matters.

    Args:
        models: whose forwards count, and those of the modules with parameters inside them that are called by themselves.
    """

    def __init__(self, models: dict[str, torch.nn.Module]) -> None:
        from torch.utils.data.dataloader import _BaseDataLoaderIter

        self.counts: Counter[str] = Counter()
        self._models = {
            id(module)
            for model in models.values()
            for module in model.modules()
            if any(True for _ in module.parameters())
        }
        self._ask = _BaseDataLoaderIter.__next__.__code__
        self._backward = torch.autograd.backward.__code__
        self._open: dict[FrameType, str] = {}

    def begin(self) -> None:
        """Count from now on, in this thread."""
        sys.setprofile(self._see)

    def end(self) -> None:
        """Count no more."""
        sys.setprofile(None)

    def _see(self, frame: FrameType, event: str, arg: Any) -> None:
        if event == "call":
            what = self._what(frame)
            if what is not None and not {what, "backwards"} & set(self._open.values()):
                self._open[frame] = what
        elif event == "return":
            if frame.f_code is self._ask and arg is not None:
                self.counts["batches"] += 1
            what = self._open.pop(frame, None)
            if what is not None:
                self.counts[what] += 1

    def _what(self, frame: FrameType) -> str | None:
        code = frame.f_code
        if code is self._backward:
            return "backwards"
        if code.co_name == "forward" and id(frame.f_locals.get("self")) in self._models:
            return "forwards"
        if code.co_name == "step" and "/torch/optim/" in code.co_filename:
            owner = frame.f_locals.get("self")
            return "updates" if isinstance(owner, torch.optim.Optimizer) else None
        return None


_watching: dict[str, Any] = {}


def begin(models: dict[str, torch.nn.Module], loaders: Any = None) -> Any:
    """Where a user would put ``otel_train.instrument(models, loaders)``; its session, if it is one."""
    how = os.environ.get(HOW, "nothing")
    if how == "profile":
        _watching["counter"] = CallCounter(models)
        _watching["counter"].begin()
    elif how == "session":
        import otel_train

        quiet: dict[str, Any] = {"prometheus": False, "console": False, "otlp": "off"}
        folder = str(Path(os.environ[WHERE]).parent / "runs")
        _watching["session"] = otel_train.instrument(models, loaders, run_dir=folder, **quiet)
        return _watching["session"]
    return None


def end(*models: torch.nn.Module, steps: int, evals: int = 0, batches: int | None = None) -> None:
    """The example is over: what the library says of itself, and what the models have learnt.

    Args:
        models: what was trained.
        steps: training steps, by the library's own count.
        evals: batches of evaluation.
        batches: where they come from no DataLoader, by the program's own count.
    """
    said: dict[str, Any] = {"steps": steps, "evals": evals}
    if "counter" in _watching:
        _watching["counter"].end()
        counts = _watching["counter"].counts
        said["counts"] = dict(counts) if batches is None else {**counts, "batches": batches}
    if "session" in _watching:
        _watching["session"].close()
        said["summary"] = _watching["session"].summary()
    sha256 = hashlib.sha256()
    for model in models:
        for weight in model.state_dict().values():
            sha256.update(weight.detach().cpu().contiguous().numpy().tobytes())
    said["weights"] = sha256.hexdigest()
    Path(os.environ[WHERE]).write_text(json.dumps(said), encoding="utf-8")
    print("steps", steps, "evals", evals, "weights", said["weights"][:12])  # noqa: T201  # the output to compare
