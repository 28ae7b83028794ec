"""From the edges of a run to nested calls, batches, phases, steps, and activities that add up to the wall time."""
