"""Observing a program without touching it: ``otel-train run``."""
