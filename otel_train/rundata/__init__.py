"""Reads run directories: what each rank has written, as it was and as it is now."""
