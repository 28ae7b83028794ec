"""``otel-train replay`` as a person meets it; that it sends is shown with a real receiver."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

import pytest

from otel_train.cli import replay as command
from otel_train.cli.replay import Counts, replay
from otel_train.errors import ConfigError
from otel_train.export.rundir import RunDirectory
from otel_train.export.spool import Spool
from tests.support.figures import RESOURCE, snapshot, spans
from tests.support.receiver import http_receiver, refusing_address

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def run_path(tmp_path: Path) -> Path:
    """A run of two ranks, three requests in its spools and one in its recording."""
    for rank in (0, 1):
        directory = RunDirectory.open(tmp_path, "r", rank=rank)
        directory.close()
        spool = Spool(directory.rank_path, RESOURCE, version="1", on_error=lambda _: None)
        spool.put(snapshot())
        if rank:
            spool.put(spans())
        spool.close()
    spool_file = tmp_path / "r" / "rank0" / "spool" / "metrics.otlp.jsonl"
    (tmp_path / "r" / "rank0" / "metrics.otlp.jsonl").write_bytes(spool_file.read_bytes())
    return tmp_path / "r"


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
    before = {path: path.read_bytes() for path in run_path.rglob("*.jsonl")}
    assert replay(run_path, dry_run=True) == Counts(sent=3)
    assert replay(run_path, dry_run=True, recorded=True) == Counts(sent=4)
    assert {path: path.read_bytes() for path in run_path.rglob("*.jsonl")} == before


def test_every_rank_is_sent_and_the_spool_is_empty_afterwards(
    run_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One command for the whole run; nothing is sent twice."""
    with http_receiver() as received:
        assert cli(str(run_path), "--endpoint", received.endpoint) == 0
        assert (len(received.metrics), len(received.traces)) == (2, 1)
        assert "3 sent, 0 kept, 0 unreadable" in capsys.readouterr().out
    assert not list(run_path.glob("rank*/spool/*"))


def test_the_recording_is_sent_when_asked_and_stays(run_path: Path) -> None:
    """The recording is the run's memory: a replay may read it, never take it."""
    with http_receiver() as received:
        assert cli(str(run_path), "--all", "--endpoint", received.endpoint) == 0
        assert len(received.metrics) == 3
    assert (run_path / "rank0" / "metrics.otlp.jsonl").stat().st_size > 0


def test_a_torn_line_is_skipped_and_said(run_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """SIGKILL tears lines; the others must get through, and silence would hide the loss."""
    torn = run_path / "rank0" / "spool" / "metrics.otlp.jsonl"
    torn.write_bytes(torn.read_bytes() + b'{"resourceMetrics": [{"x": 1}]}\n' + b'{"resourceMe')
    with http_receiver() as received:
        assert cli(str(run_path), "--endpoint", received.endpoint) == 0
    assert "3 sent, 0 kept, 2 unreadable" in capsys.readouterr().out


def test_what_a_collector_refuses_is_kept_byte_for_byte(
    run_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Trying too early must cost nothing."""
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "0.2")
    before = (run_path / "rank0" / "spool" / "metrics.otlp.jsonl").read_bytes()
    with refusing_address() as place:
        assert cli(str(run_path), "--endpoint", place) == 1
    out, err = capfd.readouterr()
    assert "0 sent, 3 kept" in out
    assert "Traceback" not in err
    assert b"".join(path.read_bytes() for path in (run_path / "rank0" / "spool").iterdir()) == before


def test_a_collector_that_is_away_is_not_asked_for_every_line(run_path: Path) -> None:
    """A spool of a week at ten seconds a refusal would take days."""
    spool = Spool(run_path / "rank0", RESOURCE, version="1", on_error=lambda _: None)
    for _ in range(9):
        spool.put(snapshot())
    spool.close()
    with http_receiver("400") as received:
        assert replay(run_path, endpoint=received.endpoint) == Counts(kept=12)
        assert received.requests == 5  # three in a row of ten, and one each for the files with one line


def test_bad_input_is_one_line_and_exit_code_two(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Scripts tell a wrong path from a collector that is away."""
    assert cli(str(tmp_path / "nothing"), "--root", str(tmp_path)) == 2
    assert capsys.readouterr().err.count("\n") == 1
