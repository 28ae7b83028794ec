"""Training observability for PyTorch: ``otel_train.instrument(model, loaders)`` before an unchanged loop."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from otel_train import jax as jax
    from otel_train import trace_analysis as trace_analysis
    from otel_train.api import (
        begin,
        capture,
        checkpoint,
        current,
        end,
        epoch,
        event,
        instrument,
        log,
        reset_window,
        stage,
        step,
        summary,
        watch,
    )
    from otel_train.config import Config
    from otel_train.errors import (
        ComparisonError,
        ConfigError,
        MissingExtraError,
        OtelTrainError,
        RunDirectoryError,
        TraceError,
    )
    from otel_train.instrumentation.naming import Loader
    from otel_train.session import Session

__version__ = "0.1.0"

__all__ = [
    "ComparisonError",
    "Config",
    "ConfigError",
    "Loader",
    "MissingExtraError",
    "OtelTrainError",
    "RunDirectoryError",
    "Session",
    "TraceError",
    "begin",
    "capture",
    "checkpoint",
    "current",
    "end",
    "epoch",
    "event",
    "instrument",
    "log",
    "reset_window",
    "stage",
    "step",
    "summary",
    "watch",
]

_MODULES = {
    "ComparisonError": "errors",
    "Config": "config",
    "ConfigError": "errors",
    "Loader": "instrumentation.naming",
    "MissingExtraError": "errors",
    "OtelTrainError": "errors",
    "RunDirectoryError": "errors",
    "Session": "session",
    "TraceError": "errors",
}

_PACKAGES = ("jax", "trace_analysis")
"""Subpackages whose functions are called by their full name: ``otel_train.trace_analysis.trace_summary(path)``."""


def __getattr__(name: str) -> object:
    """Imports a public name when it is first used, so that ``import otel_train`` loads no other module."""
    if name not in {*__all__, *_PACKAGES}:
        raise AttributeError(f"module 'otel_train' has no attribute {name!r}")
    from importlib import import_module

    from otel_train.safety import collection_deferred

    if name in _PACKAGES:
        return import_module(f"otel_train.{name}")
    with collection_deferred():
        value: object = getattr(import_module(f"otel_train.{_MODULES.get(name, 'api')}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """Returns the public names, loaded or not."""
    return sorted({*globals(), *__all__})
