"""All ranks of a run side by side, and whom they were waiting for."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from otel_train.exporters import text_layout
from otel_train.exporters.text_layout import INDENT, Page, known, pad, right

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from otel_train.distributed.hang import HangSuspect

    Report = Mapping[str, Any]  # what otel_train.aggregation.postmortem.read returns

_RANK, _STATE, _STEP, _STAGE = 6, 13, 9, 24


def render(page: Page, reports: Sequence[Report], suspects: Sequence[HangSuspect]) -> str:
    """One line per rank, the suspects marked, and a sentence on them."""
    title = page.safe(reports[0].get("run_id") or text_layout.ABSENT)
    named = {suspect.rank for suspect in suspects}
    lines = [
        page.rule([("otel_train postmortem", "bold"), (title, "cyan")], (f"{len(reports)} ranks", "")),
        *(INDENT + page.paint(line, "bold") for line in page.prose(sentence(suspects), indent=len(INDENT))),
        "",
        INDENT
        + page.paint(
            right("rank", _RANK)
            + "  "
            + pad("", _STATE)
            + right("step", _STEP)
            + "  "
            + pad("stage", _STAGE)
            + "loader",
            "dim",
        ),
    ]
    for report in reports:
        inside = (report.get("open") or [{}])[-1]
        text = (
            right(str(known(report.get("rank"))), _RANK)
            + "  "
            + pad(_state(report), _STATE)
            + right(str(known(report.get("step"))), _STEP)
            + "  "
            + pad(page.safe(inside.get("stage") or "between stages")[:_STAGE], _STAGE)
            + page.safe(inside.get("loader") or "")
        )
        lines.append(INDENT + page.paint(text.rstrip(), "red" if report.get("rank") in named else ""))
    return page.finish([*lines, ""])


def sentence(suspects: Sequence[HangSuspect]) -> str:
    """Who it was, or that it cannot be told."""
    if not suspects:
        return "Nothing tells one rank from the others: look at what they were all doing."
    first = suspects[0]
    where = (
        f"in stage {first.stage}"
        + (f" of loader {first.loader}" if first.loader else "")
        + f", step {first.step}"
    )
    if len(suspects) > 1:
        ranks = ", ".join(str(suspect.rank) for suspect in suspects)
        verb = "vanished first" if first.silent else "held the run up"
        return f"Ranks {ranks} {verb}; rank {first.rank} {where}."
    if first.silent:
        return (
            f"Rank {first.rank} vanished, {where}: killed, out of memory, or its node is gone. The other ranks "
            "outlived it."
        )
    return f"Rank {first.rank} held the run up, {where}: the other ranks were further, and waited."


def _state(report: Report) -> str:
    state = report.get("state")
    if state not in (None, "running"):
        return str(state)
    alive = report.get("alive")
    return "alive" if alive else "gone" if alive is False else "unknown"
