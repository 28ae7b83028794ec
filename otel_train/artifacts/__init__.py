"""The files of a run under names of their own, made from its run directory."""
