"""Writes docs/reference/loops.md from the counts that the tests have compared."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from tools.generated import write_or_check  # noqa: E402 - the checkout's own

RESULTS = ROOT / "docs" / "reference" / "loops.json"
PAGE = ROOT / "docs" / "reference" / "loops.md"
COUNTS = ("steps", "evals", "batches", "forwards", "backwards", "updates")

HEAD = """\
<!-- Generated from docs/reference/loops.json by `python tools/loops_page.py --write`. -->

# Loops

Which loops are accounted for, and what is found in each. Every row is a program in `tests/integration` that trains for
real, on synthetic data, and counts what it does by itself: in plain Python where it calls its model, its loss and its
optimizer, or, in libraries that own the loop, by `sys.setprofile`. Neither count uses otel_train. A test
compares both counts and this page, so a row that is wrong is a test that fails. `make loops` writes it. In every
summary of theirs the values agree with each other: activities add up to the run, training steps to the time of
training, data rows to the waits of the loaders, and a rate times its time is a count.

| Column | Counts, by the program itself |
| --- | --- |
| steps | training steps, as [the loop](step-boundaries.md) defines them |
| evals | steps outside training: a batch each, or a forward where there is no loader |
| batches | of all loaders |
| forwards | outermost calls of every model and, where no model is called, of its [parts](step-boundaries.md#parts-of-a-model); in all phases |
| backwards | outermost ones |
| updates | outermost ones; skipped ones are not updates |
| in code | what a session says that `instrument(...)` opened: `same`, or what differs |
| zero code | the same of `otel-train run`, where nothing in the program names us; empty: not tried in this shape |
| times | `sleeps`: the program sleeps for stated times, measures them, and every time of the summary is within 15 % of \
what it measured: activities, stages by phase and loader, waits, steps, rates; empty: only counts are compared |

Where it says `absent` the metric is not exported, `instrumentation_gaps` in [summary.json](summary.md) has a line for it with what
to do, a series of [`train.instrumentation.gaps`](metrics.md) counts it, and the log says it once. {same} of {all} programs run
in code agree in every value; the others lack what the row says. All of them end with the same weights, bit for bit,
with and without otel_train, where two runs of the program do so at all.
"""
UNSEEN = """
## Where a stage cannot be seen

| Seen | Why | What to do |
| --- | --- | --- |
| a forward per part | the loop calls parts of the model, or a method that does (`model.forward(x)`, `training_step`), or \
the class has a `__call__` that never reaches torch's | nothing; or call the model |
| no forward | the method that is called calls no [part](step-boundaries.md#parts-of-a-model) of the model: it computes with its \
parameters, or calls members of a list that is too long | `with otel_train.stage("forward_loss"):` around it |
| no forward | a compiled function calls the model: its forward is a part of that function's graph | compile the \
model instead of the function; or a stage around the function |
| no backward | a step that is compiled whole, or gradients made without autograd | a stage around the step |
| no update | an optimizer that is not `torch.optim`, or parameters changed without an optimizer | nothing: backwards are the steps; \
or `otel_train.step()` where a step ends |
| no wait for data | a helper thread reads the loader for a function of the program. A class of loaders that starts such a thread \
(MONAI's `ThreadDataLoader`) is timed | `otel_train.watch(prefetch(loader), name=...)`: the iterator that the training thread reads |
| no wait for data | the loop iterates another object than the loader that was given, or the pass began before `instrument` | \
give `instrument` what the loop iterates, before it does |
"""
MODULES = {
    "shapes": "How batches are asked for",
    "kinds": "What gives the batches",
    "ahead": "Batches that are fetched ahead",
    "epochs": "How epochs begin, end and repeat",
    "gaps": "What lies between batches, epochs and phases",
    "phases": "Training, evaluation, and both at once",
    "evaluating": "Evaluation in every manner",
    "midway": "Evaluation in the middle of a pass or a step",
    "environments": "Without a loader",
    "models": "What the model is, and how it is called",
    "compiled": "torch.compile",
    "gradients": "How gradients are asked for",
    "updates": "How the loop updates",
    "homemade": "User-defined components",
    "manual": "Marked manually",
    "threads": "Several threads",
    "faults": "What goes wrong on the way",
    "unseen": "Called past the place where calls are seen",
}
SECTIONS = {
    "processes": (
        "Several processes",
        "Counts are of one process; all of them say the same, or the row says which.",
    ),
    "frameworks": (
        "Libraries that own their loop",
        "Official examples, with synthetic data in place of the download. Counted by `sys.setprofile`.",
    ),
}
ABSENT = "absent"
ALWAYS = ("steps", "evals", "batches")
"""Counts that every run exports: a missing value is 0, not absent."""


def difference(program: dict[str, Any], seen: dict[str, Any] | None) -> str:
    """Returns ``same``, or the values that differ from the program's own; empty if they were not compared."""
    if not seen:
        return ""
    differing = [name for name in COUNTS if (seen[name] or 0) != program[name]]
    return (
        ", ".join(f"{name} {seen[name] or (0 if name in ALWAYS else ABSENT)}" for name in differing) or "same"
    )


def line(row: dict[str, Any]) -> str:
    """Returns one row of the table."""
    text = f"**{row['shape']}**. {row['description']}".replace("|", "\\|").replace("``", "`")
    counts = [str(row["program"][name] or "") for name in COUNTS]
    cells = [
        text,
        *counts,
        difference(row["program"], row.get("in_code")),
        ": ".join(filter(None, (difference(row["program"], row.get("zero_code")), row.get("why")))),
        "sleeps" if row.get("timed") else "",
    ]
    return f"| {' | '.join(cells)} |\n"


def table(rows: list[dict[str, Any]]) -> str:
    """Returns the rows as a Markdown table."""
    heads = ("Shape", *COUNTS, "in code", "zero code", "times")
    return f"\n| {' | '.join(heads)} |\n| {' | '.join(['---'] * len(heads))} |\n" + "".join(map(line, rows))


def page() -> str:
    """Returns the text of the page."""
    results = json.loads(RESULTS.read_text(encoding="utf-8"))
    every = [row for rows in results.values() for row in rows.values()]
    same = sum(difference(row["program"], row.get("in_code")) == "same" for row in every)
    text = HEAD.format(same=same, all=len(every)) + UNSEEN
    for module, title in MODULES.items():
        rows = [row for row in results["loops"].values() if row["module"] == module]
        text += f"\n## {title}\n" + table(rows) if rows else ""
    for section, (title, words) in SECTIONS.items():
        if section in results:
            text += f"\n## {title}\n\n{words}\n" + table(list(results[section].values()))
    return text


if __name__ == "__main__":
    sys.exit(write_or_check({PAGE: page()}, says=__doc__))
