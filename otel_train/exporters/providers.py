"""Figures and spans by way of the OpenTelemetry providers that the program has."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from otel_train.errors import ConfigError
from otel_train.exporters.otlp_sdk import sdk_resource, sdk_scope, to_metrics_data, to_readable_span
from otel_train.safety import Guard

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from otel_train.datamodel import AttributeValue, ExportBatch, Snapshot

MS_PER_S = 1e3
_UNKNOWN = "unknown_service"  # what the SDK calls a program that has not said its name


class ProviderExporter:
    """Puts our metrics among those that a provider's readers collect, and our spans before its processors.

    When and where they go is the program's own affair. The SDK has no public way to hand over figures that
    are aggregated already, so what the readers call to collect is wrapped; a provider without it is refused.

    Args:
        resource: who we are; what the provider says of itself wins.
        version: of the instrumentation scope.
        meters: a ``MeterProvider`` of the SDK, or None.
        tracers: a ``TracerProvider`` of the SDK, or None.

    Raises:
        ConfigError: one of them is none.
    """

    def __init__(
        self, resource: Mapping[str, AttributeValue], *, version: str, meters: Any = None, tracers: Any = None
    ) -> None:
        self._scope = sdk_scope(version)
        self._providers = [provider for provider in (meters, tracers) if provider is not None]
        self._snapshot: Snapshot | None = None
        self._guard = Guard("figures for the program's meter provider")
        self._undo: list[Callable[[], None]] = []
        processor = None if tracers is None else getattr(tracers, "_active_span_processor", None)
        if tracers is not None and processor is None:
            raise _refusal("tracer_provider", tracers, "opentelemetry.sdk.trace.TracerProvider()")
        readers = () if meters is None else _readers(meters)
        if readers is None:
            raise _refusal(
                "meter_provider", meters, "opentelemetry.sdk.metrics.MeterProvider(metric_readers=[...])"
            )
        self._on_end: Callable[[Any], None] | None = getattr(processor, "on_end", None)
        self._span_resource = sdk_resource({**resource, **_attributes(tracers)})
        self._metric_resource = sdk_resource({**resource, **_attributes(meters)})
        for reader in readers:
            self._join(reader)

    def export(self, batch: ExportBatch) -> None:
        """Keep the figures for whoever collects next, and pass spans on."""
        if batch.snapshot is not None:
            self._snapshot = batch.snapshot
        if self._on_end is not None:
            for span in batch.spans:
                self._on_end(to_readable_span(span, self._span_resource, self._scope))

    def close(self, timeout_s: float) -> None:
        """Have the last figures sent, and leave the readers as they were."""
        try:
            for provider in self._providers:
                provider.force_flush(timeout_millis=timeout_s * MS_PER_S)
        finally:
            for undo in self._undo:
                undo()

    def _join(self, reader: Any) -> None:  # Any: a MetricReader of the SDK
        theirs = getattr(reader, "_collect", None)
        register = getattr(reader, "_set_collect_callback", None)
        if theirs is None or register is None:
            return

        def collect(asking: Any, timeout_millis: float = 10_000) -> Any:
            found = theirs(asking, timeout_millis=timeout_millis)
            if self._guard.closed or self._snapshot is None:
                return found
            with self._guard:
                ours = to_metrics_data(self._snapshot, self._metric_resource, self._scope)
                if found is None:
                    return ours
                return replace(found, resource_metrics=[*found.resource_metrics, *ours.resource_metrics])
            return found

        register(collect)
        self._undo.append(lambda: register(theirs))


def _readers(meters: Any) -> tuple[Any, ...] | None:
    """The readers of a provider; None if it is none of the SDK's. Where they are depends on the release."""
    found = getattr(meters, "_metric_readers", None)
    if found is None:
        found = getattr(getattr(meters, "_sdk_config", None), "metric_readers", None)
    return None if found is None else tuple(found)


def _attributes(provider: Any) -> dict[str, AttributeValue]:
    """What a provider says of the program."""
    config = getattr(provider, "_sdk_config", provider)
    attributes = dict(getattr(getattr(config, "resource", None), "attributes", {}))
    if str(attributes.get("service.name", "")).startswith(_UNKNOWN):
        del attributes["service.name"]
    return attributes


def _refusal(name: str, given: Any, remedy: str) -> ConfigError:
    return ConfigError(f"{name}={given!r}: expected a provider of opentelemetry-sdk. Pass {remedy}")
