"""Bounded ``torch.profiler`` recordings of a few steps, and what is found in them."""
