"""Aggregates recorded events: counters, histograms, spans, epochs. Pure functions of events: no torch, clock or network."""
