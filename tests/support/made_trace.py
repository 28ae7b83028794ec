"""Synthetic Chrome traces, event by event, laid out the way Kineto writes them. Times are microseconds."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

HOST, MAIN, AUTOGRAD, DEVICE = 100, 100, 101, 0
COMPUTE_STREAM, NCCL_STREAM = 7, 20


class MadeTrace:
    """A trace of one rank. Every method adds events and returns nothing.

    Attributes:
        events: what was added, as JSON objects.
        about: the other keys of the document.
    """

    def __init__(self, *, rank: int | None = 0, world_size: int = 1) -> None:
        self.events: list[dict[str, Any]] = []
        self.about: dict[str, Any] = {"schemaVersion": 1, "displayTimeUnit": "ms"}
        if rank is not None:
            self.about["distributedInfo"] = {"backend": "nccl", "rank": rank, "world_size": world_size}
        self._correlation = 0

    def span(self, cat: str, name: str, start: float, dur: float, *, tid: int = MAIN, **args: Any) -> None:
        """A complete event on the host."""
        self._add(cat, name, start, dur, pid=HOST, tid=tid, args=args)

    def op(self, name: str, start: float, dur: float, *, tid: int = MAIN, **args: Any) -> None:
        """An operator on the host."""
        self.span("cpu_op", name, start, dur, tid=tid, **{"External id": len(self.events) + 1, **args})

    def note(self, name: str, start: float, dur: float, *, tid: int = MAIN) -> None:
        """A range the user, the profiler or a stage named."""
        self.span("user_annotation", name, start, dur, tid=tid)

    def step(self, number: int, start: float, dur: float) -> None:
        """One step of the profiler's schedule."""
        self.note(f"ProfilerStep#{number}", start, dur)

    def call(self, name: str, start: float, dur: float, *, tid: int = MAIN) -> int:
        """A call of the CUDA runtime; returns its correlation id."""
        self._correlation += 1
        self.span("cuda_runtime", name, start, dur, tid=tid, correlation=self._correlation)
        return self._correlation

    def kernel(
        self, name: str, start: float, dur: float, *, launched: float, stream: int = COMPUTE_STREAM,
        launch_dur: float = 2.0, tid: int = MAIN, args: Mapping[str, Any] | None = None,
    ) -> None:  # fmt: skip
        """A kernel on the device, and the call that launched it."""
        correlation = self.call("cudaLaunchKernel", launched, launch_dur, tid=tid)
        self.device("kernel", name, start, dur, stream=stream, correlation=correlation, **(args or {}))

    def device(
        self, cat: str, name: str, start: float, dur: float, *, stream: int = COMPUTE_STREAM, correlation: int, **args: Any
    ) -> None:  # fmt: skip
        """Anything that runs on the device."""
        arguments = {"device": DEVICE, "context": 1, "stream": stream, "correlation": correlation, **args}
        self._add(cat, name, start, dur, pid=DEVICE, tid=stream, args=arguments)

    def memory(self, at: float, change: int, total: int, *, reserved: int = 0, device_type: int = 1) -> None:
        """An allocation (or a release, below zero), and what is allocated from then on."""
        args = {"Total Reserved": reserved, "Total Allocated": total, "Bytes": change, "Device Id": 0 if device_type else -1,
                "Device Type": device_type, "Addr": 94869047744896}  # fmt: skip
        self.events.append({
            "ph": "i", "cat": "cpu_instant_event", "s": "t", "name": "[memory]", "pid": HOST, "tid": MAIN, "ts": at,
            "args": args,
        })  # fmt: skip

    def document(self) -> dict[str, Any]:
        """The whole, as JSON."""
        return {**self.about, "traceEvents": self.events, "traceName": "made.json"}

    def text(self) -> str:
        """The whole, as Kineto would write it."""
        return "".join(_laid_out(self.about, (self.events,)))

    def write(self, path: Path) -> Path:
        """Write it, zipped if the name ends so."""
        data = self.text().encode()
        path.write_bytes(gzip.compress(data, 1) if path.suffix == ".gz" else data)
        return path

    def _add(
        self, cat: str, name: str, start: float, dur: float, *, pid: int, tid: int, args: Mapping[str, Any]
    ) -> None:
        event = {"ph": "X", "cat": cat, "name": name, "pid": pid, "tid": tid, "ts": start, "dur": dur}
        self.events.append({**event, "args": args})


def _laid_out(about: dict[str, Any], batches: Iterable[Iterable[dict[str, Any]]]) -> Iterator[str]:
    head = json.dumps(about, indent=2)[:-2]
    yield f'{head},\n  "traceEvents": [\n'
    between = ""
    for events in batches:
        for event in events:
            rest = {key: value for key, value in event.items() if key != "args"}
            body = json.dumps(rest)[1:-1].replace(', "', ',\n    "')
            args = json.dumps(event.get("args", {}))[1:-1]
            yield f'{between}  {{\n    {body}\n    ,\n    "args": {{\n      {args}\n    }}\n  }}'
            between = ",\n"
    yield '\n  ],"traceName": "made.json" }\n'


def training(
    *, steps: int = 4, layers: int = 4, rank: int = 0, world_size: int = 1, ops_per_layer: int = 2, first_us: float = 1000.0,
) -> MadeTrace:  # fmt: skip
    """A plain training loop on a device: data, forward, backward with all-reduces beside it, optimizer."""
    made = MadeTrace(rank=rank, world_size=world_size)
    now = first_us
    for number in range(steps):
        now = one_step(made, number, now, layers=layers, ops_per_layer=ops_per_layer, world_size=world_size)
    return made


def one_step(
    made: MadeTrace, number: int, start: float, *, layers: int, ops_per_layer: int, world_size: int
) -> float:
    """Add one step; when it ends."""
    now = start
    made.note("enumerate(DataLoader)#_MultiProcessingDataLoaderIter.__next__", now, 30.0)
    made.op("aten::stack", now + 1, 20.0)
    now += 32.0
    busy = now + 10.0
    begun = now
    for layer in range(layers):
        now, busy = _layer(made, now, busy, f"{layer}", forward=True, ops=ops_per_layer)
    made.note("otel_train:forward", begun, now - begun)
    begun = now = now + 1.0
    for layer in range(layers):
        now, busy = _layer(made, now, busy, f"{layer}", forward=False, ops=ops_per_layer)
        if world_size > 1:
            made.op("record_param_comms", now, 3.0, tid=AUTOGRAD)
            made.kernel("ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevComm*, unsigned long, ncclWork*)", busy, 25.0,
                        launched=now + 0.5, launch_dur=1.5, stream=NCCL_STREAM, tid=AUTOGRAD,
                        args={"Collective name": "allreduce", "Group size": world_size, "Process Group Name": "0"})  # fmt: skip
            now += 4.0
    made.note("otel_train:backward", begun, now - begun)
    busy += 30.0 if world_size > 1 else 0.0
    begun = now = now + 1.0
    made.op("Optimizer.step#AdamW.step", now, 20.0)
    fused = "void at::native::multi_tensor_apply_kernel<at::native::FusedAdamW>(int)"
    made.kernel(fused, max(busy, now + 8), 15.0, launched=now + 4)
    made.note("otel_train:optimizer", begun, 22.0)
    busy = max(busy, now + 8) + 15.0
    now += 23.0
    made.call("cudaDeviceSynchronize", now, max(2.0, busy - now))
    now += max(2.0, busy - now) + 1.0
    made.memory(now - 1, 4096, 1 << 20, reserved=1 << 22)
    made.step(number, start, now - start)
    return now


def _layer(
    made: MadeTrace, now: float, busy: float, name: str, *, forward: bool, ops: int
) -> tuple[float, float]:
    tid = MAIN if forward else AUTOGRAD
    for number in range(ops):
        op = "aten::addmm" if forward else "autograd::engine::evaluate_function: AddmmBackward0"
        args = {"Sequence number": 15, "Fwd thread id": 0, "Record function id": 0, "Concrete Inputs": ["", "", "", "1", "1"],
                "Input type": ["float", "float", "float", "Scalar", "Scalar"],
                "Input Strides": [[1], [64, 1], [1, 64], [], []], "Input Dims": [[128], [32, 64], [64, 128], [], []], "Ev Idx": 204}  # fmt: skip
        made.op(op, now, 12.0, tid=tid, **args)
        made.op("aten::to", now + 1, 3.0, tid=tid, **args)
        made.kernel("sm90_xmma_gemm_f32f32_tf32f32_f32_tn_n_tilesize128x128x32_warpgroupsize1x1x1_execute_segment_k_off_kernel__5x_cublas"
                    if not number % 2 else "void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float>, std::array<char*, 3ul> >(int)",
                    max(busy, now + 8), 9.0 + number % 3, launched=now + 5, tid=tid,
                    args={"grid": [16, 1, 1], "block": [128, 1, 1], "shared memory": 0, "registers per thread": 32,
                          "blocks per SM": 0.1, "warps per SM": 0.5, "est. achieved occupancy %": 30, "External id": 5})  # fmt: skip
        busy = max(busy, now + 8) + 9.0 + number % 3
        now += 13.0
    return now, busy


def write_long(path: Path, *, text_bytes: int, layers: int = 24, world_size: int = 8, rank: int = 0) -> int:
    """Write a trace of at least so much text, in which no two steps are the same instants; how many events it has."""
    made = MadeTrace(rank=rank, world_size=world_size)
    now, written, events, number, between = 1000.0, 0, 0, 0, ""
    with path.open("w", encoding="utf-8") as file:
        head, tail = "".join(_laid_out(made.about, ())).split("[\n")
        file.write(f"{head}[\n")
        while written < text_bytes:
            made.events.clear()
            now = one_step(made, number, now, layers=layers, ops_per_layer=6, world_size=world_size)
            part = between + "".join(list(_laid_out({"": 0}, (made.events,)))[1:-1])
            file.write(part)
            between, number = ",\n", number + 1
            written, events = written + len(part), events + len(made.events)
        file.write(tail)
    return events
