"""Events, ring buffers and shared memory: what a rank writes and an agent reads."""
