"""What a profiler trace says: where the time of a step goes."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from otel_train.trace_analysis.events import read, shapes
    from otel_train.trace_analysis.rules import findings
    from otel_train.trace_analysis.summary import summarize, trace_summary

__all__ = ["findings", "read", "shapes", "summarize", "trace_summary"]

_MODULES = {
    "findings": "rules",
    "read": "events",
    "shapes": "events",
    "summarize": "summary",
    "trace_summary": "summary",
}


def __getattr__(name: str) -> object:
    """Import a public name when it is first used: numpy is not needed to train."""
    if name not in _MODULES:
        raise AttributeError(f"module 'otel_train.trace_analysis' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"otel_train.trace_analysis.{_MODULES[name]}"), name)
