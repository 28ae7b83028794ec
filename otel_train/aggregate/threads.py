"""What a run remembers of each of its threads."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from otel_train.aggregate.words import COMPUTING, KIND_DATA
from otel_train.catalog import STAGES
from otel_train.codes import OP_MASK, SOURCE_MASK, SOURCE_SHIFT, Op, SourceKind

if TYPE_CHECKING:
    from collections.abc import Sequence

    from otel_train.aggregate.account import ThreadAccount
    from otel_train.aggregate.pairing import Pairing
    from otel_train.aggregate.steps import Occurrences
    from otel_train.codes import Source

_LAST_OF_A_LOOP = (Op.STOP, Op.EPOCH_END)


class OpenStage(NamedTuple):
    """A stage that has begun and not ended, as of the last look."""

    stage: str
    source: str
    begun_ns: int


class Standing(NamedTuple):
    """Where in its step a thread is, as of the last look.

    Attributes:
        stage: the innermost open one, or ``other``.
        loader: the loader it waits for, or "".
        after: built-in stage that ended last, or "".
    """

    stage: str = "other"
    loader: str = ""
    after: str = ""


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
    last_code: int = 0
    open_step: list[Occurrences] = field(default_factory=list)
    """Stages of the step that is open, should it be worth a trace."""
    next_number: int = 0

    def learn(self, kinds: np.ndarray) -> None:
        """What it does, from the kinds of sources, int[n], in a slice of its edges."""
        self.computes = self.computes or bool(COMPUTING[kinds].any())
        self.asks = self.asks or bool(np.any(kinds == KIND_DATA))

    @property
    def idle(self) -> bool:
        """Its loops have ended: silence means nothing."""
        return self.over or (self.last_code & OP_MASK in _LAST_OF_A_LOOP and not self.pairing.open)

    def standing(self, sources: Sequence[Source]) -> Standing:
        """Where it is; ``sources`` are all that are known."""
        last = sources[(self.last_code >> SOURCE_SHIFT) & SOURCE_MASK].stage if sources else ""
        after = last if last in STAGES and self.last_code & OP_MASK >= Op.END else ""
        if not self.pairing.open:
            return Standing(after=after)
        innermost = sources[(self.pairing.open[-1].code >> SOURCE_SHIFT) & SOURCE_MASK]
        loader = innermost.name if innermost.kind is SourceKind.DATA else ""
        return Standing(innermost.stage, loader, after)
