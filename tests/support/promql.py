"""Which metrics and labels a PromQL expression asks for, as far as a tokenizer can tell."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import NamedTuple

from otel_train.catalog import ALL, Kind, Label

IDENTITY = {
    *("train_run_id", "train_rank", "host_name", "service_name", "service_namespace"),
    *("deployment_environment_name", "train_collector", "job", "instance"),
}
"""Labels of every series of otel_train: the resource attributes that become labels, and Prometheus' own."""

FOREIGN = {
    "up": {"job", "instance", "train_collector"},
    "ALERTS": {"alertname", "alertstate", "severity", "train_run_id"},
    "otelcol_exporter_queue_size": {"instance", "exporter", "data_type", "job"},
    "otelcol_exporter_queue_capacity": {"instance", "exporter", "data_type", "job"},
}
"""Metrics of others. Those of the Collector by family are in ``_FAMILIES``."""

_FAMILIES = (
    ("otelcol_exporter_", {"instance", "exporter", "data_type", "job", "train_collector"}),
    ("otelcol_receiver_", {"instance", "receiver", "transport", "job"}),
    ("otelcol_processor_", {"instance", "processor", "policy", "sampled", "job"}),
    ("otelcol_process_", {"instance", "job"}),
    ("prometheus_", {"instance", "job", "rule_group"}),
    ("alertmanager_", {"instance", "job", "integration"}),
    ("tempo_", {"instance", "job", "reason"}),
    ("DCGM_FI_", {"hostname", "gpu", "host_name", "instance", "job"}),
    ("node_", {"instance", "job", "device", "host_name"}),
)

_STRING = re.compile(r'"(?:[^"\\]|\\.)*"')
_CLAUSE = re.compile(r"\b(by|without|on|ignoring|group_left|group_right)\s*\(([^()]*)\)")
_NAME = re.compile(r"(?<![\w:$.])([a-zA-Z_:][\w:]*)(?:\s*\{([^{}]*)\})?")
_BARE = re.compile(r"(?<![\w:)])\{([^{}]*)\}")
_WORDS = {"and", "or", "unless", "bool", "offset", "by", "without", "on", "ignoring", "group_left"}


class Selector(NamedTuple):
    """A metric that is asked for, and the labels it is picked by, with their patterns."""

    metric: str
    labels: Mapping[str, str]


def asked(expr: str) -> list[Selector]:
    """Every selector of an expression. One without a name stands for the family its pattern names."""
    strings: dict[str, str] = {}

    def hidden(match: re.Match[str]) -> str:
        key = f'"{len(strings)}"'
        strings[key] = match[0][1:-1]
        return key

    text = re.sub(r"\[[^\]]*\]|\boffset\s+\w+", " ", _STRING.sub(hidden, _CLAUSE.sub(" ", expr)))

    def matchers(inside: str | None) -> dict[str, str]:
        found = re.findall(r'(\w+)\s*(?:=~|!~|!=|=)\s*("\d+")', inside or "")
        return {label: strings[key] for label, key in found}

    selectors = []
    for bare in _BARE.finditer(text):
        labels = matchers(bare[1])
        family = re.sub(r"[^\w:].*$", "", labels.pop("__name__", ""))
        selectors.append(Selector(family, labels))
    text = _BARE.sub(" ", text)
    selectors += [
        Selector(named[1], matchers(named[2]))
        for named in _NAME.finditer(text)
        if named[1] not in _WORDS and not text[named.end() :].lstrip().startswith("(")
    ]
    return selectors


def grouped_by(expr: str) -> set[str]:
    """Labels that ``by``, ``on`` and ``group_left`` name."""
    return {
        label.strip() for _, labels in _CLAUSE.findall(expr) for label in labels.split(",") if label.strip()
    }


def published(metric: str) -> set[str] | None:
    """Labels of a metric as Prometheus knows it; None for one that is not published."""
    ours = labels_of(metric)
    if ours is not None:
        le = {"le"} if metric.endswith("_bucket") else set()
        return IDENTITY | le | {label.prometheus for label in ours}
    if metric in FOREIGN:
        return FOREIGN[metric]
    if metric.endswith("_") and any(one.prometheus.startswith(metric) for one in ALL):
        return IDENTITY
    return next((labels for prefix, labels in _FAMILIES if metric.startswith(prefix)), None)


def labels_of(metric: str) -> tuple[Label, ...] | None:
    """Labels that the catalogue gives a metric of otel_train; None for another name."""
    for candidate in ALL:
        names = {candidate.prometheus}
        if candidate.kind is Kind.HISTOGRAM:
            names |= {f"{candidate.prometheus}_{part}" for part in ("sum", "count", "bucket")}
        if metric in names:
            return candidate.labels
    return None


def impossible(selector: Selector) -> dict[str, str]:
    """Values it picks by that the label never has."""
    closed = {
        label.prometheus: {*label.values, ""}
        for label in labels_of(selector.metric) or ()
        if label.values and not label.open
    }
    return {
        name: pattern
        for name, pattern in selector.labels.items()
        if name in closed and "$" not in pattern and not closed[name].issuperset(pattern.split("|"))
    }
