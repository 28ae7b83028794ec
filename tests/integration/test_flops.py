"""One step of the run is counted, and training computes what it computes without."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from otel_train.collectors.hardware import peak_flops
from otel_train.profiler.flops import COMPILED, COUNTER
from tests.integration.loops.truth import Watch
from tests.support.json_lines import points_of, read_jsonl
from tests.support.zero_code import printed_by

SAMPLES, WIDE = 8, 16
STEP_FLOPS = SAMPLES * (2 * WIDE * WIDE * 2 + 2 * WIDE * 4 * 3)
"""Two linear layers: forward and weights of both, the input of the second."""

MOST_STEPS = 4000
"""Of ten milliseconds each: what is counted or refused is, a few reports of half a second later."""


@pytest.fixture
def watch(tmp_path: Path) -> Iterator[Watch]:
    torch._dynamo.reset()  # other tests of this process compile
    torch._dynamo.utils.counters.clear()
    started = Watch(tmp_path / "runs")
    yield started
    started.close()


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDE, WIDE), nn.ReLU(), nn.Dropout(0.2), nn.Linear(WIDE, 4))


def batches(steps: int) -> torch.utils.data.DataLoader[Any]:
    made = torch.randn(SAMPLES * steps, WIDE, generator=torch.Generator().manual_seed(1))
    return torch.utils.data.DataLoader(torch.utils.data.TensorDataset(made), batch_size=SAMPLES)


def train(model: Any, parameters: Any, loader: Any, *, until: Any = lambda: False) -> int:
    optimizer = torch.optim.SGD(parameters, lr=0.1)
    taken = 0
    for (batch,) in loader:
        taken += 1
        model(batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        time.sleep(0.01)
        if until():
            break
    return taken


def counted(run: Path) -> dict[str, float]:
    """The last value of each metric that matters here."""
    found = {}
    for export in read_jsonl(run / "rank0" / "metrics.otlp.jsonl"):
        for name, points in points_of(export).items():
            if name in ("train.model.flops", "train.steps", "train.accelerator.flops.limit"):
                found[name] = sum(point["value"] for point in points)
    return found


@pytest.mark.parametrize("agent", ["thread", "process"])
def test_the_flop_of_one_step_are_counted_and_the_weights_are_bit_identical(watch: Watch, agent: str) -> None:
    """Utilisation without a formula of the model; what is trained is the same model."""
    torch.manual_seed(0)
    model = net()
    session = watch(
        model,
        {"train": batches(MOST_STEPS)},
        flops="auto",
        agent=agent,
        export_interval_s=1,
        device_flops=1e12,
    )
    components = session._service.components
    left = [40]

    def known() -> bool:
        left[0] -= bool(components.made_captures is not None and components.made_captures.flops.flops)
        return left[0] <= 0

    steps = train(model, model.parameters(), batches(MOST_STEPS), until=known)
    flops = components.made_captures.flops
    session.close()

    torch.manual_seed(0)
    bare = net()
    assert train(bare, bare.parameters(), batches(steps)) == steps
    assert steps < MOST_STEPS
    assert flops.flops == STEP_FLOPS
    assert flops.refusal == ""
    for ours, theirs in zip(model.parameters(), bare.parameters(), strict=True):
        assert torch.equal(ours, theirs)
    values = counted(session.run_directory)
    assert values["train.model.flops"] == STEP_FLOPS * values["train.steps"] == STEP_FLOPS * steps
    assert values["train.accelerator.flops.limit"] == 1e12
    events = [
        json.loads(line)
        for line in (session.run_directory / "rank0" / "events.jsonl").read_text().splitlines()
    ]
    [event] = [event for event in events if event.get("name") == "train.flops.count"]
    assert event["attributes"]["train.step.flops"] == STEP_FLOPS
    assert 8 <= event["attributes"]["train.step.index"] < steps


def test_what_is_compiled_is_not_counted_and_that_is_said(watch: Watch) -> None:
    """It would be counted in eager mode, whose kernels round otherwise than those of the compiler."""
    torch.manual_seed(0)
    model = net()
    compiled = torch.compile(model, backend="aot_eager")
    session = watch(model, {"train": batches(MOST_STEPS)}, flops="auto", agent="thread")
    components = session._service.components
    train(
        compiled,
        model.parameters(),
        batches(MOST_STEPS),
        until=lambda: components.made_captures is not None and components.made_captures.flops.refusal,
    )
    flops = components.made_captures.flops
    session.close()

    assert (flops.flops, flops.refusal) == (0, COMPILED)
    gaps = json.loads((session.run_directory / "rank0" / "summary.json").read_text())["instrumentation_gaps"]
    assert {"what": "flops", "name": "step", "reason": COMPILED} in gaps
    assert "train.model.flops" not in counted(session.run_directory)


def test_the_peak_of_a_device_is_that_of_its_data_sheet_or_none() -> None:
    """A peak that is guessed makes a utilisation that is wrong by two to four."""
    assert peak_flops("NVIDIA H200") == peak_flops("NVIDIA H100 80GB HBM3") == 989e12
    assert peak_flops("NVIDIA H100 PCIe") == 756e12
    assert peak_flops("NVIDIA A100-SXM4-80GB") == 312e12
    assert (peak_flops("NVIDIA L4"), peak_flops("NVIDIA L40S")) == (121e12, 362e12)
    for unknown in ("NVIDIA L40", "NVIDIA A1000", "NVIDIA H200 MIG 1g.18gb", "NVIDIA GeForce RTX 4090", ""):
        assert peak_flops(unknown) == 0


def test_nothing_is_imported_for_it_unless_it_is_asked_for(tmp_path: Path) -> None:
    """An import while training holds the interpreter."""
    program = (
        "import sys, torch, otel_train\n"
        f"before = {COUNTER!r} in sys.modules\n"
        f"otel_train.instrument(torch.nn.Linear(2, 2), run_dir={str(tmp_path)!r}, console=False).close()\n"
        f"print(before, {COUNTER!r} in sys.modules, 'otel_train.profiler.flops' in sys.modules)"
    )

    before, after, ours = printed_by("-c", program).split()
    assert before == after
    assert ours == "False"
