"""What a run remembers of each of its threads."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from otel_train.aggregate.account import ThreadAccount
    from otel_train.aggregate.pairing import Pairing
    from otel_train.aggregate.steps import Occurrences


class OpenStage(NamedTuple):
    """A stage that has begun and not ended, as of the last look."""

    stage: str
    source: str
    begun_ns: int


@dataclass(slots=True)
class Thread:
    """One thread that writes edges."""

    name: str
    main: bool
    """It is the one that called ``instrument``."""
    pairing: Pairing
    account: ThreadAccount
    label: str = ""
    """Tells its traces from those of the leading thread."""
    follows: Thread | None = None
    """The leading thread that was over when this one began: its time begins where that one's ended."""
    computes: bool = False
    """It runs models, not only a loader."""
    asks: bool = False
    """It gets batches from a loader itself."""
    key: int = 0
    """Which thread."""
    over: bool = False
    last_ns: int = 0
    last_op: int = 0
    open_step: list[Occurrences] = field(default_factory=list)
    """Stages of the step that is open, should it be worth a trace."""
    next_number: int = 0
