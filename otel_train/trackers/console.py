"""The blocks of the earlier systems, on standard error."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Container, Iterator, Mapping

    from otel_train.trackers.metrics import FlatRow

FLAT_BLOCKS = frozenset({"profiling", "throughput"})
"""Those that are made of flat metrics; the profiler's comes with its capture."""

_PREFIX = "profiling/"


class BlocksTracker:
    """Prints what was asked for.

    Args:
        blocks: some of ``FLAT_BLOCKS``.
    """

    name = "console blocks"

    def __init__(self, blocks: Container[str]) -> None:
        self._blocks = blocks

    def wanted(self) -> bool:
        """Whether there is anything to print on."""
        return sys.stderr is not None

    def place(self) -> bool:
        """There is one only."""
        return True

    def write(self, row: FlatRow, _: object) -> None:
        """Print the block of a row in one piece."""
        if row.of_epoch:
            lines = _throughput(row) if "throughput" in self._blocks else iter(())
        else:
            lines = _profiling(row) if "profiling" in self._blocks else iter(())
        text = "".join(f"{line}\n" for line in lines)
        if text:
            sys.stderr.write(text)
            sys.stderr.flush()

    def close(self) -> None:
        """Nothing was opened."""


def _profiling(row: FlatRow) -> Iterator[str]:
    yield f"--- Profiling Metrics (Step {row.step}) ---"
    for key, average in row.values.items():
        if key.startswith(_PREFIX) and key.endswith("_avg_time"):
            name = key.removeprefix(_PREFIX).removesuffix("_avg_time")
            total = row.values[f"{_PREFIX}{name}_total_time"]
            count = int(row.values[f"{_PREFIX}{name}_count"])
            yield f"{name}: avg={average:.4f}s, total={total:.2f}s, count={count}"


def _throughput(row: FlatRow) -> Iterator[str]:
    values = row.values
    yield f"[Throughput] Epoch {row.epoch}:"
    yield from _line(
        values, "", {"samples_per_second": "samples/s", "batches_per_second": "batches/s"}, "{:.1f} {}"
    )
    for what in ("load", "transform"):
        key = f"batch_{what}_time_ms"
        yield from _line(
            values, f"batch {what}: ", {f"{key}_avg": "ms", f"{key}_p95": "ms (p95)"}, "{:.2f} {}"
        )
    memories = {f"memory_{what}_mb": f"MB {what}" for what in ("dataset", "cache", "peak")}
    yield from _line(values, "memory: ", memories, "{:.1f} {}")
    yield from _line(values, "efficiency: ", {"throughput_efficiency": ""}, "{:.1%}{}")


def _line(values: Mapping[str, float], head: str, names: Mapping[str, str], form: str) -> Iterator[str]:
    """What is known of ``names``, on a line; none if nothing is."""
    known = [form.format(values[key], unit) for key, unit in names.items() if key in values]
    if known:
        yield f"  {head}{', '.join(known)}"
