"""The printed run summary, read back: every value on it, and the key of ``summary.json`` that it shows."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from otel_train.bottleneck.rules import LONG_S, MIN_LONG_STEPS, MIN_STEPS
from otel_train.console.text import cut
from tests.support.shown import differences, line

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from tests.support.shown import Line

    Summary = Mapping[str, Any]

MODEL_COLUMNS = ("count", "avg", "p50", "p95", "p99")


def run_summary_differences(run_summary: str, summary: Summary) -> Iterator[str]:
    """What the run summary shows that is not what a key says, or of which no key is known.

    Args:
        run_summary: its lines without colours.
        summary: the document that it was made of.
    """
    body = run_summary[run_summary.index("━━ otel_train") :]
    for section in re.split(r"\n\s*\n", body):
        lines = [text for text in section.splitlines() if text.strip(" ━")]
        if not lines:
            continue
        read = next((read for start, read in SECTIONS if re.match(start, lines[0].strip())), None)
        if read is None:
            yield f"no keys are known of the section that begins with {lines[0]!r}"
        else:
            yield from read(lines, summary)


def _header(lines: Sequence[str], summary: Summary) -> Iterator[str]:
    steps, partial = summary["steps"], summary["partial_steps"]
    text = _joined(lines[1:]).replace(summary["host"], "").replace(f"run {summary['run_id']}", "")
    forms = [
        line(r"rank # of #", lambda _: (summary["rank"], summary["world_size"])),
        line(r"# steps/s of wall time", lambda _: (summary["throughput"]["steps_per_second"],)),
        line(r"# unfinished (?P<phase>\w+) steps?", lambda found: (partial[found["phase"]],)),
        line(r"# (?P<phase>\w+) steps?", lambda found: (steps.get(found["phase"]),)),
        line(r"# updates? \(# skipped\)", lambda _: (summary["updates"], summary["skipped_updates"])),
        line(r"# updates?", lambda _: (summary["updates"],)),
        line(r"attempt #", lambda _: (summary["attempt"],)),
        line(r"pid #", lambda _: (summary["pid"],)),
        line(r"(?<=·) # (?=·)", lambda _: (summary["wall_seconds"],)),
    ]
    yield from differences(text, forms, where="header")


def _activities(lines: Sequence[str], summary: Summary) -> Iterator[str]:
    spent, wall_s = summary["activities"], summary["wall_seconds"]
    shown: dict[str, str] = {}

    def keys(found: re.Match[str]) -> tuple[float, float]:
        name = found["name"].strip().replace(" ", "_")
        shown[name] = found[0]
        return spent[name] / wall_s, spent[name]

    legend = line(r"(?P<name>[a-z][a-z ]*?) +# +#", keys)
    yield from differences("\n".join(lines[2:]), [legend], where="activities")
    if missing := {name for name, seconds in spent.items() if seconds} ^ shown.keys():
        yield f"activities: {missing} is shown or spent, and not both"


def _stages(lines: Sequence[str], summary: Summary) -> Iterator[str]:
    """Blocks of rows; the shares of a phase sum to one."""
    heads = lines[0].split()
    if heads[: 1 + len(MODEL_COLUMNS)] == ["stage", *MODEL_COLUMNS]:
        lines = lines[1:]
    title, *rest = lines
    place, first = re.fullmatch(r"  (\S+(?: \S+)*?)   +(\S.*)", title).groups()  # type: ignore[union-attr]
    phase, _, loader = (
        ("", "", "") if place == "outside any step" else place.replace("no phase", "").partition(" · ")
    )
    beside = [first]
    while rest and rest[0].startswith(" " * 8):
        beside.append(rest.pop(0).strip())
    yield from _beside(" · ".join(beside), summary, phase, loader)
    rows = [row for row in summary["stages"] if (row["phase"], row["loader"]) == (phase, loader)]
    phase_s = sum(row["self_seconds"] for row in summary["stages"] if row["phase"] == phase)
    for text in rest:
        if failed := re.fullmatch(r"(\d+) calls? of (.+) failed", text.strip()):
            if int(failed[1]) not in [
                row["failed"] for row in rows if failed[2] in _labels(row, len(failed[2]))
            ]:
                yield f"{place}: {text.strip()!r} is no key"
            continue
        name, *values = re.split(r"\s{2,}", text.strip())
        where = f"{place}, {name}"
        if name == "step":
            [step] = [
                row for row in summary["step_durations"] if (row["phase"], row["loader"]) == (phase, loader)
            ]
            keys = [step[column] for column in MODEL_COLUMNS]
        else:
            [row] = [row for row in rows if name in _labels(row, len(name))]
            keys = [
                *(row[column] for column in MODEL_COLUMNS),
                (row["self_seconds"] or None) and row["self_seconds"] / phase_s,
            ]
        yield from differences(" ".join(values[: len(keys)]), [_cells(keys)], where=where)


def _cells(keys: Sequence[float | None]) -> Line:
    return line(" ".join("#" for _ in keys), lambda _: keys)


def _labels(row: Mapping[str, Any], columns: int) -> tuple[str, str]:
    """How a row may be called; a long name is cut in its middle."""
    return row["stage"], cut(f"{row['stage']} {row['model']}", columns)


def _beside(text: str, summary: Summary, phase: str, loader: str) -> Iterator[str]:
    """What is said beside the name of a loader: its time and its rates, or the time of its rows."""
    rates = [row for row in summary["rates"] if (row["phase"], row["loader"]) == (phase, loader)]
    own_s = sum(r["self_seconds"] for r in summary["stages"] if (r["phase"], r["loader"]) == (phase, loader))
    rate = rates[0] if rates else {"seconds": own_s}
    forms = [
        line(r"# (?P<unit>batches|samples|tokens)/s", lambda found: (rate[f"{found['unit']}_per_second"],)),
        line(r"# batch(?:es)?", lambda _: (rate["batches"],)),
        line(r"^#(?= ·|$)", lambda _: (rate["seconds"],)),
    ]
    yield from differences(text, forms, where=f"beside {phase} {loader}")


def _loaders(lines: Sequence[str], summary: Summary) -> Iterator[str]:
    loaders = {row["loader"]: row for row in summary["loaders"]}
    blocks: list[tuple[str, list[str]]] = []
    for text in lines[1:]:
        if text.startswith("   "):
            blocks[-1][1].append(text.strip())
        else:
            name, _, beside = text.strip().partition("  ")
            blocks.append((name, [beside.strip()]))
    for name, said in blocks:
        yield from differences(" · ".join(said), _inside(loaders[name]), where=f"inside loader {name}")


def _inside(row: Mapping[str, Any]) -> list[Line]:
    """What is said of a loader."""
    build, start, weight = row["build"] or {}, row["start"] or {}, row["batch_bytes"] or {}
    ends, exits = row["endings"], row["worker_exits"]
    return [
        line(r"# workers?", lambda _: (row["workers"],)),
        line(r"a batch takes one # \(p95 #, p99 #\)", lambda _: (build["p50"], build["p95"], build["p99"])),
        line(r"a pass begins in #", lambda _: (start["avg"],)),
        line(r"# per batch", lambda _: (weight["avg"],)),
        line(r"# builds? not read in time", lambda _: (build["lost"],)),
        line(r"# pass(?:es)? ended by an exception", lambda _: (ends["error"],)),
        line(r"# pass(?:es)? fell short of len\(\)", lambda _: (ends["short"],)),
        line(r"raised: (?P<error>\w+) \(# times\)", lambda found: (row["errors"][found["error"]],)),
        line(r"worker died: (?P<how>\w+) \(# times\)", lambda found: (exits[found["how"]],)),
        line(r"worker died: (?:exit_\d+|SIG\w+)", lambda _: ()),
    ]


def _findings(lines: Sequence[str], summary: Summary) -> Iterator[str]:
    """Summary and advice are keys, word for word; their values are among the numbers of the finding."""
    findings = iter(summary["findings"])
    since_s = summary["wall_seconds"] - summary["activities"]["init"]
    blocks: list[list[str]] = []
    for text in lines:
        if re.match(r"\W+(finding|also): ", text.strip()):
            blocks.append([])
        blocks[-1].append(text)
    for block, finding in zip(blocks, findings, strict=False):
        parts = {"summary": "", "costs": "", "seen": "", "do": ""}
        part = "summary"
        for text in block[1:]:
            head = re.match(r"    (costs|seen|do) +", text)
            part = head[1] if head else part
            parts[part] += " " + text.removeprefix(head[0] if head else "").strip()
            if part == "seen":
                parts[part] += " ·"
        name = finding["name"]
        for part, key in (("summary", "summary"), ("do", "advice")):
            if parts[part].split() != finding[key].split():
                yield f"finding {name}: {part} is {parts[part]!r}, the key {key} says {finding[key]!r}"
        cost = (finding["seconds"], finding["share"])
        yield from differences(parts["costs"], [_costs(cost)], where=f"finding {name}, costs")
        seen = [_number(key, value) for key, value in finding["evidence"].items()]
        yield from differences(parts["seen"], seen, where=f"finding {name}, seen")
        yield from differences(
            finding["summary"],
            [*_throughput(finding, summary), *_summaries(finding, since_s)],
            where=f"finding {name}, summary",
        )


def _costs(cost: tuple[float, float]) -> Line:
    return line(r"#, # of the (?:training time|run)", lambda _: cost)


def _number(name: str, value: float) -> Line:
    return line(rf"(?<![\w.]){re.escape(name)} #(?= ·)", lambda _: (value,))


def _throughput(finding: Mapping[str, Any], summary: Summary) -> list[Line]:
    """What the workers of a loader take against what the loop asks for."""
    found = (row for row in summary["loaders"] if row["loader"] == finding["loader"])
    row: Mapping[str, Any] = next(found, {})
    build_s, workers = (row.get("build") or {}).get("avg"), row.get("workers") or 1
    ask_s = finding["evidence"].get("ask_interval_seconds")
    return [
        line(
            r"Its # workers take # per batch, one every #; the loop requests one every #",
            lambda _: (workers, build_s, build_s / workers if build_s else None, ask_s),
        ),
        line(r"Its worker takes # per batch; the loop requests one every #", lambda _: (build_s, ask_s)),
    ]


def _summaries(finding: Mapping[str, Any], since_s: float) -> list[Line]:
    """What the sentences of findings say, by the numbers beside them."""
    evidence, share, seconds = finding["evidence"], finding["share"], finding["seconds"]
    training_s = evidence.get("training_seconds", 1.0)
    each_s = evidence.get("wait_per_batch_seconds")
    parts = ("making_seconds", "first_batch_seconds", "ending_seconds")
    unexplained_s = evidence.get("other_seconds", 0.0) + evidence.get("data_without_loader_seconds", 0.0)
    begin_s = sum(evidence.get(part, 0.0) for part in parts) / (evidence.get("passes") or 1)
    return [
        line(r"# training steps in #", lambda _: (evidence["steps"], training_s)),
        line(r"a finding needs #, or # in # of training", lambda _: (MIN_STEPS, MIN_LONG_STEPS, LONG_S)),
        line(r"# of the run \(# of #\)", lambda _: (share, seconds, evidence["wall_seconds"])),
        line(r"`(?P<loader>\w+)`: # per batch", lambda _: (each_s,)),
        line(r"# per batch", lambda _: (each_s,)),
        line(
            r"`(?P<loader>\w+)` #", lambda found: (evidence[f"{found['loader']}.wait_seconds"] / training_s,)
        ),
        line(r"Waits for loaders take # of training time", lambda _: (evidence["steady_wait_ratio"],)),
        line(r"[Tt]he model takes #", lambda _: (evidence["model_ratio"],)),
        line(r", the beginning of passes #", lambda _: (evidence["pass_start_seconds"],)),
        line(r"loaders?(?: `\w+`)?: # of training time", lambda _: (evidence["steady_wait_ratio"],)),
        line(r"[Nn]o training step is counted in the # since the first batch", lambda _: (since_s,)),
        line(r"# of training time is in no stage and no loader", lambda _: (share,)),
        line(r", # of it after `[^`]+`", lambda _: (evidence["other_after_seconds"] / unexplained_s,)),
        line(
            r"# of training time is in stage `(?P<stage>\w+)`", lambda f: (evidence[f"{f['stage']}_ratio"],)
        ),
        line(
            r"takes #, # times: (?:with the other loaders )?# of training time",
            lambda _: (begin_s, evidence["passes"], share),
        ),
    ]


def _instrumentation_gaps(lines: Sequence[str], summary: Summary) -> Iterator[str]:
    said = [f"{row['what']} {row['name']}: {row['reason']}" for row in summary["instrumentation_gaps"]]
    text = " ".join(" ".join(lines).split())
    if missing := [each for each in said if each not in text]:
        yield f"not seen: {missing} is not in the run summary"


def _telemetry(lines: Sequence[str], summary: Summary) -> Iterator[str]:
    cost = summary["telemetry"]
    text = _joined(
        [
            each
            for each in lines
            if not each.strip().startswith(("metrics", "files", "settings", "otlp", "otel-train replay"))
        ]
    )
    per_step = cost["overhead_us_per_step"]
    share = cost["overhead_seconds"] / summary["wall_seconds"]
    forms = [
        line(r"# per step", lambda _: (None if per_step is None else per_step * 1e-6,)),
        line(r"# of wall time", lambda _: (share,)),
        line(r"agent # of CPU", lambda _: (cost["agent_cpu_seconds"],)),
        line(r"# records?, # lost", lambda _: (cost["records"], cost["records_lost"])),
        line(r"# records?, none lost", lambda _: (cost["records"],)),
        line(r"(?P<name>\S+) (?P<what>drops|faults): #", lambda found: (cost[found["what"]][found["name"]],)),
    ]
    yield from differences(text, forms, where="telemetry")


def _joined(lines: Sequence[str]) -> str:
    return " · ".join(each.strip() for each in lines) + " ·"


SECTIONS = (
    ("━━ otel_train", _header),
    ("where the time went", _activities),
    (r"stage +count", _stages),
    (r"(?:train|eval|test|predict|no phase|outside any step)\b", _stages),
    ("inside the loaders", _loaders),
    (r"\W+finding: ", _findings),
    ("incomplete, not seen", _instrumentation_gaps),
    ("telemetry", _telemetry),
)
"""By what its first line begins with: what reads a section of the run summary."""
