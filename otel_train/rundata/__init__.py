"""Reads run directories, of ended and of live runs."""
