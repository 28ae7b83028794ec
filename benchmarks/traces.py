"""What the analysis of a trace costs, and whether another one agrees; ``python -m benchmarks.traces``."""

from __future__ import annotations

import argparse
import gzip
import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.machine import this_machine
from benchmarks.plan import say
from benchmarks.row import Row, failed
from benchmarks.table import page_with, plain_table
from tests.support.made_trace import write_long

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "reference" / "analysis.md"
RESULTS = ROOT / "benchmarks" / "results"
CHILD = Path(__file__).with_name("trace_child.py")
LARGE_BYTES, SHARED_BYTES, REAL_STEPS = 200_000_000, 40_000_000, 14
"""Sizes of the trace that measures speed and of the one that both analyse (HolisticTraceAnalysis is slow); steps of the real trace."""

S_PER_100_MB, MEMORY_RATIO, SPEED_RATIO, THEIR_MEMORY_RATIO, DIFFERENCE = 1.0, 3.0, 0.2, 0.25, 0.01


def main() -> int:
    """Measures, prints and writes the page; returns 1 if a budget is missed."""
    options = _parser().parse_args()
    with tempfile.TemporaryDirectory(prefix="otel-train-bench-") as folder:
        rows = [*_speed(Path(folder), options), *_real(Path(folder), options)]
        rows += _against(Path(folder), options)
    machine = this_machine(device="cpu")
    print(machine.sentence())
    print(plain_table(rows))
    if not options.quick:
        stored = {"machine": machine.as_json(), "rows": [row.as_json() for row in rows]}
        path = RESULTS / f"{machine.date[:10]}-{machine.kind}-traces.json"
        path.write_text(json.dumps(stored, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
        text = page_with(rows, machine, device="analyze", page=PAGE.read_text(encoding="utf-8"))
        PAGE.write_text(text, encoding="utf-8")
        say(f"wrote {path} and {PAGE}")
    return int(failed(rows))


def _speed(folder: Path, options: argparse.Namespace) -> list[Row]:
    path = folder / "large.json"
    size = LARGE_BYTES // (20 if options.quick else 1)
    say(f"a synthetic trace of {size / 1e6:.0f} MB, plain and zipped")
    write_long(path, text_bytes=size)
    zipped = path.with_suffix(".json.gz")
    with path.open("rb") as plain, gzip.open(zipped, "wb", compresslevel=1) as packed:
        shutil.copyfileobj(plain, packed)
    hundreds = path.stat().st_size / 1e8
    times = 1 if options.quick else 3
    numbers = [_child(sys.executable, "ours", path) for _ in range(times)]
    packed_numbers = [_child(sys.executable, "ours", zipped) for _ in range(times)]
    grown = [(each["peak_mib"] - each["base_mib"]) / each["file_mib"] for each in numbers]
    return [
        Row(name="trace.cpu", what="read and analyse 100 MB of a GPU trace, processor time", unit="s",
            values=tuple(each["cpu_s"] / hundreds for each in numbers), budget=S_PER_100_MB),
        Row(name="trace.wall", what="the same, by the clock", unit="s",
            values=tuple(each["wall_s"] / hundreds for each in numbers)),
        Row(name="trace.gzip", what="the same from gzip, per 100 MB of text, processor time", unit="s",
            values=tuple(each["cpu_s"] / hundreds for each in packed_numbers)),
        Row(name="trace.memory", what="memory it takes, over the size of the file", unit="x",
            values=tuple(grown), budget=MEMORY_RATIO, detail={"file_mib": numbers[0]["file_mib"]}),
    ]  # fmt: skip


def _real(folder: Path, options: argparse.Namespace) -> list[Row]:
    path = folder / "real.json"
    say("a trace of torch.profiler on the CPU, with shapes and memory")
    recorder = [
        sys.executable,
        "-m",
        "benchmarks.trace_record",
        str(path),
        str(2 if options.quick else REAL_STEPS),
    ]
    subprocess.run(recorder, check=True, cwd=ROOT, stderr=subprocess.DEVNULL)
    numbers = [_child(sys.executable, "ours", path) for _ in range(1 if options.quick else 3)]
    hundreds = path.stat().st_size / 1e8
    return [
        Row(name="trace.real", what=f"read and analyse 100 MB of a real CPU trace ({hundreds * 100:.0f} MB), processor time",
            unit="s", values=tuple(each["cpu_s"] / hundreds for each in numbers), budget=S_PER_100_MB)
    ]  # fmt: skip


def _against(folder: Path, options: argparse.Namespace) -> list[Row]:
    """Analyses the same trace with otel_train and HolisticTraceAnalysis in turn."""
    if options.hta is None:
        return [
            Row(
                name="hta",
                what="HolisticTraceAnalysis on the same trace",
                unit="",
                reason="give --hta PYTHON",
            )
        ]
    path = folder / "shared.json"
    write_long(path, text_bytes=SHARED_BYTES // (10 if options.quick else 1))
    pairs = []
    for number in range(1 if options.quick else 3):
        say(f"both on the same trace, {number + 1}")
        pairs.append((_child(sys.executable, "ours", path), _child(options.hta, "theirs", path)))
    return [
        Row(name="hta.time", what="our time for the same trace, over that of HolisticTraceAnalysis", unit="x",
            values=tuple(one["wall_s"] / other["wall_s"] for one, other in pairs), budget=SPEED_RATIO,
            detail={"theirs_s": pairs[0][1]["wall_s"], "file_mib": pairs[0][0]["file_mib"]}),
        Row(name="hta.cpu", what="the same in processor time", unit="x",
            values=tuple(one["cpu_s"] / other["cpu_s"] for one, other in pairs)),
        Row(name="hta.memory", what="our memory for it, the whole process, over theirs", unit="x",
            values=tuple(one["peak_mib"] / other["peak_mib"] for one, other in pairs), budget=THEIR_MEMORY_RATIO,
            detail={"theirs_mib": pairs[0][1]["peak_mib"]}),
        *(
            Row(name=f"hta.{name}", what=f"difference to theirs: share of {meaning}", unit="",
                values=tuple(abs(one["shares"][name] - other["shares"][name]) for one, other in pairs), budget=DIFFERENCE)
            for name, meaning in (("idle", "idle time"), ("compute", "computing"), ("other", "everything else on the device"),
                               ("overlap", "communication that is hidden"))
        ),
    ]  # fmt: skip


def _child(python: str, which: str, path: Path) -> dict[str, Any]:
    done = subprocess.run(
        [python, str(CHILD), which, str(path)], check=True, capture_output=True, text=True, cwd=ROOT
    )
    numbers: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return numbers


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.traces", description=__doc__)
    parser.add_argument("--hta", metavar="PYTHON", help="an interpreter that has HolisticTraceAnalysis")
    parser.add_argument("--quick", action="store_true", help="small traces, once; writes nothing")
    return parser


if __name__ == "__main__":
    sys.exit(main())
