"""What the edges of a run mean: nested calls, batches, phases, steps, and activities that tile the wall time."""
