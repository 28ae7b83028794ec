"""What a rank tells the other ranks of itself: a record of bounded size."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Final, NamedTuple

from otel_train.accounting.types import PHASES, TRAIN, Activity
from otel_train.aggregate.run import StepPosition
from otel_train.catalog import RANK_EVENT, STAGES

if TYPE_CHECKING:
    from collections.abc import Mapping

    from otel_train.aggregate.run import RunAccount

MOST_CHARS: Final = 1024
"""A record is never longer; usually it is a third of it."""

VERSION: Final = 1
"""Ranks of another version are not understood, and left out."""

NAMED: Final = "named"
"""Time in stages of the user's own, all together."""

_NAME_CHARS = 40
_NS_PER_S = 1e9


class Digest(NamedTuple):
    """What one rank says of itself. Totals count from the start of its session.

    Attributes:
        rank: who.
        host: where.
        sequence: rises with every record: one that stands still comes from a process that does.
        steps: training steps counted.
        step: number of the step that is running.
        stage: innermost stage open at the last look; ``other`` if none is.
        loader: the loader it waits for, or "".
        after: built-in stage that ended last, or "".
        quiet_s: seconds without progress.
        stalled: that is longer than its own threshold.
        over: its loops have ended, so its silence means nothing.
        doing: one of ``catalog.RUN_STATES``.
        away_s: seconds spent in evaluation and checkpoints.
        barrier: stage in which its model waits for the other ranks, or "" if that is not known.
        every: it keeps every so many steps as a baseline; 0 if that is undecided.
        stages: seconds of training by stage.
        events: counts by ``train.rank.event``.
    """

    rank: int
    host: str
    sequence: int
    steps: int
    step: int
    stage: str
    loader: str
    after: str
    quiet_s: float
    stalled: bool
    over: bool
    doing: str
    away_s: float
    barrier: str
    every: int
    stages: Mapping[str, float]
    events: Mapping[str, int]


def digest_of(run: RunAccount, *, rank: int, host: str, barrier: str, events: Mapping[str, int]) -> Digest:
    """The record of this process, from its account. ``sequence`` is left at 0."""
    leading, totals = run.leading, run.totals
    place = leading.position(run.names.sources) if leading else StepPosition()
    away_ns = totals.activity_ns[Activity.EVAL] + totals.activity_ns[Activity.CHECKPOINT]
    return Digest(
        rank=rank,
        host=host,
        sequence=0,
        steps=totals.steps_by_phase().get(PHASES[TRAIN], 0),
        step=run.step_number,
        stage=place.stage,
        loader=place.loader,
        after=place.after,
        quiet_s=run.stalls.quiet_ns / _NS_PER_S,
        stalled=bool(run.stalls.since_ns),
        over=leading is not None and leading.idle,
        doing=run.state(),
        away_s=float(away_ns) / _NS_PER_S,
        barrier=barrier,
        every=run.keeper.every,
        stages=_train_s(run),
        events=events,
    )


def encode(digest: Digest) -> str:
    """As text of at most ``MOST_CHARS`` ASCII characters."""
    names = (digest.host, digest.stage, digest.loader, digest.after, digest.doing, digest.barrier)
    words = [
        VERSION,
        digest.rank,
        *(name.encode("ascii", "replace")[:_NAME_CHARS].decode() for name in names),
        digest.sequence, digest.steps, digest.step, int(digest.stalled), int(digest.over), digest.every,
        round(digest.quiet_s, 3), round(digest.away_s, 6),
        [round(digest.stages.get(stage, 0.0), 6) for stage in (*STAGES, NAMED)],
        [digest.events.get(event, 0) for event in RANK_EVENT.values],
    ]  # fmt: skip
    return json.dumps(words, separators=(",", ":"))


def decode(text: str) -> Digest:
    """What ``encode`` wrote.

    Raises:
        ValueError: it is something else.
    """
    if len(text) > MOST_CHARS:
        raise ValueError(f"{len(text)} characters: a record has at most {MOST_CHARS}")
    try:
        version, rank, host, stage, loader, after, doing, barrier, *rest = json.loads(text)
        sequence, steps, step, stalled, over, every, quiet_s, away_s, stages, events = rest
        if version != VERSION:
            raise ValueError(f"version {version}: expected {VERSION}")
        numbers = dict(zip((*STAGES, NAMED), map(float, stages), strict=True))
        counts = dict(zip(RANK_EVENT.values, map(int, events), strict=True))
        return Digest(
            int(rank), str(host), int(sequence), int(steps), int(step), str(stage), str(loader), str(after),
            float(quiet_s), bool(stalled), bool(over), str(doing), float(away_s), str(barrier), int(every),
            numbers, counts,
        )  # fmt: skip
    except (TypeError, OverflowError, RecursionError) as error:
        raise ValueError(f"no record of a rank: {error}") from error


def _train_s(run: RunAccount) -> dict[str, float]:
    """Seconds of phase train by built-in stage; the user's own stages together."""
    spent: dict[str, float] = {}
    totals = run.totals
    for key, self_ns in zip(totals.names.keys, totals.self_ns.tolist(), strict=False):
        if key.phase == PHASES[TRAIN]:
            stage = key.stage if key.stage in STAGES else NAMED
            spent[stage] = spent.get(stage, 0.0) + self_ns / _NS_PER_S
    return spent
