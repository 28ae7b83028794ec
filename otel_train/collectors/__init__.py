"""Readings of the process, its memory, its devices and its loaders, taken now and then."""
