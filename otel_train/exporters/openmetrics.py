"""Converts stored OTLP requests to OpenMetrics text with timestamps, from which promtool makes TSDB blocks.

Names and labels are those that Prometheus gives the same data when it comes by OTLP. Histograms become buckets with
``le``, because the text format has no native ones: four to each power of two, the same in every rank.
"""

from __future__ import annotations

import math
import os
import re
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NamedTuple

from otel_train import catalog
from otel_train.catalog import Kind, Metric
from otel_train.exporters.prometheus import label_name, target_labels
from otel_train.files import create, open_binary, open_to_write, parse_json

PROMOTED: Final = (
    *("service.name", "service.namespace", "deployment.environment.name"),
    *("host.name", "train.run.id", "train.rank", "train.collector"),
)
"""Resource attributes that become labels of every series: ``promote_resource_attributes`` of prometheus.yml."""

_TIME: Final = re.compile(rb'"timeUnixNano":"([0-9]{1,20})"')
_EXACT_SCALE: Final = 2
"""Scale of the written buckets, as of OpenTelemetry's exponential histograms: their bounds have a ratio of 2^(1/4), 1.19."""

_NS_PER_MS: Final = 1_000_000

Labels = tuple[tuple[str, str], ...]


class MetricPoint(NamedTuple):
    """One data point: its lines in OpenMetrics, its metric family and type there, and its labels without ``le``."""

    family: str
    kind: str
    labels: Labels
    time_ms: int
    text: str


@dataclass(slots=True, kw_only=True)
class WrittenBlocks:
    """What was written: requests and their data points."""

    exports: int = 0
    points: int = 0
    foreign: int = 0  # metrics that the catalogue does not have, left out
    unreadable: int = 0  # lines that are no request of metrics


def time_ms_of(line: bytes) -> int | None:
    """Returns the timestamp of the metrics on a line, from the first point; None if it has none."""
    found = _TIME.search(line)
    return int(found[1]) // _NS_PER_MS if found else None


def write_text(path: Path, ranks: Iterable[Iterable[bytes]]) -> WrittenBlocks:
    """Writes metrics requests, by rank, to a file for ``promtool tsdb create-blocks-from openmetrics``.

    The file is replaced as a whole at the end. One rank at a time is held in memory. Of points with equal time the last is kept.
    """
    written = WrittenBlocks()
    kinds: dict[str, str] = {}
    with tempfile.TemporaryDirectory(prefix=".", dir=path.parent) as folder:
        for lines in ranks:
            families: dict[str, dict[Labels, dict[int, str]]] = {}
            for line in lines:
                for point in _points(line, written):
                    kinds[point.family] = point.kind
                    series = families.setdefault(point.family, {}).setdefault(point.labels, {})
                    series[point.time_ms] = point.text
            for family, found in families.items():
                text = "".join(times[ms] for times in found.values() for ms in sorted(times))
                with os.fdopen(open_to_write(Path(folder, family), append=True), "ab") as file:
                    file.write(text.encode("utf-8", "replace"))
            written.points += sum(len(times) for found in families.values() for times in found.values())
        _join(Path(folder), kinds, path)
    return written


def _join(folder: Path, kinds: Mapping[str, str], path: Path) -> None:
    """Joins the parts of each family: the format requires each family in one place."""
    fresh = folder / "text"
    with os.fdopen(create(fresh), "wb") as out:
        for family, kind in sorted(kinds.items()):
            out.write(f"# TYPE {family} {kind}\n".encode())
            with open_binary(folder / family) as part:
                shutil.copyfileobj(part, out)
        out.write(b"# EOF\n")
    fresh.replace(path)


def resources_of(line: bytes) -> Iterator[tuple[dict[str, str], list[Any]]]:
    """Yields attributes of each resource on a line, as text, and its metrics. ValueError if the line is no request of metrics."""
    try:
        value: Any = parse_json(line)
        for resource in value["resourceMetrics"]:
            attributes = _attributes(resource.get("resource", {}).get("attributes", ()))
            scopes = resource.get("scopeMetrics", ())
            yield attributes, [each for scope in scopes for each in scope.get("metrics", ())]
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"no OTLP request of metrics ({error})") from error


def identity(resource: Mapping[str, str]) -> dict[str, str]:
    """Returns the labels that all series of a resource have."""
    namespace, name = resource.get("service.namespace", ""), resource.get("service.name", "")
    labels = {label_name(each): resource[each] for each in PROMOTED if resource.get(each)}
    labels["job"] = f"{namespace}/{name}" if namespace else name
    labels["instance"] = resource.get("service.instance.id", "")
    return {name: text for name, text in labels.items() if text}


def _points(line: bytes, written: WrittenBlocks) -> Iterator[MetricPoint]:
    try:
        found = list(resources_of(line))
        points = [point for each in found for point in _of_resource(*each, line, written)]
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError):
        written.unreadable += 1
        return
    written.exports += 1
    yield from points


def _of_resource(
    resource: Mapping[str, str], metrics: Iterable[Any], line: bytes, written: WrittenBlocks
) -> Iterator[MetricPoint]:
    own = identity(resource)
    for value in metrics:
        metric = catalog.by_name.get(value["name"])
        if metric is None:
            written.foreign += 1
            continue
        read = _histogram if metric.kind is Kind.HISTOGRAM else _number
        for point in _data_points(value):
            labels = {**own, **{label_name(k): text for k, text in _attributes(point["attributes"]).items()}}
            time_ms = int(point["timeUnixNano"]) // _NS_PER_MS
            yield read(metric, tuple(sorted(labels.items())), time_ms, point)
    at_ms = time_ms_of(line)
    if at_ms is not None and {"job", "instance"} & own.keys():
        labels = {**target_labels(resource), "job": own.get("job", "")}
        target = tuple(sorted({**labels, "instance": own.get("instance", "")}.items()))
        yield MetricPoint("target_info", "gauge", target, at_ms, _line("target_info", target, "1", at_ms))


def _data_points(value: Any) -> list[Any]:
    kinds = ("gauge", "sum", "exponentialHistogram")
    return [point for kind in kinds if kind in value for point in value[kind]["dataPoints"]]


def _number(metric: Metric, labels: Labels, time_ms: int, point: Any) -> MetricPoint:
    value = float(point["asDouble"] if "asDouble" in point else point["asInt"])
    family = metric.prometheus.removesuffix("_total")
    kind = "counter" if metric.kind is Kind.COUNTER else "gauge"
    return MetricPoint(family, kind, labels, time_ms, _line(metric.prometheus, labels, _text(value), time_ms))


def _histogram(metric: Metric, labels: Labels, time_ms: int, point: Any) -> MetricPoint:
    name, count = metric.prometheus, int(point["count"])
    bounds = grid(metric.bounds)
    counts = [0] * len(bounds)
    counts[0] = int(point.get("zeroCount", 0))
    positive = point.get("positive", {})
    offset, scale = int(positive.get("offset", 0)), int(point["scale"])
    for index, number in enumerate(positive.get("bucketCounts", ())):
        slot = _quarter(offset + index + 1, scale) - round(math.log2(bounds[0]) * 4)
        if slot < len(counts):  # values above the last bound count in bucket +Inf only
            counts[max(0, slot)] += int(number)
    lines, below = [], 0
    for bound, number in zip(bounds, counts, strict=True):
        below += number
        lines.append(_line(f"{name}_bucket", (*labels, ("le", _text(bound))), str(below), time_ms))
    lines.append(_line(f"{name}_bucket", (*labels, ("le", "+Inf")), str(count), time_ms))
    lines.append(_line(f"{name}_count", labels, str(count), time_ms))
    lines.append(_line(f"{name}_sum", labels, _text(float(point["sum"])), time_ms))
    return MetricPoint(name, "histogram", labels, time_ms, "".join(lines))


def grid(bounds: tuple[float, ...]) -> tuple[float, ...]:
    """Returns the powers of 2^(1/4) from below the lowest to above the highest bound of a metric."""
    first = math.floor(math.log2(bounds[0])) << _EXACT_SCALE
    last = math.ceil(math.log2(bounds[-1])) << _EXACT_SCALE
    return tuple(2.0 ** (k / 4) for k in range(first, last + 1))


def _quarter(index: int, scale: int) -> int:
    """Returns k of the lowest bound 2^(k / 4) that is not below 2^(index / 2^scale), the upper bound of a bucket."""
    if scale <= _EXACT_SCALE:
        return index << (_EXACT_SCALE - scale)
    return -(-index >> (scale - _EXACT_SCALE))


def _attributes(pairs: Iterable[Any]) -> dict[str, str]:
    return {pair["key"]: _value(pair.get("value", {})) for pair in pairs}


def _value(value: Any) -> str:
    if "boolValue" in value:
        return "true" if value["boolValue"] else "false"
    if "arrayValue" in value:
        return f"[{','.join(quoted(_value(each)) for each in value['arrayValue'].get('values', ()))}]"
    return str(next(iter(value.values()), ""))


def _text(value: float) -> str:
    if math.isinf(value):
        return "+Inf" if value > 0 else "-Inf"
    return "NaN" if math.isnan(value) else repr(value)


def _line(name: str, labels: Labels, value: str, time_ms: int) -> str:
    # promtool multiplies the seconds by 1000 and truncates, so that 0.003 could become 2 ms: 0.1 ms more prevents that.
    pairs = ",".join(f"{key}={quoted(text)}" for key, text in labels if text)
    return f"{name}{{{pairs}}} {value} {time_ms // 1000}.{time_ms % 1000:03d}1\n"


def quoted(text: str) -> str:
    """Returns the value of a label in Prometheus' text formats and in PromQL."""
    escaped = text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    return f'"{escaped}"'
