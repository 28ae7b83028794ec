"""What ``import otel_train`` and ``instrument()`` cost."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.row import Row
from benchmarks.spread import differences, spread_of

if TYPE_CHECKING:
    from benchmarks.plan import Plan

WHAT = (
    "A Python that only imports otel_train against one that does nothing, in pairs of processes; afterwards neither"
    " torch nor numpy nor opentelemetry may be loaded."
)
INSTRUMENT = (
    "A process that has imported torch and made a model and a loader: milliseconds of `import otel_train` and `instrument()`"
    " together, and of a second session afterwards, which imports nothing."
)
BUDGET_MS = 20.0
HEAVY = ("torch", "numpy", "opentelemetry")
"""What `import otel_train` must not import."""

_LOADED = f"import sys, otel_train; print(*(name for name in {HEAVY!r} if name in sys.modules))"


def run(plan: Plan) -> list[Row]:
    """Measures the import time in pairs, and lists the heavy packages that it loads."""
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


_BEGIN = """
import json, sys, time
from benchmarks.loop import Loop
loop = Loop()
spent_ms = []
for number in range(2):
    begun = time.perf_counter_ns()
    import otel_train
    session = otel_train.instrument(
        loop.model, {"bench": loop.loader}, run_dir=sys.argv[1], run_id=f"begin{number}",
        prometheus_address="127.0.0.1:0", console=False,
    )
    spent_ms.append((time.perf_counter_ns() - begun) / 1e6)
    session.close()
print(json.dumps(spent_ms))
"""


def run_instrument(plan: Plan) -> list[Row]:
    """Measures the time until ``instrument()`` returns, in fresh processes."""
    _begin(plan)  # compiled and cached, as after any installation
    first, second = zip(*(_begin(plan) for _ in range(plan.times(15, 5))), strict=True)
    return [
        Row(
            name="instrument.time",
            what="import otel_train and instrument(), after torch",
            unit="ms",
            values=first,
            budget=BUDGET_MS,
            detail={"second_session_ms": spread_of(second).median},
        )
    ]


def _begin(plan: Plan) -> tuple[float, float]:
    environment = {name: text for name, text in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    environment["PYTHONPATH"] = str(Path(__file__).parents[1])
    # Outside the checkout, where instrument() would parse pyproject.toml for settings because it contains "otel_train".
    with tempfile.TemporaryDirectory(dir=plan.folder) as runs:
        output = subprocess.check_output(
            [sys.executable, "-c", _BEGIN, runs], text=True, env=environment, cwd=runs
        )
    first, second = json.loads(output)
    return first, second


def _python(code: str) -> float:
    """Returns the milliseconds from start to end of an interpreter that runs ``code``."""
    begun = time.perf_counter_ns()
    subprocess.run([sys.executable, "-c", code], check=True)
    return (time.perf_counter_ns() - begun) / 1e6
