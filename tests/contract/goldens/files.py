"""What a run says in public, as files that are compared: the same wherever and whenever it is run.

Only this is changed: values of the machine and of the process are ``MACHINE``, and the versions of what is installed are
left out (``READINGS``, ``VERSIONS``, ``plain``); so are descriptions, which are the catalog's, and what is empty. What has
no order of its own (attributes, metrics, series, spans) is sorted, and numbers are rounded to twelve digits.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

MACHINE = "(machine)"

READINGS = (
    "process.memory.usage",
    "process.cpu.time",
    "process.thread.count",
    "process.unix.file_descriptor.count",
    "train.host.memory.usage",
    "train.host.memory.limit",
)
"""Metrics that read the operating system."""

VERSIONS = (
    "process.pid",
    "process.runtime.name",
    "process.runtime.version",
    "telemetry.distro.version",
    "train.torch.version",
    "train.cuda.version",
)
"""Attributes of the resource that belong to the process or to what is installed; not every machine has them all."""

_LONG = re.compile(r"(?<![\w.])\d+\.\d{7,}(?:e[+-]?\d+)?\b")
_READING = re.compile(rf"(?m)^((?:{'|'.join(n.replace('.', '_') for n in READINGS)})\w*(?:{{.*}})?) \S+$")
_VERSION = re.compile(rf'({"|".join(name.replace(".", "_") for name in VERSIONS)})="[^"]*",?')


def rounded(text: str) -> str:
    """Text whose numbers have twelve digits: the order in which floats are added up says nothing."""
    return _LONG.sub(lambda found: f"{float(found[0]):.12g}", text)


def plain(text: str, root: Path) -> str:
    """Text without the number of the process, the port of ``/metrics`` and the folder of the runs."""
    text = text.replace(str(root), "runs")
    text = re.sub(rf"\bpid {os.getpid()}\b", f"pid {MACHINE}", text)
    text = re.sub(r"127\.0\.0\.1:\d+", "127.0.0.1:9464", text)
    return "".join(f"{line.rstrip()}\n" for line in text.splitlines())


def summary(document: Any, root: Path) -> str:
    """``summary.json``, or what ``session.summary()`` gives."""
    text = json.dumps({**document, "pid": MACHINE}, indent=1, sort_keys=True, ensure_ascii=False)
    return plain(text, root)


def lines(text: str, root: Path) -> str:
    """A file of JSON lines."""
    return plain("\n".join(_dump(json.loads(line)) for line in text.splitlines()), root)


def metrics(text: str) -> str:
    """The last line of ``metrics.otlp.jsonl``: the resource, the scope, each metric, and below it each of its points."""
    resource = json.loads(text.splitlines()[-1])["resourceMetrics"][0]
    at = re.findall(r'"timeUnixNano": ?"(\d+)"', text)[-1]
    found = [_resource(resource), f"every point is of {at}, unless it says so"]
    for scope in resource["scopeMetrics"]:
        found.append(_dump({"scope": scope["scope"]}))
        for metric in sorted(scope["metrics"], key=lambda metric: str(metric["name"])):
            found += _points(metric, at)
    return "".join(f"{line}\n" for line in found)


def _points(metric: dict[str, Any], at: str) -> Iterator[str]:
    kind = next(name for name, value in metric.items() if isinstance(value, dict))
    head = {name: value for name, value in metric.items() if name not in {kind, "description"}}
    rest = {name: value for name, value in metric[kind].items() if name != "dataPoints"}
    yield _dump({**head, kind: rest})
    points = [_flat(point) for point in metric[kind]["dataPoints"]]
    for point in points:
        if point["timeUnixNano"] == at:
            del point["timeUnixNano"]
        if metric["name"] in READINGS:
            point |= {name: MACHINE for name in ("asInt", "asDouble") if name in point}
    yield from sorted(f"  {_dump(point)}" for point in points)


def spans(text: str) -> str:
    """``spans.otlp.jsonl``: the resource, the scope, then each span, by when they began, the longer one first."""
    resources = [each for line in text.splitlines() for each in json.loads(line)["resourceSpans"]]
    scopes = [scope for resource in resources for scope in resource["scopeSpans"]]
    flat = [_flat(span) for scope in scopes for span in scope["spans"]]
    flat.sort(key=lambda s: (int(s["startTimeUnixNano"]), -int(s["endTimeUnixNano"]), s["name"], s["spanId"]))
    heads = {_resource(resource): None for resource in resources}
    heads |= {_dump({"scope": scope["scope"]}): None for scope in scopes}
    return "".join(f"{line}\n" for line in (*heads, *map(_dump, flat)))


def _resource(resource: dict[str, Any]) -> str:
    attributes = _flat(resource["resource"])["attributes"]
    return _dump({"resource": {name: value for name, value in attributes.items() if name not in VERSIONS}})


def _flat(value: Any) -> Any:
    """``value`` with its attributes as one mapping, for their order says nothing; what is empty is left out."""
    if isinstance(value, list):
        return [_flat(each) for each in value]
    if not isinstance(value, dict):
        return value
    flat = {name: _attributes(held) if name == "attributes" else _flat(held) for name, held in value.items()}
    return {name: held for name, held in flat.items() if held not in ([], {})}


def _attributes(given: list[dict[str, Any]]) -> dict[str, Any]:
    """OTLP/JSON writes a whole number as text: here it is one."""
    found = {}
    for each in given:
        ((kind, value),) = each["value"].items()
        found[each["key"]] = int(value) if kind == "intValue" else value
    return found


def _dump(value: Any) -> str:
    return json.dumps(value, sort_keys=True, ensure_ascii=False)


def page(text: str) -> str:
    """``/metrics``: families by name, series by labels, and on top the labels that every series has.

    Of the buckets of a histogram those are kept at which the count rises.
    """
    text = _VERSION.sub("", _READING.sub(rf"\1 {MACHINE}", text))
    families: dict[str, list[str]] = {}
    name = ""
    for line in text.splitlines():
        if line.startswith("# "):
            name = (*line.split(), "")[2]  # "# EOF" has none
        if not line.startswith("# HELP"):
            families.setdefault(name, []).append(line)
    series = [line for family in families.values() for line in family if "{" in line]
    shared = set.intersection(*(set(_labels(line)) for line in series))
    found = [f"every series has {', '.join(sorted(shared))}"]
    for name in sorted(families, key=lambda name: (not name, name)):
        found += _rising(sorted((_without(line, shared) for line in families[name]), key=_series))
    return "".join(f"{line}\n" for line in found)


def _labels(line: str) -> list[str]:
    """The labels of a series, as they are written; an exemplar has its own."""
    return re.findall(r'\w+="[^"]*"', line.partition("{")[2].partition("}")[0])


def _without(line: str, shared: set[str]) -> str:
    head, brace, rest = line.partition("{")
    if not brace:
        return line
    kept = ",".join(label for label in _labels(line) if label not in shared)
    return f"{head}{{{kept}}}{rest.partition('}')[2]}"


def _series(line: str) -> tuple[bool, list[str]]:
    """Sorts series by their labels, and nothing else: within one the lines stay in their order."""
    return not line.startswith("#"), [label for label in _labels(line) if not label.startswith("le=")]


def _rising(lines: list[str]) -> Iterator[str]:
    last, series = 0.0, None
    for line in lines:
        if 'le="' in line.partition("}")[0]:
            count = float(line.partition("} ")[2].split()[0])
            last, series, before = count, _series(line), last if series == _series(line) else 0.0
            if count <= before:
                continue
        yield line


def report(text: str, root: Path) -> str:
    """A page of HTML as what there is to read on it, a line per block; empty bars of histograms are left out."""
    reader = _Reader()
    reader.feed(text)
    reader.close()
    return plain(reader.text(), root)


class _Reader(HTMLParser):
    """Takes down the text of a page: a line per block, cells of a row divided by bars, inline tags as they read."""

    _SILENT = ("style", "script")
    _CELLS = ("td", "th", "a", "span")
    _INLINE = ("b", "code", "em", "i", "strong", "small", "time")

    def __init__(self) -> None:
        super().__init__()
        self._lines: list[str] = []
        self._line = ""
        self._silent = False

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._silent = tag in self._SILENT
        self._between(tag)
        self._line += "".join(f"[{value}]\0" for name, value in attrs if name == "aria-label" and value)

    def handle_endtag(self, tag: str) -> None:
        self._silent = False
        self._between(tag)

    def handle_data(self, data: str) -> None:
        if not self._silent:
            self._line += data

    def text(self) -> str:
        """All of it."""
        self._between("")
        return "\n".join(line for line in self._lines if line and not line.endswith(": 0"))

    def _between(self, tag: str) -> None:
        if tag in self._CELLS:
            self._line += "\0"
        elif tag not in self._INLINE:
            cells = (" ".join(cell.split()) for cell in self._line.split("\0"))
            self._lines.append(" | ".join(cell for cell in cells if cell))
            self._line = ""
