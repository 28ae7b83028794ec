"""Findings of a run: one function per rule, with its thresholds and evidence."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple

from otel_train.aggregation.series_names import CHECKPOINT, Key
from otel_train.bottleneck.dataloader import (
    CRITICAL_SHARE,
    WARNING_SHARE,
    LoaderThroughput,
    demand_sentence,
    loader_advice,
    milliseconds,
    sentence_percent,
    start_advice,
    with_costs_of_passes,
)
from otel_train.bottleneck.device import (
    IN_STEP_SHARE,
    MIN_MEASURED_STEPS,
    Compiled,
    dispatch_bound,
    host_bound,
    is_jax,
    jax_advice,
    recompiling,
    training_finding,
)
from otel_train.console.text import duration
from otel_train.datamodel import Finding, Pace
from otel_train.recording.events import WAIT

if TYPE_CHECKING:
    from otel_train.aggregation.counters import StageTotals

    _Find = Callable[["RuleInput"], Finding | None]

LARGE_SHARE = 0.30
"""Share of the run from which evaluation, checkpoints or compiling is reported; of training time for `other`."""

MOST_SHARE = 0.50
"""Share of the run from which evaluation or checkpoints are the main finding, where they cost most."""

MODEL_SHARE = 0.50
"""Share of training time above which the stages of the model are the limit."""

MIN_STEPS = 10
"""Fewest training steps for a finding: with fewer, the metrics of a short run show its warm-up."""

MIN_LONG_STEPS, LONG_S = 3, 300.0
"""Steps, and seconds of training, that suffice if steps are long."""

MIN_PASSES = 2
"""Fewest passes whose starts are reported; a single start is preparation."""

NAMED_SHARE, MOST_NAMED = 0.01, 5
"""Share of training time from which further loaders are named, and the most that are named."""

_MODEL_STAGES = ("forward", "backward", "optimizer")
_STEP_STAGES = ("optimizer", "make_step")
"""Stages by which steps are counted. If one cannot be instrumented and no step is counted, none will be."""
_UNKNOWN = LoaderThroughput()
_NONE: Mapping[str, float] = MappingProxyType({})


class RuleInput(NamedTuple):
    """Facts about a run or a window of it. All values are keys of ``summary.json`` or derived from them."""

    rows: Sequence[StageTotals]  # the stage table
    steps: int  # of training
    activities: Mapping[str, float]  # seconds; they sum to the wall time
    loaders: Mapping[str, LoaderThroughput]
    pace: Pace = Pace()
    compiled: Compiled = Compiled()
    gaps: Sequence[Mapping[str, str]] = ()  # ``what``, ``name``, ``reason``
    other_after: Mapping[str, float] = _NONE  # seconds of training in no stage, by the stage before them
    cpu_wait_s: float = 0.0  # time for which the main thread was ready to run and waited for a processor
    training: Sequence[StageTotals] = ()  # rows of phase train, set by ``findings``; they sum to its time

    @property
    def total_s(self) -> float:
        """Training time: self time of all stages of phase train."""
        return sum(row.self_s for row in self.training)

    @property
    def wall_s(self) -> float:
        """Wall time of the run."""
        return sum(self.activities.values())

    @property
    def evaluating(self) -> list[StageTotals]:
        """Rows of the phases outside training."""
        return [row for row in self.rows if row.key.phase not in ("train", "")]

    @property
    def waits(self) -> list[StageTotals]:
        """Rows in which training waits for a loader. A data stage without a loader is not one."""
        return [row for row in self.training if row.key.stage == "data" and row.key.loader]

    def by_stage(self) -> dict[str, float]:
        """Returns the self time by stage."""
        found: dict[str, float] = {}
        for row in self.training:
            found[row.key.stage] = found.get(row.key.stage, 0.0) + row.self_s
        return found

    def model_stages(self) -> dict[str, float]:
        """Returns the self time by stage of the model."""
        names = model_stages(self.training, self.compiled)
        return {stage: seconds for stage, seconds in self.by_stage().items() if stage in names}

    def steady_waits(self) -> dict[str, float]:
        """Returns the waits for each loader within passes, in seconds, longest first; in device time if measured."""
        exposed = exposed_waits(self.training)
        found: dict[str, float] = {}
        for row in self.waits:
            known = self.loaders.get(row.key.loader, _UNKNOWN)
            spent = exposed[row.key] - known.first_s if row.key in exposed else row.self_s - known.around_s
            found[row.key.loader] = found.get(row.key.loader, 0.0) + max(0.0, spent)
        return dict(sorted(found.items(), key=lambda item: -item[1]))

    @property
    def once_s(self) -> float:
        """Time of starting and ending passes that later passes do not take again: preparation. 0 if it is short."""
        read = {row.key.loader for row in self.waits}
        known = [self.loaders.get(name, _UNKNOWN) for name in read]
        once_s = sum(max(0.0, each.around_s - each.repeated_s) for each in known)
        return once_s if once_s >= WARNING_SHARE * self.total_s else 0.0

    @property
    def hung_s(self) -> float:
        """Longest wait for a loader in a run that stalled, which more workers would not shorten. 0 in other runs."""
        longest_s = max((row.quantiles[-1] for row in self.waits if row.quantiles), default=0.0)
        return longest_s if self.activities.get("stalled") else 0.0

    def wait_evidence(self) -> dict[str, float]:
        """Returns the evidence about waits for loaders; empty without a loader."""
        if not self.waits:
            return {}
        host_s = sum(row.self_s for row in self.waits)
        found = {
            "data_wait_seconds": host_s,
            "data_wait_ratio": host_s / self.total_s,
            "steady_wait_ratio": min(1.0, sum(self.steady_waits().values()) / self.total_s),
        }
        read = [self.loaders.get(row.key.loader, _UNKNOWN) for row in self.waits]
        starts_s, ends_s = sum(known.start_s for known in read), sum(known.ends_s for known in read)
        exposed = exposed_waits(self.training)
        if starts_s:
            found["pass_start_seconds"] = starts_s
        if ends_s:
            found["pass_end_seconds"] = ends_s
        if exposed:
            found["device_wait_seconds"] = sum(exposed.values())
        return found


def model_stages(rows: Sequence[StageTotals], compiled: Compiled) -> list[str]:
    """Returns the stages of the model: forward, backward, optimizer, a whole update, JAX loss and wait."""
    training = [row for row in rows if row.key.phase == "train"]
    loss = ("loss",) if is_jax(training, compiled) else ()
    return [*_MODEL_STAGES, *sorted({*compiled.calls, WAIT, *loss} & {row.key.stage for row in training})]


def exposed_waits(training: Sequence[StageTotals]) -> dict[Key, float]:
    """Returns the seconds that the device was idle during waits for each loader; empty unless measured for all loaders.

    A wait that the device does not notice costs nothing. All loaders are compared on one clock: if one is not measured on
    the device, host time is used for all.
    """
    found: dict[Key, float] = {}
    for row in training:
        if row.key.stage != "data" or not row.key.loader or not row.count:
            continue
        if row.device is None or row.device.measured < min(MIN_MEASURED_STEPS, row.count / 2):
            return {}
        # Extrapolated from a sample, where one long wait may count for many. The device waits no longer than the host.
        found[row.key] = min(row.inclusive_s, row.device.seconds * row.count / row.device.measured)
    return found


class Rule(NamedTuple):
    """One rule, as the page of findings shows it."""

    name: str  # of its finding
    when: str  # its condition
    evidence: tuple[str, ...]  # names
    fix: str  # the usual remedy
    find: _Find


def findings(run: RuleInput) -> list[Finding]:
    """Returns the findings: at least one; the first is the main one."""
    training = [row for row in run.rows if row.key.phase == "train"]
    run = run._replace(training=training, loaders=with_costs_of_passes(run.loaders, training))
    if _evaluates_alone(run):
        return _apply(run, RUN_RULES)
    early = _too_early(run)
    if early is not None:
        long = _since_first_batch_s(run) >= LONG_S
        return [early, *(_apply(run, RUN_RULES) if long else ())]
    beside = _apply(run, SIDE_RULES)
    leading = _apply(run, LEADING_RULES)
    # Unattributed time and slow starts compete with a leading rule only: the limit of the steps already accounts for them.
    most = _most(run, beside if leading else _apply(run, RUN_RULES[1:]))
    leading = sorted([*(leading or [_limit(run, beside)]), *most], key=lambda finding: -finding.seconds)
    named = {finding.name for finding in leading}
    if "recompiling" in named:  # which gives the cause
        leading = [finding for finding in leading if finding.name != "compile_heavy"]
    beside = [finding for finding in beside if finding.name not in named]
    return [*leading, *beside, *_apply(run, CAUSE_RULES)]


def _apply(run: RuleInput, rules: Sequence[Rule]) -> list[Finding]:
    found = [finding for rule in rules if (finding := rule.find(run)) is not None]
    return sorted(found, key=lambda finding: -finding.seconds)


def _most(run: RuleInput, found: Sequence[Finding]) -> list[Finding]:
    """Returns the findings whose share makes them main ones, except time in no stage that may be a device wait or a hang."""
    stalled_s = run.activities.get("stalled", 0.0)
    return [
        each for each in found
        if each.share >= MOST_SHARE
        and not (each.name == "unattributed" and (run.pace.seen or stalled_s >= each.seconds / 2))
    ]  # fmt: skip


def _limit(run: RuleInput, beside: Sequence[Finding]) -> Finding:
    """Returns the main finding if no leading rule applies: what limits the steps."""
    for rule in LIMIT_RULES:
        found = rule.find(run)
        if found is not None:
            return found
    starts = [finding for finding in beside if finding.name == "slow_start"]
    return max([_unattributed(run), *starts], key=lambda finding: finding.seconds)


def _too_early(run: RuleInput) -> Finding | None:
    total_s, steps = run.total_s, run.steps
    if total_s and (steps >= MIN_STEPS or (steps >= MIN_LONG_STEPS and total_s >= LONG_S)):
        return None
    evidence = {"steps": float(steps), "training_seconds": total_s}
    if not steps and (_since_first_batch_s(run) >= LONG_S or _stepless(run)):
        return _incomplete(run, evidence)
    text = (
        f"Too early to say: {steps} training steps in {duration(total_s)}; a finding needs {MIN_STEPS}, "
        f"or {MIN_LONG_STEPS} in {duration(LONG_S)} of training."
    )
    advice = "Let the run go on; if it has ended, start one with more training steps."
    return training_finding("too_early", text, advice=advice, evidence=evidence)


def _since_first_batch_s(run: RuleInput) -> float:
    return run.wall_s - run.activities.get("init", 0.0)


def _stepless(run: RuleInput) -> bool:
    """Returns whether step counting cannot be instrumented, so that more time does not help."""
    return any(gap["what"] == "stage" and gap["name"] in _STEP_STAGES for gap in run.gaps)


def _incomplete(run: RuleInput, evidence: Mapping[str, float]) -> Finding:
    run = run._replace(training=run.rows)  # a loader of an evaluation is a loader
    lasted_s = _since_first_batch_s(run)
    when = f" in the {duration(lasted_s)} since the first batch" if lasted_s else ""
    text = f"INCOMPLETE: no training step is counted{when}.{_not_seen(run)}"
    advice = (
        " ".join(_missing(run).values())
        or "otel_train.step() at the end of each step of the loop marks steps."
    )
    return training_finding("incomplete", text, advice=advice, evidence=evidence, severity="warning")


def _input_bound(run: RuleInput) -> Finding | None:
    """Finds waits for loaders within passes. Starting and ending passes is a finding of its own."""
    waits = run.steady_waits()
    wait_s, total_s = sum(waits.values()), run.total_s
    share = min(1.0, wait_s / total_s)
    if share < WARNING_SHARE or (wait_s - run.hung_s) / total_s < WARNING_SHARE:
        return None
    name = next(iter(waits))
    known, batches = run.loaders.get(name, _UNKNOWN), sum(r.count for r in run.waits if r.key.loader == name)
    rest_s = sum(row.self_s for row in run.training if row.key.stage != "data")
    steady = batches - known.passes
    each_s, ask_s = (waits[name] / steady, rest_s / batches) if steady > 0 else (0.0, 0.0)
    each = f"{milliseconds(each_s)} per batch" if each_s else ""
    named = {loader: s for loader, s in waits.items() if s / total_s >= NAMED_SHARE or loader == name}
    named = dict(list(named.items())[:MOST_NAMED])
    who = "The device" if exposed_waits(run.training) else "Training"
    if len(named) == 1:
        text = f"{who} waits for loader `{name}`: {share:.0%} of training time{each and ', ' + each}."
    else:
        listed = ", ".join(f"`{loader}` {seconds / total_s:.0%}" for loader, seconds in named.items())
        text = f"{who} waits for loaders: {share:.0%} of training time ({listed}).{each and f' `{name}`: {each}.'}"
    shares = (
        {f"{loader}.wait_seconds": seconds for loader, seconds in named.items()} if len(named) > 1 else {}
    )
    return training_finding(
        "input_bound",
        text + demand_sentence(known, ask_s),
        advice=loader_advice(name, known, wait_s=each_s, ask_s=ask_s),
        evidence={
            **run.wait_evidence(), **shares, "training_seconds": total_s, "batches": batches,
            **({"wait_per_batch_seconds": each_s} if each_s else {}), **_build_evidence(known, ask_s),
        },
        share=share,
        seconds=min(wait_s, total_s),
        loader=name,
        severity="critical" if share >= CRITICAL_SHARE else "warning",
    )  # fmt: skip


def _build_evidence(known: LoaderThroughput, ask_s: float) -> dict[str, float]:
    if known.build_p50_s is None or known.build_p99_s is None:
        return {}
    found = {"build_p50_seconds": known.build_p50_s, "build_p99_seconds": known.build_p99_s}
    return {**found, "ask_interval_seconds": ask_s} if ask_s else found


def _slow_start(run: RuleInput) -> Finding | None:
    read = {row.key.loader for row in run.waits}
    known_by_name = run.loaders.items()
    again = {name: known for name, known in known_by_name if name in read and known.passes >= MIN_PASSES}
    start_s = sum(known.start_s for known in again.values())
    around_s = sum(known.around_s for known in again.values())
    share = min(1.0, around_s / run.total_s)
    repeated_s = sum(known.repeated_s for known in again.values())
    if not again or min(around_s, repeated_s) < WARNING_SHARE * run.total_s:
        return None
    name = max(again, key=lambda loader: again[loader].around_s)
    known = again[name]
    rest = sorted((loader for loader in again if loader != name), key=lambda one: -again[one].around_s)
    more = f" `{name}` costs most, then {', '.join(f'`{one}`' for one in rest[:MOST_NAMED])}." if rest else ""
    ending = " and ending" if known.ends_s >= WARNING_SHARE * known.around_s else ""
    text = (
        f"Beginning{ending} a pass over loader `{name}` takes {milliseconds(known.around_s / known.passes)}, {known.passes} "
        f"times: {'with the other loaders ' if rest else ''}{share:.0%} of training time.{more}"
    )
    ends = {"repeated_end_seconds": around_s - start_s, "ending_seconds": known.ends_s}
    evidence = {
        "repeated_start_seconds": start_s,
        "repeated_start_ratio": start_s / run.total_s,
        **(ends if around_s > start_s else {}),
        "training_seconds": run.total_s,
        "making_seconds": known.making_s,
        "first_batch_seconds": known.first_s,
        "passes": known.passes,
    }
    return training_finding(
        "slow_start",
        text,
        advice=start_advice(name, known),
        evidence=evidence,
        share=share,
        seconds=around_s,
        loader=name,
        severity="warning",
    )


def _heavy(activity: str, what: str, advice: str, *, least: float = LARGE_SHARE, **facts: str) -> _Find:
    """Returns a rule for an activity that takes at least ``least`` of the wall time."""

    def find(run: RuleInput) -> Finding | None:
        spent_s, wall_s = run.activities.get(activity, 0.0), run.wall_s
        if not wall_s or spent_s / wall_s < least:
            return None
        share = spent_s / wall_s
        return training_finding(
            facts.get("name", f"{activity}_heavy"),
            f"{share:.0%} of the run ({duration(spent_s)} of {duration(wall_s)}) is {what}.",
            advice=advice,
            evidence={f"{activity}_seconds": spent_s, f"{activity}_ratio": share, "wall_seconds": wall_s},
            share=share,
            seconds=spent_s,
            phase=facts.get("phase", ""),
            severity=facts.get("severity", "info"),
        )

    return find


_ACTING = _heavy(
    "eval", "forwards without gradients and without a loader, as of rollouts, generation or evaluation", phase="eval",
    advice="Rollouts and generation: more environments or prompts in one forward, torch.compile, mixed precision, a KV cache. "
    "Evaluation: less often.",
)  # fmt: skip


def _eval_heavy(run: RuleInput) -> Finding | None:
    """Finds heavy evaluation. If most of it is without a loader, the loop may act rather than evaluate: reinforcement learning."""
    if _evaluates_alone(run):
        what, advice, least = "evaluation, and no training is seen", _faster_evaluation(run), 0.0
    else:
        alone_s = sum(row.self_s for row in run.evaluating if not row.key.loader)
        if run.steps and alone_s > sum(row.self_s for row in run.evaluating) / 2:
            return _ACTING(run)
        what, least = "evaluation", LARGE_SHARE
        advice = f"Evaluate less often, or on fewer batches. {_faster_evaluation(run)}"
    return _heavy("eval", what, advice, least=least, phase="eval")(run)


def _evaluates_alone(run: RuleInput) -> bool:
    """Returns whether the run has only evaluated so far: inference, or before the first step. ``_stepless`` runs are excluded."""
    calls = max((row.count for row in run.evaluating if row.key.stage in ("data", "forward")), default=0)
    return (
        not run.training and calls >= MIN_STEPS and run.activities.get("eval", 0.0) > 0 and not _stepless(run)
    )


def _faster_evaluation(run: RuleInput) -> str:
    """Returns what makes evaluation faster: a change of the loader that it waits for most, if it waits, else larger batches."""
    waits = [row for row in run.evaluating if row.key.stage == "data" and row.key.loader and row.count]
    wait = max(waits, key=lambda row: row.self_s, default=None)
    if wait is None or wait.self_s < WARNING_SHARE * sum(row.self_s for row in run.evaluating):
        return "A larger batch size makes it faster: no gradients are kept."
    name, count = wait.key.loader, wait.count
    known = with_costs_of_passes(run.loaders, [wait]).get(name, _UNKNOWN)
    if known.around_s > wait.self_s / 2:
        return start_advice(name, known)
    own = [row for row in run.evaluating if row.key.loader == name and row.key.stage != "data"]
    ask_s = sum(row.self_s for row in own) / count
    return loader_advice(name, known, wait_s=(wait.self_s - known.around_s) / count, ask_s=ask_s)


def _host_bound(run: RuleInput, name: str) -> Finding | None:
    found = host_bound(run.pace, total_s=run.total_s)
    return found if found is not None and found.name == name else None


def _compute_bound(run: RuleInput) -> Finding | None:
    total_s, once_s, model = run.total_s, run.once_s, run.model_stages()
    model_s = sum(model.values())
    if model_s <= MODEL_SHARE * max(0.0, total_s - once_s):
        return None
    share = model_s / total_s
    stage, seconds = max(model.items(), key=lambda item: item[1])
    waits = run.wait_evidence()
    # A wait for a loader that another thread reads is not measured.
    loop_gap = any(gap["what"] == "loop" for gap in run.gaps)
    known = waits and not loop_gap
    sentence = f"the model takes {share:.0%}{'' if known else ' of training time'}{_begun(run)}; most goes to {stage}."
    text = (
        f"Waits for loaders take {sentence_percent(waits['steady_wait_ratio'], 1)} of training time; {sentence}"
        if known
        else f"{sentence[0].upper()}{sentence[1:]}{_not_seen(run) if loop_gap else ' No loader is seen.'}"
    )
    advice = jax_advice(stage, seconds / total_s, run.training, run.compiled) or (
        f"{'Little to gain at the input. ' if known else ''}A profiler capture shows what the time in the model is "
        "spent on."
    )
    evidence = {**_model_evidence(run), f"{stage}_ratio": seconds / total_s, **waits}
    return training_finding("compute_bound", text, advice=advice, evidence=evidence, severity="ok")


def _begun(run: RuleInput) -> str:
    """Returns a clause on the start of passes if that takes long and is not repeated; else ""."""
    begun_s = run.wait_evidence().get("pass_start_seconds", 0.0) if run.once_s else 0.0
    return f", the beginning of passes {milliseconds(begun_s)}" if begun_s else ""


def _unattributed(run: RuleInput) -> Finding:
    """Finds training time that neither the model nor a loader explains."""
    total_s, unexplained_s = run.total_s, _unexplained_s(run)
    stage, seconds = _longest_beside_model(run)
    evidence = {**_model_evidence(run), "other_seconds": run.by_stage().get("other", 0.0)}
    evidence["other_ratio"] = evidence["other_seconds"] / total_s
    if stage == "other":
        most = f"{sentence_percent(unexplained_s / total_s)} of training time is in no stage and no loader"
        before, after_s = max(run.other_after.items(), key=lambda item: item[1], default=("", 0.0))
        if before:
            evidence["other_after_seconds"] = after_s
            most += f", {sentence_percent(after_s / unexplained_s)} of it after `{before}`"
    else:
        evidence[f"{stage}_ratio"] = seconds / total_s
        most = f"{sentence_percent(seconds / total_s)} of training time is in stage `{stage}`"
    unnamed_s = unexplained_s - evidence["other_seconds"]
    if unnamed_s:
        evidence["data_without_loader_seconds"] = unnamed_s
    return training_finding(
        "unattributed",
        f"{most}; the model takes {sentence_percent(evidence['model_ratio'])}{_begun(run)}.{_not_seen(run)}",
        advice=" ".join(_remedies(run, stage)),
        evidence={**evidence, **run.wait_evidence()},
        share=seconds / total_s,
        seconds=seconds,
    )


def _longest_beside_model(run: RuleInput) -> tuple[str, float]:
    """Returns the longest stage apart from the model and waits for loaders, and its seconds; ``other`` for time in no stage."""
    beside = {*run.model_stages(), "data", "other"}
    found = {stage: seconds for stage, seconds in run.by_stage().items() if stage not in beside}
    found = {"other": _unexplained_s(run), **found}
    return max(found.items(), key=lambda item: item[1])


def _unexplained_s(run: RuleInput) -> float:
    """Returns the seconds of training in no stage, or in a data stage without a known loader."""
    return sum(
        row.self_s
        for row in run.training
        if row.key.stage == "other" or (row.key.stage == "data" and not row.key.loader)
    )


def _model_evidence(run: RuleInput) -> dict[str, float]:
    model_s = sum(run.model_stages().values())
    return {"training_seconds": run.total_s, "model_seconds": model_s, "model_ratio": model_s / run.total_s}


def _missing(run: RuleInput) -> dict[str, str]:
    """Returns remedies by what is not instrumented."""
    found = {}
    if not run.waits and all(gap["what"] != "loop" for gap in run.gaps):
        found["a loader"] = (
            "Give the loaders to instrument(model, loaders), or wrap what the loop iterates in otel_train.watch(...)."
        )
    named = any(gap["what"] == "model" for gap in run.gaps)
    if not named and not is_jax(run.training, run.compiled) and "forward" not in run.by_stage():
        found["a forward of the model"] = "Give instrument() the model object that the loop calls."
    for gap in run.gaps:
        label = f"{gap['what']} `{gap['name']}`"
        known = (gap["what"], gap["name"]) in (("stage", "data"), ("stage", "forward"))
        if not known and gap["what"] != "device":  # a device cannot be instrumented
            found[label] = f"{label}: {gap['reason']}."
    return found


def _cpu_contention(run: RuleInput) -> Finding | None:
    wait_s, wall_s = min(run.cpu_wait_s, run.wall_s), run.wall_s
    if not wall_s or wait_s / wall_s < WARNING_SHARE:
        return None
    share = wait_s / wall_s
    return training_finding(
        "cpu_contention",
        f"For {share:.0%} of the run ({duration(wait_s)} of {duration(wall_s)}) the main thread was ready to run and waited for a "
        "processor; stages on the host took longer by that.",
        advice="More threads want to run than there are processors, or the container's limit of CPU holds them up. Give the run "
        "more CPU, or let fewer threads compete: ranks times OMP_NUM_THREADS, workers of loaders, other programs.",
        evidence={"cpu_wait_seconds": wait_s, "cpu_wait_ratio": share, "wall_seconds": wall_s},
        share=share,
        seconds=wait_s,
        phase="",
    )


def _not_seen(run: RuleInput) -> str:
    missing = list(_missing(run))[:MOST_NAMED]
    return f" Not seen: {', '.join(missing)}." if missing else ""


def _remedies(run: RuleInput, stage: str = "other") -> list[str]:
    """Returns remedies for unexplained time, those for instrumentation gaps first."""
    found = list(_missing(run).values())[:MOST_NAMED]
    share = run.by_stage().get(stage, 0.0) / (run.total_s or 1.0)
    remedy = jax_advice(stage, share, run.training, run.compiled)
    if not remedy and stage == "h2d":
        remedy = "DataLoader(pin_memory=True) and tensor.to(device, non_blocking=True) make copies shorter."
    elif not remedy and stage != "other":
        remedy = f"Look inside `{stage}`: stages within it, or a profiler capture, show what takes the time."
    usual = 'Wrap suspects in `with otel_train.stage("name"):`; logging and .item() are common.'
    return [*found, remedy or usual]


_WAIT_EVIDENCE = (
    "data_wait_seconds", "data_wait_ratio", "steady_wait_ratio", "pass_start_seconds", "pass_end_seconds",
    "device_wait_seconds",
)  # fmt: skip
_MODEL_EVIDENCE = ("training_seconds", "model_seconds", "model_ratio")

LEADING_RULES = (
    Rule(
        "input_bound",
        f"training waits for its loaders, together, for {WARNING_SHARE:.0%} of training time or more (critical from "
        f"{CRITICAL_SHARE:.0%}); the beginning and the end of passes are not counted, and in a run that stalled it holds "
        "without the longest wait too",
        (*_WAIT_EVIDENCE, "<loader>.wait_seconds", "training_seconds", "batches", "wait_per_batch_seconds",
         "build_p50_seconds", "build_p99_seconds", "ask_interval_seconds"),
        "more workers, as many as the advice says; a cheaper batch. [The loader's page](dataloader-bottleneck.md)",
        _input_bound,
    ),
    Rule(
        "idle_between_passes",
        f"`outside` is {WARNING_SHARE:.0%} of the run or more",
        ("outside_seconds", "outside_ratio", "wall_seconds"),
        "find what runs there: `otel_train.stage(...)` or `checkpoint()` around saving, logging, making loaders",
        _heavy(
            "outside", "outside every batch: between passes or after the loop, where nothing trains",
            "Usual causes: saving, logging, evaluation of a model that is not instrumented, loaders or workers that are made "
            'anew each epoch. Wrap suspects in `with otel_train.stage("name"):`, and saving in '
            "`with otel_train.checkpoint():`, to see which it is.",
            least=WARNING_SHARE, name="idle_between_passes", severity="warning",
        ),
    ),
    Rule(
        "stalled",
        f"`stalled` is {WARNING_SHARE:.0%} of the run or more",
        ("stalled_seconds", "stalled_ratio", "wall_seconds"),
        "find what hung: event `train.stall` has the stage; [its runbook](../runbooks/TrainRunStalled.md)",
        _heavy(
            "stalled", "without progress for longer than the stall threshold",
            "Event `train.stall` has the stage and its start; with several ranks, the rank that the others waited for. A loader, a "
            "collective operation or a device may have hung, or the process was stopped. If a stage of that length is meant: "
            "stall_after_s.",
            least=WARNING_SHARE, name="stalled", severity="warning",
        ),
    ),
    Rule(
        "recompiling",
        f"code is compiled again, three times or more, for {WARNING_SHARE:.0%} of training time or more",
        ("recompiles", "recompile_seconds", "recompile_ratio"),
        "fixed shapes; [its runbook](../runbooks/TrainRecompileStorm.md)",
        lambda run: recompiling(run.compiled.recompiled, run.total_s),
    ),
    Rule(
        "compile_heavy",
        f"`compile` is {LARGE_SHARE:.0%} of the run or more, and `recompiling` does not hold",
        ("compile_seconds", "compile_ratio", "wall_seconds"),
        "a longer run; a cache of compiled code on disk",
        _heavy("compile", "compiling", "In a longer run it weighs less. A cache on disk keeps it: "
               "jax_compilation_cache_dir, TORCHINDUCTOR_CACHE_DIR."),
    ),
)  # fmt: skip
"""Rules whose finding is the main one, sorted by seconds."""

LIMIT_RULES = (
    Rule(
        "launch_bound",
        f"the device lags at most {IN_STEP_SHARE:.0%} of a step at every event, and can have waited for the host during half "
        "of it in forward, backward and optimizer",
        ("device_steps", "least_lag_seconds", "most_lag_seconds", "device_idle_ratio", "launch_idle_ratio"),
        "`torch.compile`, a fused optimizer, a larger batch",
        lambda run: _host_bound(run, "launch_bound"),
    ),
    Rule(
        "sync_bound",
        "the device has a quarter of a step queued at one edge, and nothing at another with no wait for data before",
        ("as `launch_bound`",),
        "no `.item()`, `.cpu()`, `print(tensor)` in the step; [host and device time](../explanation/host-and-device-time.md)",
        lambda run: _host_bound(run, "sync_bound"),
    ),
    Rule(
        "dispatch_bound",
        "a call of a JAX step takes less than 2 ms, and half of that or more is dispatch",
        ("call_p50_seconds", "dispatch_p50_seconds", "dispatch_ratio"),
        "a larger batch; several steps in one call",
        lambda run: dispatch_bound(run.training, run.compiled, run.total_s),
    ),
    Rule(
        "compute_bound",
        f"the stages of the model (forward, backward, optimizer, a whole update, the loss of JAX and its wait) take more "
        f"than {MODEL_SHARE:.0%} of training time, without the beginning of a pass that is not repeated",
        (*_MODEL_EVIDENCE, "<stage>_ratio", *_WAIT_EVIDENCE),
        "a capture: mixed precision, tensor cores, operators. [Read a capture](analyze-a-trace.md)",
        _compute_bound,
    ),
)  # fmt: skip
"""What limits a step: the first match is the main finding if no leading rule matches."""

RUN_RULES = (
    LEADING_RULES[1],
    Rule(
        "eval_heavy",
        f"`eval` is {LARGE_SHARE:.0%} of the run or more; or the run has evaluated {MIN_STEPS} batches and trained none. From "
        f"{MOST_SHARE:.0%} on it is a main finding",
        ("eval_seconds", "eval_ratio", "wall_seconds"),
        "less often; larger batches without gradients; of rollouts and generation (no loader): more in one forward",
        _eval_heavy,
    ),
    Rule(
        "checkpoint_heavy",
        f"`checkpoint` is {LARGE_SHARE:.0%} of the run or more. From {MOST_SHARE:.0%} on it is a main finding",
        ("checkpoint_seconds", "checkpoint_ratio", "wall_seconds"),
        "less often; saving beside the training",
        _heavy(CHECKPOINT, "writing checkpoints",
               "Save less often, or asynchronously (torch.distributed.checkpoint.async_save)."),
    ),
)  # fmt: skip
"""Rules about activities of the run; they need no training step."""

SIDE_RULES = (
    Rule(
        "slow_start",
        f"the beginning of passes, and their end where workers stop, takes {WARNING_SHARE:.0%} of training time or more, over "
        f"{MIN_PASSES} passes or more; also without the slowest start. From {MOST_SHARE:.0%} on it leads "
        "a smaller main finding",
        ("repeated_start_seconds", "repeated_start_ratio", "repeated_end_seconds", "training_seconds", "making_seconds",
         "first_batch_seconds", "ending_seconds", "passes"),
        "`DataLoader(persistent_workers=True)`",
        _slow_start,
    ),
    *RUN_RULES[1:],
    Rule(
        "unattributed",
        f"no rule above applies; or {LARGE_SHARE:.0%} of training time or more is in no stage or in a data stage without a "
        f"loader, or in one stage of the program's own or `h2d`. From {MOST_SHARE:.0%} on it leads a smaller main finding, "
        "where no device is timed and `stalled` is less than half of it",
        (*_MODEL_EVIDENCE, "other_seconds", "other_ratio", "other_after_seconds", "<stage>_ratio", "data_without_loader_seconds",
         *_WAIT_EVIDENCE),
        'instrument what the summary names; `with otel_train.stage("name"):` around suspects',
        lambda run: _unattributed(run) if _longest_beside_model(run)[1] >= LARGE_SHARE * run.total_s else None,
    ),
)  # fmt: skip
"""Rules whose findings follow the main one, or lead it from ``MOST_SHARE``."""

CAUSE_RULES = (
    Rule(
        "cpu_contention",
        f"the main thread waited for a processor for {WARNING_SHARE:.0%} of the run or more, as Linux counts it",
        ("cpu_wait_seconds", "cpu_wait_ratio", "wall_seconds"),
        "more CPU; a smaller `OMP_NUM_THREADS`, fewer workers; in Kubernetes a higher `resources.limits.cpu`",
        _cpu_contention,
    ),
)
"""Rules about causes that make any stage longer."""
