"""Checks of installation, settings, machine and OTLP endpoint, each with a remedy."""
