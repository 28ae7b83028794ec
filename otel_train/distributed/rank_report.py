"""The bounded record that each rank publishes to the other ranks."""

from __future__ import annotations

import json
import math
from collections import Counter, defaultdict
from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from otel_train.accounting.types import TRAIN, Activity
from otel_train.aggregation.run_state import RunState, StepPosition
from otel_train.catalog import PHASES, RANK_EVENT, SAMPLES, STAGES, TOKENS
from otel_train.datamodel import NS_PER_S

if TYPE_CHECKING:
    Counted = Mapping[tuple[str, str, str], int]

MOST_CHARS: Final = 1536
"""Longest encoded report; the usual length is a third of it."""

VERSION: Final = 4
"""Reports of another version are ignored."""

NAMED: Final = "named"
"""Key of the time in all user-defined stages together, among the names of built-in stages."""

ON_DEVICE: Final = ("h2d", "forward", "backward")
"""Stages whose device time the ranks compare."""

MOST_COUNTED: Final = 6
"""Number of counts, by loader and phase, that keep the name of their loader, in the order of ``counted``; the rest is added up."""

COUNTED: Final = (SAMPLES.name, TOKENS.name)
"""Metrics counted per rank and published by rank 0 when it exports for all."""

_NAME_CHARS = 40


class RankReport(NamedTuple):
    """State of one rank. Totals count from the start of its session.

    Attributes:
        sequence: increases with every report.
        step: number of the current step.
        stage: innermost open stage; ``other`` if there is none.
        loader: the loader it waits for, or "".
        after, within, backwards: see ``StepPosition``.
        quiet_s: seconds without progress.
        stalled: ``quiet_s`` exceeds its threshold.
        over: whether its training loops have ended, so that silence is expected.
        doing: one of ``catalog.RUN_STATES``.
        away_s: seconds spent in evaluation and checkpoints.
        barrier: stage in which its model waits for the other ranks; "" if unknown.
        every: steps between two baseline traces; 0 while undecided.
        stages: seconds of training by stage.
        events: counts by ``train.rank.event``.
        patience_s: seconds without progress that count as a stall; on rank 0 the largest of any rank.
        counted: samples and tokens by metric, loader and phase, on a rank that counts them.
        device: seconds of training on the device, by the stages in ``ON_DEVICE``; empty if no device is measured.
        slow: on rank 0 the fields of the ``Straggler`` that it found; empty if there is none.
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
    doing: str = "stalled"
    away_s: float = 0.0
    barrier: str = ""
    every: int = 0
    stages: Mapping[str, float] = MappingProxyType({})
    events: Mapping[str, int] = MappingProxyType({})
    patience_s: float = 0.0
    counted: Counted = MappingProxyType({})
    within: str = ""
    backwards: int = 0
    device: Mapping[str, float] = MappingProxyType({})
    slow: tuple[Any, ...] = ()


def rank_report(
    run: RunState, *, rank: int, host: str, barrier: str, events: Mapping[str, int], counted: Counted
) -> RankReport:
    """Returns the report of this process, with ``sequence`` 0."""
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
        quiet_s=run.stalls.quiet_ns / NS_PER_S,
        stalled=bool(run.stalls.since_ns),
        over=leading is not None and leading.idle,
        doing=run.state(),
        away_s=float(away_ns) / NS_PER_S,
        barrier=barrier,
        every=run.sampler.every,
        stages=_train_s(run),
        events=events,
        patience_s=run.stalls.patience_ns / NS_PER_S,
        counted=counted,
        within=place.within,
        backwards=place.backwards,
        device=_device_s(run),
    )


def encode(report: RankReport) -> str:
    """Returns the report as at most ``MOST_CHARS`` ASCII characters."""
    words = [
        VERSION,
        report.rank,
        *map(_short, (report.host, report.stage, report.loader, report.after, report.within, report.doing, report.barrier)),
        report.sequence, report.steps, report.step, int(report.stalled), int(report.over), report.every,
        round(report.quiet_s, 3), round(report.away_s, 6),
        [round(report.stages.get(stage, 0.0), 6) for stage in (*STAGES, NAMED)],
        [report.events.get(event, 0) for event in RANK_EVENT.values],
        round(report.patience_s, 3), _packed(report.counted), report.backwards,
        [round(seconds, 6) for seconds in report.device.values()],
        [_short(each) if isinstance(each, str) else each for each in report.slow],
    ]  # fmt: skip
    return json.dumps(words, separators=(",", ":"))


def decode(text: str) -> RankReport:
    """Parses the result of ``encode``.

    Raises:
        ValueError: the text is not a report of this version.
    """
    if len(text) > MOST_CHARS:
        raise ValueError(f"{len(text)} characters: a record has at most {MOST_CHARS}")
    try:
        version, rank, host, stage, loader, after, within, doing, barrier, *rest = json.loads(text)
        sequence, steps, step, stalled, over, every, quiet_s, away_s, stages, events, *more = rest
        patience_s, packed, backwards, device, slow = more
        if version != VERSION:
            raise ValueError(f"version {version}: expected {VERSION}")
        numbers = dict(zip((*STAGES, NAMED), map(float, stages), strict=True))
        on_device = dict(zip(ON_DEVICE, map(float, device), strict=True)) if device else {}
        counts = dict(zip(RANK_EVENT.values, map(int, events), strict=True))
        times = *numbers.values(), *on_device.values(), *map(float, (quiet_s, away_s, patience_s))
        if not all(map(math.isfinite, times)):
            raise ValueError("a time is no number")
        return RankReport(
            int(rank), str(host), int(sequence), int(steps), int(step), str(stage), str(loader), str(after),
            float(quiet_s), bool(stalled), bool(over), str(doing), float(away_s), str(barrier), int(every),
            numbers, counts, float(patience_s), _unpacked(packed), str(within), int(backwards), on_device,
            _slow(*slow) if slow else ()
        )  # fmt: skip
    except (TypeError, OverflowError, RecursionError) as error:
        raise ValueError(f"no record of a rank: {error}") from error


def _short(name: str) -> str:
    return name.encode("ascii", "replace")[:_NAME_CHARS].decode()


def _packed(counted: Counted) -> list[list[object]]:
    """Returns the counts as rows, the first with the name of their loader; the rest is added up by metric and phase."""
    small: Counter[tuple[str, str, str]] = Counter()
    for place, (metric, loader, phase) in enumerate(counted):
        small[metric, _short(loader) if place < MOST_COUNTED else "", phase] += counted[metric, loader, phase]
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


def _slow(rank: Any, host: Any, stage: Any, *numbers: Any) -> tuple[Any, ...]:  # Any: from another process
    excess_s, step_s, waits_s, windows, ranks = map(float, numbers)
    if not (all(map(math.isfinite, (excess_s, waits_s, windows, ranks))) and 0.0 < step_s < math.inf):
        raise ValueError("a time of the slow rank is no number")
    return int(rank), str(host), str(stage), excess_s, step_s, waits_s, int(windows), int(ranks)


def _train_s(run: RunState) -> dict[str, float]:
    """Returns the seconds of phase train by built-in stage; user-defined stages together."""
    spent: defaultdict[str, float] = defaultdict(float)
    totals = run.totals
    for key, self_ns in zip(totals.names.keys, totals.self_ns.tolist(), strict=False):
        if key.phase == PHASES[TRAIN]:
            spent[key.stage if key.stage in STAGES else NAMED] += self_ns / NS_PER_S
    return spent


def _device_s(run: RunState) -> dict[str, float]:
    """Returns the seconds of phase train on the device, extrapolated from the calls that were measured."""
    totals = run.totals
    spent: dict[str, float] = {}
    for series, key in enumerate(totals.names.keys[: len(totals.device)]):
        measured = totals.device.count(series)
        if measured and key.phase == PHASES[TRAIN] and key.stage in ON_DEVICE:
            seconds = totals.device.sum_s(series) * totals.stages.count(series) / measured
            spent[key.stage] = spent.get(key.stage, 0.0) + seconds
    return {stage: spent.get(stage, 0.0) for stage in ON_DEVICE} if spent else {}
