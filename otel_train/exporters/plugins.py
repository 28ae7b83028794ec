"""Loads exporters of other packages by their entry points."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.metadata import EntryPoint, entry_points
from typing import TYPE_CHECKING, Any

from otel_train.config.validation import words_of
from otel_train.errors import ConfigError, near
from otel_train.exporters.background_queue import BackgroundQueue
from otel_train.safety import Guard

if TYPE_CHECKING:
    from otel_train.datamodel import AttributeValue, ExportBatch
    from otel_train.exporters import Exporter

GROUP = "otel_train.exporters"
"""Each entry point of this group is called with the resource attributes, and returns an exporter, or None."""

MOST_WAITING = 64
"""Most batches that wait for one exporter: those of 32 s, at one every 0.5 s (``poll_interval_s``)."""


class PluginExporter(BackgroundQueue["ExportBatch"]):
    """Exporter of another package, on its own thread; it may hang or raise."""

    def __init__(self, name: str, exporter: Exporter, timeout_s: float) -> None:
        part = f"exporter {name}"
        super().__init__(part, exporter.export, lambda: exporter.close(timeout_s), most=MOST_WAITING)

    def export(self, batch: ExportBatch) -> None:
        """Queues one batch. After the final one the exporter closes on its thread, while other exporters still send."""
        self.hand(batch)
        if batch.final:
            self.end()


def load_plugins(
    wish: str, resource: Mapping[str, AttributeValue], *, timeout_s: float
) -> list[PluginExporter]:
    """Loads the selected exporters of other packages; each has ``timeout_s`` to close.

    With "auto" a failure of one of them is logged. An exporter that is selected by name and is not installed, or cannot be
    created, is a ConfigError.
    """
    if wish.strip() == "off":
        return []
    known = {point.name: point for point in entry_points(group=GROUP)}
    if wish.strip() == "auto":
        made = {}
        for name, point in known.items():
            with Guard(f"exporter {name}", limit=1):
                made[name] = _made(point, resource)
    else:
        names = dict.fromkeys(words_of(wish))
        made = {name: _asked(_installed(name, known), resource) for name in names}
    return [
        PluginExporter(name, exporter, timeout_s) for name, exporter in made.items() if exporter is not None
    ]


def check_known(wish: str) -> None:
    """Raises ConfigError for an exporter that is selected by name and not installed."""
    known = {point.name: point for point in entry_points(group=GROUP)}
    for name in words_of(wish):
        _installed(name, known)


def _installed(name: str, known: Mapping[str, EntryPoint]) -> EntryPoint:
    if name in known:
        return known[name]
    close = near(name, known)
    remedy = f"Did you mean {close}?" if close else f"Installed: {', '.join(known) or 'none'}"
    raise ConfigError(f"exporters={name!r}: expected the name of an installed entry point {GROUP}. {remedy}")


def _asked(point: EntryPoint, resource: Mapping[str, AttributeValue]) -> Exporter | None:
    try:
        return _made(point, resource)
    except ConfigError:
        raise
    except Exception as error:
        raise ConfigError(
            f"exporters={point.name!r}: {point.value} cannot be made: {type(error).__name__}: {error}. "
            "Correct it, or leave it out"
        ) from error


def _made(point: EntryPoint, resource: Mapping[str, AttributeValue]) -> Exporter | None:
    make: Any = point.load()
    exporter: Exporter | None = make(dict(resource))
    if exporter is not None and not all(callable(getattr(exporter, do, None)) for do in ("export", "close")):
        raise ConfigError(
            f"exporters={point.name!r}: {point.value} gives {exporter!r}: expected export(batch) and close(timeout_s), "
            "or None. Correct it, or leave it out"
        )
    return exporter
