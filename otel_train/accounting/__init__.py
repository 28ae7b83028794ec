"""Turns the events of a run into nested calls, batches, phases, steps, and activities that add up to the wall time."""
