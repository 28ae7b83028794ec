"""Instruments unmodified programs: ``otel-train run``."""
