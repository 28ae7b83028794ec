"""A session that does nothing: ``OTEL_TRAIN_DISABLED=true``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from otel_train.record.discover import named_loaders

if TYPE_CHECKING:
    from collections.abc import Mapping


class DisabledSession:
    """Has what a ``Session`` has, and leaves everything as it is.

    Args:
        loaders: as for ``instrument``.
    """

    closed = False
    run_directory = None
    metrics_url = None

    def __init__(self, loaders: Any) -> None:  # Any: the user's own
        self.loaders = {entry.name: entry.loader for entry in named_loaders(loaders)}

    def watch(self, iterable: Any, **_: str) -> Any:  # Any: any iterable
        """``iterable`` itself."""
        return iterable

    def log(self, values: Mapping[str, Any]) -> None:
        """Nothing."""

    def event(self, name: str, attributes: Mapping[str, Any]) -> None:
        """Nothing."""

    def summary(self) -> dict[str, Any]:
        """Nothing is known."""
        return {}

    def reset_window(self) -> None:
        """Nothing."""

    def close(self, state: str = "") -> None:
        """Nothing."""

    def __enter__(self) -> DisabledSession:
        return self

    def __exit__(self, *_: object) -> None:
        """Nothing."""
