"""The local page: reads run directories, in a separate process."""
