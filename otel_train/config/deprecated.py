"""Former names of settings, accepted until version 0.2, and messages for unknown ones."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Final

from otel_train.config.validation import FORMER_VALUES, PREFIX, switch_of, text_of, variable_of, words_of
from otel_train.errors import near
from otel_train.fast_classes import FastNamedTuple
from otel_train.safety import printable

RENAMED: Final = {
    "export_every_s": "export_interval_s",
    "keep_slow_factor": "trace_slow_factor",
    "keep_per_s": "trace_rate_per_s",
    "flight": "flight_recorder",
    "flight_edges": "flight_recorder_events",
    "console_blocks": "console_metrics",
    "throughput_parts": "throughput_metrics",
    "capture": "profiler",
    "capture_activities": "profiler_activities",
    "capture_max_bytes": "profiler_max_bytes",
    "capture_kept": "profiler_kept",
    "capture_token": "profiler_token",
    "capture_tensorboard": "profiler_tensorboard",
    "capture_output_dir": "profiler_output_dir",
    "capture_top": "profiler_top",
}
"""Former name to present name; the values are the same."""

OTHER_NAMES: Final = (
    (
        ("optim", "scheduler", "scaler", "criterion", "loss"),
        "Leave it out: what a loop calls is found without it",
    ),
    (
        ("loader", "dataloader", "dataset"),
        'Did you mean loaders, as in instrument(model, {"train": loader})?',
    ),
    (("endpoint", "collector"), "Set OTEL_EXPORTER_OTLP_ENDPOINT, for example to http://127.0.0.1:4318"),
    (("header",), "Set OTEL_EXPORTER_OTLP_HEADERS, for example to authorization=..."),
    (("service",), "Set OTEL_SERVICE_NAME"),
    (("rank", "world"), "Leave it out: RANK, LOCAL_RANK and WORLD_SIZE of the launcher are read"),
    (("port", "host"), "Did you mean prometheus_address, such as 127.0.0.1:9464?"),
)
"""Beginnings of words in names that are often tried and are no settings, and the remedy for each."""


class _Fold(FastNamedTuple):
    """Several former settings that became one.

    Attributes:
        parts: former name to its name within the present value.
        combine: builds the present value from the given parts.
    """

    parts: Mapping[str, str]
    combine: Callable[[dict[str, Any]], object]


def _pairs(parts: dict[str, Any]) -> str:
    pairs = []
    for name, value in parts.items():
        several = name == "epoch"
        listed = words_of(value) if several and isinstance(value, str) else value if several else [value]
        pairs += [f"{name}={each}" for each in listed]
    return ",".join(pairs)


def _switched_on(parts: dict[str, Any]) -> str:
    """Joins the names of the options that are on; a value that is no switch is kept for the rule of the setting to reject."""
    states = {name: switch_of(str(value)) for name, value in parts.items()}
    return ",".join(
        f"{name}={parts[name]}" if on is None else name for name, on in states.items() if on is not False
    )


def _address(parts: dict[str, Any]) -> str:
    host = str(parts.get("host", "127.0.0.1"))
    return f"{f'[{host}]' if ':' in host else host}:{parts.get('port', 9464)}"


def _largest(parts: dict[str, Any]) -> object:
    """Returns a limit so large that no label value becomes ``_OTHER`` that did not before; stages have half of it."""
    loaders, stages = parts.get("loaders", 16), parts.get("stages", 8)
    for value in (loaders, stages):
        if not math.isfinite(_number(value)):
            return value  # for the rule of the setting to reject
    twice = 2 * _number(stages)
    return int(twice) if _number(loaders) < twice else loaders


def _number(value: object) -> float:
    try:
        return float(str(value))
    except ValueError:
        return math.nan


FOLDED: Final = {
    "prometheus_address": _Fold({"prometheus_host": "host", "prometheus_port": "port"}, _address),
    "hardware": _Fold({"dcgm_endpoint": "endpoint"}, lambda parts: parts["endpoint"]),
    "max_label_values": _Fold({"max_loaders": "loaders", "max_stages": "stages"}, _largest),
    "profiler_schedule": _Fold(
        {
            "capture_skip_first": "skip_first",
            "capture_wait": "wait",
            "capture_warmup": "warmup",
            "capture_steps": "active",
            "capture_repeat": "repeat",
        },
        _pairs,
    ),
    "profiler_every": _Fold(
        {
            "capture_every_steps": "steps",
            "capture_every_epochs": "epochs",
            "capture_every_min": "minutes",
            "capture_epochs": "epoch",
        },
        _pairs,
    ),
    "profiler_options": _Fold(
        {
            "capture_shapes": "record_shapes",
            "capture_stacks": "with_stack",
            "capture_memory": "profile_memory",
            "capture_flops": "with_flops",
        },
        _switched_on,
    ),
    "tuning": _Fold(
        {
            "turn_every_s": "poll_interval_s",
            "summary_every_s": "summary_interval_s",
            "digest_every_s": "rank_report_interval_s",
            "keep_warmup_steps": "trace_warmup_steps",
            "keep_every_steps": "trace_every_steps",
            "keep_burst": "trace_burst",
            "capture_cooldown_s": "profiler_cooldown_s",
            "capture_max_s": "profiler_max_s",
        },
        _pairs,
    ),
}
"""Present settings that replace several former ones each."""

FORMER: Final = {**RENAMED, **{name: new for new, fold in FOLDED.items() for name in fold.parts}}
"""Every former name, with its present name."""


def present(
    given: Mapping[str, Any], *, variables: bool = False, secrets: tuple[str, ...] = ()
) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Returns the settings of a source under their present names, and a warning for each former name or value.

    Where both names are given, the present one wins.
    """
    values = {name: value for name, value in given.items() if name not in FORMER}
    warnings = []
    for names, new, value in _translated(given):
        old = ", ".join(_spelled(name, variables=variables) for name in names)
        spelled = _spelled(new, variables=variables)
        if new in values and not (new == "hardware" and values[new] == "auto"):
            warnings.append(f"{old}: ignored, because {spelled} is set as well. Remove {old}")
            continue
        values[new] = value
        warnings.append(
            f"{old}: deprecated; set {_assigned(new, value, variables=variables, secrets=secrets)}"
        )
    for name, renamed in FORMER_VALUES.items():
        if (former := values.get(name)) in tuple(renamed):
            values[name] = renamed[former]
            assigned = _assigned(name, values[name], variables=variables, secrets=())
            warnings.append(f"{_spelled(name, variables=variables)}={former}: deprecated; set {assigned}")
    return values, tuple(f"{each}. Version 0.2 refuses the former name" for each in warnings)


def unknown(name: str, known: Iterable[str], *, variables: bool, parameters: Iterable[str] = ()) -> str:
    """Returns the message for a name or variable that is no setting; ``parameters`` are further names to suggest."""
    name = printable(name)
    present = {
        _spelled(old, variables=variables): _spelled(new, variables=variables) for old, new in FORMER.items()
    }
    present.update((each, each) for each in (*known, *parameters))
    # Compared without the prefix, which would make all names of variables similar.
    plain = {each.removeprefix(PREFIX): now for each, now in present.items()}
    bare = name.removeprefix(PREFIX)
    words = bare.lower().split("_")
    remedies = [remedy for starts, remedy in OTHER_NAMES if any(word.startswith(starts) for word in words)]
    close = near(bare, plain, cutoff=0.8 if remedies else 0.6)
    remedy = f"Did you mean {plain[close]}?" if close else next(iter(remedies), "Known: " + ", ".join(known))
    return f"{name}: not a setting of otel_train. {remedy}"


def _translated(
    given: Mapping[str, Any],
) -> Iterator[tuple[list[str], str, Any]]:  # Any: values as they are given
    for old in filter(RENAMED.__contains__, given):
        yield [old], RENAMED[old], given[old]
    for new, fold in FOLDED.items():
        parts = {part: given[old] for old, part in fold.parts.items() if given.get(old) is not None}
        if parts:
            yield [old for old in fold.parts if old in given], new, fold.combine(parts)


def _spelled(name: str, *, variables: bool) -> str:
    return variable_of(name) if variables else name


def _assigned(name: str, value: object, *, variables: bool, secrets: tuple[str, ...]) -> str:
    if name in secrets:
        return f"{_spelled(name, variables=variables)} to the same value"
    return f"{_spelled(name, variables=variables)}={text_of(value)}" if variables else f"{name}={value!r}"
