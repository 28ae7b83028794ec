"""What the figures of a trace mean: findings, the weightiest first."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from otel_train.analyze.rules import RULES, TraceFinding, found

if TYPE_CHECKING:
    from collections.abc import Mapping

WAITING_SHARE, BLAMED_SHARE = 0.05, 0.5
"""Share of the steps that ranks wait on average, and share of it due to one of them, from which that one is named."""


def findings(document: Mapping[str, Any]) -> list[TraceFinding]:
    """Findings about one trace.

    Args:
        document: the analysis, as ``summarize`` makes it.

    Returns:
        At least one. Where no rule applies it is ``no_finding``, which says what was looked at.
    """
    if not document["events"]:
        claim = "Nothing can be said: the trace has no events."
        return [found(document, "nothing_recorded", claim, share=0.0, evidence={}, severity="info",
                      advice=" ".join(document["missing"]), confidence="high")]  # fmt: skip
    applying = [finding for rule in RULES if (finding := rule(document)) is not None]
    return sorted(applying, key=lambda finding: -finding.share) or [_nothing(document)]


def rank_finding(document: Mapping[str, Any], waiting: Mapping[str, Any]) -> TraceFinding | None:
    """The rank that the others wait for, if there is one.

    Args:
        document: the analysis of one rank, for the length of the steps.
        waiting: what ``ranks.waits`` says of all.
    """
    rows = waiting["ranks"]
    waited_s = sum(row["waited_seconds"] for row in rows)
    whole_s = document["breakdown"]["seconds"] * len(rows)
    worst = max(rows, key=lambda row: float(row["caused_seconds"]))
    share = waited_s / whole_s if whole_s else 0.0
    if share < WAITING_SHARE or worst["caused_seconds"] < BLAMED_SHARE * waited_s:
        return None
    part = worst["caused_seconds"] / waited_s
    return found(
        document,
        "straggler",
        f"The ranks wait for each other {share:.0%} of the time, and {part:.0%} of that for rank {worst['rank']}.",
        share=share * part,
        evidence={"waiting_share": share, "rank": worst["rank"], "caused_seconds": worst["caused_seconds"]},
        advice=f"Compare rank {worst['rank']} with another: `otel-train compare`. Uneven batches, a slow data path, "
        "a throttled device and work that only one rank does are the usual causes.",
        confidence="high" if waiting["unmatched"] == 0 else "medium",
    )


def _nothing(document: Mapping[str, Any]) -> TraceFinding:
    data, idle = document["breakdown"]["data_share"], document["idle"]
    looked = [
        None if data is None else f"data loading takes {data:.1%} of the time, which is fine",
        None if not idle else f"the device is idle {idle['share']:.0%} of it",
    ]
    said = (
        "; ".join(part for part in looked if part) or "there is no range that says what the time is spent on"
    )
    return found(
        document,
        "no_finding",
        f"No rule applies: {said}.",
        share=0.0,
        evidence={} if data is None else {"data_share": data},
        advice="Look at the operators and kernels that take most of the time.",
        confidence="medium" if document["breakdown"]["steps"] else "low",
        severity="ok",
    )
