"""Old data as OpenMetrics text: read back by a parser, and true to what was stored."""

from __future__ import annotations

import argparse
import itertools
import math
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.openmetrics import parser
from prometheus_client.samples import Sample

from otel_train import catalog as c
from otel_train.cli import replay as command
from otel_train.datamodel import HistogramPoint, MetricFamily, Point, Snapshot
from otel_train.exporters.openmetrics import PROMOTED, grid, time_ms_of, write_text
from otel_train.exporters.otlp_json import metrics_line
from otel_train.exporters.run_directory import RunDirectory
from otel_train.exporters.spool import SpoolQueue
from otel_train.stack import configuration
from tests.support.snapshots import RESOURCE, START_NS, snapshot

parse: Any = parser.text_string_to_metric_families  # it publishes no types


def line(steps: float = 7.0, *, second: int = 10, **resource: Any) -> bytes:
    return metrics_line(snapshot(steps, second=second), {**RESOURCE, **resource}).encode()


def at_s(sample: Sample) -> Any:  # Any: of approx
    return float(str(sample.timestamp))


def read_back(path: Path) -> dict[str, list[Sample]]:
    """Family to its samples.

    Time by time: the parser takes the second point of a histogram for a copy of the first.
    """
    lines = path.read_text().splitlines()
    assert lines[-1] == "# EOF"
    times = sorted({text.rpartition(" ")[2] for text in lines if not text.startswith("#")})
    found: dict[str, list[Sample]] = {}
    for at in times:
        text = "\n".join(each for each in lines if each.startswith("#") or each.endswith(f" {at}"))
        for family in parse(text):
            found.setdefault(family.name, []).extend(family.samples)
    return found


def test_a_parser_reads_back_what_was_stored(tmp_path: Path) -> None:
    """Names, labels, values and times are those that Prometheus gives the same request."""
    path = tmp_path / "text"
    odd: dict[str, Any] = {"train.rank": 4, "3d..loss": 1, "__name__": "x"}
    ranks = [[line(7), line(9, second=25)], [line(8, **odd)]]
    written = write_text(path, ranks)
    families = read_back(path)
    steps = sorted(families["train_steps"], key=lambda s: (s.labels["train_rank"], s.timestamp))

    assert (written.exports, written.unreadable, written.foreign) == (3, 0, 3)  # one name is of no metric
    assert [(s.labels["train_rank"], s.value, at_s(s)) for s in steps] == [
        ("3", 7.0, pytest.approx(START_NS / 1e9 + 10, abs=5e-4)),
        ("3", 9.0, pytest.approx(START_NS / 1e9 + 25, abs=5e-4)),
        ("4", 8.0, pytest.approx(START_NS / 1e9 + 10, abs=5e-4)),
    ]
    assert steps[0].name == "train_steps_total"
    assert steps[0].labels == {
        "job": "otel-train",
        "service_name": "otel-train",
        "train_loader": "code",
        "train_rank": "3",
        "train_run_id": "run-1",
    }
    assert families["train_heartbeat_time_seconds"][0].value == 1_700_000_010.5
    assert families["target_info"][0].labels["train_debug"] == "true"
    assert {s.labels.get("key_3d__loss") for s in families["target_info"]} == {None, "1"}
    assert not any("__name__" in s.labels for s in families["target_info"])


def test_buckets_of_a_histogram_hold_what_they_say(tmp_path: Path) -> None:
    """The histogram has 0.5, 0.5 and 4.0."""
    path = tmp_path / "text"
    write_text(path, [[line()]])
    samples = [
        each
        for each in read_back(path)["train_step_duration_seconds"]
        if each.labels["train_loader"] == "code"
    ]
    below = {float(s.labels["le"]): s.value for s in samples if s.name.endswith("_bucket")}
    rest = {s.name.rpartition("_")[2]: s.value for s in samples if not s.name.endswith("_bucket")}

    assert rest == {"count": 3, "sum": 5.0}
    assert (below[0.25], below[0.5], below[2.0], below[4.0], below[math.inf]) == (0, 2, 2, 3, 3)
    steps = sorted(bound for bound in below if bound < math.inf)
    assert max(b / a for a, b in itertools.pairwise(steps)) < 1.2


@given(
    scale=st.integers(-2, 8),
    values=st.lists(st.floats(1e-4, 200.0), min_size=1, max_size=30),
)
def test_every_bound_counts_exactly_what_lies_below_it(scale: int, values: list[float]) -> None:
    """At a bound that the histogram knows, nothing is put above or below it."""
    indexes = [math.ceil(math.log2(value) * 2.0**scale) - 1 for value in values]
    offset = min(indexes)
    counts = [0] * (max(indexes) - offset + 1)
    for index in indexes:
        counts[index - offset] += 1
    point = HistogramPoint(
        (), len(values), sum(values), min(values), max(values), 0, scale, offset, tuple(counts), ()
    )
    made = Snapshot(START_NS, START_NS, (MetricFamily(c.STEP_DURATION, (point,)),))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "text")
        write_text(path, [[metrics_line(made, RESOURCE).encode()]])
        samples = read_back(path)["train_step_duration_seconds"]
    below = {float(s.labels["le"]): s.value for s in samples if s.name.endswith("_bucket")}
    uppers = [2.0 ** ((index + 1) / 2.0**scale) for index in indexes]
    for bound in grid(c.STEP_DURATION.bounds):
        assert below[bound] == sum(upper <= bound * (1 + 1e-9) for upper in uppers)


def test_a_time_that_lies_in_recording_and_spool_counts_once(tmp_path: Path) -> None:
    """Prometheus' block writer refuses a series that goes back in time."""
    path = tmp_path / "text"
    written = write_text(path, [[line(9, second=25), line(7), line(7)]])
    steps = read_back(path)["train_steps"]

    assert [s.value for s in steps] == [7.0, 9.0]
    assert written.exports == 3


def test_what_is_no_request_is_left_out_and_counted(tmp_path: Path) -> None:
    """One wrong line must not cost the others."""
    path = tmp_path / "text"
    written = write_text(path, [[b"no JSON", b'{"resourceSpans":[]}', b'{"resourceMetrics":[5]}', line()]])

    assert (written.exports, written.unreadable) == (1, 3)
    assert read_back(path)["train_steps"][0].value == 7.0


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_value_that_is_no_number_is_spelled_as_prometheus_does(tmp_path: Path, value: float) -> None:
    """A loss that went to NaN is what people look for."""
    path = tmp_path / "text"
    made = Snapshot(
        START_NS, START_NS, (MetricFamily(c.LOSS, (Point((("train.loss.name", 'a"\\\n'),), value),)),)
    )
    write_text(path, [[metrics_line(made, RESOURCE).encode()]])
    [sample] = read_back(path)["train_loss"]

    assert sample.value == value or math.isnan(sample.value) == math.isnan(value)
    assert sample.labels["train_loss_name"] == 'a"\\\n'


def test_what_becomes_a_label_is_what_the_shipped_prometheus_promotes() -> None:
    """Else old data would be other series than new."""
    shipped = configuration.folder() / "deploy" / "prometheus" / "prometheus.yml"
    assert set(yaml.safe_load(shipped.read_text())["otlp"]["promote_resource_attributes"]) == set(PROMOTED)


def test_only_what_is_older_than_the_window_is_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The rest can be sent."""
    rank = RunDirectory.open(tmp_path / "runs", "r", rank=0)
    rank.close()
    young = line().replace(str(START_NS + 10**10).encode(), str(time.time_ns()).encode())
    queue = SpoolQueue(rank.rank_path, "metrics")
    for each in (line(), young):
        queue.append(each)
    queue.close()
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    for words, exports in (([], 1), (["--older-than", "0"], 2)):
        args = parser.parse_args([str(tmp_path / "runs" / "r"), "--blocks", str(tmp_path / "b"), *words])
        assert command.run(args) == 0
        assert f"of {exports} exports" in capsys.readouterr().out
    assert (tmp_path / "b" / "r.openmetrics.txt").read_text().endswith("# EOF\n")
    assert len(list(SpoolQueue(rank.rank_path, "metrics").waiting())) == 2
    assert time_ms_of(line()) == START_NS // 10**6 + 10_000
