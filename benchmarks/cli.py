"""Command line of the benchmarks: measures, compares with budgets, writes the results."""

from __future__ import annotations

import argparse
import json
import tempfile
import textwrap
import time
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks import (
    accounting,
    captures,
    idle,
    imports,
    processes,
    step_cost,
    trackers,
    wait,
    wall_time,
)
from benchmarks.machine import this_machine
from benchmarks.plan import Bench, Plan, say
from benchmarks.row import Row, Status, failed
from benchmarks.table import page_with, plain_table

if TYPE_CHECKING:
    from collections.abc import Sequence

    from benchmarks.machine import Machine

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
PAGE = ROOT / "docs" / "reference" / "overhead.md"

BENCHES = (
    Bench("step", step_cost.WHAT, step_cost.run),
    Bench("wall", wall_time.WALL, wall_time.run_wall),
    Bench("cpu", wall_time.CPU, wall_time.run_cpu),
    Bench("wait", wait.WHAT, wait.run),
    Bench("account", accounting.WHAT, accounting.run),
    Bench("import", imports.WHAT, imports.run),
    Bench("instrument", imports.INSTRUMENT, imports.run_instrument),
    Bench("exit", processes.EXIT, processes.run_exit),
    Bench("memory", processes.MEMORY, processes.run_memory),
    Bench("node", processes.NODE, processes.run_node),
    Bench("capture", captures.WHAT, captures.run),
    Bench("trackers", trackers.WHAT, trackers.run),
    Bench("idle", idle.WHAT, idle.run),
)
ON_CUDA = ("step",)
"""Benchmarks of ``--device cuda``; the others do not depend on the device."""


_STATUSES = """\
An exit status of 1 says that a budget is missed, not decided or not measured. A row is too busy to quote
if its quartiles are further apart than twice its budget. Then, and if the load was above 1 before the
start, the page stays as it is, and the name of the results file ends in "-busy".
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Measures what was asked for; returns 1 if a budget is missed, not decided or not measured, unless only a report is wanted."""
    parser = _parser()
    options = parser.parse_args(arguments)
    if options.device == "cuda" and not set(options.only or ()) <= set(ON_CUDA):
        parser.error(f"--device cuda measures {', '.join(ON_CUDA)} only: leave the others out")
    machine = this_machine(device=options.device)
    names = options.only or (ON_CUDA if options.device == "cuda" else tuple(bench.name for bench in BENCHES))
    with tempfile.TemporaryDirectory(prefix="otel-train-bench-") as folder:
        plan = Plan(folder=Path(folder), quick=options.quick, device=options.device)
        rows = [row for bench in BENCHES if bench.name in names for row in _rows_of(bench, plan)]
    print(machine.sentence())
    print(plain_table(rows))
    _write(options, machine, rows)
    return int(failed(rows) and not options.report_only)


def _rows_of(bench: Bench, plan: Plan) -> list[Row]:
    say(bench.name)
    begun = time.perf_counter()
    try:
        rows = bench.run(plan)
    except Exception as error:  # noqa: BLE001 - one part that fails must not lose minutes of others
        rows = [
            Row(
                name=bench.name,
                what=bench.name,
                unit="",
                reason=f"{type(error).__name__}: {error}",
            )
        ]
    say(f"  {time.perf_counter() - begun:.0f} s")
    return rows


def _write(options: argparse.Namespace, machine: Machine, rows: list[Row]) -> None:
    """Writes the results as JSON, and the page if everything was measured in full on a quiet machine."""
    complete = not (options.quick or options.only or options.no_write)
    noisy = machine.busy or any(row.status is Status.TOO_BUSY for row in rows)
    busy = noisy and not options.write_busy
    path = options.json
    if path is None and complete:
        path = RESULTS / f"{machine.date[:10]}-{machine.kind}{'-busy' if busy else ''}.json"
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        stored = {
            "machine": machine.as_json(),
            "quick": options.quick,
            "rows": [row.as_json() for row in rows],
        }
        path.write_text(json.dumps(stored, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
        say(f"wrote {path}")
    if complete and busy:
        say(f"the machine was too busy to quote: {PAGE} stays as it is; --write-busy writes it nevertheless")
    elif complete and any(row.values for row in rows):
        page = PAGE.read_text(encoding="utf-8") if PAGE.exists() else ""
        PAGE.write_text(page_with(rows, machine, device=options.device, page=page), encoding="utf-8")
        say(f"wrote {PAGE}")


def _parser() -> argparse.ArgumentParser:
    what = "\n".join(
        textwrap.fill(bench.what, 96, initial_indent=f"  {bench.name:<8}", subsequent_indent=" " * 10)
        for bench in BENCHES
    )
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks",
        description="What watching costs, against the bare loop in the same run. About a quarter of an hour; use a quiet machine.",
        epilog=f"what is measured:\n{what}\n\n{_STATUSES}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--quick", action="store_true", help="few repetitions: see that it works; writes nothing by itself"
    )
    parser.add_argument(
        "--only", nargs="+", choices=[bench.name for bench in BENCHES], help="measure these alone"
    )
    parser.add_argument(
        "--device", choices=("cpu", "cuda"), default="cpu", help="cuda measures the cost per step there"
    )
    parser.add_argument("--json", type=Path, metavar="PATH", help="write the results here")
    parser.add_argument(
        "--no-write", action="store_true", help="leave benchmarks/results and the page as they are"
    )
    parser.add_argument(
        "--write-busy", action="store_true", help="write the page even if the machine was too busy to quote"
    )
    parser.add_argument("--report-only", action="store_true", help="exit with 0 even if a budget is missed")
    return parser
