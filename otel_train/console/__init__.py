"""Text for terminals: the run summary, what a trace says, and how numbers and names are written."""
