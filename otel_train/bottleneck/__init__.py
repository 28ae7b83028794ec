"""Findings: where training time is lost, with evidence and advice."""
