"""Rule tests: series in, alerts out, by Prometheus' own promtool."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from otel_train.catalog import DURATION_BOUNDS
from tests.support.stack import program
from tests.support.zero_code import launched
from tools.alerts_pages import ALERT_FILES, RULES, rules

VARIANTS = ("classic", "native")
OVERDUE_MIN = 40
"""After the end of a series nothing of it is left in any window: half an hour at most, and five minutes of memory."""

OUTLIVES_ITS_SERIES = {"Watchdog", "OtelCollectorDown"}
"""Alerts that must not resolve with their series: absence is what they are about."""

_FRUGAL = {"GOGC": "400", "GOMAXPROCS": "1"}
"""It takes a quarter less of the processors that the other tests wait for."""

_SCHEMA = 8
_REPEATED = re.compile(r"(?:_|[-+0-9.]+)x(\d+)$")
_RANK = re.compile(r'train_run_id="[^"]+"(?:,train_rank="[^"]+")?')
_ALERTS = rules(*ALERT_FILES)


class Durations(NamedTuple):
    """A histogram that grows.

    Attributes:
        metric: its name in Prometheus.
        labels: inside the braces.
        parts: (duration in seconds, occurrences per interval, intervals), one after the other.
    """

    metric: str
    labels: str
    parts: Sequence[tuple[float, int, int]]

    def series(self, variant: str) -> dict[str, str]:
        """As promtool wants it."""
        return self._native() if variant == "native" else self._classic()

    def _samples(self) -> list[dict[float, int]]:
        """Occurrences by duration, cumulative, at each interval."""
        counts = {seconds: 0 for seconds, _, _ in self.parts}
        samples = [dict(counts)]
        for seconds, occurrences, intervals in self.parts:
            for _ in range(intervals):
                counts[seconds] += occurrences
                samples.append(dict(counts))
        return samples

    def _classic(self) -> dict[str, str]:
        samples = self._samples()
        found: dict[str, Sequence[float]] = {
            f"{self.metric}_sum{{{self.labels}}}": [
                sum(s * n for s, n in sample.items()) for sample in samples
            ],
            f"{self.metric}_count{{{self.labels}}}": [sum(sample.values()) for sample in samples],
        }
        for bound in (*DURATION_BOUNDS, math.inf):
            le = "+Inf" if bound == math.inf else f"{bound:g}"
            below = [sum(n for s, n in sample.items() if s <= bound) for sample in samples]
            found[f'{self.metric}_bucket{{{self.labels},le="{le}"}}'] = below
        return {name: " ".join(f"{value:g}" for value in values) for name, values in found.items()}

    def _native(self) -> dict[str, str]:
        index = {seconds: math.ceil(math.log2(seconds) * 2**_SCHEMA) for seconds, _, _ in self.parts}
        first, last = min(index.values()), max(index.values())
        written = []
        for sample in self._samples():
            buckets = [0] * (last - first + 1)
            for seconds, occurrences in sample.items():
                buckets[index[seconds] - first] += occurrences
            total = sum(s * n for s, n in sample.items())
            written.append(
                f"{{{{schema:{_SCHEMA} sum:{total:g} count:{sum(buckets)} "
                f"offset:{first} buckets:[{' '.join(map(str, buckets))}]}}}}"
            )
        return {f"{self.metric}{{{self.labels}}}": " ".join(written)}

    @property
    def intervals(self) -> int:
        return sum(part[2] for part in self.parts)


class Expectation(NamedTuple):
    """What an alert does at one moment; without instances it keeps quiet. ``capture`` is what it says of captures."""

    alert: str
    at_min: float
    instances: tuple[tuple[Mapping[str, str], str], ...] = ()
    capture: str = "none in the last hour"


def fires(alert: str, at_min: float, value: str = "", **labels: str) -> Expectation:
    """It fires then, once, with these labels. ``value`` is how the summary shows its value; ``a or b`` differs by variant."""
    return Expectation(alert, at_min, ((labels, value),))


def with_capture(expectation: Expectation, capture: str) -> Expectation:
    """The same, and the newest capture of the run is named with it."""
    return expectation._replace(capture=capture)


def quiet(alert: str, at_min: float) -> Expectation:
    """It does not fire then."""
    return Expectation(alert, at_min)


class Case(NamedTuple):
    """A short scenario. When its series have ended, every alert must resolve: a finished run does not page.

    Attributes:
        name: a sentence.
        interval_s: between samples.
        series: values by series, in promtool's notation.
        expected: what the alerts do.
        durations: histograms.
    """

    name: str
    interval_s: int
    series: Mapping[str, str]
    expected: Sequence[Expectation]
    durations: Sequence[Durations] = ()

    def intervals(self) -> int:
        """How many the longest series lasts."""
        lengths = [sum(_length(word) for word in text.split()) - 1 for text in self.series.values()]
        return max(lengths + [histogram.intervals for histogram in self.durations])

    def document(self, variant: str) -> dict[str, Any]:
        """The test for promtool."""
        series = dict(self.series)
        for histogram in self.durations:
            series.update(histogram.series(variant))
        # Every run publishes this, without labels where it knows none, and every rank how long it has been there.
        for run in sorted(set(re.findall(r'train_run_id="([^"]+)"', " ".join(series)))):
            series[f'train_run_info{{train_run_id="{run}"}}'] = f"1x{self.intervals()}"
        for rank in sorted({labels for name in series for labels in _RANK.findall(name)}):
            series.setdefault(
                f"train_rank_time_seconds_total{{{rank}}}", f"0+{self.interval_s}x{self.intervals()}"
            )
        return {
            "name": self.name,
            "interval": f"{self.interval_s}s",
            "input_series": [{"series": name, "values": values} for name, values in series.items()],
            "alert_rule_test": [_wanted(expected, variant) for expected in (*self.expected, *self._gone())],
        }

    def _gone(self) -> list[Expectation]:
        """What fired keeps quiet once its series are gone."""
        fired = {expectation.alert for expectation in self.expected if expectation.instances}
        later_min = self.intervals() * self.interval_s / 60 + OVERDUE_MIN
        return [quiet(alert, later_min) for alert in sorted(fired - OUTLIVES_ITS_SERIES)]


def _length(word: str) -> int:
    """Samples of one word: ``0+1x3`` has four, ``_x3`` three."""
    repeated = _REPEATED.search(word)
    if repeated is None:
        return 1
    return int(repeated[1]) + (0 if word.startswith("_") else 1)


def _wanted(expectation: Expectation, variant: str) -> dict[str, Any]:
    rule = _ALERTS[expectation.alert]
    return {
        "eval_time": f"{round(expectation.at_min * 60)}s",
        "alertname": expectation.alert,
        "exp_alerts": [
            {
                "exp_labels": {**rule["labels"], **labels},
                "exp_annotations": {
                    name: expectation.capture
                    if name == "capture"
                    else _rendered(text, labels, _in_variant(value, variant))
                    for name, text in rule["annotations"].items()
                },
            }
            for labels, value in expectation.instances
        ],
    }


def _in_variant(value: str, variant: str) -> str:
    """Coarse buckets and fine ones answer differently: ``classic or native``."""
    return dict(zip(VARIANTS, value.split(" or ") * 2, strict=False))[variant]


def _rendered(text: str, labels: Mapping[str, str], value: str) -> str:
    text = re.sub(r"{{ \$labels\.(\w+) }}", lambda found: labels.get(found[1], ""), text)
    return re.sub(r"{{ \$value[^}]*}}", value, text)


def rule_files(variant: str) -> list[Path]:
    """The files that are loaded together."""
    names = (f"histograms-{variant}", "recording", *ALERT_FILES)
    return [RULES / f"otel-train-{name}.yml" for name in names]


def groups_in_order(variant: str) -> list[str]:
    """Recording rules first: promtool would evaluate groups in any order."""
    documents = [yaml.safe_load(path.read_text(encoding="utf-8")) for path in rule_files(variant)]
    return [group["name"] for document in documents for group in document["groups"]]


def check(folder: Path, variant: str, tests: Sequence[Mapping[str, Any]]) -> None:
    """Fail with promtool's own words unless it agrees with all tests."""
    said = judged(folder, variant, tests)
    assert "SUCCESS" in said, said


_SAMPLE = re.compile(r"(\{[^{}]*\}) ([-+0-9.eEInfNa]+)(?:, |\s*$)")


def answers(
    folder: Path, variant: str, series: Mapping[str, str], exprs: Sequence[str], *, at_min: float
) -> list[dict[str, float]]:
    """What each expression gives then, by labels; native histograms are left out."""
    asks = [
        {
            "expr": expr,
            "eval_time": f"{round(at_min * 60)}s",
            "exp_samples": [{"labels": '{asked="x"}', "value": 1}],
        }
        for expr in exprs
    ]
    test = {
        "interval": "15s",
        "input_series": [{"series": name, "values": values} for name, values in series.items()],
        "promql_expr_test": asks,
    }
    found = re.findall(r"got:(.*)", judged(folder, variant, [test]))
    assert len(found) == len(exprs)
    return [
        {labels: float(value) for labels, value in _SAMPLE.findall(line) if not math.isnan(float(value))}
        for line in found
    ]


def judged(folder: Path, variant: str, tests: Sequence[Mapping[str, Any]]) -> str:
    """What promtool says of tests."""
    path = folder / "tests.yml"
    document = {
        "rule_files": [str(file) for file in rule_files(variant)],
        "evaluation_interval": "30s",
        "group_eval_order": groups_in_order(variant),
        "tests": list(tests),
    }
    path.write_text(yaml.safe_dump(document, width=10_000), encoding="utf-8")
    asked = launched([program("promtool"), "test", "rules", path], {**os.environ, **_FRUGAL})
    return asked.stdout + asked.stderr
