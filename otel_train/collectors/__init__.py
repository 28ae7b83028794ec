"""Samples values of the process, its memory, devices and loaders."""
