"""Writes and validates artifacts: JSON, CSV and trace files made from a run directory."""
