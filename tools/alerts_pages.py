"""Writes docs/reference/alerts.md and docs/runbooks/README.md from the rule files in deploy/prometheus/rules."""

from __future__ import annotations

import re
import sys
import textwrap
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from tools.generated import write_or_check  # noqa: E402 - the checkout's own

RULES = ROOT / "deploy" / "prometheus" / "rules"
RUNBOOKS = ROOT / "docs" / "runbooks"
REFERENCE = ROOT / "docs" / "reference" / "alerts.md"
MARK = "<!-- Generated from deploy/prometheus/rules by `python tools/alerts_pages.py --write`. -->\n\n"
ALERT_FILES = ("alerts", "alerts-collector")
INDEX_HEAD = """\
# Runbooks

One page for each alert: what it means, what is usually behind it, what to run, when to ignore it.
`critical` needs action now, `warning` can wait for working hours, `none` is read by software only.

| alert | severity | means |
| --- | --- | --- |
"""
REFERENCE_HEAD = """\
# Rules and alerts

What the files in `deploy/prometheus/rules` hold. [How to load and change them](../howto/alerts.md).

Held (`for`): how long the condition must be true first. Kept (`keep_firing_for`): how long the alert fires after
it was last true.

Rules use, of every rank, only the metrics that every rank sends in each [export profile](export-profiles.md); all other metrics they use of rank 0 alone.

The files multiply each condition on a run by `run:train_info:last1h`, which adds the labels of `train.run.info` (name, team,
owner, job, cluster, namespace).

## Alerts
"""
RECORDING_HEAD = """
## Recording rules

A name reads `level:metric:operation`; the level names the labels that are left.
Rules over histograms are shown in the native form; the classic form records the same names.

| record | expression |
| --- | --- |"""


def groups(*names: str) -> list[dict[str, Any]]:
    """Returns the rule groups of the files ``otel-train-<name>.yml``, in their order."""
    texts = [(RULES / f"otel-train-{name}.yml").read_text(encoding="utf-8") for name in names]
    return [group for text in texts for group in yaml.safe_load(text)["groups"]]


def rules(*names: str) -> dict[str, dict[str, Any]]:
    """Returns the rules of these files by the name of their record or alert."""
    return {rule.get("record") or rule["alert"]: rule for group in groups(*names) for rule in group["rules"]}


def condition(rule: dict[str, Any]) -> str:
    """Returns the expression of an alert without the multiplication that adds the labels of the run."""
    expr: str = rule["expr"]
    first, labelled, _ = expr.partition("\n)\n* on (train_run_id) group_left (train_run_name,")
    return textwrap.dedent(first.removeprefix("(\n")) if labelled else expr.strip()


def on_one_line(expr: str) -> str:
    """Removes line breaks of an expression, and spaces inside parentheses."""
    return re.sub(r"(?<=\() | (?=\))", "", " ".join(expr.split()))


def _index() -> str:
    rows = [
        f"| [{name}]({name}.md) | {rule['labels']['severity']} | {rule['annotations']['description']} |"
        for name, rule in rules(*ALERT_FILES).items()
    ]
    return INDEX_HEAD + "\n".join([*rows, ""])


def _reference() -> str:
    lines = []
    for group in groups(*ALERT_FILES):
        lines += ["", f"### {group['name'].rpartition('.')[2].capitalize()}"]
        for rule in group["rules"]:
            held = f"{rule['labels']['severity']}, held {rule['for']}"
            held += f", kept {rule['keep_firing_for']}" if "keep_firing_for" in rule else ""
            name, description = rule["alert"], rule["annotations"]["description"]
            lines += ["", f"**[{name}](../runbooks/{name}.md)** ({held}). {description}"]
            lines += ["", "```promql", condition(rule), "```"]
    lines.append(RECORDING_HEAD)
    for name, rule in rules("histograms-native", "recording").items():
        escaped = on_one_line(rule["expr"]).replace("|", "\\|")
        lines.append(f"| `{name}` | `{escaped}` |")
    return REFERENCE_HEAD + "\n".join([*lines, ""])


if __name__ == "__main__":
    pages = {RUNBOOKS / "README.md": MARK + _index(), REFERENCE: MARK + _reference()}
    sys.exit(write_or_check(pages, says=__doc__))
