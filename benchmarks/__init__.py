"""What watching costs, measured against the bare loop in the same run: ``python -m benchmarks``."""
