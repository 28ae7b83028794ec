"""Pure functions of edges: no torch, no clock, no network."""
