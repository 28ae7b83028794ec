"""Settings: their names and defaults, what is allowed, where they come from."""

from __future__ import annotations

from otel_train.config.settings import Config

__all__ = ["Config"]
