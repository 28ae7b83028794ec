"""What torch's profiler is set to record is in the trace, and what a machine lacks is said."""

from __future__ import annotations

import gzip
import json
import time
from pathlib import Path

import torch
from torch.utils.data import DataLoader, TensorDataset

import otel_train
from tests.integration.loops.truth import QUIET


def test_shapes_stacks_and_memory_are_recorded_and_a_device_that_is_not_there_is_said(tmp_path: Path) -> None:
    """A setting that does not reach the profiler is worse than none."""
    session = otel_train.instrument(
        run_dir=tmp_path, **QUIET, tuning={"poll_interval_s": 0.02}, profiler_activities="cpu,cuda",
        profiler_options=["record_shapes", "with_stack", "profile_memory"],
    )  # fmt: skip
    model = torch.nn.Linear(8, 1)
    session.add(model)
    optimizer = torch.optim.SGD(model.parameters())
    folder, deadline = tmp_path, time.monotonic() + 60
    otel_train.capture(steps=2)
    while not list(folder.glob("*/captures/*.record.json")) and time.monotonic() < deadline:
        for (batch,) in DataLoader(TensorDataset(torch.randn(64, 8)), batch_size=8):
            model(batch).sum().backward()
            optimizer.step()
            time.sleep(0.001)
    session.close()

    (record,) = (
        json.loads(path.read_text(encoding="utf-8")) for path in folder.glob("*/captures/*.record.json")
    )
    (trace,) = folder.glob("*/captures/*.json.gz")
    with gzip.open(trace, "rt", encoding="utf-8") as opened:
        events = json.load(opened)["traceEvents"]
    assert any("Input Dims" in event.get("args", {}) for event in events)
    assert any(event.get("cat") == "python_function" for event in events)
    assert any(event.get("name") == "[memory]" for event in events)
    assert record["warnings"] == (
        [] if torch.cuda.is_available() else ["no cuda activity: torch does not support it on this machine"]
    )
