"""A launcher counts to the end what a killed process could not: no more, no less."""

from __future__ import annotations

import json
import pickle
import subprocess
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
import torch

import otel_train
from otel_train.export.rundir import read_jsonl
from otel_train.launch.aftermath import settle
from otel_train.launch.parent import Ended
from otel_train.launch.will import Will, read_wills
from tests.integration.loops.truth import QUIET, Net, loader, sgd
from tests.support.inside import inside
from tests.support.receiver import http_receiver

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

COUNTED = ("steps", "partial_steps", "batches", "samples", "updates", "step_source")


def learn(model: Any, batches: Any) -> None:
    optimizer = sgd(model)
    for x, y in batches:
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()


def evaluate(model: Any, batches: Any) -> None:
    with torch.no_grad():
        for x, _ in batches:
            model(x)


@pytest.fixture
def dead_pid() -> int:
    """Of a process that has been."""
    process = subprocess.Popen(["true"])
    process.wait()
    return process.pid


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Of a launcher."""
    made = tmp_path / "launch"
    made.mkdir()
    return made


@pytest.fixture
def session(tmp_path: Path, folder: Path) -> Iterator[Any]:
    """One that leaves a will, and looks only when told to."""
    model, loaders = Net(), {"train": loader(6), "val": loader(2)}  # held until the test is over
    opened = otel_train.instrument(
        model, loaders, run_dir=str(tmp_path / "runs"), keep_burst=1000,
        keep_every_steps=1, **{**QUIET, "turn_every_s": 10.0},
    )  # fmt: skip
    Will.deposit(opened, folder)
    yield opened
    opened.close()


def epoch(session: Any) -> None:
    [probe] = session._recording.probes.models
    learn(probe.model(), session.loaders["train"])
    evaluate(probe.model(), session.loaders["val"])


def turn(session: Any, *, exports: bool) -> None:
    """Let the pump look; with ``exports`` it also sends, and the will is written again."""
    with inside(session).pump.lock:
        if exports:
            inside(session).pump._due.clear()
        inside(session).pump.settle()
        inside(session).pump.turn()


def die(folder: Path, pid: int, session: Any, code: int = -9) -> dict[str, Any]:
    """As if the process of the session had been killed now; what the launcher then writes about it."""
    [will] = read_wills(folder)
    estate = will._replace(info=replace(will.info, pid=pid))
    for path in folder.iterdir():
        path.unlink()
    (folder / f"{pid}.will").write_bytes(pickle.dumps(estate))
    session._recording.recorder.publish(0)
    [settled] = settle(folder, Ended(pid, code), {})
    assert settled.lost == 0
    written: dict[str, Any] = json.loads((settled.rank_path / "summary.json").read_text(encoding="utf-8"))
    return written


def counts(summary: dict[str, Any]) -> dict[str, Any]:
    rows = {
        (row["stage"], row["phase"], row["loader"], row["model"]): (row["count"], row["inclusive_seconds"])
        for row in summary["stages"]
        if row["stage"] != "other"
    }
    return {**{name: summary[name] for name in COUNTED}, "rows": rows}


@pytest.mark.parametrize("exports", [(), (0,), (1,), (0, 2), (0, 1, 2)], ids=str)
def test_the_launcher_counts_what_the_process_would_have_counted(
    exports: tuple[int, ...], session: Any, folder: Path, dead_pid: int
) -> None:
    """Whenever the last export was: counters go on from there, and nothing is counted twice."""
    for number in range(3):
        epoch(session)
        if number in exports:
            turn(session, exports=True)

    written = die(folder, dead_pid, session)
    counted = session.summary()

    assert written["state"] == "killed"
    assert written["steps"] == {"train": 18, "eval": 6}
    assert counts(written) == counts(counted)
    assert written["telemetry"]["records"] == counted["telemetry"]["records"]
    assert sum(written["activities"].values()) == pytest.approx(written["wall_seconds"], rel=0.01)


def test_spans_and_events_that_were_told_are_not_told_again(
    session: Any, folder: Path, dead_pid: int
) -> None:
    """Between two exports of metrics a process goes on telling: a launcher that counts again must not."""
    epoch(session)
    turn(session, exports=True)
    epoch(session)
    turn(session, exports=False)
    epoch(session)
    die(folder, dead_pid, session)
    rank = session.run_directory / "rank0"

    spans = [
        span["name"] + span["traceId"] + span["spanId"]
        for line in read_jsonl(rank / "spans.otlp.jsonl")
        for span in line["resourceSpans"][0]["scopeSpans"][0]["spans"]  # type: ignore[index]  # OTLP/JSON
    ]
    events = [str(line["name"]) for line in read_jsonl(rank / "events.jsonl")]
    assert len(set(spans)) == len(spans)
    assert sum(name.startswith("train.rank_step") for name in spans) == 18
    assert events.count("train.loader.exhausted") == 6
    assert events.count("train.run.killed") == 1


def test_the_last_figures_are_sent_with_the_end_of_the_run(
    session: Any, folder: Path, dead_pid: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An alert on `train_run_status` fires for who died without a word; others look at the trace."""
    epoch(session)
    with http_receiver() as received:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", received.endpoint)
        environ = {"OTEL_EXPORTER_OTLP_ENDPOINT": received.endpoint}
        [will] = read_wills(folder)
        for path in folder.iterdir():
            path.unlink()
        info = replace(will.info, pid=dead_pid)
        lively = will._replace(info=info, config=replace(will.config, otlp="auto"))
        (folder / f"{dead_pid}.will").write_bytes(pickle.dumps(lively))
        settle(folder, Ended(dead_pid, -11), environ)
        assert received.wait(metrics=1, traces=1)

    states = {
        point.attributes[0].value.string_value: point.as_double
        for point in received.points()["train.run.status"].sum.data_points
    }
    assert states["failed"] == 1
    assert sum(states.values()) == 1
    [end] = [span for span in received.spans() if span.name == "train.run.end"]
    assert end.status.message == "SIGSEGV"


def test_a_process_that_left_by_os_exit_has_failed(session: Any, folder: Path, dead_pid: int) -> None:
    """No signal killed it, and nothing of it could say goodbye."""
    epoch(session)
    written = die(folder, dead_pid, session, code=5)
    [event] = [
        line for line in read_jsonl(session.run_directory / "rank0" / "events.jsonl")
        if line["name"] == "train.run.killed"
    ]  # fmt: skip

    assert written["state"] == "failed"
    assert event["attributes"]["train.run.end.cause"] == "exit code 5"  # type: ignore[index]  # as above


def test_who_ends_by_itself_leaves_nothing_to_a_launcher(session: Any, folder: Path) -> None:
    """The launcher must not write over a regular end."""
    assert len(read_wills(folder)) == 1
    session.close()

    assert read_wills(folder) == []


def test_an_earlier_attempt_is_left_alone(session: Any, folder: Path, dead_pid: int) -> None:
    """A rank that was started again goes on in the same folder: its summary is the later one's."""
    [will] = read_wills(folder)
    (folder / f"{dead_pid}.will").write_bytes(
        pickle.dumps(will._replace(info=replace(will.info, pid=dead_pid)))
    )
    for path in folder.iterdir():
        if path.stem != str(dead_pid):
            path.unlink()
    (session.run_directory / "rank0" / "attempt").write_text("1\n")

    assert settle(folder, Ended(dead_pid, -9), {}) == []


def test_a_will_that_cannot_be_read_costs_itself_alone(folder: Path) -> None:
    """Killed while it wrote, or written by another version."""
    (folder / "1.will").write_bytes(b"\x80\x05nonsense")
    (folder / "2.will").write_bytes(pickle.dumps({"not": "an estate"}))

    assert read_wills(folder) == []
