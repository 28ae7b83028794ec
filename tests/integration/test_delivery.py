"""Every request arrives once, or lies in the spool and that is said: whatever the collector and the process do."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import subprocess
import sys
import textwrap
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from otel_train.cli.replay import replay
from otel_train.datamodel import ExportBatch
from otel_train.exporters.otlp import OtlpExporter
from otel_train.exporters.otlp_json import OtlpLines
from otel_train.exporters.otlp_settings import OtlpSettings
from otel_train.exporters.spool import SpoolQueue
from tests.support.json_lines import points_of, read_jsonl
from tests.support.programs import line
from tests.support.receiver import Received, grpc_receiver, http_receiver
from tests.support.snapshots import RESOURCE, snapshot, spans
from tests.support.waiting import until
from tests.support.zero_code import ended_well

ROOT = Path(__file__).parents[2]
PROTOCOLS = ("http/json", "http/protobuf")


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first pause between two tries is short."""
    monkeypatch.setattr("otel_train.exporters.otlp.FIRST_PAUSE_S", 0.1)


def exporter(endpoint: str, directory: Path | None, **environ: str) -> OtlpExporter:
    settings = OtlpSettings.read(environ, endpoint=endpoint)
    return OtlpExporter(settings, OtlpLines(RESOURCE), directory=directory)


def arrived(received: Received) -> list[int]:
    """Steps of the snapshots that arrived, in order."""
    return [
        round(metric.sum.data_points[0].as_double)
        for request in received.metrics
        for metric in request.resource_metrics[0].scope_metrics[0].metrics
        if metric.name == "train.steps"
    ]


def waiting(directory: Path) -> list[int]:
    """Steps of the snapshots that wait."""
    return [steps_of(json.loads(line)) for line in SpoolQueue(directory, "metrics").waiting()]


def steps_of(line: Any) -> int:
    steps: float = points_of(line)["train.steps"][0]["value"]
    return round(steps)


@pytest.mark.parametrize(
    ("protocol", "trouble"),
    [
        *product(PROTOCOLS, ("503", "500", "302", "html", "odd", "close", "401", "429")),
        *product(("grpc",), ("UNAVAILABLE", "RESOURCE_EXHAUSTED", "UNAUTHENTICATED", "INTERNAL")),
    ],
)
def test_after_any_trouble_every_snapshot_arrives_once_and_in_order(
    trouble: str, protocol: str, tmp_path: Path
) -> None:
    """No manual replay is needed, and no graph has a gap."""
    with grpc_receiver() if protocol == "grpc" else http_receiver() as received:
        received.mode = trouble
        received.retry_after = "1" if trouble in {"429", "503"} else ""
        otlp = exporter(received.endpoint, tmp_path, OTEL_EXPORTER_OTLP_PROTOCOL=protocol)
        for steps in range(10):
            otlp.export(ExportBatch(snapshot=snapshot(steps), spans=spans()))
        until(lambda: otlp.failures >= 2)
        received.mode = "ok"
        until(lambda: len(received.metrics) == len(received.traces) == 10)
        otlp.close(2)
        assert arrived(received) == list(range(10))
    assert not otlp.drops
    assert list(tmp_path.iterdir()) == []


def test_a_collector_that_rejects_stops_nothing_and_hides_nothing(tmp_path: Path) -> None:
    """What it takes arrives; what it does not take lies aside with its reason, and is counted."""
    with http_receiver() as received:
        otlp = exporter(received.endpoint, tmp_path)
        for steps in range(9):
            received.mode = {3: "partial", 5: "400", 6: "413"}.get(steps, "ok")
            received.rejecting = 2
            before = received.requests
            otlp.export(ExportBatch(snapshot=snapshot(steps)))
            until(lambda before=before: received.requests > before)  # type: ignore[misc]  # a default binds it
        otlp.close(2)
        assert arrived(received) == [0, 1, 2, 3, 4, 7, 8]
    lines = (tmp_path / "spool" / "rejected" / "metrics.jsonl").read_text().splitlines()
    rejected = [json.loads(line) for line in lines]

    assert [steps_of(json.loads(each["line"])) for each in rejected] == [3, 5, 6]
    assert "too old" in rejected[0]["reason"]
    assert otlp.drops == {("metrics", "rejected"): 2 + 5 + 5}
    assert waiting(tmp_path) == []


def test_a_request_that_the_collector_cannot_bear_stops_nothing_behind_it(tmp_path: Path) -> None:
    """A Collector answers 500 to what a processor of its cannot read, for ever."""
    with http_receiver("500") as received:
        received.poison = b'"asDouble":3.0'
        otlp = exporter(received.endpoint, tmp_path)
        for steps in range(6):
            otlp.export(ExportBatch(snapshot=snapshot(steps)))
        until(lambda: len(received.metrics) == 5)
        otlp.close(2)
        assert arrived(received) == [0, 1, 2, 4, 5]
    assert otlp.drops == {("metrics", "rejected"): 5}
    assert "accepts the one behind it" in (tmp_path / "spool" / "rejected" / "metrics.jsonl").read_text()


def test_a_collector_that_answers_500_to_everything_has_nothing_moved_aside(tmp_path: Path) -> None:
    """It is the collector that is broken, not what it is sent."""
    with http_receiver("500") as received:
        otlp = exporter(received.endpoint, tmp_path)
        for steps in range(3):
            otlp.export(ExportBatch(snapshot=snapshot(steps)))
        until(lambda: otlp.failures >= 4)
        otlp.close(0.5)
    assert waiting(tmp_path) == [0, 1, 2]
    assert not (tmp_path / "spool" / "rejected").exists()


def test_the_next_start_of_the_run_sends_what_is_left(tmp_path: Path) -> None:
    """An outage at the end of an attempt needs no manual replay."""
    with http_receiver("503") as received:
        otlp = exporter(received.endpoint, tmp_path)
        otlp.export(ExportBatch(snapshot=snapshot(1)))
        otlp.close(1)
        assert waiting(tmp_path) == [1]
        received.mode = "ok"
        after = exporter(received.endpoint, tmp_path)
        until(lambda: received.metrics)
        after.export(ExportBatch(snapshot=snapshot(2)))
        after.close(20)
        assert arrived(received) == [1, 2]


def test_a_run_directory_that_cannot_be_written_still_sends(tmp_path: Path) -> None:
    """Read-only and full disks are found where training is worth most."""
    (tmp_path / "spool").write_text("in the way")
    with http_receiver("503") as received:
        otlp = exporter(received.endpoint, tmp_path)
        for steps in range(3):
            otlp.export(ExportBatch(snapshot=snapshot(steps)))
        until(lambda: otlp.failures)
        received.mode = "ok"
        until(lambda: len(received.metrics) == 3)
        received.mode = "503"
        otlp.export(ExportBatch(snapshot=snapshot(3)))
        otlp.close(1)
        assert arrived(received) == [0, 1, 2]
    assert otlp.drops == {("metrics", "shutdown"): 5}


PROGRAM = textwrap.dedent(
    """
    import os, signal, sys, time
    sys.path.insert(0, os.getcwd())
    from pathlib import Path
    from otel_train.exporters.otlp import OtlpExporter
    from otel_train.exporters.otlp_json import OtlpLines
    from otel_train.exporters.otlp_settings import OtlpSettings
    from otel_train.datamodel import ExportBatch
    from tests.support.snapshots import RESOURCE, snapshot
    otlp = OtlpExporter(OtlpSettings.read(os.environ), OtlpLines(RESOURCE), directory=Path(sys.argv[1]))
    first, count = int(sys.argv[2]), int(sys.argv[3])
    stop = []
    def end(*_):
        if stop:
            os._exit(143)  # the second one does not wait
        stop.append(True)
        otlp.close(5)
        os._exit(0)
    signal.signal(signal.SIGTERM, end)
    for steps in range(first, first + count):
        otlp.export(ExportBatch(snapshot=snapshot(steps)))
        time.sleep(0.002)
    print("put", flush=True)
    time.sleep(60)
    """
)


@contextmanager
def running(program: str, *arguments: str, endpoint: str, until: str) -> Iterator[subprocess.Popen[str]]:
    """A program that has said a word, and does not outlive the test."""
    with subprocess.Popen(
        [sys.executable, "-c", program, *arguments],
        env={**os.environ, "OTEL_EXPORTER_OTLP_ENDPOINT": endpoint, "PYTHONPATH": str(ROOT)},
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            assert line(process) == until
            yield process
        finally:
            process.kill()


def started(
    directory: Path, endpoint: str, first: int, count: int
) -> AbstractContextManager[subprocess.Popen[str]]:
    """A process that has put ``count`` snapshots."""
    return running(PROGRAM, str(directory), str(first), str(count), endpoint=endpoint, until="put")


def test_sigkill_in_the_middle_of_sending_loses_nothing(tmp_path: Path) -> None:
    """Twice only what was under way at a kill: one request for each."""
    rank = tmp_path / "rank0"
    kills = 4
    with http_receiver("slow", slow_s=0.01) as received:
        for attempt in range(kills):
            with started(rank, received.endpoint, attempt * 50, 50) as process:
                time.sleep(0.05 * attempt)
                process.kill()
        counts = replay(tmp_path, endpoint=received.endpoint)
        times = Counter(arrived(received))
    assert (counts.kept, counts.rejected) == (0, 0)
    assert sorted(times) == list(range(50 * kills))
    assert sum(times.values()) - len(times) <= kills


QUEUE = textwrap.dedent(
    """
    import json, os, random, sys, time
    from pathlib import Path
    from otel_train.exporters.spool import SpoolQueue
    role, folder, first = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])
    queue = SpoolQueue(folder, "metrics")
    log = os.open(folder / role, os.O_CREAT | os.O_APPEND | os.O_WRONLY)
    number = first
    while True:
        if role == "put":
            queue.append(json.dumps({"n": number, "pad": "x" * random.choice([10, 3000, 90_000])}).encode())
            os.write(log, f"{number}\\n".encode())
            number += 1
            time.sleep(0.0005)
            continue
        with queue.sending() as granted:
            head = queue.head() if granted else None
            if head is not None:
                os.write(log, f"{json.loads(head.line)['n']}\\n".encode())
                queue.remove(head)
        time.sleep(0 if head else 0.001)
    """
)


def test_random_kills_of_one_that_appends_and_two_that_send_lose_nothing(tmp_path: Path) -> None:
    """Twice only what was under way at a kill; everything else once, whoever dies when."""

    def run(role: str, first: int = 0) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-c", QUEUE, role, str(tmp_path), str(first)]
        return subprocess.Popen(command, env={**os.environ, "PYTHONPATH": str(ROOT)})

    chance, kills = random.Random(7), 0
    processes = [run("put"), run("sent"), run("sent")]
    try:
        for round_ in range(1, 13):
            time.sleep(chance.uniform(0.3, 0.6))
            which = chance.randrange(3)
            processes[which].kill()
            processes[which].wait()
            kills += which > 0
            processes[which] = run("sent" if which else "put", round_ * 1_000_000)
        processes[0].kill()
        processes[0].wait()
        put = (tmp_path / "put").read_text().split()
        until(lambda: set(put) <= set((tmp_path / "sent").read_text().split()))
    finally:
        for process in processes:
            process.kill()
            process.wait()
    sent = Counter((tmp_path / "sent").read_text().split())

    assert len(put) > 100
    assert sum(sent.values()) - len(sent) <= kills
    assert len(set(sent) - set(put)) <= 12  # appended, and killed before that was written down


TRAINING = textwrap.dedent(
    """
    import sys, time, torch
    import otel_train
    torch.set_num_threads(1)
    model = torch.nn.Linear(4, 2)
    data = torch.utils.data.DataLoader(torch.randn(80, 4), batch_size=4)
    otel_train.instrument(model, {"train": data}, run_dir=sys.argv[1], run_id="r", prometheus=False,
                          export_interval_s=0.2, tuning={"poll_interval_s": 0.05}, console=False, exit_timeout_s=5.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    print("trains", flush=True)
    while True:
        for x in data:
            model(x).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            time.sleep(0.001)
    """
)


def training(folder: Path, endpoint: str) -> AbstractContextManager[subprocess.Popen[str]]:
    """A run that trains until it is asked to end."""
    return running(TRAINING, str(folder), endpoint=endpoint, until="trains")


def recorded_ns(rank: Path) -> list[int]:
    """When the snapshots in the recording of a rank were made."""
    lines = read_jsonl(rank / "metrics.otlp.jsonl")
    return [int(points_of(line)["train.heartbeat.time"][0]["timeUnixNano"]) for line in lines]


def arrived_ns(*receivers: Received) -> list[int]:
    """When the snapshots that arrived were made, in the order of their arrival."""
    return [
        metric.gauge.data_points[0].time_unix_nano
        for received in receivers
        for request in received.metrics
        for metric in request.resource_metrics[0].scope_metrics[0].metrics
        if metric.name == "train.heartbeat.time"
    ]


def test_a_run_whose_collector_dies_and_returns_has_no_hole(tmp_path: Path) -> None:
    """The whole program: what the run recorded is what arrived, in order and each once, unless its answer was lost."""
    rank = tmp_path / "r" / "rank0"
    with ExitStack() as stack:
        with http_receiver() as first:
            port = int(first.endpoint.rpartition(":")[2])
            process = stack.enter_context(training(tmp_path, first.endpoint))
            until(lambda: len(first.metrics) >= 2, seconds=60)
        time.sleep(1.5)  # no server listens there
        with http_receiver(port=port) as second:
            until(lambda: len(second.metrics) >= 8, seconds=60)
            process.send_signal(signal.SIGTERM)
            process.wait(20)
    arrived, again = arrived_ns(first), arrived_ns(second)
    if arrived[-1] == again[0]:  # the server closed between the request and its answer: it is sent again
        del again[0]
    assert arrived + again == recorded_ns(rank)
    assert not (rank / "spool").exists()


def run_summary(folder: Path, answer: str) -> str:
    """What the same program prints when it ends by itself, where a Collector answers so."""
    program = TRAINING.replace("console=False, ", "").replace("while True", "for _ in range(30)")
    with http_receiver(answer) as received:
        environ = {**os.environ, "OTEL_EXPORTER_OTLP_ENDPOINT": received.endpoint}
        done = ended_well([sys.executable, "-c", program, folder], environ, ROOT)
    return done.stderr[done.stderr.index("where the time went") :]


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        ("503", "otlp       the Collector has not accepted the last requests: they wait in the spool\n"),
        ("400", "were rejected\n"),
        ("ok", ""),
    ],
)
def test_the_run_summary_says_whether_the_collector_accepts_requests(
    answer: str, said: str, tmp_path: Path
) -> None:
    """A run of which nothing had arrived ended with the words "none lost", after one line at its beginning."""
    summary = run_summary(tmp_path, answer)
    assert said in summary
    rejected = " --rejected" * (answer == "400")
    assert (f"\n             otel-train replay {tmp_path}/r{rejected}\n" in summary) is bool(said)


def test_without_a_run_directory_the_run_summary_says_what_the_collector_has_not_accepted(
    tmp_path: Path,
) -> None:
    """There is nothing to replay: what waits at the end is lost, and the run summary had no word of it."""
    (tmp_path / "file").touch()
    summary = run_summary(tmp_path / "file", "503")
    assert "otlp       the Collector has not accepted the last requests: they are in memory alone" in summary
    assert "replay" not in summary.partition("━━━")[0]


def test_the_run_summary_says_how_many_requests_a_full_disk_keeps_in_memory(tmp_path: Path) -> None:
    """It said that they wait in the spool, where they are not. A file where that should be is as good as a full disk."""
    (tmp_path / "r" / "rank0").mkdir(parents=True)
    (tmp_path / "r" / "rank0" / "spool").touch()
    summary = run_summary(tmp_path, "503")
    assert re.search(r"\d+ requests? in memory alone, as the disk\s+cannot be written", summary)


def test_two_sigterms_in_the_middle_of_a_send_of_a_run_lose_nothing(tmp_path: Path) -> None:
    """The whole program: what the run recorded arrives by a replay, each once and in order."""
    rank = tmp_path / "r" / "rank0"
    with http_receiver("slow", slow_s=60) as received, training(tmp_path, received.endpoint) as process:
        until(lambda: received.requests, seconds=60)
        time.sleep(0.7)
        process.send_signal(signal.SIGTERM)
        time.sleep(0.3)
        process.send_signal(signal.SIGTERM)
        process.wait(20)
    with http_receiver() as after:
        counts = replay(tmp_path / "r", endpoint=after.endpoint)
    assert (counts.kept, counts.rejected, counts.torn) == (0, 0, 0)
    assert arrived_ns(after) == recorded_ns(rank)
    assert len(recorded_ns(rank)) >= 3


def test_a_replay_beside_a_running_process_sends_nothing_twice(tmp_path: Path) -> None:
    """Cron on a login node calls it while the job runs."""
    rank = tmp_path / "rank0"
    with http_receiver("503") as received:
        with started(rank, received.endpoint, 0, 40) as process:
            received.mode = "ok"
            counts = replay(tmp_path, endpoint=received.endpoint)
            until(lambda: len(received.metrics) >= 40)
            process.send_signal(signal.SIGTERM)
            process.wait(10)
        assert counts.kept == 0
        assert sorted(arrived(received)) == list(range(40))
