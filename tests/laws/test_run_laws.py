"""What holds for a run of several threads, however their edges are read and whenever a snapshot is taken."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hypothesis import example, given, settings
from hypothesis import strategies as st

from otel_train.aggregation.metrics import MetricBuilder, RunMetrics
from otel_train.catalog import Kind
from otel_train.datamodel import HistogramPoint
from tests.laws.test_account_laws import ACTIONS
from tests.support.edges import Tape
from tests.support.runs import Run

if TYPE_CHECKING:
    from otel_train.datamodel import Attributes

THREADS = 3
turns = st.lists(
    st.tuples(
        st.integers(0, THREADS - 1),
        st.lists(st.sampled_from(sorted(ACTIONS)), max_size=6),
        st.sampled_from(["", "", "look", "snapshot", "snapshot behind", "end"]),
    ),
    max_size=25,
)
"""What a thread does next, and what the agent does then."""


def cumulative(metrics: RunMetrics) -> dict[tuple[str, Attributes, str], float]:
    """Every value of a snapshot that must not fall."""
    builder = MetricBuilder()
    metrics.write(builder)
    found: dict[tuple[str, Attributes, str], float] = {}
    for family in builder.families():
        for point in family.points:
            if isinstance(point, HistogramPoint):
                series = family.metric.name, point.attributes
                values = {"count": point.count, "sum": point.sum, "zero": point.zero_count}
                values |= {f"bucket {n}": count for n, count in enumerate(point.explicit_counts)}
                found |= {(*series, what): value for what, value in values.items()}
            elif family.metric.kind is Kind.COUNTER:
                found[family.metric.name, point.attributes, ""] = point.value
    return found


@settings(deadline=None, max_examples=200)
@given(turns)
@example(
    [
        (1, ["closure"], ""),
        (0, ["ask", "grad"], ""),
        (1, ["ask"], "end"),
        (1, ["backward"], ""),
        (0, [], "end"),
        (0, ["scaler"], ""),
    ]
)
@example(
    [
        (2, ["closure"], ""),
        (0, ["nested update", "ask"], ""),
        (2, ["ask"], "end"),
        (2, ["forward"], ""),
        (0, [], "end"),
    ]
)
def test_no_cumulative_value_falls_and_activities_add_up_whichever_thread_leads(
    history: list[tuple[int, list[str], str]],
) -> None:
    """A counter that falls is taken for one that began anew: its rate is then of the whole run at once."""
    tapes, over = [Tape() for _ in range(THREADS)], list[Tape]()
    run = Run(stall_after_s=1e9)
    metrics = RunMetrics(run.account, max_loaders=16, max_stages=8)
    now_ns, shown = 0, cumulative(metrics)
    for thread, names, then in history:
        tape = tapes[thread]
        tape.spend(max(0, now_ns - tape.now_ns))
        for name in names:
            ACTIONS[name](tape)
        now_ns = tape.now_ns
        run.feed(tape, main=thread == 0, name=f"thread {thread}")
        if then == "end":
            run.account.end_thread(id(tape))
            over.append(tape)  # Run tells tapes apart by their identity
            tapes[thread] = Tape(started_ns=now_ns)
        elif then:
            run.account.check_stalls(now_ns, [id(tape) for tape in tapes] if "behind" in then else ())
        if "snapshot" in then:
            shown = rising(shown, cumulative(metrics))
    run.close(now_ns + 7)
    rising(shown, cumulative(metrics))
    assert run.account.totals.activity_ns.sum() == now_ns + 7


def rising(
    before: dict[tuple[str, Attributes, str], float], now: dict[tuple[str, Attributes, str], float]
) -> dict[tuple[str, Attributes, str], float]:
    """The later of two snapshots; no value is less."""
    fallen = {
        key: (value, now.get(key)) for key, value in before.items() if now.get(key, -1.0) < value - 1e-12
    }
    assert not fallen
    return now
