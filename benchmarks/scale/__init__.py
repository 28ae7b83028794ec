"""Ranks that do not exist: what they would send, made by the code that real ranks send with."""
