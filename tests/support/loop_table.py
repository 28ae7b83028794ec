"""The rows of docs/reference/loops.md: compared with what is committed, or written (``make loops``)."""

from __future__ import annotations

import fcntl
import json
import os
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parents[2] / "docs" / "reference" / "loops.json"
WRITE = "GOLDEN"

COUNTS = ("steps", "evals", "batches", "forwards", "backwards", "updates")
"""Training steps, steps outside training, batches of all loaders, calls of all models, backwards, updates."""


def rows() -> dict[str, dict[str, Any]]:
    """What is committed, by section and name."""
    if not RESULTS.exists():
        return {}
    found: dict[str, dict[str, Any]] = json.loads(RESULTS.read_text(encoding="utf-8"))
    return found


def check_row(section: str, name: str, row: dict[str, Any]) -> None:
    """Compare a row with the committed one; with ``GOLDEN=write`` in the environment write it instead.

    A column that this row does not have is left as it is: another test has it.
    """
    if os.environ.get(WRITE) == "write":
        with RESULTS.with_suffix(".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # tests that write may run side by side
            table = rows()
            table.setdefault(section, {}).setdefault(name, {}).update(row)
            RESULTS.write_text(json.dumps(table, indent=1, sort_keys=True) + "\n", encoding="utf-8")
        return
    committed = rows().get(section, {}).get(name, {})
    merged = {**committed, **row}
    assert committed == merged, (
        f"{section}/{name} is not what docs/reference/loops.json says: run `make loops`"
    )


def shape_of(program: Any) -> tuple[str, str]:
    """How a program is named and described in the table: its own name and docstring, on one line."""
    return program.__name__.replace("_", " "), " ".join((program.__doc__ or "").split())


def counted(summary: dict[str, Any]) -> dict[str, int | None]:
    """The six values of a summary; None where a value is absent."""
    stages: dict[str, int] = {}
    for row in summary["stages"]:
        if row["count"] is not None:
            stages[row["stage"]] = stages.get(row["stage"], 0) + row["count"]
    steps = dict(summary["steps"])
    return {
        "steps": steps.pop("train", 0),
        "evals": sum(steps.values()),
        "batches": sum(summary["batches"].values()),
        "forwards": stages.get("forward"),
        "backwards": stages.get("backward"),
        "updates": summary["updates"],
    }
