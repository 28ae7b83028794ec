"""One line on how training goes, every ``log_every_steps`` steps."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from otel_train.exporters import text_layout
from otel_train.exporters.text_layout import percent, rate

if TYPE_CHECKING:
    from collections.abc import Mapping

    from otel_train.exporters.text_layout import Page


class _Counted(NamedTuple):
    """What a summary has counted up to a line."""

    steps: int = 0
    samples: int = 0
    data_wait_s: float = 0.0
    wall_s: float = 0.0


class Progress:
    """Makes the lines. Rates and the share of waiting are since the line before, the verdict is the run's so far."""

    def __init__(self) -> None:
        self._before = _Counted()

    def line(self, page: Page, summary: Mapping[str, Any], step: int) -> str:
        """The next line.

        Args:
            page: what it is laid out for.
            summary: what ``summary.json`` would hold now.
            step: number of the step that training is at.
        """
        loaders = {
            row["loader"] for row in summary["stages"] if row["stage"] == "data" and row["phase"] == "train"
        }
        now = _Counted(
            summary["steps"].get("train", 0),
            sum(number for loader, number in summary["samples"].items() if loader in loaders),
            summary["activities"].get("data_wait", 0.0),
            summary["wall_seconds"],
        )
        before, self._before = self._before, now
        wall_s, samples = now.wall_s - before.wall_s, now.samples - before.samples
        facts = [
            f"step {text_layout.count(step)}",
            f"{text_layout.figure(rate(now.steps - before.steps, wall_s))} steps/s",
        ]
        if samples:
            facts.append(f"{text_layout.figure(rate(samples, wall_s))} samples/s")
        if loaders:
            facts.append(f"{percent(rate(now.data_wait_s - before.data_wait_s, wall_s))} waiting for data")
        leading: Mapping[str, Any] = next(iter(summary["verdicts"]), {})
        if leading:
            facts.append(f"verdict: {page.safe(leading['name'])}")
        return page.finish([f"otel_train: {' · '.join(facts)}"])
