"""``otel-train replay`` as a person meets it, against a real server."""

from __future__ import annotations

import argparse
import json
from typing import TYPE_CHECKING

import pytest

from otel_train.cli import replay as command
from otel_train.cli.replay import Counts, replay
from otel_train.errors import ConfigError
from otel_train.export.otlp_json import metrics_line, spans_line
from otel_train.export.rundir import RunDirectory
from otel_train.export.spool import SpoolQueue
from tests.support.figures import RESOURCE, snapshot, spans
from tests.support.receiver import http_receiver, refusing_address

if TYPE_CHECKING:
    from pathlib import Path


def metrics(steps: float = 7.0) -> bytes:
    return metrics_line(snapshot(steps), RESOURCE, "1").encode()


def put(rank: Path, *lines: bytes, signal: str = "metrics") -> None:
    """Leave requests in the spool of a rank."""
    queue = SpoolQueue(rank, signal)
    for line in lines:
        queue.append(line)
    queue.close()


def left(run: Path) -> list[bytes]:
    """What waits in the spools of a run."""
    return [
        line
        for rank in sorted(run.glob("rank*"))
        for signal in ("metrics", "traces")
        for line in SpoolQueue(rank, signal).waiting()
    ]


@pytest.fixture
def run_path(tmp_path: Path) -> Path:
    """A run of two ranks, three requests in its spools and one in its recording."""
    for rank in (0, 1):
        directory = RunDirectory.open(tmp_path, "r", rank=rank)
        directory.close()
        put(directory.rank_path, metrics())
        if rank:
            put(directory.rank_path, spans_line(spans(), RESOURCE, "1").encode(), signal="traces")
    (tmp_path / "r" / "rank0" / "metrics.otlp.jsonl").write_bytes(metrics() + b"\n")
    return tmp_path / "r"


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pauses between tries are not waited for."""
    monkeypatch.setattr("otel_train.export.sender.FIRST_PAUSE_S", 0.01)


def cli(*words: str) -> int:
    parser = argparse.ArgumentParser()
    command.add_parser(parser.add_subparsers())
    args = parser.parse_args(["replay", *words])
    return int(args.run_command(args))


def test_without_a_collector_replay_says_how_to_name_one(run_path: Path) -> None:
    """Sending to a default address would look like success to nobody."""
    with pytest.raises(ConfigError, match="--endpoint"):
        replay(run_path, environ={})


def test_a_dry_run_counts_and_touches_nothing(run_path: Path) -> None:
    """People look before they send."""
    before = {path: path.read_bytes() for path in run_path.rglob("*") if path.is_file()}
    assert replay(run_path, dry_run=True) == Counts(accepted=3)
    assert replay(run_path, dry_run=True, recorded=True) == Counts(accepted=4)
    assert {path: path.read_bytes() for path in run_path.rglob("*") if path.is_file()} == before


def test_every_rank_is_sent_and_the_spool_is_empty_afterwards(
    run_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One command for the whole run; nothing is sent twice."""
    with http_receiver() as received:
        assert cli(str(run_path), "--endpoint", received.endpoint) == 0
        assert (len(received.metrics), len(received.traces)) == (2, 1)
        assert "3 accepted, 0 kept, 0 rejected, 0 torn" in capsys.readouterr().out
        assert cli(str(run_path), "--endpoint", received.endpoint) == 0
        assert received.requests == 3
    assert not list(run_path.glob("rank*/spool"))


def test_the_recording_is_sent_when_asked_and_stays(run_path: Path) -> None:
    """The recording is the run's memory: a replay may read it, never take it."""
    with http_receiver() as received:
        assert cli(str(run_path), "--all", "--endpoint", received.endpoint) == 0
        assert len(received.metrics) == 3
    assert (run_path / "rank0" / "metrics.otlp.jsonl").stat().st_size > 0


def test_a_torn_line_is_skipped_and_said(run_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """SIGKILL tears lines; the others must get through, and silence would hide the loss."""
    [segment] = (run_path / "rank0" / "spool").glob("metrics-*")
    segment.write_bytes(segment.read_bytes() + b'{"resourceMe')
    with http_receiver() as received:
        assert cli(str(run_path), "--endpoint", received.endpoint) == 0
    assert "3 accepted, 0 kept, 0 rejected, 1 torn" in capsys.readouterr().out


def test_a_line_that_is_no_request_is_moved_aside_and_said(
    run_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What cannot be read here may mean something to somebody: it is never deleted."""
    theirs = b'{"resourceLogs": [{"scopeLogs": []}]}'
    put(run_path / "rank0", b"not JSON", theirs, metrics(8))
    with http_receiver() as received:
        assert cli(str(run_path), "--endpoint", received.endpoint) == 1
        assert len(received.metrics) == 3
    out, err = capsys.readouterr()
    rejected = run_path / "rank0" / "spool" / "rejected" / "metrics.jsonl"

    assert "4 accepted, 0 kept, 2 rejected, 0 torn" in out
    assert "the line is no JSON" in err
    assert str(rejected) in err
    assert [json.loads(line)["line"].encode() for line in rejected.read_text().splitlines()] == [
        b"not JSON",
        theirs,
    ]


def test_requests_of_another_exporter_are_sent_as_they_are(run_path: Path) -> None:
    """A valid line with a kind of metric that we never write was deleted as unreadable."""
    theirs = b'{"resourceMetrics":[{"scopeMetrics":[{"metrics":[{"name":"theirs","summary":{"dataPoints":[{"count":"2"}]}}]}]}]}'
    put(run_path / "rank0", theirs)
    with http_receiver() as received:
        assert replay(run_path, endpoint=received.endpoint) == Counts(accepted=4)
        [metric] = [
            metric
            for asked in received.metrics
            for metric in asked.resource_metrics[0].scope_metrics[0].metrics
            if metric.name == "theirs"
        ]
    assert metric.summary.data_points[0].count == 2


@pytest.mark.parametrize("mode", ["html", "302", "404", "401", "503", "500", "odd", "429"])
def test_what_gets_no_good_answer_is_kept_byte_for_byte(
    run_path: Path, mode: str, capfd: pytest.CaptureFixture[str]
) -> None:
    """A login page or a redirect once counted as sent, and the spool was deleted."""
    before = left(run_path)
    with http_receiver(mode) as received:
        received.location = "http://login.example/" if mode == "302" else ""
        assert cli(str(run_path), "--endpoint", received.endpoint) == 1
    out, err = capfd.readouterr()

    assert "0 accepted, 3 kept, 0 rejected" in out
    assert "kept: the collector " in err
    assert "Traceback" not in err
    assert left(run_path) == before


def test_a_collector_that_is_not_there_costs_nothing(run_path: Path) -> None:
    """Trying too early is what people do."""
    before = left(run_path)
    with refusing_address() as place:
        counts = replay(run_path, endpoint=place)
    assert counts == Counts(kept=3)
    assert list(counts.kept_because) == ["refuses connections"]
    assert left(run_path) == before


def test_what_is_refused_is_counted_said_and_no_obstacle(
    run_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Five refused lines stopped everything behind them."""
    put(run_path / "rank0", *(metrics(steps) for steps in range(6)))
    with http_receiver("400") as received:
        assert cli(str(run_path), "--endpoint", received.endpoint) == 1
        assert received.requests == 9
    out, err = capsys.readouterr()

    assert "0 accepted, 0 kept, 9 rejected" in out
    assert "9 rejected: the collector refuses a request (400)" in err
    assert left(run_path) == []


def test_rejected_points_are_not_called_sent(run_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Status 200 alone says nothing."""
    with http_receiver("partial") as received:
        received.rejecting = 2
        assert cli(str(run_path), "--endpoint", received.endpoint) == 1
    out, err = capsys.readouterr()

    assert "0 accepted, 0 kept, 3 rejected" in out
    assert "rejects 2 records of a request (too old)" in err


def test_a_collector_that_is_away_is_not_asked_for_every_line(run_path: Path) -> None:
    """A spool of a week at ten seconds a refusal would take days."""
    put(run_path / "rank0", *(metrics(steps) for steps in range(9)))
    with http_receiver("503") as received:
        assert replay(run_path, endpoint=received.endpoint) == Counts(kept=12)
        assert received.requests == 6  # three tries for each signal


def test_a_spool_that_another_process_sends_from_is_left_to_it(
    run_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Sent by both, everything would arrive twice."""
    monkeypatch.setattr(command, "_BUSY_TRIES", 2)
    with http_receiver() as received, SpoolQueue(run_path / "rank0", "metrics").sending():
        assert cli(str(run_path), "--endpoint", received.endpoint) == 1
        assert received.requests == 2
    out, err = capsys.readouterr()

    assert "2 accepted, 1 kept" in out
    assert "another process" in err


def test_bad_input_is_one_line_and_exit_code_two(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Scripts tell a wrong path from a collector that is away."""
    assert cli(str(tmp_path / "nothing"), "--root", str(tmp_path)) == 2
    assert capsys.readouterr().err.count("\n") == 1
