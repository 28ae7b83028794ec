"""Every rule, with a trace that provokes it and one that must not."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from otel_train import catalog
from otel_train.trace_analysis.events import read
from otel_train.trace_analysis.rules import RULES, TraceFinding, findings, rank_finding
from otel_train.trace_analysis.summary import summarize
from tests.support.made_trace import NCCL_STREAM, MadeTrace

STEPS, LENGTH = 5, 10_000.0
GEMM, PLAIN, ADD = "sm90_xmma_gemm_bf16_kernel", "sgemm_largek_lds64", "void at::native::add_kernel(int)"
H2D = "Memcpy HtoD (Pageable -> Device)"


def loop(fill: Callable[[MadeTrace, float], None], *, steps: int = STEPS) -> MadeTrace:
    """Steps of 10 ms, each filled in the same way."""
    made = MadeTrace()
    for number in range(steps):
        made.step(number, number * LENGTH, LENGTH)
        fill(made, number * LENGTH)
    return made


def busy(
    made: MadeTrace, at: float, *, until: float = 9_900.0, begin: float = 100.0, kernel: str = GEMM
) -> None:
    """One long kernel, launched in time."""
    made.kernel(kernel, at + begin, until - begin, launched=at + begin - 20)


def healthy(made: MadeTrace, at: float) -> None:
    """Waits 50 us for data; the device is busy nearly all of the time."""
    made.note("enumerate(DataLoader)#_MultiProcessingDataLoaderIter.__next__", at, 50)
    busy(made, at)


def starved(made: MadeTrace, at: float) -> None:
    made.note("enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__", at, 4_000)
    busy(made, at, begin=4_100)


def starved_on_the_host(made: MadeTrace, at: float) -> None:
    made.note("enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__", at, 4_000)
    made.op("aten::a", at + 4_000, 2_000)
    made.op("aten::b", at + 6_000, 2_000)
    made.op("aten::c", at + 8_000, 2_000)
    made.op("aten::d", at, 2_000)


def read_ahead(made: MadeTrace, at: float) -> None:
    """The host waits for a batch, and the device has work all the while."""
    made.kernel(GEMM, at + 20, 9_900, launched=at + 2)
    made.note("enumerate(DataLoader)#_MultiProcessingDataLoaderIter.__next__", at + 10, 4_000)


def of_another_vendor(made: MadeTrace, at: float) -> None:
    """Its names do not say whether its matrix units were used."""
    correlation = made.call("hipLaunchKernel", at + 80, 2)
    made.device("kernel", PLAIN, at + 100, 9_800, correlation=correlation)


def evaluated_between(made: MadeTrace, at: float) -> None:
    """Another whole step, and 40 ms of an evaluation that waits for its loader before it."""
    begin = STEPS * 10 * LENGTH + 5 * at
    made.step(STEPS + round(at / LENGTH), begin, LENGTH)
    for start in (at, begin):
        made.note("otel_train:forward", start, LENGTH)
        busy(made, start)
    made.note("otel_train:data:val", begin + LENGTH + 500, 39_000)


def many_launches(made: MadeTrace, at: float) -> None:
    for number in range(400):
        made.kernel(ADD, at + number * 25 + 12, 4, launched=at + number * 25, launch_dur=10)


def slow_python(made: MadeTrace, at: float) -> None:
    for number in range(5):
        made.op("aten::nonzero", at + number * 2_000, 1_000)
        made.kernel(GEMM, at + number * 2_000 + 1_100, 900, launched=at + number * 2_000 + 1_080)


def syncs(made: MadeTrace, at: float) -> None:
    """The device is done, the call returns 5 us later, and it takes the host 1 ms to launch again."""
    for number in range(5):
        begin = at + number * 2_000
        made.kernel(GEMM, begin + 20, 980, launched=begin + 10)
        made.call("cudaStreamSynchronize", begin + 15, 990)


def one_sync(made: MadeTrace, at: float) -> None:
    busy(made, at)
    made.call("cudaDeviceSynchronize", at + 200, 9_705)


def all_reduce(made: MadeTrace, at: float, *, beside: bool) -> None:
    busy(made, at, until=9_900 if beside else 6_000)
    start = 3_000 if beside else 6_010
    made.kernel("ncclDevKernel_AllReduce_Sum_f32", at + start, 3_000, launched=at + 90, stream=NCCL_STREAM)
    made.kernel(GEMM, at + 9_050, 850, launched=at + 92)


def copies(made: MadeTrace, at: float, *, name: str = H2D) -> None:
    correlation = made.call("cudaMemcpyAsync", at + 10, 1_000)
    made.device("gpu_memcpy", name, at + 20, 980, correlation=correlation)
    busy(made, at, begin=1_100)


def optimizer(made: MadeTrace, at: float, *, op: str, length: float = 3_000) -> None:
    made.note("otel_train:forward", at, 5_000)
    made.note("otel_train:optimizer", at + 5_000, length)
    for number in range(4):
        made.op(op, at + 5_000 + number * 100, 90)
    made.op("aten::mm", at, 100)
    made.op("aten::relu", at + 100, 100)
    made.op("aten::add", at + 200, 300)


def one_op(made: MadeTrace, at: float, *, name: str, share: float) -> None:
    made.op(name, at, 5_000 * share)
    for number in range(10):
        made.op(f"aten::other{number}", at + 5_000 + number * 300, 500 * (1 - share) / 2)


def memory(made: MadeTrace, at: float, *, leak: int) -> None:
    healthy(made, at)
    left = 100_000_000 + round(at / LENGTH) * leak
    made.memory(at + 10, 50_000_000, left + 50_000_000)
    made.memory(at + 9_000, -50_000_000 + leak, left + leak)


def beside_evaluation(
    work: Callable[[MadeTrace, float], None], step: Callable[[MadeTrace, float], None] = healthy
) -> Callable[[MadeTrace, float], None]:
    """Steps that nothing is wrong with, and for each of them three times this work after the last one."""

    def fill(made: MadeTrace, at: float) -> None:
        step(made, at)
        for number in range(3):
            work(made, (STEPS + number) * LENGTH + 3 * at)

    return fill


Fill = Callable[[MadeTrace, float], None]


PLAIN_GEMM = partial(busy, kernel=PLAIN)
MM = partial(one_op, name="aten::mm", share=0.9)
CASES: list[tuple[str, Fill, Fill]] = [
    ("input_bound", starved, read_ahead),
    ("input_bound", starved_on_the_host, MM),
    ("launch_bound", many_launches, slow_python),
    ("host_bound", slow_python, many_launches),
    ("sync_bound", syncs, one_sync),
    ("exposed_communication", partial(all_reduce, beside=False), partial(all_reduce, beside=True)),
    ("pageable_copies", copies, partial(copies, name="Memcpy HtoD (Pinned -> Device)")),
    ("no_tensor_cores", PLAIN_GEMM, busy),
    (
        "unfused_optimizer",
        partial(optimizer, op="aten::addcdiv_"),
        partial(optimizer, op="aten::_fused_adamw_"),
    ),
    (
        "no_tensor_cores",
        partial(busy, kernel="sm80_xmma_gemm_f32f32_f32f32_f32_tn_n_tilesize32x32x8_ffma_"),
        partial(busy, kernel="nvjet_tst_128x256_64x4_2x1_v_bz_coopA_NTN"),
    ),
    (
        "no_tensor_cores",
        partial(busy, kernel="sm80_xmma_fprop_implicit_gemm_f32f32_f32_nhwc_g1_ffma_t1r1s1"),
        partial(busy, kernel="sm80_xmma_fprop_implicit_gemm_f16f16_f32_nhwc_g1_tensor16x8x16_"),
    ),
    (
        "unfused_optimizer",
        partial(optimizer, op="aten::addcdiv_"),
        partial(optimizer, op="Torch-Compiled Region: 1/0"),
    ),
    ("input_bound", starved, evaluated_between),
    ("pageable_copies", copies, beside_evaluation(copies)),
    ("no_tensor_cores", PLAIN_GEMM, beside_evaluation(PLAIN_GEMM)),
    ("heavy_op", MM, beside_evaluation(MM, partial(one_op, name="aten::mm", share=0.05))),
    (
        "heavy_op",
        partial(one_op, name="aten::conv2d", share=0.8),
        partial(one_op, name="aten::conv2d", share=0.05),
    ),
    ("no_tensor_cores", PLAIN_GEMM, of_another_vendor),
    ("memory_growth", partial(memory, leak=5_000_000), partial(memory, leak=0)),
]


def found_in(path: Path, fill: Callable[[MadeTrace, float], None]) -> dict[str, TraceFinding]:
    document = summarize(read(loop(fill).write(path / "trace.json")))
    return {finding.name: finding for finding in findings(document)}


@pytest.mark.parametrize(
    ("name", "guilty", "innocent"), CASES, ids=[f"{number}-{case[0]}" for number, case in enumerate(CASES)]
)
def test_a_rule_accuses_the_guilty_and_spares_the_innocent(
    tmp_path: Path, name: str, guilty: Callable[..., None], innocent: Callable[..., None]
) -> None:
    """A false accusation costs the reader a day, and us the reader."""
    accused = found_in(tmp_path, guilty)

    assert name in accused
    assert name not in found_in(tmp_path, innocent)
    assert accused[name].summary.endswith(".")
    assert accused[name].advice
    assert accused[name].evidence


@pytest.mark.parametrize("name", sorted({name for name, *_ in CASES}))
def test_a_short_list_of_kernels_has_the_same_findings(tmp_path: Path, name: str) -> None:
    """``--top 1`` changes what is listed."""
    guilty = next(guilty for case, guilty, _ in CASES if case == name)
    trace = read(loop(guilty).write(tmp_path / "trace.json"))
    short, long = summarize(trace, most=1), summarize(trace, most=10)

    assert short["findings"] == long["findings"]
    assert len(short["top_cuda_ops"]) <= 1


@pytest.mark.parametrize("name", ["torchvision::nms", "aten::topk", "aten::histc", "mine::concatenate"])
def test_an_operator_is_not_taken_for_a_copy_by_a_part_of_its_name(tmp_path: Path, name: str) -> None:
    """The advice for what only moves data would send the reader the wrong way."""
    for each, moves in ((name, False), ("aten::_to_copy", True)):
        [heavy] = [
            f for n, f in found_in(tmp_path, partial(one_op, name=each, share=0.8)).items() if n == "heavy_op"
        ]
        assert ("only moves" in heavy.advice) is moves


def test_the_label_of_captures_knows_every_finding() -> None:
    """A finding that is in no catalogue has no documented name to alert on."""
    without_a_rule = {"straggler", "no_finding", "nothing_recorded"}

    assert {name for name, *_ in CASES} | without_a_rule == set(catalog.CAPTURE_FINDING.values)
    assert len({name for name, *_ in CASES}) >= len(RULES)


def test_a_healthy_loop_has_the_finding_that_nothing_is_wrong(tmp_path: Path) -> None:
    """Silence would leave open whether the rules were applied."""
    [finding] = found_in(tmp_path, healthy).values()

    assert finding.name == "no_finding"
    assert finding.severity == "ok"
    assert "data loading takes 0.5% of the time, which is fine" in finding.summary


def test_time_won_back_is_in_seconds_and_hours(tmp_path: Path) -> None:
    """40 % of 50 ms, and of a day."""
    finding = found_in(tmp_path, starved)["input_bound"]

    assert finding.share == pytest.approx(0.40)
    assert finding.seconds == pytest.approx(0.020)
    assert finding.hours_per_day == pytest.approx(9.6)
    assert finding.confidence == "high"
    assert finding.where[0] == "4.2 ms idle at 0.009900 s in step 0"


def test_the_advice_on_workers_has_no_number_that_the_trace_does_not_know(tmp_path: Path) -> None:
    """The run summary knows processors and batches. Pinned memory serves copies to a device."""
    with_device = found_in(tmp_path, starved)["input_bound"].advice
    without = found_in(tmp_path, starved_on_the_host)["input_bound"].advice

    assert "num_workers=N, persistent_workers=True, pin_memory=True) reads beside" in with_device
    assert "num_workers=N, persistent_workers=True) reads beside" in without


def test_the_heaviest_finding_comes_first(tmp_path: Path) -> None:
    """It is what the alert and the event carry."""

    def both(made: MadeTrace, at: float) -> None:
        starved(made, at)
        made.memory(at + 5_000, 1, round(at) * 1_000_000 + 1)

    assert list(found_in(tmp_path, both)) == ["input_bound", "memory_growth"]


@pytest.mark.parametrize(
    ("fill", "name", "confidence"),
    [
        (starved, "input_bound", "medium"),  # what happens once at the start may be all there is
        (lambda *_: None, "nothing_recorded", "medium"),  # a schedule longer than the run leaves such a file
    ],
    ids=["without steps", "without events"],
)
def test_a_trace_without_steps_is_trusted_less(
    tmp_path: Path, fill: Fill, name: str, confidence: str
) -> None:
    """And of one without events nothing can be said."""
    made = MadeTrace()
    fill(made, 0)
    [finding] = findings(summarize(read(made.write(tmp_path / "trace.json"))))

    assert (finding.name, finding.confidence) == (name, confidence)


def waiting(*caused_s: float) -> dict[str, Any]:
    whole = sum(caused_s)
    ranks = [
        {"rank": rank, "waited_seconds": whole / len(caused_s), "caused_seconds": part, "step_seconds": 0.01}
        for rank, part in enumerate(caused_s)
    ]
    return {"collectives": 10, "unmatched": 0, "ranks": ranks}


@pytest.mark.parametrize("caused", [(0.0005, 0.0005), (0.007, 0.007, 0.007)])
def test_the_rank_that_all_wait_for_is_named_unless_waiting_is_short_or_shared(
    tmp_path: Path, caused: tuple[float, ...]
) -> None:
    """Two ranks, 50 ms each; 20 ms of waiting, 18 of them for rank 1. Ranks that take turns in coming last are none."""
    document = summarize(read(loop(healthy).write(tmp_path / "trace.json")))
    finding = rank_finding(document, waiting(0.002, 0.018))

    assert finding is not None
    assert "rank 1" in finding.summary
    assert finding.share == pytest.approx(0.20 * 0.9)
    assert rank_finding(document, waiting(*caused)) is None
