"""Captures asked for from outside, as JSON: by a request file, over HTTP."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from otel_train.arguments import one_of, truth, whole
from otel_train.errors import ConfigError
from otel_train.profiler.capture_request import ACTIVITIES, NEXT, CaptureRequest, Options

if TYPE_CHECKING:
    from collections.abc import Mapping

REQUEST_FILE = "capture-request.json"
"""In the folder of a rank: taken and removed by its process."""

MOST_STEPS = 10_000
_SWITCHES = ("record_shapes", "with_stack", "profile_memory", "with_flops")
_KNOWN = ("steps", "warmup", "wait", "at_step", "ranks", "activities", "reason", "pinned", *_SWITCHES)


class ParsedRequest(NamedTuple):
    """A capture that somebody asked for.

    Attributes:
        plan: what is wanted.
        ranks: of whom; None for whoever was asked.
    """

    plan: CaptureRequest
    ranks: tuple[int, ...] | None


def read(document: object, defaults: CaptureRequest) -> ParsedRequest:
    """What a request wants.

    Args:
        document: an object with any of steps, warmup, wait, at_step, ranks, activities, record_shapes,
            with_stack, profile_memory, with_flops, reason, pinned.
        defaults: what holds where it says nothing.

    Raises:
        ConfigError: something in it cannot be honoured; says value, rule and remedy.
    """
    if not isinstance(document, dict):
        raise ConfigError(f'capture request {document!r:.80}: expected an object, such as {{"steps": 5}}')
    for name in document:
        if name not in _KNOWN:
            one_of("capture request: {}", name, _KNOWN)
    options = defaults.options
    if "activities" in document:
        options = options._replace(activities=activities(document["activities"]))
    switches = [_switch(name, document.get(name, getattr(options, name))) for name in _SWITCHES]
    options = Options(options.activities, *switches)
    plan = defaults._replace(
        steps=_whole(document, "steps", defaults.steps, least=1),
        warmup=_whole(document, "warmup", defaults.warmup),
        wait=_whole(document, "wait", defaults.wait),
        at_step=_whole(document, "at_step", NEXT, least=NEXT, most=1 << 53),
        options=options,
        reason=str(document.get("reason", ""))[:200],
        pinned=_switch("pinned", document.get("pinned", False)),
    )
    return ParsedRequest(plan, _ranks(document.get("ranks")))


def activities(names: object) -> tuple[str, ...]:
    """Activities from ``"cpu,cuda"`` or a list.

    Raises:
        ConfigError: one of them does not exist, or there is none.
    """
    words = names.split(",") if isinstance(names, str) else names
    found = tuple(str(word).strip().lower() for word in words) if isinstance(words, (list, tuple)) else ()
    wrong = [name for name in found if name not in ACTIVITIES]
    if wrong or not found:
        raise ConfigError(
            f"activities={names!r:.80}: expected some of {', '.join(ACTIVITIES)}. Leave it out for cpu,cuda"
        )
    return tuple(dict.fromkeys(found))


def options_of(
    names: object, *, record_shapes: bool, with_stack: bool, profile_memory: bool, with_flops: bool
) -> Options:
    """Options from settings.

    Raises:
        ConfigError: an activity does not exist.
    """
    return Options(activities(names), record_shapes, with_stack, profile_memory, with_flops)


def _whole(
    document: Mapping[str, Any], name: str, default: int, *, least: int = 0, most: int = MOST_STEPS
) -> int:
    remedy = f"Leave it out for {default}"
    return whole(f"{name}={{}}", document.get(name, default), remedy, least=least, most=most)


def _switch(name: str, value: object) -> bool:
    return truth(f"{name}={{}}", value)


def _ranks(value: object) -> tuple[int, ...] | None:
    if value is None:
        return None
    given = value if isinstance(value, list) else [None]
    found = tuple(
        rank for rank in given if isinstance(rank, int) and not isinstance(rank, bool) and rank >= 0
    )
    if len(found) < len(given):
        raise ConfigError(f"ranks={value!r:.40}: expected a list of ranks, such as [0, 3]")
    return found
