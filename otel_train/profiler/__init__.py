"""Bounded ``torch.profiler`` captures of a few steps: requests, step boundaries, trace files and findings."""
