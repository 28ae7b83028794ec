"""What simulated ranks ask of a Collector and a Prometheus; writes benchmarks/results and docs/explanation/scale.md.

Everything is started fresh for each row, with the shipped files, from this machine's programs, and shares the
machine with the one process that plays the ranks.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
import time
import urllib.parse
import urllib.request
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

from benchmarks.machine import Machine, this_machine
from otel_train.stack import local
from otel_train.stack.local import LocalStack
from tests.support.stack import free_ports

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "explanation" / "scale.md"
RESULTS = ROOT / "benchmarks" / "results"
BEGIN, END = "<!-- measured: make bench-scale -->", "<!-- end of what was measured -->"
CASES = (
    (8, "full"),
    (64, "full"),
    (512, "reduced"),
    (512, "full"),
    (4096, "rank0_aggregate"),
    (4096, "reduced"),
    (4096, "full"),
)
"""Ranks and profile: the choice of ``auto``, and at the two larger sizes other profiles as well."""

CHOSEN = {(8, "full"), (64, "full"), (512, "reduced"), (4096, "rank0_aggregate")}

EXPORT_EVERY_S = {"full": 15.0, "reduced": 30.0, "rank0_aggregate": 15.0}
STEPS_PER_S = 2.0
MARGIN_S = 3.0
"""Wait after every rank has sent once, until queued data has arrived."""

PARTS = ("collector", "prometheus", "jaeger")


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One case, measured in its window.

    Attributes:
        ranks: of the run.
        profile: how much they export.
        window_s: how long was measured.
        senders: ranks that send anything.
        series: series of the run in Prometheus.
        samples_per_s: samples that Prometheus took, those of the stack itself included.
        sent_per_s: data points that the ranks sent.
        kbytes_per_s: sent, before compression.
        collector_cpu: of one core.
        collector_mib: resident memory at the end.
        prometheus_cpu: as above.
        prometheus_mib: as above.
        simulator_cpu: of the process that plays the ranks.
        queued: size of the Collector's queues at the end, in bytes; in results from before queues were bounded in bytes, requests.
        failures: requests refused or left out.
        latest_s: longest that a request began after it was due.
        load_1min: of the machine when the window ended; everything here is part of it.
    """

    ranks: int
    profile: str
    window_s: float
    senders: int
    series: int
    samples_per_s: float
    sent_per_s: float
    kbytes_per_s: float
    collector_cpu: float
    collector_mib: float
    prometheus_cpu: float
    prometheus_mib: float
    simulator_cpu: float
    queued: int
    failures: int
    latest_s: float
    load_1min: float


def main(argv: Sequence[str] | None = None) -> int:
    """Measures all cases, or those of ``--ranks``."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, nargs="*", help="only these sizes, and write nothing")
    parser.add_argument("--page", type=Path, metavar="RESULT", help="write the page from this result alone")
    args = parser.parse_args(argv)
    if args.page:
        result = json.loads(args.page.read_text(encoding="utf-8"))
        table = as_table([Row(**row) for row in result["rows"]])
        write_page(PAGE, Machine(**result["machine"]), table)
        return 0
    machine = this_machine()
    rows = [measure(ranks, profile) for ranks, profile in CASES if not args.ranks or ranks in args.ranks]
    table = as_table(rows)
    print(table)
    if not args.ranks:
        result = {"machine": machine.as_json(), "rows": [asdict(row) for row in rows]}
        path = RESULTS / f"{machine.date[:10]}-{machine.kind}-scale.json"
        path.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
        write_page(PAGE, machine, table)
    return 0


def measure(ranks: int, profile: str) -> Row:
    """Measures one case, on a stack of its own."""
    every_s = EXPORT_EVERY_S[profile]
    print(f"{ranks} ranks, {profile}: about {2 * every_s + MARGIN_S:.0f} s", flush=True)
    with tempfile.TemporaryDirectory(prefix="otel-train-scale-") as folder:
        stack = LocalStack(Path(folder), free_ports())
        stack.configure()
        try:
            stack.start(*PARTS)
            return _measure(stack, ranks, profile, every_s)
        finally:
            stack.stop()


def _measure(stack: LocalStack, ranks: int, profile: str, every_s: float) -> Row:
    simulator = _simulator(stack, ranks, profile, 2 * every_s + MARGIN_S + 5)
    try:
        time.sleep(every_s + MARGIN_S)
        seen: dict[str, Any] = {part: local.running(stack.state, part) for part in PARTS[:2]}
        seen["simulator"] = psutil.Process(simulator.pid)
        began_s, cpu, samples = time.monotonic(), _cpu_s(seen), _samples(stack)
        time.sleep(every_s)
        window_s = time.monotonic() - began_s
        used = {name: (now - cpu[name]) / window_s for name, now in _cpu_s(seen).items()}
        memory = {name: one.memory_info().rss / 2**20 for name, one in seen.items()}
        taken, load = (_samples(stack) - samples) / window_s, psutil.getloadavg()[0]
        series, queued = _ask(stack, 'count({train_run_id!=""})'), _queued(stack)
        result = result_of(simulator)
    finally:
        simulator.kill()
        simulator.wait()
    return Row(
        ranks=ranks, profile=profile, window_s=window_s, senders=result["senders"], series=int(series),
        samples_per_s=taken, sent_per_s=result["samples"] / result["seconds"],
        kbytes_per_s=result["sent_bytes"] / result["seconds"] / 1e3, collector_cpu=used["collector"],
        collector_mib=memory["collector"], prometheus_cpu=used["prometheus"],
        prometheus_mib=memory["prometheus"], simulator_cpu=used["simulator"], queued=int(queued),
        failures=result["failures"] + result["skipped"], latest_s=result["latest_s"], load_1min=load,
    )  # fmt: skip


def _simulator(stack: LocalStack, ranks: int, profile: str, duration_s: float) -> subprocess.Popen[str]:
    words = ["--json", "--ranks", str(ranks), "--profile", profile, "--duration", str(duration_s)]
    words += ["--steps-per-second", str(STEPS_PER_S), "--endpoint", stack.addresses()["send OTLP to"]]
    return subprocess.Popen(
        [sys.executable, "-m", "benchmarks.scale", *words], stdout=subprocess.PIPE, text=True, cwd=ROOT
    )


def result_of(simulator: subprocess.Popen[str]) -> dict[str, Any]:
    """Returns what the simulator printed, once it has ended.

    Raises:
        RuntimeError: it printed nothing.
    """
    output, _ = simulator.communicate(timeout=300)
    if not output.strip():
        raise RuntimeError(f"the simulator ended with {simulator.returncode}: its error is above")
    result: dict[str, Any] = json.loads(output)
    return result


def _cpu_s(seen: Mapping[str, Any]) -> dict[str, float]:
    return {name: sum(one.cpu_times()[:2]) for name, one in seen.items()}


def _get(url: str) -> bytes:
    with urllib.request.urlopen(url, timeout=30) as answer:
        return bytes(answer.read())


def _page_value(url: str, pattern: str) -> float:
    """Returns the sum of the samples on a page of metrics whose names match."""
    text = _get(url).decode()
    return sum(float(found) for found in re.findall(rf"(?m)^{pattern}(?:\{{[^}}]*\}})? (\S+)$", text))


def _samples(stack: LocalStack) -> float:
    """Returns the samples appended so far, from Prometheus's /metrics: a query returns its last scrape of itself, which is older."""
    address = stack.addresses()["Prometheus"]
    return _page_value(f"{address}/metrics", "prometheus_tsdb_head_samples_appended_total")


def _queued(stack: LocalStack) -> float:
    address = f"http://127.0.0.1:{stack.ports.collector_metrics}/metrics"
    return _page_value(address, "otelcol_exporter_queue_size")


def _ask(stack: LocalStack, query: str) -> float:
    words = urllib.parse.urlencode({"query": query})
    answer = json.loads(_get(f"{stack.addresses()['Prometheus']}/api/v1/query?{words}"))
    result = answer["data"]["result"]
    return float(result[0]["value"][1]) if result else 0.0


def as_table(rows: Sequence[Row]) -> str:
    """Returns the rows in Markdown."""
    lines = [
        "| ranks | profile | ranks that send | series | per rank | samples/s sent | stored | kB/s | Collector | Prometheus | waiting | lost | late | load |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for row in rows:
        chosen = " (`auto`)" if (row.ranks, row.profile) in CHOSEN else ""
        lines.append(
            f"| {row.ranks:,} | `{row.profile}`{chosen} | {row.senders:,} | {row.series:,} | {row.series / row.ranks:,.1f} "
            f"| {row.sent_per_s:,.0f} | {row.samples_per_s:,.0f} | {row.kbytes_per_s:,.0f} "
            f"| {row.collector_cpu:.0%}, {row.collector_mib:.0f} MiB | {row.prometheus_cpu:.0%}, {row.prometheus_mib:.0f} MiB "
            f"| {row.queued:,} | {row.failures:,} | {row.latest_s:.1f} s | {row.load_1min:.1f} |"
        )
    return "\n".join(lines)


def write_page(page: Path, machine: Machine, table: str) -> None:
    """Replaces the table on the page."""
    text = page.read_text(encoding="utf-8")
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    words = (
        f"Measured {machine.date[:10]} on {machine.cpu}, {machine.cores} cores, {machine.system}, Python {machine.python}; "
        f"load before the start {machine.load_1min:.1f}. Everything ran on it, the simulated ranks included."
    )
    page.write_text(f"{before}{BEGIN}\n{words}\n\n{table}\n{END}{after}", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
