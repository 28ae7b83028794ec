"""Wrong values in the files of a run: each is named with file, key, value, rule and remedy."""

from __future__ import annotations

import copy
import json
import os
import tracemalloc
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jsonschema  # type: ignore[import-untyped]  # it publishes no types
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from otel_train.profiler.storage import read_metadata
from otel_train.rundata.schemas import REMEDY, wrong_values
from tests.support.command_line import Cli
from tests.support.left_run import leave_run, say_summary
from tests.unit.test_console import full

if TYPE_CHECKING:
    from collections.abc import Iterator

SCHEMAS = Path(__file__).parents[2] / "otel_train/rundata"
TEXT = (SCHEMAS / "summary.schema.json").read_text(encoding="utf-8")
SCHEMA = json.loads(TEXT.replace('"additionalProperties": false', '"additionalProperties": true'))
"""Unknown keys are no fault for a reader."""

WRONG: tuple[Any, ...] = (5, -5, 1.5, "x", True, None, [], {}, [[1]], {"a": {"b": 1}})


def places(value: object, place: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Every value of a document."""
    if place:
        yield place
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, each in inner:
        yield from places(each, (*place, key))


def with_value(document: Any, place: tuple[Any, ...], value: object) -> Any:
    """A copy with another value at one place."""
    found = copy.deepcopy(document)
    inner = found
    for key in place[:-1]:
        inner = inner[key]
    inner[place[-1]] = value
    return found


DOCUMENT = json.loads(json.dumps(full()))
PLACES = list(places(DOCUMENT))


@settings(max_examples=300, deadline=None)
@given(st.sampled_from(PLACES), st.sampled_from(WRONG))
def test_a_value_is_wrong_where_a_full_validator_says_so(place: tuple[Any, ...], value: object) -> None:
    """The checker knows a part of JSON Schema: as much as the schemas use."""
    changed = with_value(DOCUMENT, place, value)

    valid = jsonschema.Draft202012Validator(SCHEMA).is_valid(changed)

    assert (not wrong_values(changed, "summary")) == valid


@pytest.mark.parametrize("file", sorted(SCHEMAS.glob("*.schema.json")), ids=lambda path: path.name)
def test_every_word_of_the_schemas_is_known_to_the_checker(file: Path) -> None:
    """A rule that is written down and not looked at is none."""
    known = {
        "$ref", "type", "properties", "additionalProperties", "items", "required", "enum", "const", "minimum",
        "maximum", "pattern", "minItems", "maxItems", "minProperties", "maxProperties", "anyOf",
    }  # fmt: skip
    schema = json.loads(file.read_text(encoding="utf-8"))
    jsonschema.Draft202012Validator.check_schema(schema)

    def words(rule: dict[str, Any]) -> Iterator[str]:
        yield from rule
        inner = [*rule.get("properties", {}).values(), rule.get("items"), rule.get("additionalProperties")]
        for each in inner:
            yield from words(each) if isinstance(each, dict) else ()

    rules = [*schema.get("$defs", {}).values(), {key: schema[key] for key in known & schema.keys()}]

    assert {word for rule in rules for word in words(rule)} <= known | {
        "description",
        "unevaluatedProperties",
    }


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run whose summary is complete."""
    run = leave_run(tmp_path / "runs", (5,))
    say_summary(run)
    return run


def edit(path: Path, place: tuple[Any, ...], value: object) -> None:
    document = json.loads(path.read_text(encoding="utf-8"))
    path.write_text(json.dumps(with_value(document, place, value)), encoding="utf-8")


@pytest.mark.parametrize(
    ("edited", "said"),
    [
        ((("steps",), 5), "steps is 5: expected an object"),
        ((("stages", 1, "count"), "five"), 'stages[1].count is "five": expected a whole number or null'),
        ((("stages", 0), [1]), "stages[0] is a list of 1: expected an object"),
        ((("wall_seconds",), -1), "wall_seconds is -1: expected at least 0"),
        ((("wall_seconds",), float("nan")), "wall_seconds is null (so are NaN, Infinity and integers beyond 64 bits"),
        ((("state",), "fine"), 'state is "fine": expected one of running, finished,'),
        ((("steps",), {"\x1b[2J": -1}), r"steps['\x1b[2J'] is -1: expected at least 0"),
    ],
)  # fmt: skip
def test_every_reader_names_file_key_value_rule_and_remedy(
    run: Path, edited: tuple[tuple[Any, ...], object], said: str, cli: Cli
) -> None:
    """They said "unexpected AttributeError ...: 'int' object has no attribute 'get'"."""
    path = run / "rank0" / "summary.json"
    edit(path, *edited)

    for words in (["summary", run], ["report", run], ["compare", run, run]):
        line = cli(*words).refused
        for part in (str(path), said, REMEDY):
            assert part in line
        assert line.count("\n") == 1
        assert "\x1b" not in line
    code, out, _ = cli("validate", run)
    assert code == 1
    assert f"rank0/summary.json: {said}" in out


def test_readers_that_have_something_else_pass_the_summary_over(run: Path, cli: Cli) -> None:
    """Export and postmortem also read the flight file."""
    edit(run / "rank0" / "summary.json", ("telemetry", "faults"), [1])

    for name in ("export", "postmortem"):
        out = " ".join(cli(name, run).printed.split())
        assert "summary.json: telemetry.faults is a list of 1: expected an object" in out


def test_validate_names_every_wrong_value_of_every_file(run: Path, cli: Cli) -> None:
    """It named the first, by the error that it made."""
    rank = run / "rank0"
    edit(rank / "summary.json", ("steps",), [1])
    edit(rank / "summary.json", ("stages", 2, "loader"), 7)
    edit(run / "run.json", ("settings",), 1e300)
    edit(run / "run.json", ("attempt",), "none")
    (rank / "events.jsonl").write_text('{"name": "e", "time_unix_ns": "now"}\n{"name": 1}\n')
    (rank / "metrics.otlp.jsonl").write_text('{"resourceMetrics": [{"resource": {"attributes": {}}}]}\n')
    (run / "captures").mkdir()
    (run / "captures" / "a-rank0.record.json").write_text('{"steps": 3, "finding": ["x"]}')
    code, out, _ = cli("validate", run, "--json")

    assert code == 1
    assert {(fault["file"], fault["what"]) for fault in json.loads(out)["faults"]} == {
        ("rank0/summary.json", "steps is a list of 1: expected an object"),
        ("rank0/summary.json", "stages[2].loader is 7: expected text"),
        ("run.json", "settings is 1e+300: expected an object"),
        ("run.json", 'attempt is "none": expected a whole number'),
        ("rank0/events.jsonl", 'line 1: time_unix_ns is "now": expected a whole number'),
        ("rank0/events.jsonl", "line 2: name is 1: expected text"),
        ("rank0/events.jsonl", "line 2: time_unix_ns is missing"),
        ("rank0/metrics.otlp.jsonl", "line 1: resourceMetrics[0].resource.attributes is {}: expected a list"),
        ("rank0/metrics.otlp.jsonl", "line 1: resourceMetrics[0].scopeMetrics is missing"),
        ("captures/a-rank0.record.json", "steps is 3: expected a list"),
        ("captures/a-rank0.record.json", "finding is a list of 1: expected an object or null"),
    }


@pytest.mark.parametrize("value", [-5, -0.5, "-5", "-Infinity"])
def test_a_negative_count_or_duration_on_a_line_of_metrics_is_wrong(value: object) -> None:
    """Counters and histograms of durations only grow. A gauge, such as a logged loss, may have any value."""

    def wrong(kind: str, **point: object) -> list[str]:
        metric = {"name": "m", kind: {"dataPoints": [{"attributes": [], **point}]}}
        line = {
            "resourceMetrics": [{"resource": {"attributes": []}, "scopeMetrics": [{"metrics": [metric]}]}]
        }
        return [said.partition(" is ")[0].rpartition(".")[2] for said in wrong_values(line, "files/metrics")]

    good = {"sum": 1.0, "scale": 3}

    assert wrong("gauge", asDouble=value) == []
    assert wrong("sum", asDouble=value) == ["asDouble"]
    for name in ("sum", "min", "max"):
        assert wrong("exponentialHistogram", **{**good, name: value}) == [name]


def test_a_key_of_any_length_is_cut() -> None:
    """A file may have a key of megabytes."""
    [said] = wrong_values({"steps": {"a" * 100_000: -1}}, "summary", complete=False)

    assert len(said) < 200


def test_a_file_of_wrong_values_alone_does_not_fill_the_terminal(run: Path) -> None:
    """A list may have a million elements, and none of them is a row."""
    found = wrong_values({"stages": [1] * 1_000_000}, "summary")

    assert len(found) == 201
    assert found[-1] == "and further wrong values, behind the first 200"


def test_files_of_holes_are_neither_read_whole_nor_taken_for_torn_lines(run: Path, cli: Cli) -> None:
    """A crash tears a line, and no line has megabytes; a capture's metadata of 1 GB took 1.3 GB to analyze."""
    (run / "captures").mkdir()
    metadata = run / "captures" / "a-rank0.record.json"
    for path, size_bytes in ((metadata, 1 << 30), (run / "rank0" / "events.jsonl", 16 << 20)):
        path.touch()
        os.truncate(path, size_bytes)
    tracemalloc.start()
    assert read_metadata(metadata) == {}
    _, most_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    code, out, _ = cli("validate", run)

    assert most_bytes < 1 << 20
    assert code == 1
    assert "rank0/events.jsonl: 1 line is not a JSON object" in out
