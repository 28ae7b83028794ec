"""Folder that ``otel-train run`` adds to PYTHONPATH."""
