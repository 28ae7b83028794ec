"""Callbacks for training frameworks. Each module imports its framework; this package imports none."""
