"""Writes the table of findings in docs/howto/fix-a-bottleneck.md from the rules that give them."""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from otel_train.bottleneck.rules import (  # noqa: E402 - the checkout's own
    CAUSE_RULES,
    LEADING_RULES,
    LIMIT_RULES,
    SIDE_RULES,
    Rule,
)
from tools.generated import write_or_check  # noqa: E402 - as above

PAGE = ROOT / "docs" / "howto" / "fix-a-bottleneck.md"
BEGIN = "<!-- Generated from otel_train/bottleneck/rules.py by `python tools/findings_page.py --write`. -->"
END = "<!-- End of the generated table. -->"


def table() -> str:
    """Returns the rules as Markdown: a table of names, conditions and remedies, then the names of the evidence."""
    groups = (
        ("Main findings, the costliest first", LEADING_RULES),
        ("Main finding if none of those applies, in this order", LIMIT_RULES),
        ("Additional findings, in this order", SIDE_RULES),
        ("What makes stages longer, after all of them", CAUSE_RULES),
    )
    rows = ["| Finding | Condition | Remedy |", "| --- | --- | --- |"]
    for heading, rules in groups:
        rows += [f"| **{heading}** | | |", *map(_row, rules)]
    evidence = [_evidence(rule) for _, rules in groups for rule in rules]
    return "\n".join([*rows, "", "Evidence that a finding has:", "", *evidence])


def _row(rule: Rule) -> str:
    return f"| `{rule.name}` | {rule.when} | {rule.fix} |"


def _evidence(rule: Rule) -> str:
    names = ", ".join(name if "`" in name else f"`{name}`" for name in rule.evidence)
    return f"- **{rule.name}**: {names}"


def page() -> str:
    """Returns the page with a fresh table."""
    before, rest = PAGE.read_text(encoding="utf-8").split(BEGIN, 1)
    return f"{before}{BEGIN}\n\n{table()}\n\n{END}{rest.split(END, 1)[1]}"


if __name__ == "__main__":
    sys.exit(write_or_check({PAGE: page()}, says=__doc__))
