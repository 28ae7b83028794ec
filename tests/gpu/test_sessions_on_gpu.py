"""A session on a real device: the same weights, the right times, nothing in the way."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

import otel_train
from otel_train.session import Session

torch = pytest.importorskip("torch")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("default"),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

AGREEMENT = 0.02
"""Device stage times against the profiler's kernel spans. Source: the criteria for device time."""

STEPS = 20


@pytest.fixture(autouse=True)
def quiet_device() -> Iterator[None]:
    """Nothing of one test is still running, or still allocated, in the next."""
    yield
    torch.cuda.synchronize()
    torch.cuda.empty_cache()


def watch(model: Any, loader: Any, folder: Path, **settings: Any) -> Session:
    return otel_train.instrument(
        model, {"train": loader}, run_dir=str(folder), prometheus=False, console=False, tuning={"poll_interval_s": 0.05},
        **settings,
    )  # fmt: skip


class Mlp(torch.nn.Module):  # type: ignore[name-defined]
    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(
            torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Dropout(0.1), torch.nn.Linear(256, 10)
        )

    def forward(self, x: Any) -> Any:
        return self.layers(x)


class Transformer(torch.nn.Module):  # type: ignore[name-defined]
    """Large enough that the device, not the host, is the limit."""

    batch = staticmethod(lambda: torch.randint(0, 8192, (16, 512), device="cuda"))

    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(8192, 1024)
        layer = torch.nn.TransformerEncoderLayer(1024, 16, 4096, dropout=0.0, batch_first=True)
        self.encoder = torch.nn.TransformerEncoder(layer, 8, enable_nested_tensor=False)
        self.head = torch.nn.Linear(1024, 8192)

    def forward(self, tokens: Any) -> Any:
        return self.head(self.encoder(self.embed(tokens)))


class ConvNet(torch.nn.Module):  # type: ignore[name-defined]
    """As above, of convolutions, with a head that gives the optimizer something to do."""

    batch = staticmethod(lambda: torch.randn(128, 3, 128, 128, device="cuda"))

    def __init__(self) -> None:
        super().__init__()
        widths = (3, 64, 128, 256, 512)
        blocks: list[Any] = []
        for before, after in pairwise(widths):
            blocks += [
                torch.nn.Conv2d(before, after, 3, padding=1), torch.nn.BatchNorm2d(after), torch.nn.ReLU(),
                torch.nn.Conv2d(after, after, 3, padding=1), torch.nn.ReLU(), torch.nn.MaxPool2d(2),
            ]  # fmt: skip
        self.layers = torch.nn.Sequential(*blocks, torch.nn.Flatten(), torch.nn.Linear(512 * 64, 4000))

    def forward(self, images: Any) -> Any:
        return self.layers(images)


def small_run(watching: Callable[[Any, Any], Any]) -> list[Any]:
    """Weights after 30 steps from the same seed."""
    torch.manual_seed(0)
    model = Mlp().cuda()
    samples = torch.utils.data.TensorDataset(torch.randn(960, 64), torch.randint(0, 10, (960,)))
    loader = torch.utils.data.DataLoader(samples, batch_size=32, shuffle=True, pin_memory=True)
    session = watching(model, loader)
    optimizer = torch.optim.AdamW(model.parameters())
    for x, y in loader:
        loss = torch.nn.functional.cross_entropy(model(x.cuda(non_blocking=True)), y.cuda(non_blocking=True))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    if session is not None:
        session.close()
    return [parameter.detach().cpu() for parameter in model.parameters()]


@pytest.mark.parametrize("mode", ["events", "sync", "off"])
def test_the_weights_are_the_same_bit_by_bit(mode: str, tmp_path: Path) -> None:
    """We watch training; we do not change what it does."""
    bare = small_run(lambda *_: None)

    instrumented = small_run(lambda model, loader: watch(model, loader, tmp_path, cuda_timing=mode))

    assert all(torch.equal(a, b) for a, b in zip(bare, instrumented, strict=True))


def test_an_instrumented_loop_synchronises_no_more_than_a_bare_one(tmp_path: Path) -> None:
    """By torch's own account, which raises at the first synchronisation that a bare loop does not make."""
    model = Mlp().cuda()
    batches = [(torch.randn(32, 64, device="cuda"), torch.randint(0, 10, (32,), device="cuda"))] * 100
    session = watch(model, batches, tmp_path)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    torch.cuda.set_sync_debug_mode("error")
    try:
        for x, y in session.loaders["train"]:
            loss = torch.nn.functional.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    torch.cuda.synchronize()
    summary = session.summary()
    session.close()

    stages = {row["stage"]: row for row in summary["stages"] if row["phase"] == "train"}
    assert summary["telemetry"]["faults"] == {}
    for stage in ("data", "forward", "backward", "optimizer"):
        assert 0 < stages[stage]["device_count"] <= stages[stage]["count"]


def test_a_training_step_in_a_cuda_graph_works_and_is_timed_from_outside(tmp_path: Path) -> None:
    """Capture fails if an event of the session is recorded into it, or is queried from another thread."""
    model = Mlp().cuda()
    model.layers[2].p = 0.0
    x, y = torch.randn(32, 64, device="cuda"), torch.randint(0, 10, (32,), device="cuda")
    optimizer = torch.optim.AdamW(model.parameters(), capturable=True)

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        torch.nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()

    session = watch(model, [0] * 200, tmp_path)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    for _ in session.loaders["train"]:
        with otel_train.stage("replay"):
            graph.replay()
    torch.cuda.synchronize()
    summary = session.summary()
    session.close()

    assert summary["telemetry"]["faults"] == {}
    [replay] = [row for row in summary["stages"] if row["stage"] == "replay"]
    assert 0 < replay["device_count"] <= replay["count"] == 200


@pytest.mark.timeout(300)
@pytest.mark.parametrize("kind", [Transformer, ConvNet])
def test_device_time_agrees_with_the_profilers_kernel_spans(
    kind: Any, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    """Two ways to ask the device how long a stage took, in one and the same run."""
    torch.manual_seed(0)
    model = kind().cuda()
    optimizer = torch.optim.AdamW(model.parameters())
    loader = [kind.batch()] * (3 * STEPS)
    session = watch(model, loader, tmp_path)
    batches = iter(session.loaders["train"])

    def step() -> None:
        batch = next(batches)
        with torch.profiler.record_function("mark:forward"):
            out = model(batch)
        loss = out.float().square().mean()
        with torch.profiler.record_function("mark:backward"):
            loss.backward()
        with torch.profiler.record_function("mark:optimizer"):
            optimizer.step()
        optimizer.zero_grad()

    for _ in range(STEPS):
        step()
    torch.cuda.synchronize()
    session.reset_window()
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        for _ in range(STEPS):
            step()
        torch.cuda.synchronize()
    summary = session.summary()
    session.close()
    profile.export_chrome_trace(str(tmp_path / "trace.json"))

    kernels = kernel_spans_ms(tmp_path / "trace.json")
    ours = {
        row["stage"]: row["device_seconds"] / row["device_count"] * 1e3
        for row in summary["stages"]
        if row["device_count"] and row["stage"] in kernels
    }
    print(json.dumps({"model": kind.__name__, "kernel_span_ms": kernels, "device_ms": ours}))  # noqa: T201 - for the record
    record_property("kernel_span_ms", kernels)
    record_property("device_ms", ours)
    assert set(ours) == {"forward", "backward", "optimizer"}
    assert ours == pytest.approx(kernels, rel=AGREEMENT)


def kernel_spans_ms(trace: Path) -> dict[str, float]:
    """Mean time from the start of the first to the end of the last kernel launched within each mark."""
    events = json.loads(trace.read_text())["traceEvents"]
    launched = {
        event["args"]["correlation"]: event["ts"]
        for event in events
        if event.get("cat") in ("cuda_runtime", "cuda_driver") and "correlation" in event.get("args", {})
    }
    marks = [
        (event["ts"], event["ts"] + event["dur"], event["name"].removeprefix("mark:"))
        for event in events
        if event.get("cat") == "user_annotation" and event["name"].startswith("mark:")
    ]
    spans: dict[tuple[float, str], list[float]] = {}
    for event in events:
        if event.get("cat") not in ("kernel", "gpu_memcpy", "gpu_memset"):
            continue
        at = launched.get(event["args"].get("correlation"))
        mark = next(((begun, name) for begun, ended, name in marks if at and begun <= at <= ended), None)
        if mark is not None:
            first, last = spans.get(mark, [event["ts"], 0.0])
            spans[mark] = [min(first, event["ts"]), max(last, event["ts"] + event["dur"])]
    by_stage: dict[str, list[float]] = defaultdict(list)
    for (_, name), (first, last) in spans.items():
        by_stage[name].append((last - first) / 1e3)
    return {name: sum(found) / len(found) for name, found in by_stage.items()}
