"""What the value of a setting may be, and how it reads as text."""

from __future__ import annotations

import math
import os
import re
import reprlib
from collections.abc import Sequence
from numbers import Integral, Real
from typing import TYPE_CHECKING, Final, NamedTuple
from urllib.parse import urlsplit

from otel_train.errors import ConfigError, near
from otel_train.safety import printable

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

PREFIX: Final = "OTEL_TRAIN_"
"""Every setting is also an environment variable: this prefix, then the field in capitals."""

FILE_VARIABLE: Final = "OTEL_TRAIN_CONFIG"
"""Names a YAML file with settings."""

DEBUG_VARIABLE: Final = "OTEL_TRAIN_DEBUG"
"""Where it is set, a command that fails unexpectedly shows the traceback."""

RESERVED: Final = frozenset(
    {FILE_VARIABLE, DEBUG_VARIABLE, "OTEL_TRAIN_TEST_BIN", "OTEL_TRAIN_LAUNCH", "OTEL_TRAIN_LAUNCH_RUN"}
)
"""Names with our prefix that are no settings: of a file with settings, of commands, of the project's own tests, and of
``otel-train run``."""

MIB: Final = 1 << 20

SECRETS: Final = ("capture_token", "alertmanager_url", "alertmanager_headers")
"""Settings whose values are shown nowhere: a token, an address that may hold a password, headers that may log in."""

_SWITCH: Final = {
    **dict.fromkeys(("true", "1", "yes", "on"), True),
    **dict.fromkeys(("false", "0", "no", "off"), False),
}
_EXPECTED: Final = {bool: "true or false", int: "a whole number", float: "a number", str: "text"}
_UNPRINTABLE: Final = re.compile(r"[\x00-\x1f\x7f]")

RANGES: Final[tuple[tuple[str, float, float], ...]] = (
    ("attempt", -1, 1 << 31),
    ("prometheus_port", 0, 65535),
    ("tensor_parallel", 1, 1 << 31),
    ("pipeline_parallel", 1, 1 << 31),
    ("export_every_s", 0.1, 3600),
    ("turn_every_s", 0.01, 10),
    ("log_every_steps", 0, math.inf),
    ("log_every_epochs", 0, math.inf),
    ("flight_edges", 1 << 12, 1 << 24),
    ("keep_warmup_steps", 0, math.inf),
    ("keep_every_steps", 0, math.inf),
    ("keep_burst", 1, math.inf),
    ("digest_every_s", 0, 3600),
    ("max_loaders", 1, 64),
    ("max_stages", 0, 32),
    ("exit_timeout_s", 0, 60),
    ("total_steps", 0, math.inf),
    ("checkpoint_every_s", 0, 1e9),
    ("flops_per_sample", 0, 1e30),
    ("device_flops", 0, 1e30),
    ("summary_every_s", 1, 1e9),
    ("capture_steps", 1, 10_000),
    ("capture_warmup", 0, 10_000),
    ("capture_wait", 0, 10_000),
    ("capture_every_steps", 0, math.inf),
    ("capture_every_epochs", 0, math.inf),
    ("capture_every_min", 0, 1e9),
    ("capture_skip_first", 0, math.inf),
    ("capture_repeat", 0, math.inf),
    ("capture_cooldown_s", 0, 1e9),
    ("capture_max_bytes", 1, math.inf),
    ("capture_kept", 1, math.inf),
    ("capture_top", 0, 100),
    ("max_run_dir_bytes", 16 * MIB, math.inf),
)
"""Smallest and largest value allowed, both included."""

ABOVE: Final[tuple[tuple[str, float], ...]] = (
    ("keep_slow_factor", 1),
    ("keep_per_s", 0),
    ("stall_after_s", 0),
    ("capture_max_s", 0),
)
"""Values that must be finite, and larger than this."""

CHOICES: Final[dict[str, tuple[str, ...]]] = {
    "otlp": ("auto", "on", "off"),
    "agent": ("process", "thread", "off"),
    "capture": ("asked", "auto", "off"),
    "flops": ("given", "auto"),
    "cuda_timing": ("events", "sync", "off"),
    "hardware": ("auto", "on", "off"),
    "export_profile": ("auto", "full", "lean", "digest", "rank0"),
    "wandb": ("auto", "on", "off"),
    "mlflow": ("auto", "on", "off"),
    "tensorboard": ("auto", "on", "off"),
}
"""Closed sets."""

SWITCHED: Final = ("wandb", "mlflow", "tensorboard")
"""Of those, the ones that a switch may set as well."""

LISTS: Final[dict[str, tuple[str, ...]]] = {
    "capture_activities": ("cpu", "cuda", "xpu", "mtia"),
    "console_blocks": ("", "profiling", "throughput", "profiler"),
    "throughput_parts": ("timing", "memory", "none"),
}
"""What may stand in texts that name several things, divided by commas; "" where there may be none."""

NUMBERS: Final = ("capture_epochs",)
"""Texts that hold whole numbers from 1, divided by commas; "" for none."""

NAMES: Final = ("exporters",)
"""Texts that name things which other packages bring, divided by commas."""

PLAIN: Final = (
    *NAMES,
    "run_id",
    "run_name",
    "run_dir",
    "prometheus_host",
    "dcgm_endpoint",
    "capture_token",
    "alertmanager_url",
    "alertmanager_headers",
    "capture_tensorboard",
    "capture_output_dir",
)
"""Texts without control characters."""

FILLED: Final = (*NAMES, "run_dir", "prometheus_host", "dcgm_endpoint")
"""Texts that may not be empty."""


class IgnoredSetting(NamedTuple):
    """A setting in the environment or in a file that is not honoured: the run goes on as if it were not there.

    Attributes:
        name: of the variable or the key, or the file that cannot be read.
        origin: ``environment`` or the path of a file.
        problem: value, rule and remedy.
        used: what holds in its place, as text; "" where nothing stands for it.
    """

    name: str
    origin: str
    problem: str
    used: str = ""

    def __str__(self) -> str:
        end = "" if self.problem.endswith((".", "?")) else "."
        return f"{self.problem}{end} Ignored{f'; in force: {self.used}' if self.used else ''}"

    def document(self) -> dict[str, str]:
        """As ``summary.json`` has it."""
        return {"name": self.name, "from": self.origin, "problem": self.problem, "used": self.used}


def check(values: Mapping[str, object], defaults: Mapping[str, object]) -> None:
    """Refuse what cannot be honoured.

    Args:
        values: every setting, each in its own type.
        defaults: every setting and what it is when nobody says anything.

    Raises:
        ConfigError: a value is out of its range.
    """
    for name, rule in _broken(values):
        raise ConfigError(refusal(name, values[name], rule, defaults[name]))


def _broken(values: Mapping[str, object]) -> Iterable[tuple[str, str]]:
    yield from _broken_numbers(values)
    for name, choices in CHOICES.items():
        if values[name] not in choices:
            yield name, "one of " + ", ".join(choices)
    for name, choices in LISTS.items():
        if not {word.strip() for word in str(values[name]).split(",")} <= set(choices):
            yield name, "some of " + ",".join(filter(None, choices))
    for name in NUMBERS:
        if values[name] and not all(_from_one(word) for word in str(values[name]).split(",")):
            yield name, "whole numbers from 1, such as 1,3"
    yield from ((name, "no control characters") for name in PLAIN if _UNPRINTABLE.search(str(values[name])))
    if values["alertmanager_url"] and not is_http(str(values["alertmanager_url"])):
        yield "alertmanager_url", "http://host:port or https://host:port"
    yield from ((name, "not empty") for name in FILLED if not values[name])


def is_http(address: str) -> bool:
    """Whether it is an address that can be asked over HTTP."""
    try:
        parts = urlsplit(address)
        return parts.scheme in {"http", "https"} and bool(parts.hostname) and parts.port != 0
    except ValueError:  # a port that is no number, half an IPv6 address
        return False


def _from_one(word: str) -> bool:
    return word.strip().isascii() and word.strip().isdigit() and int(word) > 0


def _broken_numbers(values: Mapping[str, object]) -> Iterable[tuple[str, str]]:
    for name, low, high in RANGES:
        if not low <= _number(values[name]) <= high:
            yield name, f"{low} or more" if high == math.inf else f"{low} to {high}"
    for name, low in ABOVE:
        value = _number(values[name])
        if not (value > low and math.isfinite(value)):
            yield name, f"more than {low}"
    edges = int(_number(values["flight_edges"]))
    if edges & (edges - 1):
        yield "flight_edges", "a power of two, such as 262144"


def _number(value: object) -> float:
    return value if isinstance(value, (int, float)) else math.nan


def words_of(text: str) -> list[str]:
    """What a text names that names several things, divided by commas."""
    return [word.strip() for word in text.split(",") if word.strip()]


def typed(name: str, value: object, default: object) -> object:
    """``value`` in the type of its setting: numpy's numbers and a path are as good as Python's own.

    Raises:
        ConfigError: it is of another type.
    """
    kind = type(default)
    if name in SWITCHED and str(value).lower() in _SWITCH:
        return "on" if _SWITCH[str(value).lower()] else "off"
    if name in (*LISTS, *NAMES, *NUMBERS) and isinstance(value, Sequence) and not isinstance(value, str):
        value = ",".join(map(str, value))
    # bool is an int to Python, but attempt=True is a slip.
    if isinstance(value, bool):
        if kind is bool:
            return value
    elif kind is int and isinstance(value, Integral):
        return int(value)
    elif kind is float and isinstance(value, Real):
        return float(value)
    elif kind is str and isinstance(value, (str, os.PathLike)):
        return str.__str__(os.fspath(value))
    raise ConfigError(refusal(name, value, _EXPECTED[kind], default))


def switch_of(text: str) -> bool | None:
    """What a text says that switches something on or off; None for any other text."""
    return _SWITCH.get(text.strip().lower())


def parsed(variable: str, text: str, default: object) -> object:
    """``text`` read as a value of the type of ``default``.

    Raises:
        ConfigError: it does not read as one.
    """
    kind = type(default)
    if kind is str:
        return text
    word = text.strip().lower()
    try:
        return _SWITCH[word] if kind is bool else kind(word)  # type: ignore[call-arg]  # int or float
    except (KeyError, ValueError):
        raise ConfigError(refusal(variable, text, _EXPECTED[kind], default)) from None


def text_of(value: object) -> str:
    """A value as an environment variable holds it."""
    return str(value).lower() if isinstance(value, bool) else str(value)


def refusal(name: str, value: object, rule: str, default: object) -> str:
    """What the user reads: value, rule, remedy."""
    return f"{name}={_shown(name, value)}: expected {rule}. Leave it out for the default, {default!r}"


class _Shown(reprlib.Repr):
    """A value as people read it: a file of settings may hold a megabyte, or a list that holds itself."""

    def __init__(self) -> None:
        super().__init__()
        self.maxstring = self.maxother = self.maxlong = 200
        self.maxlevel = 3


def _shown(name: str, value: object) -> str:
    return "(not shown)" if name.removeprefix(PREFIX).lower() in SECRETS else _Shown().repr(value)


def unknown(name: str, known: Iterable[str]) -> str:
    """What the user reads when there is no such setting."""
    # The prefix, which all share, would make any two names look alike.
    name = printable(name)
    plain = {each.removeprefix(PREFIX): each for each in known}
    close = near(name.removeprefix(PREFIX), plain)
    remedy = f"Did you mean {plain[close]}?" if close else "Known: " + ", ".join(known)
    return f"{name}: not a setting of otel_train. {remedy}"
