"""The local page: a reader of run directories, in a process of its own."""
