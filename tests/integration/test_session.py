"""A session from ``instrument`` to ``close``, with torch, files, sockets and a collector."""

from __future__ import annotations

import gc
import itertools
import json
import logging
import os
import signal
import socket
import sys
import threading
import time
import urllib.request
import weakref
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import jsonschema  # type: ignore[import-untyped]  # it publishes no types
import psutil
import pytest
import torch
from prometheus_client import parser
from prometheus_client.openmetrics import parser as openmetrics_parser
from torch.optim import optimizer as torch_optimizer
from torch.utils.data import DataLoader, Dataset
from torch.utils.data import dataloader as torch_dataloader

import otel_train
from otel_train import catalog as c
from otel_train.cli.main import main
from otel_train.instrumentation import registry
from otel_train.recording.shared_memory import SIDE_RINGS
from otel_train.rundata.live_view import state_of
from tests.integration.loops.truth import QUIET, Net, Watch, loader, loss_of, sgd
from tests.support.command_line import Cli
from tests.support.inside import inside
from tests.support.json_lines import last_points, read_jsonl
from tests.support.receiver import http_receiver
from tests.support.summary_laws import laws_of
from tests.support.waiting import in_threads, until
from tests.support.watchdog import watchdog

ROOT = Path(__file__).parents[2]
SCHEMA = json.loads((ROOT / "otel_train/rundata/summary.schema.json").read_text())
classic: Any = parser.text_string_to_metric_families
openmetrics: Any = openmetrics_parser.text_string_to_metric_families  # it publishes no types
FAST: dict[str, Any] = {"tuning": {"poll_interval_s": 0.01}, "export_interval_s": 0.1}


def train(model: Net, batches: Any, *, epochs: int = 1, log: bool = False) -> None:
    optimizer = sgd(model)
    for _ in range(epochs):
        for batch in batches:
            loss = loss_of(model, batch)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            if log:
                otel_train.log(loss=loss, lr=0.01)


def validate(model: Net, batches: Any) -> None:
    with torch.no_grad():
        for batch in batches:
            loss_of(model, batch)


def rank_folder(session: Any) -> Path:
    folder: Path = session.run_directory / "rank0"
    return folder


def summary_file(session: Any) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((rank_folder(session) / "summary.json").read_text())
    return found


@pytest.fixture
def slept(watch: Watch, monkeypatch: pytest.MonkeyPatch) -> tuple[Any, Net, Any]:
    """A session that has trained, with model and loader, on a machine that then slept for an hour."""
    model, batches = Net(), loader(8)
    session = watch(model, {"train": batches}, **FAST)
    train(model, batches)
    of_the_system = time.time_ns
    monkeypatch.setattr(time, "time_ns", lambda: of_the_system() + 3600 * 10**9)
    return session, model, batches


def test_a_clock_that_is_set_leaves_how_long_a_stage_is_open(
    slept: tuple[Any, Net, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    """A machine that has slept for an hour: a postmortem must not say that the stage has hung as long."""
    session, _, _ = slept
    set_s = time.time_ns() / 1e9
    with otel_train.stage("slow"):

        def heard() -> list[Any] | None:
            failed = main(["postmortem", str(session.run_directory), "--json"])  # there may be no file yet
            found = json.loads(capsys.readouterr().out or "{}")
            return found["open"] if not failed and (found["last_edge_unix_s"] or 0.0) > set_s - 60 else None

        stages = until(heard, "the flight file has the time that was set")

    assert [stage["stage"] for stage in stages] == ["slow"]
    assert stages[0]["for_seconds"] < 60


def test_after_a_clock_was_set_spans_events_and_summary_have_its_time(slept: tuple[Any, Net, Any]) -> None:
    """A machine that has slept: its run was shown as gone, and its last spans and events as an hour old."""
    session, model, batches = slept
    train(model, batches)
    now_s = time.time_ns() / 1e9
    session.close()

    folder, summary = rank_folder(session), summary_file(session)
    traces = read_jsonl(folder / "spans.otlp.jsonl")[-1]["resourceSpans"][0]["scopeSpans"][0]["spans"]
    event_s = read_jsonl(folder / "events.jsonl")[-1]["time_unix_ns"] / 1e9
    assert state_of(folder, summary, {}, now_s)[0].word == "finished"
    for said_s in (summary["until_unix_s"], int(traces[-1]["endTimeUnixNano"]) / 1e9, event_s):
        assert said_s == pytest.approx(now_s, abs=60)


def test_a_clock_that_is_set_leaves_the_age_of_the_last_progress(slept: tuple[Any, Net, Any]) -> None:
    """A machine that has slept for an hour, or asked for the time late: an alert compares the heartbeat with its sample's time."""
    session, model, batches = slept
    train(model, batches)
    with otel_train.checkpoint():
        pass
    session.close()

    points = last_points(rank_folder(session))
    for name in (c.HEARTBEAT_TIME.name, c.CHECKPOINT_LAST_SUCCESS_TIME.name):
        age_s = int(points[name][0]["timeUnixNano"]) / 1e9 - points[name][0]["value"]
        assert 0 <= age_s < 60, name


@pytest.fixture
def set_back(watch: Watch, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of a rank whose machine had begun an hour ahead; the clock was set while it ran."""
    model, batches = Net(), loader(8)
    session = watch(model, {"train": batches}, **FAST)
    of_the_system = time.time_ns
    monkeypatch.setattr(time, "time_ns", lambda: of_the_system() - 3600 * 10**9)
    train(model, batches)
    session.close()
    return rank_folder(session)


def test_a_run_ends_after_it_began_where_the_clock_was_set_back(set_back: Path, cli: Cli) -> None:
    """Its end lay an hour before its start, in the summary and the post-mortem, and ``validate`` called that consistent."""
    summary = json.loads((set_back / "summary.json").read_text())
    lasted_s = summary["until_unix_s"] - summary["started_unix_s"]
    report = json.loads(cli("postmortem", set_back, "--json").printed)

    assert lasted_s == pytest.approx(summary["wall_seconds"], abs=1e-3)
    assert summary["started_unix_s"] - 1e-3 <= report["started_unix_s"] <= report["last_edge_unix_s"]
    assert list(laws_of(summary)) == []
    [broken] = laws_of({**summary, "started_unix_s": summary["started_unix_s"] + 3600})
    assert "wall_seconds is" in broken


def test_no_point_ends_before_it_began_where_the_clock_was_set_back(set_back: Path) -> None:
    """Backends refuse a start time that is after the time of its point."""
    points = [point for each in last_points(set_back).values() for point in each]
    lasted_s = {
        (int(point["timeUnixNano"]) - int(point["startTimeUnixNano"])) / 1e9
        for point in points
        if "startTimeUnixNano" in point
    }
    assert all(0 <= each < 60 for each in lasted_s), lasted_s
    assert lasted_s


# --- bad input ------------------------------------------------------------------------------------


def traces_of_us() -> dict[str, Any]:
    """Everything a session leaves in a process while it is open."""
    return {
        "threads": sorted(t.name for t in threading.enumerate() if t.name.startswith("otel")),
        "sockets": len(psutil.Process().net_connections()),
        "backward": torch.autograd._engine_run_backward,
        "init": torch_dataloader._BaseDataLoaderIter.__init__,
        "sigterm": signal.getsignal(signal.SIGTERM),
        "hooks": len(torch_optimizer._global_optimizer_pre_hooks),
        "scaler": torch.amp.GradScaler.step,
        "mapped": [m.path for m in psutil.Process().memory_maps() if "flight" in m.path],
    }


def two_loaders_named_alike() -> Any:
    return [otel_train.Loader(loader(1), name="a"), otel_train.Loader(loader(1), name="a")]


def unknown_phase() -> Any:
    return otel_train.Loader(loader(1), name="a", phase="training")


WRONG: dict[str, tuple[Callable[[], dict[str, Any]], tuple[str, ...]]] = {
    "unknown setting": (lambda: {"exprt_every_s": 5}, ("exprt_every_s", "export_interval_s")),
    "negative interval": (lambda: {"export_interval_s": -1.0}, ("export_interval_s", "-1", "0.1")),
    "text for a number": (lambda: {"export_interval_s": "often"}, ("export_interval_s", "often", "number")),
    "loader not iterable": (lambda: {"loaders": {"train": 42}}, ("train", "whole number", "iterable")),
    "loader is a batch": (lambda: {"loaders": {"train": torch.zeros(3)}}, ("train", "Tensor", "iterable")),
    "name twice": (lambda: {"loaders": two_loaders_named_alike()}, ("'a'", "twice", "own name")),
    "unknown phase": (lambda: {"loaders": unknown_phase()}, ("phase", "training", "train")),
    "model no module": (lambda: {"model": loss_of}, ("function", "torch.nn.Module", "stage")),
    "one of several models": (
        lambda: {"model": {"g": Net(), "d": 3}},
        ("'d'", "whole number", "torch.nn.Module"),
    ),
    "no address": (
        lambda: {"prometheus": True, "prometheus_address": "256.1.1.1:9464"},
        ("256.1.1.1", "127.0.0.1"),
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_mistake_is_refused_at_once_and_nothing_stays(name: str, watch: Watch, tmp_path: Path) -> None:
    """Value, rule and remedy now, instead of a night of training without metrics; and no hook left behind."""
    make, said = WRONG[name]
    gc.collect()  # what earlier tests have left
    before = traces_of_us()
    given = {"prometheus_address": "127.0.0.1:0", **make()}

    with pytest.raises(otel_train.ConfigError) as refused:
        watch(**given)

    message = str(refused.value)
    del refused  # its traceback holds the frames, and those hold the session
    gc.collect()
    assert [word for word in said if word not in message] == []
    assert traces_of_us() == before
    assert otel_train.current() is None
    # A run directory of a run that never began would be taken for a crash; an address is tried when there is one.
    assert name == "no address" or not (tmp_path / "runs").exists()


def test_a_mistake_in_a_second_call_leaves_the_session_as_it_was(watch: Watch) -> None:
    """The good loader beside the bad one is not half added."""
    batches = loader(1)
    session = watch(Net(), {"train": batches})

    with pytest.raises(otel_train.ConfigError):
        watch(None, {"extra": loader(1), "bad": 42})
    assert set(session.loaders) == {"train"}
    assert otel_train.current() is session


# --- one session, several calls -------------------------------------------------------------------


def test_a_second_call_extends_the_session_and_times_nothing_twice(watch: Watch) -> None:
    """A notebook cell is run again; a library instruments as well."""
    model, batches = Net(), loader(12)
    session = watch(model, {"train": batches})
    assert watch(model, {"train": batches}) is session
    assert watch(model, {"again": batches, "val": loader(2)}) is session
    train(model, batches)
    found = session.summary()

    forward = [row for row in found["stages"] if row["stage"] == "forward"]
    assert [(row["model"], row["count"]) for row in forward] == [("Net", 12)]
    assert sum(found["batches"].values()) == 12
    assert found["steps"] == {"train": 12}


def test_a_name_can_be_used_again_for_the_next_fold(watch: Watch) -> None:
    """Folds and sweeps: the series goes on, the run is one."""
    for fold in range(3):
        model, batches = Net(), loader(12)
        session = watch(model, {"train": batches})
        train(model, batches)
        assert session.summary()["batches"] == {"train": 12 * (fold + 1)}
        del model, batches
        watch.models.clear()
        gc.collect()
    found = session.summary()

    assert {row["model"] for row in found["stages"] if row["stage"] == "forward"} == {"Net"}
    assert found["steps"] == {"train": 36}


def test_a_session_is_a_context_manager(watch: Watch) -> None:
    """The end of the block closes the session."""
    before = torch.autograd._engine_run_backward
    with watch(Net(), {"train": loader(2)}) as session:
        shown = f"<otel_train.Session: rank 0 of run {session.info.run_id!r}, "
        assert otel_train.current() is session
        assert torch.autograd._engine_run_backward is not before
        assert repr(session) == shown + "recording>"  # a notebook prints it below the cell

    assert otel_train.current() is None
    assert repr(session) == shown + "closed>"
    assert torch.autograd._engine_run_backward is before
    assert summary_file(session)["state"] == "finished"


def test_closing_twice_is_closing_once(watch: Watch) -> None:
    """``close`` in a finally block, and again at exit."""
    model, batches = Net(), loader(12)
    session = watch(model, {"train": batches})
    train(model, batches)
    session.close()
    first = (rank_folder(session) / "summary.json").read_bytes()
    session.close("failed")

    assert (rank_folder(session) / "summary.json").read_bytes() == first
    assert session.summary()["steps"] == {"train": 12}


def test_a_window_holds_what_came_since_it_was_reset(watch: Watch) -> None:
    """Metrics of this epoch, not of all; what the telemetry costs included."""
    model, batches = Net(), loader(12)
    session = watch(model, {"train": batches})
    train(model, batches, epochs=3)
    whole = session.summary()
    otel_train.reset_window()
    train(model, batches)
    window = otel_train.summary()

    assert (whole["steps"], window["steps"]) == ({"train": 36}, {"train": 12})
    assert window["wall_seconds"] < whole["wall_seconds"] + window["wall_seconds"]
    assert sum(window["activities"].values()) == pytest.approx(window["wall_seconds"], rel=1e-3)
    assert window["telemetry"]["records"] < whole["telemetry"]["records"]
    assert 0 < window["telemetry"]["overhead_us_per_step"] < 3 * whole["telemetry"]["overhead_us_per_step"]
    session.close()
    assert summary_file(session)["steps"] == {"train": 48}


# --- manually -------------------------------------------------------------------------------------


def test_events_of_threads_without_a_ring_are_lost_records(watch: Watch) -> None:
    """No metric counts what happened in them."""
    session = watch(Net(), {"train": loader(1)})
    arrived = threading.Barrier(SIDE_RINGS + 3)

    def work() -> None:
        with otel_train.stage("work"):
            arrived.wait(20)

    in_threads(*[work] * (SIDE_RINGS + 3))
    session.close()

    telemetry = session.summary()["telemetry"]
    assert (telemetry["records_lost"], telemetry["drops"]) == (6, {"overrun": 6})


def test_manual_steps_go_on_from_where_the_user_says(watch: Watch) -> None:
    """After a resume the step number is the user's."""
    model, rows = Net(), list(loader(3))
    session = watch(model, **FAST)
    otel_train.step(start=500)
    for batch in rows:
        loss_of(model, batch).backward()
        otel_train.step()
    otel_train.event("resumed", checkpoint="x.pt")
    session.close()
    events = read_jsonl(rank_folder(session) / "events.jsonl")
    [event] = [event for event in events if event["name"] == "resumed"]

    assert session.summary()["steps"] == {"train": 3}
    assert session.summary()["step_source"] == "manual"
    assert event["attributes"] == {c.STEP_NUMBER.name: 503, "checkpoint": "x.pt"}


# --- log ------------------------------------------------------------------------------------------


def gauges(session: Any) -> dict[str, dict[tuple[str, ...], float]]:
    session.close()
    return {
        name: {tuple(point["labels"].values()): point["value"] for point in points if "value" in point}
        for name, points in last_points(rank_folder(session)).items()
    }


def test_a_logged_tensor_is_what_it_was_when_it_was_logged(watch: Watch) -> None:
    """``total_loss += loss`` in place, right after the call, must not show."""
    session = watch(tuning={"poll_interval_s": 10.0})
    loss = torch.tensor(1.5)
    otel_train.log(loss=loss, lr=0.25, grad_norm=torch.tensor([2.0]))
    loss.add_(100)
    found = gauges(session)

    assert found["train.loss"] == {("loss", "train"): 1.5}
    assert found["train.learning_rate"] == {("0",): 0.25}
    assert found["train.gradient.norm"] == {(): 2.0}


def test_a_logged_loss_does_not_keep_its_graph_alive(watch: Watch) -> None:
    """The activations of a step are gigabytes."""
    watch(tuning={"poll_interval_s": 10.0})
    weight = torch.ones(3, requires_grad=True)
    hidden = weight * 2
    gone = weakref.ref(hidden)
    loss = hidden.sum()
    otel_train.log(loss=loss)
    del hidden, loss
    gc.collect()

    assert gone() is None


@pytest.mark.parametrize("poll_interval_s", [0.01, 10.0])
def test_a_loss_that_is_not_a_number_keeps_its_step(watch: Watch, poll_interval_s: float) -> None:
    """An event, a metric, and the trace of that very step."""
    model, batches = Net(), loader(30)
    tuning = {"poll_interval_s": poll_interval_s, "trace_warmup_steps": 0}
    session = watch(model, {"train": batches}, tuning=tuning, trace_slow_factor=1e6)
    optimizer = sgd(model)
    for number, batch in enumerate(batches):
        loss = loss_of(model, batch)
        loss.backward()
        optimizer.step()
        otel_train.log(loss=loss * float("nan") if number == 17 else loss)
    found = gauges(session)
    events = [
        e for e in read_jsonl(rank_folder(session) / "events.jsonl") if e["name"] == c.NONFINITE_EVENT.name
    ]
    kept = [span["attributes"] for span in spans_of(session) if span["name"] == c.RANK_STEP_SPAN.name]

    assert found["train.nonfinite.detections"]["loss",] == 1
    assert [event["attributes"][c.STEP_NUMBER.name] for event in events] == [17]
    assert (17, "nonfinite") in [(a[c.STEP_NUMBER.name], a[c.KEEP_REASON.name]) for a in kept]


def test_a_wrong_value_costs_only_itself(watch: Watch, caplog: pytest.LogCaptureFixture) -> None:
    """A slip in a log call is said once; training and the other values go on."""
    session = watch(**FAST)
    with caplog.at_level(logging.WARNING, "otel_train"):
        for _ in range(5):
            otel_train.log(loss=torch.tensor(2.0), output=torch.zeros(4), note="text")
        found = gauges(session)

    assert found["train.loss"] == {("loss", "train"): 2.0}
    assert len([r for r in caplog.records if "note" in r.getMessage()]) == 1
    assert not session.summary()["telemetry"]["faults"]
    assert session.summary()["telemetry"]["drops"] == {"serialization": 10}


# --- the run directory ----------------------------------------------------------------------------


def value_of(item: dict[str, Any]) -> Any:
    [(kind, value)] = item["value"].items()
    return int(value) if kind == "intValue" else value


def spans_of(session: Any) -> list[dict[str, Any]]:
    path = rank_folder(session) / "spans.otlp.jsonl"
    return [
        {**span, "attributes": {item["key"]: value_of(item) for item in span.get("attributes", [])}}
        for line in read_jsonl(path)
        for span in line["resourceSpans"][0]["scopeSpans"][0]["spans"]
    ]


def test_the_run_directory_is_what_its_contract_says(watch: Watch) -> None:
    """Other programs read it: each file parses, the summary fits its schema, metrics add up."""
    model, batches, val = Net(), loader(12), loader(3)
    session = watch(model, {"train": batches, "val": val}, run_name="a run", **FAST)
    train(model, batches, epochs=2, log=True)
    validate(model, val)
    with otel_train.checkpoint():
        pass
    session.close()
    folder = rank_folder(session)
    summary = summary_file(session)

    jsonschema.validate(summary, SCHEMA)
    assert summary["steps"] == {"train": 24, "eval": 3}
    assert summary["state"] == "finished"
    assert sum(summary["activities"].values()) == pytest.approx(summary["wall_seconds"], rel=1e-6)
    in_stages_s = sum(row["self_seconds"] for row in summary["stages"])
    assert in_stages_s == pytest.approx(summary["wall_seconds"], rel=1e-6)
    assert json.loads((session.run_directory / "run.json").read_text())["run_name"] == "a run"
    assert read_jsonl(folder / "events.jsonl")
    assert read_jsonl(folder / "metrics.otlp.jsonl")
    assert {span["name"] for span in spans_of(session)} >= {
        c.RUN_SPAN.name, c.RUN_END_SPAN.name, c.STEP_SPAN.name, c.EVAL_SPAN.name, c.CHECKPOINT_SAVE_SPAN.name,
    }  # fmt: skip
    assert (folder / "flight.bin").stat().st_size > 0


def test_a_run_without_a_step_has_lasted_as_well(watch: Watch) -> None:
    """A script that fails in its set-up still has a wall time and a ledger."""
    session = watch()
    time.sleep(0.05)
    session.close()
    found = summary_file(session)

    jsonschema.validate(found, SCHEMA)
    assert found["wall_seconds"] >= 0.05
    assert found["activities"]["init"] == pytest.approx(found["wall_seconds"])


def test_the_summary_on_the_way_fits_its_schema_too(watch: Watch) -> None:
    """Half of all readers come while it runs."""
    session = watch(None, None, tuning={"summary_interval_s": 1.0, "poll_interval_s": 0.01})
    jsonschema.validate(session.summary(), SCHEMA)

    assert until((rank_folder(session) / "summary.json").exists)
    written = summary_file(session)
    jsonschema.validate(written, SCHEMA)
    assert written["state"] == "running"


def test_a_run_directory_that_cannot_be_made_costs_only_itself(
    watch: Watch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Said once; training goes on, and the metrics are there."""
    (tmp_path / "file").write_text("in the way")
    model, batches = Net(), loader(12)
    with caplog.at_level(logging.WARNING, "otel_train"):
        session = watch(model, {"train": batches}, run_dir=str(tmp_path / "file" / "runs"), **FAST)
        train(model, batches)
        session.close()

    assert len([record for record in caplog.records if record.levelno >= logging.WARNING]) == 1
    assert session.run_directory is None
    assert session.summary()["steps"] == {"train": 12}


# --- /metrics -------------------------------------------------------------------------------------

OPENMETRICS = "application/openmetrics-text; version=1.0.0"
PAGE: dict[str, Any] = {"prometheus": True, "prometheus_address": "127.0.0.1:0"}


def page(session: Any, accept: str = "text/plain") -> str:
    request = urllib.request.Request(session.metrics_url, headers={"Accept": accept})
    with urllib.request.urlopen(request, timeout=10) as answer:
        return str(answer.read().decode())


def trained(watch: Watch, **settings: Any) -> Any:
    """A session with training, validation and logging behind it, whose page shows all of it."""
    model, batches, val = Net(), loader(20), loader(3)
    session = watch(model, {"train": batches, "val": val}, **{**PAGE, **FAST, **settings})
    train(model, batches, epochs=2, log=True)
    validate(model, val)
    train(model, batches)
    next(iter(batches))  # the ask that closes the last step
    assert until(lambda: steps_on(page(session)) == 60)
    return session


def steps_on(text: str) -> float:
    samples = [sample for family in classic(text) for sample in family.samples]
    steps = [sample for sample in samples if sample.name == "train_steps_total"]
    return sum(float(sample.value) for sample in steps if sample.labels["train_phase"] == "train")


def test_a_page_reads_back_in_both_formats(watch: Watch) -> None:
    """Law 6: the real parsers, and they agree."""
    session = trained(watch)
    text, modern = list(classic(page(session))), list(openmetrics(page(session, OPENMETRICS)))

    assert {s.name for f in text for s in f.samples} - {s.name for f in modern for s in f.samples} == set()
    assert any(s.exemplar for f in modern for s in f.samples)


def test_every_name_on_the_page_is_of_the_catalogue(watch: Watch) -> None:
    """Law 5: what a dashboard queries is what is published."""
    session = trained(watch)
    known = {metric.prometheus: metric for metric in c.ALL}
    names: Counter[str] = Counter()
    for family in classic(page(session)):
        if family.name in ("target", "target_info"):
            continue
        suffix = "_total" if family.type == "counter" else ""
        metric = known[family.name.removesuffix("_total") + suffix]
        labels = {label.prometheus: label for label in metric.labels}
        for sample in family.samples:
            own = {k: v for k, v in sample.labels.items() if k.startswith("train_") and k not in constant()}
            assert set(own) <= set(labels), sample
            for name, value in own.items():
                label = labels[name]
                assert label.open or not label.values or value in label.values, sample
        names[metric.name] += 1

    assert names.total() >= 30
    assert set(names.values()) == {1}


def constant() -> set[str]:
    return {"train_run_id", "train_rank"}


def test_counters_start_at_zero(watch: Watch) -> None:
    """``increase()`` of a counter that is born at 1 is 0: its alert would never fire."""
    session = watch(None, {"train": loader(2)}, **PAGE, **FAST)
    assert until(lambda: "train_loader_exhaustions_total" in page(session))
    present = {sample.name for family in classic(page(session)) for sample in family.samples}
    expected = [
        c.RUN_TIME, c.NONFINITE_DETECTIONS, c.STALL_EVENTS, c.STEP_SKIPS, c.CHECKPOINT_FAILURES,
        c.LOADER_EXHAUSTIONS, c.TELEMETRY_DROPS, c.TELEMETRY_FAULTS, c.TELEMETRY_ATTRIBUTE_OVERFLOWS,
        c.RUN_RESTARTS, c.TELEMETRY_OVERHEAD_TIME,
    ]  # fmt: skip

    assert {metric.prometheus for metric in expected} <= present


def test_a_port_that_is_taken_is_left_to_its_owner(watch: Watch) -> None:
    """Two runs on one machine; where this one listens stands in its run directory."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        session = watch(None, None, prometheus=True, prometheus_address=f"127.0.0.1:{port}", **FAST)
        [target] = json.loads((rank_folder(session) / "prometheus_target.json").read_text())

        assert session.metrics_url != f"http://127.0.0.1:{port}/metrics"
        assert session.metrics_url == f"http://{target['targets'][0]}/metrics"
        assert until(lambda: "train_run_status" in page(session))


# --- both paths -----------------------------------------------------------------------------------


def on_page(session: Any, metric: c.Metric) -> dict[tuple[str, ...], tuple[float, float]]:
    """(count, sum) by labels."""
    found: dict[tuple[str, ...], dict[str, float]] = {}
    for family in classic(page(session)):
        if family.name == metric.prometheus:
            for sample in family.samples:
                labels = tuple(sample.labels[label.prometheus] for label in metric.labels)
                found.setdefault(labels, {})[sample.name.rpartition("_")[2]] = sample.value
    return {labels: (values["count"], values["sum"]) for labels, values in found.items()}


def sent(received: Any, metric: c.Metric) -> dict[tuple[str, ...], tuple[float, float]]:
    points = received.points()[metric.name].exponential_histogram.data_points
    return {tuple(item.value.string_value for item in p.attributes): (p.count, p.sum) for p in points}


def test_both_paths_tell_the_same(watch: Watch, monkeypatch: pytest.MonkeyPatch) -> None:
    """Law 5: a dashboard on OTLP and one on a scrape must not disagree."""
    with http_receiver() as received:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", received.endpoint)
        session = trained(watch, otlp="auto")

        def agree() -> bool:
            return bool(received.metrics) and all(
                on_page(session, metric) == sent(received, metric) != {}
                for metric in (c.STAGE_DURATION, c.STEP_DURATION)
            )

        assert until(agree)
        known = {metric.name for metric in c.ALL}
        assert set(received.points()) <= known
        session.close()
        durations = [received.points()[metric.name] for metric in (c.STAGE_DURATION, c.STEP_DURATION)]
        points = [point for each in durations for point in each.exponential_histogram.data_points]
        exemplars = {(each.trace_id, each.span_id) for point in points for each in point.exemplars}
        spans = {(span.trace_id, span.span_id) for span in received.spans()}

    assert exemplars
    assert exemplars <= spans


def test_a_disabled_session_has_everything_that_a_session_has(monkeypatch: pytest.MonkeyPatch) -> None:
    """The switch is for emergencies: a script must not die of an attribute it no longer finds."""
    monkeypatch.setenv("OTEL_TRAIN_DISABLED", "true")
    batches = loader(2)
    off = otel_train.instrument(Net(), {"train": batches})

    public = [name for name in dir(otel_train.Session) if not name.startswith("_")]
    assert [name for name in [*public, "config", "closed"] if not hasattr(off, name)] == []
    assert off.loaders == {"train": batches}
    assert otel_train.current() is None
    assert isinstance(batches, DataLoader)


def test_a_forked_child_has_no_session(watch: Watch) -> None:
    """It must neither wait for a lock of its parent's, nor write to its parent's map."""
    session = watch(Net(), {"train": loader(2)}, **FAST)
    inside(session).loop.lock.acquire()  # as if the export loop were in the middle of a turn
    try:
        child = os.fork()
        if child == 0:
            signal.alarm(10)
            quiet = otel_train.current() is None and otel_train.summary() == {} and session.summary() == {}
            session.reset_window()
            session.close()
            os._exit(0 if quiet else 1)
    finally:
        inside(session).loop.lock.release()
    _, status = os.waitpid(child, 0)

    assert os.waitstatus_to_exitcode(status) == 0
    assert QUIET["prometheus"] is False


@pytest.mark.parametrize("kind", [list, DataLoader])
def test_what_has_been_imported_is_noticed_when_a_pass_begins(
    watch: Watch, monkeypatch: pytest.MonkeyPatch, kind: Callable[[Any], Any]
) -> None:
    """A tracker, or a compiler: the thread that looks for them sleeps for half a minute."""
    given = kind([torch.zeros(2)] * 3)
    session = watch(None, {"train": given})
    batches, recorder = session.loaders["train"], session._recording.recorder
    monkeypatch.setattr(registry, "time", SimpleNamespace(monotonic=itertools.count(0.0, 10.0).__next__))
    list(batches)
    seen = recorder.changes
    list(batches)
    assert recorder.changes == seen

    monkeypatch.setitem(sys.modules, "a_tracker", ModuleType("a_tracker"))
    list(batches)
    assert recorder.changes > seen


def reports_from_now(session: otel_train.Session) -> list[float]:
    """Wait until everything is reported; the times of reports that are made after that."""
    reports: Any = session._service._reports
    until(
        lambda: reports._state_changes == reports._changes == session._recording.recorder.changes, "a report"
    )
    make, made = reports.make, list[float]()

    def counted(**how: Any) -> Any:
        made.append(time.monotonic())
        return make(**how)

    reports.make = counted
    return made


def test_the_service_thread_makes_no_report_while_nothing_but_edges_is_new(watch: Watch) -> None:
    """Each time it wakes, the training thread waits for the interpreter; the agent counts every step all the same."""
    model, batches = Net(), loader(64)
    session = watch(model, {"train": batches}, flight_recorder_events=1 << 18)
    optimizer = sgd(model)

    def one_pass() -> int:
        for batch in batches:
            loss_of(model, batch).backward()
            optimizer.step()
        return len(batches)

    steps = one_pass()
    assert session.run_directory is not None
    made = reports_from_now(session)
    until_s = time.monotonic() + 1.5
    while time.monotonic() < until_s:
        steps += one_pass()
    assert made == []
    assert session.summary()["steps"]["train"] >= steps - 1


class Unhurried(Dataset[torch.Tensor]):
    """Rows that take a worker some time."""

    def __len__(self) -> int:
        return 1000

    def __getitem__(self, _: int) -> torch.Tensor:
        time.sleep(0.01)
        return torch.ones(4)


def test_metrics_are_read_when_a_client_asks_however_seldom_they_are_exported(
    watch: Watch, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prometheus has its own interval: a page must not be as old as the last request to a Collector."""
    monkeypatch.setattr("otel_train.exporters.prometheus.PAGE_S", 0.0)
    model, batches = Net(), loader(12)
    seldom = {"agent": "thread", "export_interval_s": 3600, **PAGE}
    session = watch(model, {"train": batches}, **seldom)
    for number in (1, 2):
        train(model, batches)
        session.summary()  # everything is read
        assert steps_on(page(session)) == number * len(batches)
    session.close()


def test_workers_and_counts_of_tokens_wake_the_service_thread_every_two_seconds(watch: Watch) -> None:
    """Build times wait in memory of their own, and counts of tokens belong to the state, which is reported as often."""
    batches = DataLoader(Unhurried(), num_workers=1)
    session = watch(None, {"train": otel_train.Loader(batches, tokens=lambda _: 7)})
    iterator = iter(batches)
    next(iterator)
    made = reports_from_now(session)
    until_s = time.monotonic() + 3.0
    while time.monotonic() < until_s:
        next(iterator)
    assert 1 <= len(made) <= 2


def test_a_rank_that_awaits_a_process_group_wakes_the_service_thread_every_two_seconds(
    watch: Watch, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing announces the group. Programs without one, of JAX for example, await it to their end."""
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    session = watch(None, {"train": (batches := loader(1))})
    list(batches)
    made = reports_from_now(session)
    time.sleep(3.0)
    assert 1 <= len(made) <= 2


def test_what_a_watchdog_raises_while_a_session_closes_reaches_the_program_after_all_is_released(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A watchdog that bounds the training bounds its end as well."""
    model, rows = Net(), loader(8)
    session = otel_train.instrument(model, {"train": rows}, run_dir=tmp_path, **QUIET)
    train(model, rows)
    with watchdog() as expire:
        monkeypatch.setattr(session._service.components, "stop_captures", expire)
        with pytest.raises(TimeoutError, match="watchdog"):
            session.close()

    assert not [record for record in caplog.records if "close failed" in record.getMessage()]
    assert session.summary()["state"] == "finished"
    assert (session.closed, torch_optimizer._global_optimizer_pre_hooks) == (True, {})


def test_settings_of_a_second_call_are_named_once_as_without_effect(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The program may be instrumented by a library, or by ``otel-train run``, before it says its own settings."""
    first = otel_train.instrument(run_dir=tmp_path, run_name="a", **QUIET)
    try:
        for _ in range(2):
            assert otel_train.instrument(run_dir=tmp_path, run_name="second call") is first
        otel_train.instrument(disabled=True)
        with pytest.raises(otel_train.ConfigError, match="whole number"):
            otel_train.step(start="x")  # type: ignore[arg-type]
    finally:
        first.close()

    said = [record.getMessage() for record in caplog.records if "no effect" in record.getMessage()]
    assert ["(run_name)" in said[0], "(disabled)" in said[1], len(said)] == [True, True, 2]


def test_a_keyword_that_is_no_setting_is_not_explained_by_a_name_that_is_no_keyword() -> None:
    """``*others`` takes positional arguments only."""
    with pytest.raises(otel_train.ConfigError) as refused:
        otel_train.instrument(other=1)

    assert "others" not in str(refused.value)
