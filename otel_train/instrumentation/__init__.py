"""Hooks on the training thread: each reads the clock and appends two words to a ring buffer."""
