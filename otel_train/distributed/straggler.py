"""Finds the rank that the others wait for, by comparing the ranks' own work over several windows of steps."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import takewhile
from typing import Final, NamedTuple

import numpy as np

from otel_train.bottleneck.dataloader import CRITICAL_SHARE, WARNING_SHARE
from otel_train.datamodel import Finding
from otel_train.distributed.rank_report import NAMED, ON_DEVICE, RankReport
from otel_train.recording.events import STAGES

WARM_UP_STEPS: Final = 5
"""First steps of a rank, ignored because they allocate, tune and compile."""

WINDOW_STEPS: Final = 8
"""Steps that every rank must make before a window closes. A mean over fewer is noise."""

LONG_WINDOW_STEPS: Final = 10 * WINDOW_STEPS
"""The same for jobs whose steps vary so much that short windows name a different rank each time, or find unequal steps."""

WORTH_RATIO: Final = 0.05
"""Share of the step that a rank must cost the others to be a candidate for straggler."""

SYNCHRONOUS_RATIO: Final = 0.10
"""Largest difference, as a share of a step, between step durations of ranks that wait for each other."""

AWAY_RATIO: Final = 0.05
"""Share of a window spent in evaluation or checkpoints above which a window with unequal steps is ignored."""

BY_LUCK: Final = 0.001
"""Largest probability at which chance may pick the same rank in so many consecutive windows that it is named. It is small
because a run has thousands of windows, and a streak may end in each of them."""

LEAST_WINDOWS: Final = 3

MEAN_WINDOWS: Final = 64
"""Most windows over which the excess of a rank is averaged, unless more are needed to exclude chance."""

STEADY: Final = {3: 70.7, 4: 22.2, 5: 13.0, 6: 9.68, 7: 8.02, 8: 7.06, 9: 6.44, 10: 6.01}
"""By number of consecutive windows: a rank whose mean excess is at least this many standard errors is named, before the number of
windows alone excludes chance. Student's t, one-sided at 0.01 %: a tenth of ``BY_LUCK``, because it is tested in each window."""

MOST_TOP: Final = 3
"""Ranks with the largest excess in a window, which are published by rank number."""

MOST_SHOWN: Final = 4 * MOST_TOP
"""Most ranks published at once: those of former windows stay while they satisfy the condition, like all ranks of a slow node."""

LOCAL: Final = tuple(stage.name for stage in STAGES if stage.is_local)
"""Stages before the point at which ranks wait for each other, if gradients are exchanged in or after backward."""

LOCAL_OF: Final = {"backward": (*LOCAL, NAMED, "other"), "forward": LOCAL[: LOCAL.index("forward")]}
"""Stages without waiting, by the stage in which the model waits for the other ranks. A sharded model gathers its
weights in forward. If that stage is unknown (the loop reduces manually, or the wrapped module was given),
``other`` may contain waiting and is left out."""

ON_DEVICE_OF: Final = {"backward": ("backward",), "forward": ("forward", "backward")}
"""Stages in which a device waits for other ranks, by the same key. The host launches device work and waits for it anywhere: in a
blocking copy, in ``.item()``, at a full queue. So if device time is measured, host time counts for ``data`` alone."""

ADVICE: Final = {
    "data": "Look at what rank {rank} reads: its share of the data, its storage, the CPU left for its workers.",
    "h2d": "Look at how rank {rank} copies: pinned memory, its place in the PCIe tree, another process there.",
    "forward": "Look at the device of rank {rank}: clocks, temperature, ECC errors, another process on it.",
    "other": "Look for code that rank {rank} alone runs between the stages: logging, .item(), saving, printing.",
    NAMED: "Look at the user-defined stages on rank {rank}: they take longer than on the other ranks.",
}


class Spread(NamedTuple):
    """Mean stage time per step over the ranks, in seconds; ``rank`` is the slowest."""

    least: float
    median: float
    p95: float
    most: float
    rank: int


class Excess(NamedTuple):
    """Own work of a rank relative to the others: (own - median of the others) / median; and the stage with the largest excess."""

    rank: int
    host: str
    stage: str
    ratio: float


class Straggler(NamedTuple):
    """A rank that the others wait for.

    Attributes:
        stage: the stage with the largest excess.
        excess_s: seconds per step that it takes longer than the median rank.
        step_s: seconds that a step takes.
        waits_s: seconds per step that the others spend waiting for it.
        windows: consecutive windows in which it was this rank.
        ranks: how many ranks of the host took turns as the slowest; ``rank`` was it most often.
    """

    rank: int
    host: str
    stage: str
    excess_s: float
    step_s: float
    waits_s: float
    windows: int
    ranks: int = 1

    @property
    def ratio(self) -> float:
        """Share of the step that it costs."""
        return self.excess_s / self.step_s


class Window(NamedTuple):
    """Result of one window: the spread by stage, the ranks with the largest excess, the rank that the others wait for.

    ``together``: all steps were equally long, so that the window can tell which rank the others wait for.
    """

    spread: dict[str, Spread]
    top: tuple[Excess, ...]
    candidate: Straggler | None
    together: bool


def windows_needed(ranks: float) -> int:
    """Returns the consecutive windows after which one of ``ranks`` is named: ``ranks ** (1 - windows) <= BY_LUCK``."""
    return max(LEAST_WINDOWS, 1 + math.ceil(-math.log(BY_LUCK) / math.log(ranks) - 1e-9))


class Stragglers:
    """Compares ranks window by window and names one that is slow repeatedly.

    ``slow``: that rank; ``spread`` and ``top``: those of the last window; ``window_steps``: fewest steps of a window.
    """

    def __init__(self, window_steps: int = WINDOW_STEPS) -> None:
        self.slow: Straggler | None = None
        self.spread: dict[str, Spread] = {}
        self.top: tuple[Excess, ...] = ()
        self._window_steps = window_steps
        self._begun: dict[int, RankReport] = {}
        self._idle: dict[int, int] = {}  # steps of the ranks that are left out, because they make none
        self._streak: list[Straggler] = []
        self._unequal = 0  # windows in a row with unequal steps

    def take(self, reports: Mapping[int, RankReport]) -> None:
        """Takes in the current reports of all ranks that have not ended."""
        self._leave_out_idle(reports)
        reports = {rank: report for rank, report in reports.items() if rank not in self._idle}
        self.top = tuple(excess for excess in self.top if excess.rank in reports)
        warm = {rank: report for rank, report in reports.items() if report.steps >= WARM_UP_STEPS}
        if set(warm) != set(self._begun) or any(
            report.sequence < self._begun[rank].sequence for rank, report in warm.items()
        ):
            self._begun = dict(warm)  # a rank joined or left: so the window begins anew
            return
        steps = [warm[rank].steps - begun.steps for rank, begun in self._begun.items()]
        if len(warm) <= 1 or len(warm) < len(reports) or min(steps) < self._window_steps:
            return
        self._judge(self._begun, warm)
        self._begun = dict(warm)

    def _leave_out_idle(self, reports: Mapping[int, RankReport]) -> None:
        """Leaves a rank out from when it stands while the others make several windows until it makes a step.

        Ranks that wait for it stand as well. It evaluates, has ended its loop, or does not train.
        """
        steps = {rank: report.steps for rank, report in reports.items()}
        self._idle = {rank: stood for rank, stood in self._idle.items() if steps.get(rank) == stood}
        made = {
            rank: number - max(self._begun[rank].steps if rank in self._begun else 0, WARM_UP_STEPS)
            for rank, number in steps.items()
            if rank not in self._idle
        }
        standing = {rank: steps[rank] for rank, number in made.items() if number <= 0}
        others = [number for rank, number in made.items() if rank not in standing]
        if len(others) > 1 and min(others) >= LEAST_WINDOWS * self._window_steps:
            self._idle.update(standing)

    def _judge(self, begun: Mapping[int, RankReport], now: Mapping[int, RankReport]) -> None:
        window = window_between(begun, now, shown=[excess.rank for excess in self.top])
        if window is None:  # ranks may have waited for one that evaluated or saved: no evidence
            return
        self.spread, self.top, candidate, together = window
        self._unequal = 0 if together else self._unequal + 1
        if 0 < self._unequal < LEAST_WINDOWS:  # short disturbance, or ranks that do not wait for each other
            return
        if candidate is None or (self._streak and self._streak[-1].host != candidate.host):
            self._streak = []
        hosts = [report.host for report in now.values()]
        if candidate is not None:
            most = max(MEAN_WINDOWS, _needed_of_host(candidate.host, hosts))
            self._streak = [*self._streak, candidate][-most:]
        self.slow = _repeated(self._streak, hosts)


def window_between(
    begun: Mapping[int, RankReport], now: Mapping[int, RankReport], *, shown: Sequence[int] = ()
) -> Window | None:
    """Evaluates one window, from the reports of the same ranks at its start and end.

    None if a rank evaluated or saved in it and the steps are unequal: the others may have waited for that. Device time is compared
    if it is known of all ranks, else host time. None as well if device time became known within the window.

    ``shown``: ranks that were among those with the largest excess before.
    """
    on_device, ranks = all(report.device for report in now.values()), sorted(now)
    if on_device and not all(report.device for report in begun.values()):
        return None
    stages = list(now[ranks[0]].stages)
    steps = np.array([now[r].steps - begun[r].steps for r in ranks], dtype=np.float64)
    spent = np.empty((len(ranks), len(stages)))
    for row, r in enumerate(ranks):
        spent[row] = [now[r].stages[s] - begun[r].stages[s] for s in stages]
    away = np.array([now[r].away_s - begun[r].away_s for r in ranks])
    per_step = spent / steps[:, None]
    totals = per_step.sum(axis=1)
    if totals.min() <= 0:
        return None
    barriers = {now[r].barrier for r in ranks}
    barrier = barriers.pop() if len(barriers) == 1 else ""
    own, local = per_step, LOCAL_OF.get(barrier, LOCAL)
    if on_device:
        own = _on_device(begun, now, per_step, stages)
        local = tuple(stage for stage in local if stage in ("data", *ON_DEVICE))
    own_columns = [place for place, stage in enumerate(stages) if stage in local]
    work = own[:, own_columns].sum(axis=1)
    waits, by_waits = totals - work, on_device and barrier in ON_DEVICE_OF
    if by_waits:
        waits = own[:, [stages.index(stage) for stage in ON_DEVICE_OF[barrier]]].sum(axis=1)
    spread = {
        stage: _spread(per_step[:, place], ranks)
        for place, stage in enumerate(stages)
        if per_step[:, place].any()
    }
    measured = _Measured(
        [now[r] for r in ranks], per_step, own, work, waits, stages, own_columns, on_device, by_waits
    )
    if not measured.together and (away > AWAY_RATIO * (spent.sum(axis=1) + away)).any():
        return None
    return Window(spread, measured.top(shown), measured.candidate(), measured.together)


def _on_device(
    begun: Mapping[int, RankReport], now: Mapping[int, RankReport], per_step: np.ndarray, stages: list[str]
) -> np.ndarray:
    """Returns ``per_step`` with device time for the stages in ``ON_DEVICE``, host time for ``data``, and 0 for other stages."""
    own, ranks = np.zeros_like(per_step), sorted(now)
    own[:, stages.index("data")] = per_step[:, stages.index("data")]
    for stage in ON_DEVICE:
        own[:, stages.index(stage)] = [
            max(0.0, now[r].device[stage] - begun[r].device[stage]) / (now[r].steps - begun[r].steps)
            for r in ranks
        ]
    return own


class _Measured(NamedTuple):
    """Seconds per step of a window, one row per rank: by stage on the host, own work by stage and in all, waits for other ranks."""

    reports: list[RankReport]
    per_step: np.ndarray
    own: np.ndarray
    work: np.ndarray
    waits: np.ndarray
    stages: list[str]
    own_columns: list[int]
    on_device: bool
    by_waits: bool  # ``waits`` was measured on the devices

    @property
    def step_s(self) -> float:
        return float(np.median(self.per_step.sum(axis=1)))

    @property
    def together(self) -> bool:
        """Whether the steps of all ranks are equally long, because the ranks wait for each other."""
        return float(np.ptp(self.per_step.sum(axis=1))) <= SYNCHRONOUS_RATIO * self.step_s

    @property
    def late(self) -> np.ndarray:
        """Seconds by which a rank reaches the point where ranks wait for each other later than others, up to a constant."""
        return -self.waits if self.by_waits else self.work

    def excess_s(self, row: int) -> float:
        """Returns the seconds per step by which a rank is later than the median of the others."""
        return float(self.late[row] - np.median(np.delete(self.late, row)))

    def waits_s(self, row: int) -> float:
        """Returns the seconds per step by which the others wait longer for other ranks than this rank does."""
        return float(np.median(np.delete(self.waits, row)) - self.waits[row])

    def worst(self, row: int) -> str:
        """Returns the stage with the largest excess over the median of the others; ``other`` if none explains a late device."""
        over = self.own[row] - np.median(np.delete(self.own, row, axis=0), axis=0)
        most = self.own_columns[_largest(over[self.own_columns])]
        return "other" if self.by_waits and over[most] < self.excess_s(row) / 2 else self.stages[most]

    def top(self, shown: Sequence[int]) -> tuple[Excess, ...]:
        found: list[Excess] = []
        most = np.argsort(-self.late, kind="stable").tolist()
        for row in [*most[:MOST_TOP], *(row for row in most[MOST_TOP:] if self.reports[row].rank in shown)]:
            excess_s, report = self.excess_s(row), self.reports[row]
            others_s = float(np.median(np.delete(self.work, row)))
            # Work that the device does not wait for costs nothing.
            costs = not self.on_device or self.waits_s(row) >= excess_s / 2
            if costs and excess_s >= WORTH_RATIO * self.step_s and others_s > 0:
                found.append(Excess(report.rank, report.host, self.worst(row), excess_s / others_s))
        return tuple(found[:MOST_SHOWN])

    def candidate(self) -> Straggler | None:
        slowest, step_s = _largest(self.late), self.step_s
        excess_s = self.excess_s(slowest)
        waits_s = self.waits_s(slowest)
        # The last rank to arrive waits least. Otherwise the others do not wait for it.
        if not self.together or excess_s < WORTH_RATIO * step_s or waits_s < excess_s / 2:
            return None
        report = self.reports[slowest]
        return Straggler(report.rank, report.host, self.worst(slowest), excess_s, step_s, waits_s, 1)


def _largest(values: np.ndarray) -> int:
    """Returns the index of the largest value; the first one if only rounding distinguishes several."""
    return int(np.argmax(values >= values.max() - 1e-9 * np.abs(values).max()))


def _spread(column: np.ndarray, ranks: list[int]) -> Spread:
    median, p95 = np.quantile(column, (0.5, 0.95))
    return Spread(
        float(column.min()), float(median), float(p95), float(column.max()), ranks[int(np.argmax(column))]
    )


def _repeated(streak: list[Straggler], hosts: list[str]) -> Straggler | None:
    """Returns the rank that was repeatedly the slowest, or one of a host whose ranks take turns; None if it may be chance.

    ``streak``: candidates of one host, oldest first; ``hosts``: the host of every rank.
    """
    if not streak:
        return None
    last = streak[-1]
    alone = list(takewhile(lambda slow: slow.rank == last.rank, reversed(streak)))
    if len(alone) >= windows_needed(len(hosts)) or _is_steady(alone):
        return _together(alone)
    if 0 < _needed_of_host(last.host, hosts) <= len(streak):
        return _together(streak)
    return None


def _needed_of_host(host: str, hosts: list[str]) -> int:
    """Returns the consecutive windows after which a host is named whose ranks take turns; 0 if it is the only one."""
    beside = hosts.count(host)
    return windows_needed(len(hosts) / beside) if 0 < beside < len(hosts) else 0


def _is_steady(streak: list[Straggler]) -> bool:
    """Returns whether the excess of a rank varies too little between windows to be chance."""
    least = STEADY.get(len(streak))
    if least is None:
        return False
    excess_s = [slow.excess_s for slow in streak]
    error_s = float(np.std(excess_s, ddof=1)) / math.sqrt(len(streak))
    return float(np.mean(excess_s)) >= least * error_s


def _together(streak: list[Straggler]) -> Straggler:
    """Returns the means over the windows of a streak."""
    (rank, _), *others = Counter(slow.rank for slow in streak).most_common()
    stages = [slow.stage for slow in streak]
    excess_s, step_s, waits_s = np.mean(
        [(slow.excess_s, slow.step_s, slow.waits_s) for slow in streak], axis=0
    ).tolist()
    stage = max(sorted(set(stages)), key=stages.count)
    host = streak[-1].host
    return Straggler(rank, host, stage, excess_s, step_s, waits_s, len(streak), 1 + len(others))


def straggler_finding(slow: Straggler, *, others: int, train_s: float) -> Finding:
    """Returns the finding about a slow rank, for ``train_s`` seconds of training."""
    limits = ((CRITICAL_SHARE, "critical"), (WARNING_SHARE, "warning"))
    stage = "user-defined stages" if slow.stage == NAMED else f"`{slow.stage}`"
    than = "the other rank, which waits" if others == 1 else f"the median rank; the {others} other ranks wait"
    who = f"Rank {slow.rank} on {slow.host} is slow"
    if slow.ranks > 1:
        who = f"{slow.ranks} ranks on {slow.host} are slow, most often rank {slow.rank},"
    return Finding(
        name="straggler_bound",
        summary=(
            f"{who} in {stage}: {slow.excess_s * 1e3:.3g} ms more per step than "
            f"{than} for it: {slow.ratio:.0%} of each step."
        ),
        evidence={
            "rank": slow.rank,
            "excess_s": slow.excess_s,
            "others_wait_s": slow.waits_s,
            "step_s": slow.step_s,
            "windows": slow.windows,
        },
        share=slow.ratio,
        seconds=slow.ratio * train_s,
        advice=ADVICE[slow.stage].format(rank=slow.rank),
        phase="train",
        severity=next((severity for least, severity in limits if slow.ratio >= least), "info"),
    )
