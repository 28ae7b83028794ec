"""What a rank tells the other ranks of itself: a record of bounded size."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from otel_train.accounting.types import PHASES, TRAIN, Activity
from otel_train.aggregation.run_state import StepPosition
from otel_train.catalog import RANK_EVENT, SAMPLES, STAGES, TOKENS

if TYPE_CHECKING:
    from collections.abc import Mapping

    from otel_train.aggregation.run_state import RunState

    Counted = Mapping[tuple[str, str, str], int]

MOST_CHARS: Final = 1536
"""A record is never longer; usually it is a third of it."""

VERSION: Final = 2
"""Ranks of another version are not understood, and left out."""

NAMED: Final = "named"
"""Time in stages of the user's own, all together."""

MOST_COUNTED: Final = 6
"""Counts of samples and tokens, by loader and phase, that a record has room for; the smallest are added up."""

COUNTED: Final = (SAMPLES.name, TOKENS.name)
"""Metrics that are counted per rank, and published by rank 0 where it speaks for all."""

_NAME_CHARS = 40
_NS_PER_S = 1e9


class RankReport(NamedTuple):
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
        patience_s: seconds without progress that are a stall, in what it is doing; on rank 0 the most of any rank.
        counted: samples and tokens by metric, loader and phase, of a rank that counts them.
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
    patience_s: float = 0.0
    counted: Counted = {}  # noqa: RUF012 - a default of a named tuple, never changed


def rank_report(
    run: RunState, *, rank: int, host: str, barrier: str, events: Mapping[str, int], counted: Counted
) -> RankReport:
    """The record of this process, from its account. ``sequence`` is left at 0."""
    leading, totals = run.leading, run.totals
    place = leading.position(run.names.sources) if leading else StepPosition()
    away_ns = totals.activity_ns[Activity.EVAL] + totals.activity_ns[Activity.CHECKPOINT]
    return RankReport(
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
        every=run.sampler.every,
        stages=_train_s(run),
        events=events,
        patience_s=run.stalls.patience_ns / _NS_PER_S,
        counted=counted,
    )


def encode(digest: RankReport) -> str:
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
        round(digest.patience_s, 3), _packed(digest.counted),
    ]  # fmt: skip
    return json.dumps(words, separators=(",", ":"))


def decode(text: str) -> RankReport:
    """What ``encode`` wrote.

    Raises:
        ValueError: it is something else.
    """
    if len(text) > MOST_CHARS:
        raise ValueError(f"{len(text)} characters: a record has at most {MOST_CHARS}")
    try:
        version, rank, host, stage, loader, after, doing, barrier, *rest = json.loads(text)
        sequence, steps, step, stalled, over, every, quiet_s, away_s, stages, events, *more = rest
        patience_s, packed = more
        if version != VERSION:
            raise ValueError(f"version {version}: expected {VERSION}")
        numbers = dict(zip((*STAGES, NAMED), map(float, stages), strict=True))
        counts = dict(zip(RANK_EVENT.values, map(int, events), strict=True))
        return RankReport(
            int(rank), str(host), int(sequence), int(steps), int(step), str(stage), str(loader), str(after),
            float(quiet_s), bool(stalled), bool(over), str(doing), float(away_s), str(barrier), int(every),
            numbers, counts, float(patience_s), _unpacked(packed),
        )  # fmt: skip
    except (TypeError, OverflowError, RecursionError) as error:
        raise ValueError(f"no record of a rank: {error}") from error


def _packed(counted: Counted) -> list[list[object]]:
    """The largest counts by their names, the rest of each metric and phase without a loader."""
    largest = sorted(counted, key=lambda key: -counted[key])
    small: dict[tuple[str, str, str], int] = {}
    for place, (metric, loader, phase) in enumerate(largest):
        name = loader.encode("ascii", "replace")[:_NAME_CHARS].decode() if place < MOST_COUNTED else ""
        key = (metric, name, phase)
        small[key] = small.get(key, 0) + counted[metric, loader, phase]
    return [
        [COUNTED.index(metric), loader, PHASES.index(phase), number]
        for (metric, loader, phase), number in small.items()
    ]


def _unpacked(packed: Any) -> dict[tuple[str, str, str], int]:  # Any: from another process
    found = {}
    for metric, loader, phase, number in packed:
        if not (0 <= metric < len(COUNTED) and 0 <= phase < len(PHASES)):
            raise ValueError(f"count {metric}, {phase}: no such metric or phase")
        found[COUNTED[metric], str(loader), PHASES[phase]] = int(number)
    return found


def _train_s(run: RunState) -> dict[str, float]:
    """Seconds of phase train by built-in stage; the user's own stages together."""
    spent: dict[str, float] = {}
    totals = run.totals
    for key, self_ns in zip(totals.names.keys, totals.self_ns.tolist(), strict=False):
        if key.phase == PHASES[TRAIN]:
            stage = key.stage if key.stage in STAGES else NAMED
            spent[stage] = spent.get(stage, 0.0) + self_ns / _NS_PER_S
    return spent
