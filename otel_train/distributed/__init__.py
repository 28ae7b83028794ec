"""Ranks of one run: what each reports, who is slow, who hangs, and how they find each other."""
