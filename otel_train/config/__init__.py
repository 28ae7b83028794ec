"""Settings: names, defaults, rules and sources."""

from __future__ import annotations

from otel_train.config.settings import Config

__all__ = ["Config"]
