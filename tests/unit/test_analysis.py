"""A trace small enough to be verified mentally, and the expected result of each analysis."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from otel_train import TraceError
from otel_train.trace_analysis.breakdown import allocations, breakdown, critical_path, idle, overlap, temporal
from otel_train.trace_analysis.events import read
from otel_train.trace_analysis.hot_spots import launches, tensor_cores, top_kernels, top_ops
from otel_train.trace_analysis.summary import summarize, trace_summary, waits
from otel_train.trace_analysis.timeline import TraceTimeline
from tests.support.made_trace import NCCL_STREAM, MadeTrace

US = 1e-6
GEMM, ADD, NCCL = "sm90_xmma_gemm_bf16", "void at::native::add_kernel(int)", "ncclDevKernel_AllReduce_Sum_f32"


def small_trace(*, first_us: float = 0.0) -> MadeTrace:
    """One step of 100 us.

    us       0        20        30        40        50   55   60   65        80 82  84    92 94 96   100
    host     data----- forward-- backward- cudaDeviceSynchronize(40..82)------------  optimizer
    stream 7                     GEMM--------------- .... ADD------                          ADD
    stream 20                                             .... NCCL-----------
    """
    made = MadeTrace(rank=0, world_size=2)
    at = first_us
    made.step(7, at, 100)
    made.note("enumerate(DataLoader)#_MultiProcessingDataLoaderIter.__next__", at, 20)
    made.note("otel_train:forward", at + 20, 10)
    made.op("aten::linear", at + 20, 8)
    made.op("aten::addmm", at + 21, 7)
    made.kernel(GEMM, at + 30, 20, launched=at + 22)
    made.kernel(ADD, at + 55, 10, launched=at + 25)
    made.kernel(
        NCCL, at + 60, 20, launched=at + 28, stream=NCCL_STREAM, args={"Collective name": "allreduce"}
    )
    made.note("otel_train:backward", at + 30, 10)
    made.call("cudaDeviceSynchronize", at + 40, 42)
    made.note("otel_train:optimizer", at + 84, 8)
    made.kernel(ADD, at + 94, 2, launched=at + 88)
    made.memory(at + 22, 300, 300, reserved=1000)
    made.memory(at + 50, 500, 800, reserved=1000)
    made.memory(at + 60, -700, 100, reserved=1000)
    return made


@pytest.fixture(params=[0.0, 4431026791522.0], ids=["from 0", "since boot"])
def timeline(request: pytest.FixtureRequest, tmp_path: Path) -> TraceTimeline:
    return TraceTimeline(read(small_trace(first_us=request.param).write(tmp_path / "trace.json")))


@pytest.mark.parametrize(("lengths", "steps"), [((0, 100), 1), ((1e-200, 0), None), ((40, 60), 2)])
def test_a_step_without_a_length_is_none(
    lengths: tuple[float, float], steps: int | None, tmp_path: Path
) -> None:
    """A damaged file has such; where no step has a length the whole trace is taken."""
    made = MadeTrace()
    made.step(0, 0, lengths[0])
    made.step(1, 40, lengths[1])
    made.kernel(GEMM, 50, 10, launched=45)

    summary = trace_summary(made.write(tmp_path / "trace.json"))

    assert summary["breakdown"]["steps"] == steps
    assert summary["idle"]["seconds"] > 0


def test_a_device_that_worked_for_no_time_in_a_trace_without_a_length_has_no_idle_time(
    tmp_path: Path,
) -> None:
    """Nothing has a share of a trace in which no time passes."""
    made = MadeTrace()
    made.kernel(GEMM, 0, 0, launched=0, launch_dur=0)

    assert idle(TraceTimeline(read(made.write(tmp_path / "trace.json")))) is None


def test_idle_time_has_one_cause_each(timeline: TraceTimeline) -> None:
    """100 - 47 = 53: 20 data, 4 + 4 host, 10 after the sync, and 6 + 5 + 4 that the device itself took."""
    found = idle(timeline)

    assert found is not None
    assert found["seconds"] == pytest.approx(53 * US)
    assert {name: part["seconds"] for name, part in found["causes"].items()} == pytest.approx(
        {"data": 20 * US, "sync": 10 * US, "host": 8 * US, "kernel_gap": 15 * US}
    )
    assert found["longest"][0] == {
        "start_seconds": 0.0,
        "seconds": pytest.approx(30 * US),
        "cause": "data",
        "step": 7,
    }


def test_the_device_computes_communicates_and_idles(timeline: TraceTimeline) -> None:
    """From 30 to 96: kernels compute 20 + 10 + 2, the collective alone 15, and 5 + 14 are idle."""
    found = temporal(timeline)

    assert found is not None
    seconds = {name: found[f"{name}_seconds"] for name in ("compute", "other", "idle")}
    assert seconds == pytest.approx({"compute": 32 * US, "other": 15 * US, "idle": 19 * US})
    assert found["seconds"] == pytest.approx(66 * US)


def test_communication_is_hidden_while_a_kernel_computes(timeline: TraceTimeline) -> None:
    """60 to 65 of 60 to 80: a quarter. The other 15 us are 15 % of the step."""
    found = overlap(timeline)

    assert found is not None
    assert found["overlap_share"] == pytest.approx(0.25)
    assert found["exposed_seconds"] == pytest.approx(15 * US)
    assert found["exposed_share_of_steps"] == pytest.approx(0.15)
    assert [row["name"] for row in found["collectives"]] == ["allreduce"]


def test_stages_add_up_to_the_step(timeline: TraceTimeline) -> None:
    """20 data, 10 forward, 10 backward, 8 optimizer; the other 52 are in no stage."""
    found = breakdown(timeline)

    host = {row["stage"]: row["seconds"] for row in found["stages"]}
    assert host == pytest.approx(
        {"data": 20 * US, "forward": 10 * US, "backward": 10 * US, "optimizer": 8 * US, "other": 52 * US}
    )
    assert sum(host.values()) == pytest.approx(found["seconds"]) == pytest.approx(100 * US)
    assert found["data_share"] == pytest.approx(0.20)
    assert found["by_step"][0]["step"] == 7
    assert found["by_step"][0]["device_busy_seconds"] == pytest.approx(47 * US)


def test_device_work_counts_to_the_stage_that_launched_it(timeline: TraceTimeline) -> None:
    """Forward launched GEMM, ADD and the collective: 20 + 10 + 20. Backward launched nothing."""
    found = breakdown(timeline)

    device = {row["stage"]: row["device_seconds"] for row in found["stages"] if row["stage"] != "other"}
    assert device == pytest.approx({"data": 0.0, "forward": 50 * US, "backward": 0.0, "optimizer": 2 * US})


def test_the_critical_path_adds_up_to_the_step(timeline: TraceTimeline) -> None:
    """24 host, 6 to launch, 20 GEMM, 10 between, 20 NCCL, 2 for the sync to return, 18 host."""
    found = critical_path(timeline)

    assert found is not None
    assert found["parts"] == pytest.approx(
        {
            "host": 42 * US,
            "launch": 6 * US,
            "compute": 20 * US,
            "kernel_gap": 10 * US,
            "communication": 20 * US,
            "sync": 2 * US,
        }
    )
    assert sum(found["parts"].values()) == pytest.approx(found["seconds"])
    assert {row["name"] for row in found["kernels"]} == {GEMM, NCCL}
    assert found["host_stages"] == pytest.approx(
        {"data": 20 * US, "forward": 4 * US, "optimizer": 8 * US, "other": 10 * US}
    )


def test_launches_are_counted_with_their_queue(timeline: TraceTimeline) -> None:
    """Four launches of 2 us; kernels waited 6, 28, 30 and 4 us; one is below 10 us."""
    found = launches(timeline)

    assert found is not None
    counted = {"count": 4, "per_step": 4.0, "short_share": 0.25, "outrun_share": 0.0}
    assert {name: found[name] for name in counted} == counted
    assert found["call_seconds"] == pytest.approx(2 * US)
    assert found["queue_seconds"]["p50"] == pytest.approx((6 + 28) / 2 * US)


def test_an_operator_owns_what_no_operator_below_it_owns(timeline: TraceTimeline) -> None:
    """addmm: 7, its two launches included; linear: 8 - 7."""
    found = {row["name"]: row for row in top_ops(timeline)}

    assert found["aten::addmm"]["seconds"] == pytest.approx(7 * US)
    assert found["aten::linear"]["seconds"] == pytest.approx(1 * US)
    assert found["aten::linear"]["total_seconds"] == pytest.approx(8 * US)
    assert found["aten::addmm"]["share"] == pytest.approx(7 / 8)


def test_kernels_are_listed_by_time(timeline: TraceTimeline) -> None:
    """GEMM and NCCL 20 each, ADD 10 + 2, of 52."""
    found = top_kernels(timeline, most=3)

    assert [(row["name"], row["count"]) for row in found] == [(GEMM, 1), (NCCL, 1), (ADD, 2)]
    assert found[2]["seconds"] == pytest.approx(12 * US)
    assert found[0]["share"] == pytest.approx(20 / 52)
    assert [row["tensor_cores"] for row in found] == [True, False, False]


def test_tensor_cores_are_recognized_by_the_names_of_kernels(timeline: TraceTimeline) -> None:
    """GEMM's 20 of 32 us could, and all of it does."""
    assert tensor_cores(timeline) == pytest.approx(
        {"seconds": 32e-6, "share": 20 / 32, "matrix_share": 20 / 32, "used_share": 1.0}
    )


def test_memory_has_a_peak_and_a_timeline(timeline: TraceTimeline) -> None:
    """800 bytes at 50 us."""
    [found] = allocations(timeline)

    assert found["device"] == "cuda:0"
    assert found["peaks"] == [
        {"time_seconds": pytest.approx(50 * US), "bytes": 800, "reserved_bytes": 1000, "step": 7}
    ]
    assert [size for _, size in found["timeline"]] == [300, 800, 100]
    assert found["step_end_bytes"] == [100]


@pytest.mark.parametrize(
    ("device_type", "name"), [(0, "cpu"), (1, "cuda:0"), (12, "xpu:0"), (19, "mtia:0"), (20, "privateuseone:0"), (77, "device type 77:0")],
)  # fmt: skip
def test_memory_is_of_the_device_that_torch_names(tmp_path: Path, device_type: int, name: str) -> None:
    """Not every accelerator is CUDA."""
    made = MadeTrace()
    made.step(0, 0, 100)
    made.memory(10, 100, 100, device_type=device_type)

    [found] = allocations(TraceTimeline(read(made.write(tmp_path / "trace.json"))))
    assert found["device"] == name


def test_a_step_whose_number_is_no_int64_is_none(tmp_path: Path) -> None:
    """Any program can name a range."""
    made = MadeTrace()
    made.note("ProfilerStep#99999999999999999999", 0, 100)
    made.step(3, 100, 100)

    assert TraceTimeline(read(made.write(tmp_path / "trace.json"))).steps.number.tolist() == [3]


def collectives(path: Path, rank: int, lengths: list[float]) -> TraceTimeline:
    made = MadeTrace(rank=rank, world_size=2)
    made.step(1, 0, 1000)
    for number, length in enumerate(lengths):
        made.kernel(NCCL, 100 * number + 50, length, launched=100 * number)
    return TraceTimeline(read(made.write(path)))


def test_the_rank_that_spends_the_least_time_in_a_collective_came_last(tmp_path: Path) -> None:
    """10 against 25: rank 1 waited 15 for rank 0. 30 against 5: rank 0 waited 25 for rank 1."""
    one = collectives(tmp_path / "0.json", 0, [10, 30])
    two = collectives(tmp_path / "1.json", 1, [25, 5])

    found = waits([one, two])

    assert found["collectives"] == 2
    assert [row["waited_seconds"] for row in found["ranks"]] == pytest.approx([25 * US, 15 * US])
    assert [row["caused_seconds"] for row in found["ranks"]] == pytest.approx([15 * US, 25 * US])


def test_traces_of_one_rank_are_not_put_side_by_side(tmp_path: Path) -> None:
    """Two captures of rank 0 would make it wait for itself."""
    one, two = (collectives(tmp_path / f"{name}.json", 0, [10]) for name in "ab")

    with pytest.raises(TraceError, match="both are of rank 0"):
        waits([one, two])


def test_a_trace_without_a_rank_is_not_put_beside_others(tmp_path: Path) -> None:
    """The rank that it waited for is unknown."""
    made = MadeTrace(rank=None)
    made.step(1, 0, 10)

    with pytest.raises(TraceError, match="which rank"):
        waits(
            [TraceTimeline(read(made.write(tmp_path / "a.json"))), collectives(tmp_path / "b.json", 0, [10])]
        )


def test_the_summary_has_the_keys_that_were_promised(tmp_path: Path) -> None:
    """Scripts written for ``analyze_trace`` go on working."""
    found = trace_summary(small_trace().write(tmp_path / "trace.json.gz"))

    assert found["top_cpu_ops"][0]["name"] == "aten::addmm"
    assert found["top_cuda_ops"][0]["name"] == GEMM
    assert found["memory_peaks"][0]["bytes"] == 800
    assert found["dataloader_time_pct"] == pytest.approx(20.0)
    assert found["rank"] == 0


def test_what_is_not_in_a_trace_is_absent(tmp_path: Path) -> None:
    """A trace of the host alone says nothing about a device; zero would be a statement."""
    made = MadeTrace(rank=None)
    made.op("aten::mm", 0, 10)

    found = summarize(read(made.write(tmp_path / "trace.json")))

    absent = (
        "device",
        "idle",
        "overlap",
        "launches",
        "occupancy",
        "tensor_cores",
        "dataloader_time_pct",
        "rank",
    )
    assert [found[key] for key in absent] == [None] * len(absent)
    assert found["breakdown"]["steps"] is None
    assert any("No device events" in sentence for sentence in found["missing"])


PYTORCHS_OWN = "enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__"


@pytest.mark.parametrize(("ranges", "stages_us", "guessed"), [
    # A forward inside an optimizer's closure: 30 - 10, as in the run's own account.
    pytest.param([("otel_train:optimizer", 10, 30), ("otel_train:forward", 20, 10)],
                 {"optimizer": 20, "forward": 10, "other": 70}, False, id="a stage in a stage is cut out of it"),
    # Captures name the loader; 10 for one, 5 for the other, of which PyTorch's own range is a part.
    pytest.param([("otel_train:data:train", 0, 10), (PYTORCHS_OWN, 1, 8), ("otel_train:data:extra", 50, 5)],
                 {"data:train": 10, "data:extra": 5, "other": 85}, False, id="waiting for any loader is waiting for data"),
    # A trace recorded without us still says when data, backward and optimizer ran; forward it does not.
    pytest.param([(PYTORCHS_OWN, 0, 10), ("Optimizer.step#SGD.step", 70, 5)],
                 {"data": 10, "backward": 20, "optimizer": 5, "other": 65}, True,
                 id="ranges of PyTorch replace stages that are not recorded"),
])  # fmt: skip
def test_time_goes_to_the_stage_that_is_noted(
    tmp_path: Path, ranges: list[tuple[str, float, float]], stages_us: dict[str, float], guessed: bool
) -> None:
    """A step of 100."""
    made = MadeTrace()
    made.step(1, 0, 100)
    for each in ranges:
        made.note(*each)
    if guessed:
        made.op("autograd::engine::evaluate_function: AddmmBackward0", 40, 20, tid=101)

    found = breakdown(TraceTimeline(read(made.write(tmp_path / "trace.json"))))

    assert found["guessed"] is guessed
    assert {row["stage"]: row["seconds"] for row in found["stages"]} == pytest.approx(
        {stage: took_us * US for stage, took_us in stages_us.items()}
    )
    waits_us = sum(took_us for stage, took_us in stages_us.items() if stage.startswith("data"))
    assert (found["data_share"] or 0.0) == pytest.approx(waits_us / 100)


def test_occupancy_is_weighted_by_time(tmp_path: Path) -> None:
    """30 % for 10 us and 60 % for 20 us: 50 %; a kernel that does not say counts for nothing."""
    made = MadeTrace()
    for at, length, percent in ((10, 10, 30), (30, 20, 60)):
        made.kernel(ADD, at, length, launched=at - 5, args={"est. achieved occupancy %": percent})
    made.kernel(ADD, 60, 99, launched=55)

    found = summarize(read(made.write(tmp_path / "trace.json")))

    assert found["occupancy"] == pytest.approx(0.5)
    assert not math.isnan(found["top_cuda_ops"][0]["occupancy"])
