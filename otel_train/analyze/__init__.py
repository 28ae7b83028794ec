"""What a profiler trace says: where the time of a step goes."""
