"""Analyzes profiler traces: where the time of a step goes."""

from otel_train.trace_analysis.events import read, shapes
from otel_train.trace_analysis.rules import findings
from otel_train.trace_analysis.summary import summarize, trace_summary

__all__ = ["findings", "read", "shapes", "summarize", "trace_summary"]
