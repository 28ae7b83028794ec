"""Libraries that own the loop, translated: each module imports its library, and this package none."""
