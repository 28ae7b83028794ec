"""Time series and histograms from the exported metrics of a rank."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from statistics import median
from typing import TYPE_CHECKING, Any, BinaryIO

import numpy as np

from otel_train import catalog as c
from otel_train.datamodel import METRICS_FILE, NS_PER_S
from otel_train.files import lines_of, open_binary, parse_json, predecessor
from otel_train.rundata.files import FOREIGN

if TYPE_CHECKING:
    from pathlib import Path

    from numpy.typing import NDArray

_MEMORY = tuple(
    metric.name
    for metric in c.ALL
    if metric.unit == "By" and ".memory." in metric.name and not metric.name.endswith(".limit")
)
"""Metrics of the memory chart: memory in use. Limits are left out: on their scale the curves would be flat."""

_ORDER = ("productive", "data_wait", *c.STAGES)
_HISTOGRAMS = 8  # most that are shown


def values_of(owner: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the attributes of a resource or of a point, by key."""
    return {item["key"]: next(iter(item["value"].values())) for item in owner["attributes"]}


def all_points(line: Mapping[str, Any]) -> Iterator[tuple[dict[str, Any], str, dict[str, Any]]]:
    """Yields each data point on a line as (metric, kind, point); kind: ``sum``, ``gauge`` or ``exponentialHistogram``."""
    for group in line["resourceMetrics"]:
        for metric in (metric for scope in group["scopeMetrics"] for metric in scope["metrics"]):
            kind = next(kind for kind in ("sum", "gauge", "exponentialHistogram") if kind in metric)
            for point in metric[kind]["dataPoints"]:
                yield metric, kind, point


def points_of(line: Mapping[str, Any], name: str) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """Yields the data points of a metric as (attributes, point)."""
    for metric, _, point in all_points(line):
        if metric["name"] == name:
            yield values_of(point), point


def series_of(read: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Returns time series: increases of counters from line to line, and values of gauges.

    The last line is written at the end of the run, and counts steps that earlier lines had not counted yet. If it comes
    early, its short interval and the one before it both get the values of the two together.

    Args:
        read: the lines in order, each as ``moment_of`` returns it.

    Returns:
        ``times`` in seconds after the start of the run, or after the first line if no line has the start; and for each of
        them a value: ``activities`` by name as shares, ``stages`` by name in seconds per training step, ``memory`` by name
        in bytes, and ``steps_per_s``.
    """
    moments = _accounted(_with_start(read))
    pairs = list(pairwise(moments))
    if (spans := [other["at"] - one["at"] for one, other in pairs])[1:] and spans[-1] < median(
        spans[:-1]
    ) / 2:
        pairs[-2:] = [(moments[-3], moments[-1])] * 2
    activities = {name for moment in moments for name, value in moment["activities"].items() if value}
    stages = {name for moment in moments for name in moment["stages"]}
    memory = {name for moment in moments for name in moment["memory"]}
    return {
        "times": [moment["at"] - moments[0]["at"] for moment in moments[1:]],
        "activities": {
            name: [_share_of(pair, name, activities) for pair in pairs] for name in in_order(activities)
        },
        "stages": {name: [_per_step(pair, name) for pair in pairs] for name in in_order(stages)},
        "steps_per_s": [
            _increase(one["steps"], other["steps"]) / (other["at"] - one["at"]) for one, other in pairs
        ],
        "memory": {name: [moment["memory"].get(name) for moment in moments[1:]] for name in sorted(memory)},
    }


def _with_start(read: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Puts a moment with zero counters, at the start of the run, before the lines; not before a single line: no series."""
    known = [moment["began"] for moment in read[1:] if moment["began"] is not None]
    start = {"at": min(known), "activities": {}, "stages": {}, "steps": 0.0, "memory": {}} if known else None
    return [start, *read] if start is not None else list(read)


def _accounted(moments: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Returns the lines at which the accounted time has grown: it grows only when a step ends."""
    kept: list[Mapping[str, Any]] = []
    for moment in moments:
        total = sum(moment["activities"].values())
        if moment["at"] is None or (
            kept and (moment["at"] <= kept[-1]["at"] or total == sum(kept[-1]["activities"].values()))
        ):
            continue
        kept.append(moment)
    return kept


def in_order(names: Iterable[str]) -> list[str]:
    """Returns stages in the order of a step, or activities with training first; ``other`` comes last."""
    places = {name: place for place, name in enumerate(_ORDER)}
    return sorted(names, key=lambda name: (name == "other", places.get(name, len(places)), name))


def _increase_of(pair: tuple[Mapping[str, Any], Mapping[str, Any]], key: str, name: str) -> float:
    """Returns the increase of a counter between two moments; after a reset, its value."""
    before, after = (moment[key].get(name, 0.0) for moment in pair)
    return _increase(before, after)


def _increase(before: float, after: float) -> float:
    return float(after - before if after >= before else after)


def _per_step(pair: tuple[Mapping[str, Any], Mapping[str, Any]], stage: str) -> float:
    return _increase_of(pair, "stages", stage) / max(1.0, _increase(pair[0]["steps"], pair[1]["steps"]))


def _share_of(pair: tuple[Mapping[str, Any], Mapping[str, Any]], name: str, activities: set[str]) -> float:
    """Returns an activity's share of the time accounted between two lines, which may differ from the wall time between them."""
    whole = sum(_increase_of(pair, "activities", each) for each in activities)
    return _increase_of(pair, "activities", name) / whole if whole else 0.0


def moment_of(line: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the values on one line; ``at``: its Unix time, ``began``: that of the start of its counters, both None if unknown."""
    activities, began_ns = {}, []
    for attributes, point in points_of(line, c.RUN_TIME.name):
        activities[attributes.get(c.ACTIVITY.name)] = float(point["asDouble"]), int(point["timeUnixNano"])
        began_ns += [int(point["startTimeUnixNano"])] if "startTimeUnixNano" in point else []
    stages: dict[str, float] = {}
    for attributes, point in points_of(line, c.STAGE_DURATION.name):
        if attributes.get(c.PHASE.name) == "train":
            stage = attributes[c.STAGE.name]
            stages[stage] = stages.get(stage, 0.0) + float(point["sum"])
    steps = sum(
        float(point["asDouble"])
        for attributes, point in points_of(line, c.STEPS.name)
        if attributes.get(c.PHASE.name) == "train"
    )
    memory = {
        " ".join([name.removeprefix("train.").replace(".", " "), *about.values()]): float(point["asDouble"])
        for name in _MEMORY
        for about, point in points_of(line, name)
    }
    instants = [at for _, at in activities.values()]
    return {
        "at": max(instants) / NS_PER_S if instants else None,
        "began": min(began_ns) / NS_PER_S if began_ns else None,
        "activities": {name: value for name, (value, _) in activities.items()},
        "stages": stages,
        "steps": steps,
        "memory": memory,
    }


def histograms_of(line: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Returns the histograms of steps and stages on a line, those of the longest total time first."""
    found = []
    for metric, what in ((c.STEP_DURATION.name, "step"), (c.STAGE_DURATION.name, "")):
        for attributes, point in points_of(line, metric):
            low, high, number = buckets_of(point)
            stage = what or attributes.get(c.STAGE.name, "")
            parts = [attributes.get(c.PHASE.name), attributes.get(c.LOADER.name), stage]
            found.append({
                "name": " · ".join(filter(None, parts)), "stage": stage, "seconds": float(point["sum"]),
                "edges": list(zip(low.tolist(), high.tolist(), strict=True)), "numbers": number.tolist()
            })  # fmt: skip
    return sorted(found, key=lambda each: -each["seconds"])[:_HISTOGRAMS]


def buckets_of(
    point: Mapping[str, Any],
) -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.int64]]:
    """Returns lower bound, upper bound and count of every positive bucket, clipped to min and max.

    Source: "ExponentialHistogram" of the OpenTelemetry metrics data model: bucket i is (b^i, b^(i+1)].
    """
    positive = point.get("positive") or {"offset": 0, "bucketCounts": []}
    number = np.array([int(count) for count in positive["bucketCounts"]], np.int64)
    growth = 2.0 ** (2.0 ** -int(point["scale"]))
    index = int(positive["offset"]) + np.arange(number.size)
    least, most = float(point.get("min", 0.0)), float(point.get("max", np.inf))
    return np.clip(growth**index, least, most), np.clip(growth ** (index + 1), least, most), number


MOST_MOMENTS = 300
"""Points of a chart that are aimed at, and at most doubled: a screen cannot show more."""

MOST_BYTES = 256 << 20
"""Most bytes read from the end of a file: the default limit of all files of a rank together."""


class MetricsHistory:
    """Time series and histograms of one rank. Each ``read`` reads only lines that were added since the one before.

    Args:
        folder: folder of the rank.
    """

    problem = ""
    """Sentence about what was left out; "" if nothing was."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._inode = -1
        self._read_bytes = 0
        self._moments: list[dict[str, Any]] = []
        self._series: dict[str, Any] = {}
        self._histograms: list[dict[str, Any]] = []

    def read(self) -> tuple[dict[str, Any], list[dict[str, Any]]]:
        """Reads new lines; returns the results of ``series_of`` and ``histograms_of``, which are empty without lines."""
        path = self._folder / METRICS_FILE
        try:
            file = open_binary(path)
        except OSError:
            return self._series, self._histograms
        with file:
            status = os.fstat(file.fileno())
            if status.st_ino != self._inode or status.st_size < self._read_bytes:
                if self._inode < 0:
                    self._older()
                self._inode, self._read_bytes = status.st_ino, 0
            if status.st_size > self._read_bytes:
                self._take(file)
        return self._series, self._histograms

    def _older(self) -> None:
        """Reads the older half, ``.1``, of the metrics file, if it was rotated before the first read."""
        try:
            file = open_binary(predecessor(self._folder / METRICS_FILE))
        except OSError:
            return
        with file:
            self._take(file)
        self._read_bytes = 0

    def _take(self, file: BinaryIO) -> None:
        start = self._first_read(file)
        file.seek(start)
        total = sum(line.endswith(b"\n") for line in lines_of(file))
        every = max(1, total // MOST_MOMENTS)
        file.seek(start)
        last: dict[str, Any] = {}
        for number, line in enumerate(self._whole_lines(file), 1):
            if (total - number) % every:
                continue
            try:
                value: Any = parse_json(line)
                self._moments.append(moment_of(value))
            except FOREIGN:
                continue
            last = value
        if len(self._moments) > 2 * MOST_MOMENTS:
            self._moments = [*self._moments[:-1:2], self._moments[-1]]
        if last:
            self._update(last)

    def _first_read(self, file: BinaryIO) -> int:
        """Returns the offset to read from. It may be within a line: the rest of that line is not JSON, and is skipped."""
        size = os.fstat(file.fileno()).st_size
        if size - self._read_bytes <= MOST_BYTES:
            return self._read_bytes
        self.problem = (
            f"{METRICS_FILE} has {size:,} bytes: the charts show what is in its last {MOST_BYTES >> 20} MiB."
        )
        return size - MOST_BYTES

    def _whole_lines(self, file: BinaryIO) -> Iterator[bytes]:
        """Yields complete lines, and advances the offset of the next read behind each."""
        for line in lines_of(file):
            if line.endswith(b"\n"):
                self._read_bytes = file.tell()
                yield line

    def _update(self, last: dict[str, Any]) -> None:
        try:
            self._series = series_of(self._moments)
            self._histograms = histograms_of(last)
        except FOREIGN:
            self._moments, self._series, self._histograms = [], {}, []
