"""What ``import otel_train`` costs."""

from __future__ import annotations

import subprocess
import sys
import time
from typing import TYPE_CHECKING

from benchmarks.row import Row
from benchmarks.spread import differences, spread_of

if TYPE_CHECKING:
    from benchmarks.plan import Plan

WHAT = (
    "A Python that only imports otel_train against one that does nothing, in pairs of processes; afterwards neither"
    " torch nor numpy nor opentelemetry may be loaded."
)
BUDGET_MS = 20.0
HEAVY = ("torch", "numpy", "opentelemetry")
"""What `import otel_train` must not import."""

_LOADED = f"import sys, otel_train; print(*(name for name in {HEAVY!r} if name in sys.modules))"


def run(plan: Plan) -> list[Row]:
    """Import time in pairs, and what was loaded by it."""
    _python("import otel_train")  # compiled and cached, as after any installation
    bare, ours = [], []
    for _ in range(plan.times(25, 7)):
        bare.append(_python("pass"))
        ours.append(_python("import otel_train"))
    loaded = subprocess.check_output([sys.executable, "-c", _LOADED], text=True).split()
    return [
        Row(
            name="import.time",
            what="import otel_train",
            unit="ms",
            values=tuple(differences(ours, bare)),
            budget=BUDGET_MS,
            detail={"bare_ms": spread_of(bare).median},
        ),
        Row(
            name="import.heavy",
            what="heavy packages loaded by it (torch, numpy, opentelemetry)",
            unit="packages",
            values=(float(len(loaded)),),
            budget=0.0,
            reason="loaded: " + ", ".join(loaded) if loaded else "",
        ),
    ]


def _python(code: str) -> float:
    """Milliseconds from start to end of an interpreter that runs ``code``."""
    begun = time.perf_counter_ns()
    subprocess.run([sys.executable, "-c", code], check=True)
    return (time.perf_counter_ns() - begun) / 1e6
