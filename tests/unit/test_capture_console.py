"""What a capture leaves on the console."""

from __future__ import annotations

from typing import Any

import pytest

from otel_train.datamodel import Capture
from otel_train.profiler.endpoint import Console

ADVICE = "DataLoader(..., num_workers=4) reads beside the training."
RECORD: dict[str, Any] = {
    "epoch": 2,
    "finding": {
        "name": "input_bound",
        "summary": "Training waits for the next batch during 40% of the time.",
    },
    "findings": [
        {"summary": "Training waits for the next batch during 40% of the time.", "advice": ADVICE},
        {"summary": "aten::conv2d takes 30% of the time of the host.", "advice": "torch.compile(model)."},
    ],
    "top_cpu_ops": [
        {"name": "aten::conv2d", "seconds": 0.01234, "share": 0.456},
        {"name": "aten::add\x1b[2J", "seconds": 0.002, "share": 0.05},
        {"name": "aten::relu", "seconds": 0.001, "share": 0.01},
    ],
    "top_cuda_ops": [{"name": "gemm", "seconds": 0.02, "share": 1.0}],
    "stages": [
        {"stage": "data", "share": 0.4},
        {"stage": "forward", "share": 0.25},
        {"stage": "other", "share": 0.35},
    ],
    "memory_peaks": [
        {"device": "cuda:0", "bytes": 300 << 20, "time_seconds": 0.0345},
        {"device": "cpu", "bytes": 20 << 20, "time_seconds": 0.01},
    ],
}
CAPTURE = Capture(
    "schedule", (1, 2), (20, 24), "runs/r/captures/epoch_2-step_20-rank0.json.gz", 1000, "", "", 1.0,
    RECORD["finding"]["summary"], RECORD,
)  # fmt: skip
BLOCK = f"""\
[Profiler] Epoch 2: runs/r/captures/epoch_2-step_20-rank0.json.gz
  Top 2 CPU operations:
    1. aten::conv2d: 12.34 ms (45.6%)
    2. aten::add\\x1b[2J: 2.00 ms (5.0%)
  Top 1 CUDA kernels:
    1. gemm: 20.00 ms (100.0%)
  Shares: data 40.0%, forward 25.0%, other 35.0%
  Memory peak: 300.0 MB on cuda:0 at 0.035 s
  Bottlenecks:
    Training waits for the next batch during 40% of the time. {ADVICE}
    aten::conv2d takes 30% of the time of the host. torch.compile(model).
"""


def shown(capture: Capture, capsys: pytest.CaptureFixture[str], **how: Any) -> str:
    Console(**{"lines": True, "block": False, "top": 2, **how}).show(capture)
    return capsys.readouterr().err


def test_the_profiler_block_reads_as_it_always_has(capsys: pytest.CaptureFixture[str]) -> None:
    """Scripts read it; an operator's name is not obeyed by the terminal."""
    assert shown(CAPTURE, capsys, block=True) == BLOCK
    assert shown(CAPTURE, capsys, block=True, lines=False) == BLOCK


def test_the_block_needs_no_operations_to_name_what_holds_training_up(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """``profiler_top=0`` is about the lists."""
    block = shown(CAPTURE, capsys, block=True, top=0)

    assert "Top" not in block
    assert block.startswith("[Profiler] Epoch 2: ")
    assert "Bottlenecks:\n    Training waits" in block


def test_a_trace_that_was_not_analysed_says_how_to(capsys: pytest.CaptureFixture[str]) -> None:
    """The run may have ended before."""
    bare = CAPTURE._replace(finding="", metadata={"epoch": 1})

    assert shown(bare, capsys, block=True).splitlines() == [
        f"[Profiler] Epoch 1: {CAPTURE.file}",
        f"  not analysed yet: otel-train analyze {CAPTURE.file}",
    ]


def test_a_path_with_spaces_can_be_pasted(capsys: pytest.CaptureFixture[str]) -> None:
    """The command is for a shell."""
    bare = CAPTURE._replace(finding="", file="/my runs/a.json.gz", steps=(3, 3))

    assert shown(bare, capsys, block=False, lines=True).splitlines() == [
        "otel_train: captured step 3: /my runs/a.json.gz",
        "otel_train:   analyse it with: otel-train analyze '/my runs/a.json.gz'",
    ]


def test_a_trace_with_little_in_it_gives_a_short_block(capsys: pytest.CaptureFixture[str]) -> None:
    """No device, no memory, no ranges: nothing is invented in their place."""
    little = {"epoch": 1, "finding": RECORD["finding"], "findings": RECORD["findings"][:1]}

    assert shown(CAPTURE._replace(metadata=little), capsys, block=True).splitlines()[1:] == [
        "  Bottlenecks:",
        f"    {RECORD['findings'][0]['summary']} {ADVICE}",
    ]


def test_without_the_block_it_is_shown_in_our_own_words_or_not_at_all(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """``console=False`` and ``profiler_top=0`` both mean silence."""
    assert shown(CAPTURE, capsys).startswith("otel_train: captured steps 20 to 24: ")
    assert shown(CAPTURE, capsys, top=0) == shown(CAPTURE, capsys, lines=False) == ""


def test_a_capture_without_a_file_is_not_shown(capsys: pytest.CaptureFixture[str]) -> None:
    """The log has said why there is none."""
    assert shown(CAPTURE._replace(file=""), capsys, block=True) == ""
