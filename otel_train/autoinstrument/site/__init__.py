"""A folder that ``otel-train run`` puts on PYTHONPATH, and nothing else."""
