"""The command line: parse, call one function, print, exit code."""
