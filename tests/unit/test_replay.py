"""``otel-train replay`` as a person meets it, against a real server."""

from __future__ import annotations

import errno
import json
import os
import socketserver
import threading
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from otel_train.cli import replay as command
from otel_train.cli.replay import RequestCounts, replay
from otel_train.errors import ConfigError
from otel_train.exporters.otlp_json import metrics_line, spans_line
from otel_train.exporters.run_directory import RunDirectory
from otel_train.exporters.spool import SpoolQueue
from tests.support.command_line import Cli
from tests.support.http_server import http_server
from tests.support.receiver import http_receiver, refusing_address
from tests.support.snapshots import RESOURCE, START_NS, snapshot, spans

WITHOUT_RIGHTS = 65_534


def metrics(steps: float = 7.0) -> bytes:
    return metrics_line(snapshot(steps), RESOURCE).encode()


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
            put(directory.rank_path, spans_line(spans(), RESOURCE).encode(), signal="traces")
    (tmp_path / "r" / "rank0" / "metrics.otlp.jsonl").write_bytes(metrics() + b"\n")
    return tmp_path / "r"


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pauses between tries are not waited for."""
    monkeypatch.setattr("otel_train.exporters.otlp.FIRST_PAUSE_S", 0.01)


@pytest.fixture
def send(run_path: Path, cli: Cli) -> Cli:
    """Replays the run to an endpoint."""
    return lambda endpoint, *words: cli("replay", run_path, *words, "--endpoint", endpoint)


@pytest.fixture
def verify(run_path: Path, cli: Cli) -> Cli:
    """Asks a Prometheus what it has of the run."""
    return partial(cli, "replay", run_path, "--verify", "--wait", "0", "--prometheus")


def test_without_a_collector_replay_says_how_to_name_one(run_path: Path) -> None:
    """A default address would only give a connection error."""
    with pytest.raises(ConfigError, match="--endpoint"):
        replay(run_path)


def test_a_dry_run_counts_and_touches_nothing(run_path: Path) -> None:
    """People look before they send."""
    before = {path: path.read_bytes() for path in run_path.rglob("*") if path.is_file()}
    assert replay(run_path, dry_run=True) == RequestCounts(accepted=3)
    assert replay(run_path, dry_run=True, recorded=True) == RequestCounts(accepted=4)
    assert {path: path.read_bytes() for path in run_path.rglob("*") if path.is_file()} == before


def test_a_signal_without_an_endpoint_is_kept_and_counted_as_kept(
    run_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A dry run counted spans that no replay would send, and a replay did not say that they are left."""
    with http_receiver() as received:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_METRICS_ENDPOINT", f"{received.endpoint}/v1/metrics")
        dry = replay(run_path, dry_run=True, recorded=True)
        sent = replay(run_path, recorded=True)

        assert dry == sent == RequestCounts(accepted=3, kept=1)
        assert "no endpoint for traces" in str(dry.kept_because) == str(sent.kept_because)
        assert (len(received.metrics), len(received.traces)) == (3, 0)


def test_a_wrong_endpoint_is_refused_with_the_option_that_gives_it(run_path: Path, send: Cli) -> None:
    """The variable that it named was not set."""
    said = send("foo").refused

    assert "'foo'" in said
    assert said.endswith("Give --endpoint http://127.0.0.1:4318.\n")


def test_every_rank_is_sent_and_the_spool_is_empty_afterwards(run_path: Path, send: Cli) -> None:
    """One command for the whole run; nothing is sent twice."""
    with http_receiver() as received:
        sent = send(received.endpoint)
        assert (sent.code, "3 accepted, 0 kept, 0 rejected, 0 cut off" in sent.out) == (0, True)
        # A Collector accepts them, and the store behind it does not: "5 sent" was true, and none was stored.
        assert "2 of metrics are older than 24 h" in sent.err
        assert (len(received.metrics), len(received.traces)) == (2, 1)
        assert send(received.endpoint).code == 0
        assert received.requests == 3
    assert not list(run_path.glob("rank*/spool"))


def test_the_recording_is_sent_when_asked_and_stays(run_path: Path, send: Cli) -> None:
    """The recording is the run's memory: a replay may read it, never take it."""
    with http_receiver() as received:
        assert send(received.endpoint, "--all").code == 0
        assert len(received.metrics) == 3
    assert (run_path / "rank0" / "metrics.otlp.jsonl").stat().st_size > 0


def test_a_torn_line_is_skipped_and_said(run_path: Path, send: Cli) -> None:
    """SIGKILL tears lines; the others must get through, and silence would hide the loss."""
    [segment] = (run_path / "rank0" / "spool").glob("metrics-*")
    segment.write_bytes(segment.read_bytes() + b'{"resourceMe')
    with http_receiver() as received:
        assert "3 accepted, 0 kept, 0 rejected, 1 cut off" in send(received.endpoint).printed


def test_a_line_that_is_no_request_is_moved_aside_and_said(run_path: Path, send: Cli) -> None:
    """What cannot be read here may be readable to another tool: it is never deleted."""
    theirs = b'{"resourceLogs": [{"scopeLogs": []}]}'
    put(run_path / "rank0", b"not JSON", theirs, metrics(8))
    with http_receiver() as received:
        code, out, err = send(received.endpoint)
        assert len(received.metrics) == 3
    rejected = run_path / "rank0" / "spool" / "rejected" / "metrics.jsonl"

    assert code == 1
    assert "4 accepted, 0 kept, 2 rejected, 0 cut off" in out
    assert "the line is no JSON" in err
    assert str(rejected) in err
    lines = [json.loads(line)["line"].encode() for line in rejected.read_text().splitlines()]
    assert lines == [b"not JSON", theirs]


def test_requests_of_another_exporter_are_sent_as_they_are(run_path: Path) -> None:
    """A valid line with a kind of metric that we never write was deleted as unreadable."""
    theirs = b'{"resourceMetrics":[{"scopeMetrics":[{"metrics":[{"name":"theirs","summary":{"dataPoints":[{"count":"2"}]}}]}]}]}'
    put(run_path / "rank0", theirs)
    with http_receiver() as received:
        assert replay(run_path, endpoint=received.endpoint) == RequestCounts(accepted=4)
        [metric] = [
            metric
            for asked in received.metrics
            for metric in asked.resource_metrics[0].scope_metrics[0].metrics
            if metric.name == "theirs"
        ]
    assert metric.summary.data_points[0].count == 2


@pytest.mark.parametrize("mode", ["html", "302", "404", "401", "503", "500", "odd", "429"])
def test_what_gets_no_good_answer_is_kept_byte_for_byte(run_path: Path, mode: str, send: Cli) -> None:
    """A login page or a redirect once counted as sent, and the spool was deleted."""
    before = left(run_path)
    with http_receiver(mode) as received:
        received.location = "http://login.example/" if mode == "302" else ""
        code, out, err = send(received.endpoint)

    assert code == 1
    assert "0 accepted, 3 kept, 0 rejected" in out
    assert "kept: the collector " in err
    assert "Traceback" not in err
    assert left(run_path) == before


def test_a_collector_that_is_not_there_costs_nothing(run_path: Path) -> None:
    """Trying too early is what people do."""
    before = left(run_path)
    with refusing_address() as place:
        counts = replay(run_path, endpoint=place)
    assert counts == RequestCounts(kept=3)
    assert list(counts.kept_because) == ["refuses connections"]
    assert left(run_path) == before


def test_what_is_refused_is_counted_said_and_no_obstacle(run_path: Path, send: Cli) -> None:
    """Five refused lines stopped everything behind them."""
    put(run_path / "rank0", *(metrics(steps) for steps in range(6)))
    with http_receiver("400") as received:
        code, out, err = send(received.endpoint)
        assert (code, received.requests) == (1, 9)

    assert "0 accepted, 0 kept, 9 rejected" in out
    assert "9 rejected: the collector refuses a request (400)" in err
    assert left(run_path) == []


def test_rejected_points_are_not_called_sent(send: Cli) -> None:
    """Status 200 alone says nothing."""
    with http_receiver("partial") as received:
        received.rejecting = 2
        code, out, err = send(received.endpoint)

    assert code == 1
    assert "0 accepted, 0 kept, 3 rejected" in out
    assert "rejects 2 records of a request (too old)" in err


def test_a_collector_that_is_away_is_not_asked_for_every_line(run_path: Path) -> None:
    """A spool of a week at ten seconds a refusal would take days."""
    put(run_path / "rank0", *(metrics(steps) for steps in range(9)))
    with http_receiver("503") as received:
        assert replay(run_path, endpoint=received.endpoint) == RequestCounts(kept=12)
        assert received.requests == 6  # three tries for each signal


def test_what_was_rejected_is_sent_again_once_the_cause_is_fixed(run_path: Path, send: Cli, cli: Cli) -> None:
    """It lay in a file that only a person with jq and curl could empty."""
    with http_receiver("400") as received:
        assert send(received.endpoint).code == 1
    with http_receiver() as received:
        assert send(received.endpoint).code == 0
        assert received.requests == 0
        assert "3 to send" in cli("replay", run_path, "--rejected", "--dry-run").printed
        assert "3 accepted, 0 kept, 0 rejected" in send(received.endpoint, "--rejected").printed
        assert (len(received.metrics), len(received.traces)) == (2, 1)
    assert not list(run_path.glob("rank*/spool"))


@pytest.mark.parametrize(("mode", "counts"), [("400", "1 kept, 3 rejected"), ("503", "4 kept, 0 rejected")])
def test_what_is_rejected_again_stays_with_its_reason(
    run_path: Path, mode: str, counts: str, send: Cli
) -> None:
    """Whatever the answer, no line of spool/rejected/ is lost, nor one that cannot be read."""
    with http_receiver("413") as received:
        assert send(received.endpoint).code == 1
    files = sorted(run_path.glob("rank*/spool/rejected/*.jsonl"))
    lines = [json.loads(path.read_text())["line"] for path in files]
    files[0].write_text(files[0].read_text() + "no JSON\n")
    with http_receiver(mode) as received:
        code, out, _ = send(received.endpoint, "--rejected")
    kept = [path.read_text().splitlines() for path in files]

    assert code == 1
    assert [json.loads(each[0])["line"] for each in kept] == lines
    assert kept[0][1] == "no JSON"
    assert ("413" in json.loads(kept[0][0])["reason"]) == (mode == "503")
    assert counts in out


def test_rejected_requests_wait_for_the_lock_and_are_kept_without_it(
    run_path: Path, monkeypatch: pytest.MonkeyPatch, send: Cli
) -> None:
    """A run that rejects one at the same time must not lose it, and what was not sent is not called sent."""
    monkeypatch.setattr(command, "_BUSY_TRIES", 2)
    with http_receiver("400") as received:
        assert send(received.endpoint).code == 1
    with http_receiver() as received, SpoolQueue(run_path / "rank0", "metrics").sending():
        code, out, _ = send(received.endpoint, "--rejected")
        assert (code, received.requests) == (1, 2)
    assert "2 accepted, 1 kept" in out


def test_a_link_in_place_of_a_recording_is_not_followed(run_path: Path, tmp_path: Path, send: Cli) -> None:
    """Whatever lies in a run directory, only files of a run are sent."""
    secret = tmp_path / "secret"
    secret.write_bytes(metrics() + b"\n")
    recording = run_path / "rank0" / "metrics.otlp.jsonl"
    recording.unlink()
    recording.symlink_to(secret)
    with http_receiver() as received:
        assert "link" in send(received.endpoint, "--all").refused
        assert received.requests == 0


@pytest.mark.parametrize("place", ["rank0", "rank0/spool", "a link"])
def test_a_rank_that_cannot_be_read_is_refused(
    place: str, run_path: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its requests were counted as none: "0 to send", exit code 0."""
    monkeypatch.chdir(run_path.parent)  # pytest's folders above it are closed to other users
    path, user = run_path / place, os.geteuid()
    if place == "a link":
        path = run_path / "rank0"
        path.rename(run_path / "moved")
        path.symlink_to("moved")
    else:
        for each in (run_path.parent, run_path, *run_path.rglob("*")) if not user else ():
            os.chown(each, WITHOUT_RIGHTS, -1)
        path.chmod(0)
    cli("replay", "--help")  # imports the command
    modes = (["--dry-run"], ["--verify", "--prometheus", "http://127.0.0.1:9"], ["--blocks=b"])
    try:
        if place != "a link":
            os.seteuid(user or WITHOUT_RIGHTS)
        said = [cli("replay", f"./{run_path.name}", *mode).refused for mode in modes]
    finally:
        os.seteuid(user)
        path.chmod(0o700)

    why = "a link" if place == "a link" else "Permission denied"
    assert all(f"{run_path.name}/{path.relative_to(run_path)}: " in each and why in each for each in said), (
        said
    )


def store(*times_s: float, status: int = 200) -> AbstractContextManager[str]:
    """A Prometheus that has samples of these times, of every rank."""
    values = [[time_s, "1"] for time_s in times_s]
    document = {"status": "success", "data": {"result": [{"values": values}]}}
    return http_server(lambda *_: (status, json.dumps(document if status == 200 else {}).encode()))


def test_what_is_in_the_store_is_no_more_than_what_the_store_says(send: Cli, verify: Cli) -> None:
    """Accepted is not stored. What is not there lies somewhere, and the way from there is said."""
    with store(START_NS / 1e9 + 10) as there, store() as empty:
        assert "2 of 2 exports are in" in verify(there).printed
        waiting = verify(empty)
        with http_receiver("400") as received:
            send(received.endpoint)
        rejected = verify(empty)
        with http_receiver() as received:
            send(received.endpoint, "--rejected")
        missing = verify(empty)

    assert [ended.code for ended in (waiting, rejected, missing)] == [1, 1, 1]
    assert "2 wait in the spool: otel-train replay sends them" in waiting.err
    assert "--rejected sends them again" in rejected.err
    assert "rank 3: 1 of 1 are missing, between 2023-11-14 22:13:30 UTC" in missing.err
    assert "--blocks DIR writes them for promtool" in missing.err


def test_only_times_of_exports_are_asked_for(run_path: Path, cli: Cli) -> None:
    """A clock of 1970 made 80,000 queries, one for every six hours since, and --wait did not end them."""
    for time_s in (1, START_NS // 10**9 + 12):
        put(run_path / "rank0", metrics().replace(b"%d" % (START_NS + 10**10), b"%d" % (time_s * 10**9)))
    queries: list[str] = []

    def answer(request: Any, _: bytes) -> tuple[int, bytes]:
        queries.append(request.path)
        return 200, b'{"status": "success", "data": {"result": []}}'

    with http_server(answer) as there:
        ended = cli("replay", run_path, "--verify", "--wait", "0", "--prometheus", there)

    assert ended.code == 1
    assert len(queries) == 3
    assert "4 are not" in ended.out


def test_an_infinite_time_in_an_answer_is_said(verify: Cli) -> None:
    """It was an unexpected OverflowError."""
    document = b'{"data": {"result": [{"values": [["inf", "1"]]}]}}'
    with http_server(lambda *_: (200, document)) as there:
        assert "does not answer as Prometheus does" in verify(there).refused


def test_an_address_that_is_no_url_is_said(verify: Cli) -> None:
    """It was an unexpected ValueError."""
    assert "http://[ does not answer as Prometheus does (Invalid IPv6 URL)" in verify("http://[").refused


def test_a_full_disk_names_the_folder_of_blocks(
    run_path: Path, tmp_path: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It named the spool, which is on another disk."""

    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(command, "write_text", full)
    said = cli("replay", run_path, "--blocks", tmp_path / "b").refused
    assert said == f"otel-train: {tmp_path / 'b'}: No space left on device\n"


@pytest.mark.parametrize("status", [302, 404, 503])
def test_a_store_that_is_none_is_said_and_exit_code_two(status: int, verify: Cli) -> None:
    """No answer must not read as nothing missing, nor as everything."""
    with store(status=status) as there:
        assert "does not answer as Prometheus does" in verify(there).refused
    assert "does not answer as Prometheus does" in verify("http://127.0.0.1:9").refused


@pytest.mark.parametrize(
    "answer",
    [
        b"SSH-2.0-OpenSSH_9.6\r\n",
        b"HTTP/1.1 200 OK\r\n\r\n" + b"[" * 100_000,
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nno chunk\r\n",
        b"HTTP/1.1 503 No\r\nTransfer-Encoding: chunked\r\n\r\nno chunk\r\n",
    ],
    ids=["no HTTP", "deep", "torn", "torn error"],
)
def test_an_answer_that_is_none_is_said_and_exit_code_two(answer: bytes, verify: Cli) -> None:
    """Another port of a machine answers, too: with "unexpected BadStatusLine"."""

    class Handler(socketserver.BaseRequestHandler):
        def handle(self) -> None:
            self.request.recv(4096)
            self.request.sendall(answer)

    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever).start()
        ended = verify(f"http://127.0.0.1:{server.server_address[1]}")
        server.shutdown()
    assert "does not answer as Prometheus does" in ended.refused


def test_bad_input_is_one_line_and_exit_code_two(tmp_path: Path, cli: Cli) -> None:
    """Scripts tell a wrong path from a collector that is away."""
    assert cli("replay", tmp_path / "nothing", "--run-dir", tmp_path).refused.count("\n") == 1
