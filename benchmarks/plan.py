"""Options of an invocation, and the description of a benchmark."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from benchmarks.row import Row


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What one invocation of the benchmark does.

    Attributes:
        folder: a temporary folder for run directories.
        quick: few repetitions: to see that it works, not to quote.
        device: ``cpu`` or ``cuda``.
    """

    folder: Path
    quick: bool = False
    device: str = "cpu"

    def times(self, full: int, quick: int) -> int:
        """Returns the number of repetitions."""
        return quick if self.quick else full


class Bench(NamedTuple):
    """A benchmark.

    Attributes:
        name: for ``--only``.
        what: how it is measured, one or two sentences.
        run: measures it.
    """

    name: str
    what: str
    run: Callable[[Plan], list[Row]]


def say(text: str) -> None:
    """Prints progress to standard error."""
    print(text, file=sys.stderr, flush=True)
