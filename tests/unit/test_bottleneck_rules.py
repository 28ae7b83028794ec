"""What the metrics mean: the sentence a person acts on."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from otel_train.aggregation.counters import StageTotals
from otel_train.aggregation.series_names import Key
from otel_train.bottleneck.dataloader import CRITICAL_SHARE, WARNING_SHARE, LoaderThroughput
from otel_train.bottleneck.rules import (
    CAUSE_RULES,
    LARGE_SHARE,
    LEADING_RULES,
    LIMIT_RULES,
    MIN_STEPS,
    SIDE_RULES,
    RuleInput,
    findings,
)
from otel_train.datamodel import Finding, Pace
from tests.support.summary_laws import RULES as EVIDENCE

COMPUTE = ("forward", "backward", "optimizer")


def stage(
    name: str, self_s: float, loader: str = "code", phase: str = "train", *, count: int = 10
) -> StageTotals:
    return StageTotals(Key(name, loader, phase, ""), count, 0, self_s, self_s, None, called_s=self_s)


def findings_of(
    *rows: StageTotals, steps: int = 100, workers: dict[str, int] | None = None, **known: Any
) -> list[Finding]:
    """Of a run of 100 s in which nothing else is known."""
    loaders = {name: LoaderThroughput(number) for name, number in (workers or {}).items()}
    facts = {"steps": steps, "activities": {"productive": 100.0}, "loaders": loaders, **known}
    return findings(RuleInput(rows, **facts))


def names_of(*rows: StageTotals, **known: Any) -> list[str]:
    return [finding.name for finding in findings_of(*rows, **known)]


def test_a_loader_that_training_waits_for_is_named() -> None:
    """Which loader, how much, and what it costs: the three things to know."""
    [finding] = findings_of(stage("data", 3.0), stage("forward", 6.0), stage("data", 1.0, "val", "eval"))

    assert (finding.name, finding.loader, finding.severity) == ("input_bound", "code", "critical")
    assert finding.share == pytest.approx(1 / 3)
    assert finding.seconds == 3.0
    assert "`code`" in finding.summary
    assert "33%" in finding.summary
    assert "300 ms per batch" in finding.summary


@pytest.mark.parametrize(
    ("waiting_s", "name", "severity"),
    [(9.0, "compute_bound", "ok"), (11.0, "input_bound", "warning"), (21.0, "input_bound", "critical")],
)
def test_how_bad_it_is_depends_on_the_share(waiting_s: float, name: str, severity: str) -> None:
    """The thresholds of the alert rules: what the run summary calls critical also pages."""
    first = findings_of(stage("data", waiting_s), stage("forward", 100.0 - waiting_s))[0]

    assert (first.name, first.severity) == (name, severity)
    assert (WARNING_SHARE, CRITICAL_SHARE) == (0.10, 0.20)


TENTH = [stage("data", 12.0), stage("forward", 20.0)]
"""With 68 s of something else a tenth of the time is a wait for a loader."""
TWO_FIFTHS = [stage("data", 40.0), stage("forward", 60.0)]
SLOW_START = {"code": LoaderThroughput(4, passes=5, first_s=59.0)}
LONG, SHORT = ([stage(name, seconds, count=4) for name in ("data", "forward")] for seconds in (1200.0, 100.0))
HALF_STALLED = {"productive": 50.0, "stalled": 50.0}


def idles(seconds: float) -> dict[str, float]:
    return {"productive": 60.0, "data_wait": 40.0, "outside": seconds}


def hung(longest_s: float) -> list[StageTotals]:
    waits = stage("data", 60.0)._replace(quantiles=(0.01, 0.01, 0.01, 0.01, longest_s))
    return [waits, stage("forward", 40.0)]


@pytest.mark.parametrize(("rows", "known", "names"), [
    # One bucket for all loaders is the mistake that others made.
    pytest.param([stage("data", 1.0), stage("forward", 99.0), stage("data", 500.0, "val", "eval")], {}, ["compute_bound"],
                 id="a slow validation loader is no reason to call training slow"),
    # To load faster wins a tenth of the time.
    *(pytest.param([*TENTH, stage(name, 68.0)], {}, ["unattributed", "input_bound"],
                   id=f"what takes most of training is named before a smaller wait: {name}") for name in ("augment", "other")),
    # `loss.item()` in every step: the time is the device's.
    pytest.param([*TENTH, stage("other", 68.0)], {"pace": Pace(seen=100)}, ["input_bound", "unattributed"],
                 id="time in no stage may be a wait for the device and leads no finding"),
    # Most of the time is known to be the start of workers: that is no unexplained time.
    pytest.param([stage("data", 60.0), stage("forward", 30.0), stage("other", 10.0)], {"loaders": SLOW_START}, ["slow_start"],
                 id="passes that begin slowly explain a run that the model does not"),
    # An empty window must not divide by zero.
    pytest.param([], {"steps": 0}, ["too_early"], id="nothing at all is too early"),
    pytest.param([stage("data", 0.0)], {"steps": 50}, ["too_early"], id="no time at all is too early"),
    # Four steps of ten minutes have said what they say; ten of them would take the morning.
    pytest.param(LONG, {"steps": 4}, ["input_bound"], id="a few long steps are enough"),
    pytest.param(LONG, {"steps": 2}, ["too_early"], id="two are not"),
    pytest.param(SHORT, {"steps": 4}, ["too_early"], id="a few short ones are not"),
    # Both are there, in the order of the seconds that one would win back.
    pytest.param(TWO_FIFTHS, {"activities": idles(30.0)}, ["input_bound", "idle_between_passes"], id="waiting before idling"),
    pytest.param(TWO_FIFTHS, {"activities": idles(50.0)}, ["idle_between_passes", "input_bound"], id="idling before waiting"),
    # 73 % of a run were called evaluation that were sleep.
    pytest.param([stage("forward", 20.0)], {"activities": {"productive": 20.0, "eval": 7.0, "outside": 73.0}},
                 ["idle_between_passes"], id="time outside is no evaluation"),
    # One wait of an hour is not a loader that is too slow, unless training waits for it without that, too.
    pytest.param(hung(55.0), {"activities": HALF_STALLED}, ["stalled"], id="no number of workers helps a loader that hung"),
    pytest.param(hung(5.0), {"activities": HALF_STALLED}, ["input_bound", "stalled"], id="a slow loader that hung as well"),
    pytest.param([stage("forward", 40.0), stage("other", 60.0)], {"activities": HALF_STALLED}, ["stalled", "unattributed"],
                 id="a hang between two stages is no time to be wrapped in a stage"),
    # A night of which two thirds are spent saving is not bound by its model, nor by a loader.
    *(pytest.param(rows, {"activities": {"productive": 40.0, spent: 60.0}}, [f"{spent}_heavy", limit],
                   id=f"what takes most of the run is its main finding: {spent} before {limit}")
      for spent in ("eval", "checkpoint")
      for rows, limit in (([stage("forward", 40.0)], "compute_bound"),
                          ([stage("forward", 20.0), stage("data", 20.0)], "input_bound"))),
])  # fmt: skip
def test_findings_come_in_the_order_of_what_they_cost(
    rows: list[StageTotals], known: dict[str, Any], names: list[str]
) -> None:
    """And none that leads to the wrong place."""
    assert names_of(*rows, **known) == names


def test_loaders_are_judged_together_and_named_by_their_share() -> None:
    """Three loaders of 6 % each cost as much as one of 18 %; the advice is for the weightiest."""
    rows = [stage("data", seconds, name) for name, seconds in (("b", 6.0), ("a", 7.0), ("c", 5.0))]
    [finding] = findings_of(*rows, stage("forward", 82.0), workers={"a": 0})

    assert (finding.name, finding.loader, finding.severity) == ("input_bound", "a", "warning")
    assert finding.share == pytest.approx(0.18)
    assert finding.seconds == pytest.approx(18.0)
    assert "18% of training time (`a` 7%, `b` 6%, `c` 5%)" in finding.summary
    assert "`a`: 700 ms per batch" in finding.summary
    assert "`a` is read in the training process" in finding.advice
    assert [finding.evidence[f"{name}.wait_seconds"] for name in "abc"] == [7.0, 6.0, 5.0]


def test_without_a_loader_there_is_no_word_of_waiting_for_one() -> None:
    """A data stage that belongs to no loader says that a loader must be instrumented, not that input is slow."""
    found = findings_of(stage("data", 6.0, ""), stage("forward", 4.0, ""))
    computing = findings_of(stage("forward", 10.0, ""))[0]

    assert [finding.name for finding in found] == ["unattributed"]
    assert "Not seen: a loader." in found[0].summary
    assert "otel_train.watch" in found[0].advice
    assert found[0].evidence["data_without_loader_seconds"] == 6.0
    assert computing.name == "compute_bound"
    for finding in (*found, computing):
        assert "0.0%" not in finding.summary
        assert "data_wait_ratio" not in finding.evidence
        assert "waits" not in finding.summary


def test_a_loader_that_a_thread_reads_is_not_said_to_keep_up() -> None:
    """Training waits for that thread, and nothing shows how long: only the iterator was made where training runs."""
    rows = [stage("data", 0.1, count=0), stage("forward", 56.0, ""), stage("other", 43.9, "")]
    thing = {"what": "loop", "name": "Thread", "reason": "it reads a loader beside the training thread"}
    [first, *_] = findings_of(*rows, gaps=[{**thing, "cause": "ambiguous"}])

    assert first.name == "compute_bound"
    assert "Waits for loaders" not in first.summary
    assert "Not seen: loop `Thread`." in first.summary
    assert "input" not in first.advice


@pytest.mark.parametrize(("model_s", "name"), [(51.0, "compute_bound"), (50.0, "unattributed")])
def test_computing_is_the_limit_only_where_the_model_takes_most_of_the_time(
    model_s: float, name: str
) -> None:
    """A loop that spends half of its time in code of its own is not busy with the model."""
    rows = [stage("data", 1.0), stage("forward", model_s - 20.0), stage("backward", 20.0)]
    first = findings_of(*rows, stage("other", 99.0 - model_s))[0]

    assert first.name == name
    assert first.evidence["model_ratio"] == pytest.approx(model_s / 100)
    assert first.evidence["model_seconds"] == pytest.approx(model_s)
    assert first.evidence["training_seconds"] == pytest.approx(100.0)


def test_unexplained_time_says_after_which_stage_it_lies() -> None:
    """The loop's own code has no name: where it stands in a step is the most that can be said of it."""
    rows = [stage("data", 1.0), stage("forward", 9.0), stage("optimizer", 10.0), stage("other", 80.0)]
    [first, *_] = findings_of(*rows, other_after={"forward": 8.0, "optimizer": 72.0})

    assert first.name == "unattributed"
    assert "80% of training time is in no stage and no loader, 90% of it after `optimizer`;" in first.summary
    assert first.evidence["other_after_seconds"] == 72.0


def test_little_unexplained_time_is_not_shown_as_none() -> None:
    """A short run that waits for its first batch most of the time: it said 0 %, and nothing of that wait."""
    [first] = findings_of(
        stage("data", 97.2), stage("forward", 2.4), stage("other", 0.4),
        steps=10, activities={"productive": 2.8, "data_wait": 97.2},
        loaders={"code": LoaderThroughput(0, passes=2, first_s=95.0, longest_start_s=95.0)},
    )  # fmt: skip

    assert first.name == "unattributed"
    assert first.summary.startswith("0.4% of training time is in no stage")
    assert "the model takes 2%, the beginning of passes 95.0 s." in first.summary


def test_unexplained_time_says_what_is_not_seen_and_what_to_do() -> None:
    """Without the loader and the model in sight the only honest answer is what to watch."""
    reason = "updates were seen and no backward: call it where autograd sees it"
    gaps = [
        {"what": "stage", "name": name, "reason": why}
        for name, why in (("data", "no loader was seen"), ("backward", reason))
    ]
    [first] = findings_of(stage("other", 80.0, ""), stage("optimizer", 20.0, ""), gaps=gaps)

    assert (first.name, first.share, first.seconds) == ("unattributed", 0.8, 80.0)
    assert "80% of training time is in no stage and no loader; the model takes 20%." in first.summary
    assert "Not seen: a loader, a forward of the model, stage `backward`." in first.summary
    assert reason in first.advice
    assert first.evidence["other_ratio"] == pytest.approx(0.8)


def test_a_model_that_is_not_seen_is_named_once() -> None:
    """The one that was given and never called is the one to look at."""
    thing = {"what": "model", "name": "GPT", "reason": "its forward was never observed"}
    [first] = findings_of(stage("data", 1.0), stage("other", 99.0, ""), gaps=[thing])

    assert first.summary.endswith("Not seen: model `GPT`.")
    assert first.advice.startswith("model `GPT`: its forward was never observed. ")


def test_a_stage_of_the_users_own_that_takes_most_of_the_time_is_named() -> None:
    """It is attributed, to something that is neither the model nor a loader."""
    first = findings_of(stage("data", 1.0), stage("forward", 19.0), stage("augment", 80.0))[0]

    assert first.name == "unattributed"
    assert "80% of training time is in stage `augment`; the model takes 19%." in first.summary
    assert "Look inside `augment`" in first.advice
    assert first.evidence["augment_ratio"] == first.share == pytest.approx(0.8)
    assert first.seconds == 80.0


def test_what_takes_a_third_of_training_is_named_after_a_wait() -> None:
    """The wait has a remedy."""
    first, second = findings_of(stage("data", 12.0), stage("forward", 49.0), stage("augment", 39.0))

    assert (first.name, second.name, second.share) == ("input_bound", "unattributed", 0.39)
    assert "stage `augment`" in second.summary


def test_workers_that_stop_at_the_end_of_passes_are_no_wait_for_batches() -> None:
    """Faster batches, or more workers, would not end a pass any sooner: workers that live on would."""
    waits = stage("data", 60.0)._replace(called_s=5.0)
    stops = LoaderThroughput(4, persistent=False, passes=5, making_s=20.0, first_s=2.0)
    [found] = findings_of(waits, stage("forward", 30.0), stage("other", 10.0), loaders={"code": stops})

    assert found.name == "slow_start"
    assert found.seconds == pytest.approx(57.0)
    assert "Beginning and ending a pass over loader `code` takes 11.4 s, 5 times: 57%" in found.summary
    assert found.evidence["repeated_end_seconds"] == pytest.approx(35.0)
    assert "persistent_workers=True" in found.advice


@pytest.mark.parametrize(
    ("workers", "advice"),
    [({"code": 0}, "num_workers=2"), ({"code": 3}, "has 3 workers"), ({}, "ahead of need")],
)
def test_the_advice_fits_the_loader(workers: dict[str, int], advice: str) -> None:
    """More workers are no help to a generator, and no news to a loader that has eight."""
    assert advice in findings_of(stage("data", 5.0), stage("forward", 5.0), workers=workers)[0].advice


def test_a_run_that_waits_for_nothing_is_compute_bound() -> None:
    """That nothing is wrong is a finding, too. It does not say that a wait of 9% is none."""
    first = findings_of(stage("data", 9.0), stage("forward", 20.0), stage("backward", 71.0))[0]

    assert (first.name, first.severity) == ("compute_bound", "ok")
    assert first.summary.startswith("Waits for loaders take 9.0% of training time; the model takes 91%; ")
    assert first.summary.endswith("most goes to backward.")


def test_a_few_steps_are_too_early() -> None:
    """The first batch starts workers and warms caches: a finding about it would be wrong."""
    [finding] = findings_of(stage("data", 9.0), stage("forward", 1.0), steps=MIN_STEPS - 1)

    assert finding.name == "too_early"
    assert finding.advice == "Let the run go on; if it has ended, start one with more training steps."


def test_a_program_without_a_step_is_advised_to_call_step() -> None:
    """An hour in which no step is counted is not early."""
    rows = [stage(name, 350.0, "val", "eval", count=MIN_STEPS - 1) for name in ("forward", "data")]
    first, second = findings_of(*rows, steps=0, activities={"init": 1000.0, "eval": 700.0})
    [soon] = findings_of(*rows, steps=0, activities={"init": 1000.0, "eval": 7.0})

    assert (first.name, first.severity) == ("incomplete", "warning")
    assert "INCOMPLETE: no training step is counted in the 11.7 min since the first batch." in first.summary
    assert "loader" not in first.summary
    assert "otel_train.step()" in first.advice
    assert second.name == "eval_heavy"
    assert soon.name == "too_early"


@pytest.mark.parametrize(
    ("data_s", "advice"), [(900.0, "`test` is read in the training"), (50.0, "A larger batch size")]
)
def test_what_limits_a_run_that_only_evaluates_is_found(data_s: float, advice: str) -> None:
    """A program of inference misses no step, has not begun too early, and cannot evaluate less often."""
    rows = [stage("forward", 1000.0 - data_s, "test", "test"), stage("data", data_s, "test", "test")]
    [finding] = findings_of(*rows, steps=0, activities={"init": 9000.0, "eval": 1000.0}, workers={"test": 0})
    idle, _ = findings_of(*rows, steps=0, activities={"outside": 9000.0, "eval": 1000.0}, workers={"test": 0})

    assert (finding.name, finding.severity, finding.phase) == ("eval_heavy", "info", "eval")
    assert finding.summary.endswith("is evaluation, and no training is seen.")
    assert finding.advice.startswith(advice)
    assert idle.name == "idle_between_passes"


@pytest.mark.parametrize("name", ["optimizer", "make_step"])
def test_a_step_that_is_known_not_to_be_seen_is_not_waited_for(name: str) -> None:
    """More time changes nothing; a line must be added."""
    thing = {"what": "stage", "name": name, "reason": "otel_train.jax.make_step around the update shows it"}
    rows = [stage("data", 1.0), stage("block_until_ready", 1.0)]
    [first] = findings_of(*rows, steps=0, activities={"init": 1.0, "productive": 2.0}, gaps=[thing])

    assert first.name == "incomplete"
    assert f"Not seen: stage `{name}`." in first.summary
    assert "otel_train.jax.make_step" in first.advice


@pytest.mark.parametrize(("outside_s", "found"), [(9.0, False), (11.0, True)])
def test_time_outside_every_batch_is_a_finding_with_what_it_costs(outside_s: float, found: bool) -> None:
    """Saving, logging and sleeping between epochs make the night longer, and no step slower."""
    activities = {"productive": 100.0 - outside_s, "outside": outside_s}
    first = findings_of(stage("forward", 80.0), activities=activities)[0]

    assert (first.name == "idle_between_passes") is found
    if found:
        assert (first.severity, first.share, first.seconds) == ("warning", 0.11, 11.0)
        assert first.evidence == {"outside_seconds": 11.0, "outside_ratio": 0.11, "wall_seconds": 100.0}
        assert "11% of the run (11.0 s of 100 s)" in first.summary
        assert "otel_train.checkpoint()" in first.advice


def test_a_run_that_stood_still_is_not_bound_by_its_model() -> None:
    """The stage in which it hung has the time: a forward that waited for an hour is no forward to be made faster."""
    rows = (stage("forward", 90.0), stage("backward", 10.0))
    [found], [little] = (
        findings_of(*rows, activities={"productive": 100 - still, "stalled": still}) for still in (61.0, 5.0)
    )

    assert (found.name, little.name) == ("stalled", "compute_bound")
    assert "61% of the run (61.0 s of 100 s)" in found.summary
    assert "train.stall" in found.advice


@pytest.mark.parametrize(("activity", "name"), [("eval", "eval_heavy"), ("checkpoint", "checkpoint_heavy")])
def test_time_beside_training_is_worth_a_word_when_there_is_much_of_it(activity: str, name: str) -> None:
    """Half of the night spent evaluating is not seen in any stage of training."""
    much, little = (
        findings_of(stage("forward", 60.0), activities={"productive": 100 - spent, activity: spent})
        for spent in (40.0, 20.0)
    )
    assert [finding.name for finding in much] == ["compute_bound", name]
    assert "40% of the run (40.0 s of 100 s)" in much[1].summary
    assert much[1].evidence[f"{activity}_seconds"] == 40.0
    assert [finding.name for finding in little] == ["compute_bound"]


@pytest.mark.parametrize(("loader", "said"), [("", "rollouts"), ("val", "is evaluation.")])
def test_forwards_without_gradients_and_without_a_loader_may_be_rollouts(loader: str, said: str) -> None:
    """Reinforcement learning cannot act less often: the advice for an evaluation would be wrong."""
    rows = [stage("forward", 60.0, loader, "eval"), stage("forward", 30.0, ""), stage("backward", 10.0, "")]
    found = findings_of(*rows, activities={"productive": 40.0, "eval": 60.0})

    [eval_heavy] = [finding for finding in found if finding.name == "eval_heavy"]
    assert said in eval_heavy.summary
    assert ("in one forward" in eval_heavy.advice) is (not loader)


def test_much_time_in_no_stage_is_said() -> None:
    """A loop that calls ``.item()`` every step hides there."""
    found = findings_of(stage("other", 4.0), stage("forward", 6.0))

    assert [finding.name for finding in found] == ["compute_bound", "unattributed"]
    assert "otel_train.stage" in found[1].advice


@given(
    rows=st.lists(
        st.tuples(
            st.sampled_from(["data", "other", *COMPUTE]),
            st.floats(0, 1e6),
            st.sampled_from(["code", "prose"]),
        ),
        max_size=12,
        unique_by=lambda row: (row[0], row[2]),
    ),
    steps=st.integers(0, 1000),
    evaluating_s=st.floats(0, 1e6),
)
def test_a_finding_is_never_missing_and_its_shares_are_shares(
    rows: list[tuple[str, float, str]], steps: int, evaluating_s: float
) -> None:
    """Whatever the metrics: one finding or more, shares within 0 and 1, advice that is not empty."""
    table = [stage(name, self_s, loader) for name, self_s, loader in rows]
    found = findings(RuleInput(table, steps, {"productive": 1.0, "eval": evaluating_s}, {}))

    assert found
    assert all(0 <= finding.share <= 1 for finding in found)
    assert all(finding.advice and finding.summary for finding in found)
    assert LARGE_SHARE > CRITICAL_SHARE


@given(
    names=st.lists(st.sampled_from(["code", "prose", ""]), min_size=1, max_size=3, unique=True),
    data_s=st.floats(0, 1e4),
    model_s=st.floats(0, 1e4),
    activities=st.dictionaries(
        st.sampled_from(["outside", "eval", "compile", "checkpoint"]), st.floats(0, 1e4)
    ),
)
def test_the_numbers_beside_a_finding_follow_from_the_table(
    names: list[str], data_s: float, model_s: float, activities: dict[str, float]
) -> None:
    """Every number of the evidence is a key of the summary or follows from keys by the rule that the page states."""
    rows = [*(stage("data", data_s, name) for name in names), stage("forward", model_s), stage("other", 1.0)]
    loaded_s = data_s * sum(map(bool, names))
    expected = {
        "training_seconds": data_s * len(names) + model_s + 1.0, "model_seconds": model_s, "other_seconds": 1.0,
        "data_wait_seconds": loaded_s, "wall_seconds": 1.0 + sum(activities.values()),
        **{f"{name}_seconds": seconds for name, seconds in activities.items()},
    }  # fmt: skip
    found = findings(RuleInput(rows, 100, {"productive": 1.0, **activities}, {}))

    for finding in found:
        known = finding.evidence.keys() & expected.keys()
        assert known
        assert {name: finding.evidence[name] for name in known} == pytest.approx(
            {name: expected[name] for name in known}
        )
        assert finding.name != "input_bound" or any(names)


@pytest.mark.parametrize(
    ("cpu_wait_s", "names"),
    [
        (9.0, ["input_bound"]),
        (11.0, ["input_bound", "cpu_contention"]),
        (99.0, ["input_bound", "cpu_contention"]),
    ],
)
def test_a_main_thread_that_waits_for_a_processor_is_said_after_what_it_makes_longer(
    cpu_wait_s: float, names: list[str]
) -> None:
    """What is limited stays the main finding: the remedy for a slow loader may help as well as a processor."""
    found = findings_of(stage("data", 60.0), stage("forward", 40.0), cpu_wait_s=cpu_wait_s)

    assert [finding.name for finding in found] == names
    assert "For 11% of the run (11.0 s of 100 s)" in found[-1].summary or cpu_wait_s != 11.0


def test_every_finding_has_a_rule_that_the_page_shows() -> None:
    """The page of findings is generated from these lists; a finding that is missing there is a riddle."""
    rules = [*LEADING_RULES, *LIMIT_RULES, *SIDE_RULES, *CAUSE_RULES]

    assert len({rule.name for rule in rules}) == len(rules)
    assert {"idle_between_passes", "eval_heavy", "unattributed", "compute_bound"} <= {
        rule.name for rule in rules
    }
    assert all(rule.when and rule.evidence and rule.fix for rule in rules)


def test_validate_knows_what_each_number_of_a_finding_follows_from() -> None:
    """It would take a run that has such a finding for a damaged one. Names of loaders and stages are in ``<>``."""
    rules = [*LEADING_RULES, *LIMIT_RULES, *SIDE_RULES, *CAUSE_RULES]
    names = {name for rule in rules for name in rule.evidence if "<" not in name and " " not in name}

    assert names <= EVIDENCE.keys()
