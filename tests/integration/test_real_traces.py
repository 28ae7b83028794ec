"""Traces that torch.profiler wrote: our values against its own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity, profile, record_function, schedule
from torch.utils.data import DataLoader, TensorDataset

from otel_train.trace_analysis import trace_summary

STEPS = 3


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], Any]:
    """Our analysis of three steps, and what the profiler says about the same ones."""
    path = tmp_path_factory.mktemp("trace") / "trace.json.gz"
    model = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.ReLU(), torch.nn.Linear(64, 8))
    optimizer = torch.optim.Adam(model.parameters(), foreach=False)
    loader = DataLoader(TensorDataset(torch.randn(80, 32)), batch_size=16)
    with profile(
        activities=[ProfilerActivity.CPU],
        schedule=schedule(wait=0, warmup=1, active=STEPS, repeat=1),
        on_trace_ready=lambda done: done.export_chrome_trace(str(path)),
        profile_memory=True,
        acc_events=True,
    ) as profiler:
        for (batch,) in loader:
            with record_function("otel_train:forward"):
                loss = model(batch).square().mean()
            with record_function("otel_train:backward"):
                loss.backward()
            with record_function("otel_train:optimizer"):
                optimizer.step()
            profiler.step()
    return trace_summary(path, most=1000), profiler.key_averages()


def test_self_time_of_every_operator_is_that_of_the_profiler(recorded: tuple[dict[str, Any], Any]) -> None:
    """Two ways to the same value: the profiler's own tree, and ours from the file."""
    document, averages = recorded
    ours = {row["name"]: row for row in document["top_cpu_ops"]}
    theirs = {each.key: each for each in averages if each.key in ours}

    assert len(theirs) > 15
    for name, each in theirs.items():
        # The profiler drops an operator that does nothing but call its own overload; its file does not.
        assert ours[name]["count"] >= each.count
        assert ours[name]["seconds"] * 1e6 == pytest.approx(
            each.self_cpu_time_total, abs=2.0 + 0.01 * each.self_cpu_time_total
        )


def test_stages_and_steps_of_a_real_trace_are_found(recorded: tuple[dict[str, Any], Any]) -> None:
    """By the ranges that captures write."""
    document, _ = recorded

    parts = document["breakdown"]
    assert parts["steps"] == STEPS
    assert [row["count"] for row in parts["stages"] if row["stage"] != "data" and row["count"]] == [STEPS] * 3
    assert {row["stage"] for row in parts["stages"]} >= {"forward", "backward", "optimizer", "other"}
    assert sum(row["share"] for row in parts["stages"]) == pytest.approx(1.0)
    assert parts["optimizer"] == "single"
    assert 0 < document["dataloader_time_pct"] < 100


def test_memory_of_a_real_trace_is_found(recorded: tuple[dict[str, Any], Any]) -> None:
    """The allocator of the host says what it holds."""
    document, _ = recorded

    assert document["memory_peaks"][0]["device"] == "cpu"
    assert document["memory_peaks"][0]["bytes"] > 0


def test_a_trace_of_the_host_says_that_nothing_of_a_device_is_in_it(
    recorded: tuple[dict[str, Any], Any],
) -> None:
    """It must not look like an idle device."""
    document, _ = recorded

    assert document["idle"] is None
    assert any("No device events" in sentence for sentence in document["missing"])
