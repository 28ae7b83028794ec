"""Rules for the values of settings, and their text form."""

from __future__ import annotations

import math
import os
import re
import reprlib
from collections.abc import Mapping, Sequence
from numbers import Integral, Real
from typing import Any, Final, TypeVar
from urllib.parse import urlsplit

from otel_train.errors import ConfigError, has_control
from otel_train.fast_classes import FastNamedTuple

PREFIX: Final = "OTEL_TRAIN_"
"""Prefix of the environment variable of a setting; the name in capitals follows."""

FILE_VARIABLE: Final = "OTEL_TRAIN_CONFIG"
"""Variable with the path of a YAML file with settings."""

DEBUG_VARIABLE: Final = "OTEL_TRAIN_DEBUG"
"""Variable that makes a command show the traceback of an unexpected error."""

RESERVED: Final = frozenset(
    {FILE_VARIABLE, DEBUG_VARIABLE, "OTEL_TRAIN_TEST_BIN", "OTEL_TRAIN_LAUNCH", "OTEL_TRAIN_LAUNCH_RUN"}
)
"""Variables with the prefix that are no settings: of the settings file, of commands, of the project's tests, and of
``otel-train run``."""

MOST_PORT: Final = 65535

MIB: Final = 1 << 20

MOST_CHARS: Final = 200
"""Most characters of a wrong name or value in a message."""

MOST_NAMED: Final = 10
"""Most unknown names of one source that are reported: a file of another program may have thousands."""

_SWITCH: Final = {
    **dict.fromkeys(("true", "1", "yes", "on"), True),
    **dict.fromkeys(("false", "0", "no", "off"), False),
}
_EXPECTED: Final = {bool: "true or false", int: "a whole number", float: "a number", str: "text"}

FORMER_VALUES: Final = {
    "profiler": {"asked": "on_demand"},
    "export_profile": {"lean": "reduced", "digest": "rank0_aggregate"},
}
"""Former to present values, by setting; accepted until version 0.2."""

T = TypeVar("T")


class ValueRule:
    """Rule for the value of a setting. This one accepts any value of the type."""

    table = False
    """Whether the value may be given as a dict, in files as a table."""

    listed = False
    """Whether words separated by commas may be given as a list."""

    def converted(self, value: object) -> object:
        """Returns ``value`` in the form in which the setting holds it."""
        listed = self.listed and isinstance(value, Sequence) and not isinstance(value, str)
        return ",".join(map(str, value)) if listed else value  # type: ignore[call-overload]  # a Sequence

    def broken(self, value: Any) -> str:  # Any: of the type of the setting
        """Returns what is expected in place of ``value``; "" if ``value`` is valid."""
        del value
        return ""


class Between(ValueRule):
    """A number from ``low`` to ``high``, both included."""

    def __init__(self, low: float, high: float = math.inf) -> None:
        self.low, self.high = low, high

    def broken(self, value: float) -> str:
        """Returns the range if ``value`` is outside of it, else ""."""
        return "" if self.low <= value <= self.high else _range(self.low, self.high)


def _range(low: float, high: float) -> str:
    return f"{low} or more" if high == math.inf else f"{low} to {high}"


class PowerOfTwo(Between):
    """A power of two in the range."""

    def broken(self, value: float) -> str:
        """Returns the range or an example if ``value`` is not a power of two in the range, else ""."""
        return super().broken(value) or (
            "a power of two, such as 262144" if int(value) & int(value) - 1 else ""
        )


class MoreThan(ValueRule):
    """A finite number that is larger than ``low``."""

    def __init__(self, low: float) -> None:
        self.low = low

    def broken(self, value: float) -> str:
        """Returns the limit if ``value`` is not above it, else ""."""
        return "" if value > self.low and math.isfinite(value) else f"more than {self.low}"


class OneOf(ValueRule):
    """One word of a closed set."""

    def __init__(self, *choices: str) -> None:
        self.choices = choices

    def broken(self, value: str) -> str:
        """Returns the words if ``value`` is none of them, else ""."""
        return "" if value in self.choices else "one of " + ", ".join(self.choices)


TRACKER_CHOICES: Final = ("auto", "on", "off")


class TrackerChoice(OneOf):
    """Whether to log to a tracker: ``auto``, ``on``, ``off``, a bool, or a dict of arguments of the tracker."""

    table = True

    def __init__(self) -> None:
        super().__init__(*TRACKER_CHOICES)

    def converted(self, value: object) -> object:
        """Returns ``on`` or ``off`` for a switch, any other value unchanged."""
        switch = _SWITCH.get(str(value).lower())
        return value if switch is None else "on" if switch else "off"


class SomeOf(ValueRule):
    """Words of a closed set, separated by commas; in code also a list. With ``""`` in the set the value may be empty."""

    listed = True

    def __init__(self, *choices: str) -> None:
        self.choices = choices

    def broken(self, value: str) -> str:
        """Returns the words if ``value`` has another one, else ""."""
        if {word.strip() for word in value.split(",")} <= set(self.choices):
            return ""
        return "some of " + ",".join(filter(None, self.choices))


class Plain(ValueRule):
    """Text without control characters; ``filled``: not empty; ``listed``: names separated by commas, in code also a list."""

    def __init__(self, *, filled: bool = False, listed: bool = False) -> None:
        self.filled, self.listed = filled, listed

    def broken(self, value: str) -> str:
        """Returns what is wrong with ``value``."""
        if self.filled and not value:
            return "not empty"
        return "no control characters" if has_control(value) else ""


class BearerToken(ValueRule):
    """A token that an HTTP header carries unchanged, or empty."""

    def broken(self, value: str) -> str:
        """Returns the characters of a token if ``value`` has others, else ""."""
        return "" if re.fullmatch("[!-~]*", value) else "printable ASCII characters without spaces"


class HttpUrl(Plain):
    """An HTTP URL, or empty."""

    def broken(self, value: str) -> str:
        """Returns the form of a URL if ``value`` has another form, else ""."""
        try:
            parts = urlsplit(value)
            is_url = not value or (parts.scheme in {"http", "https"} and parts.hostname and parts.port != 0)
        except ValueError:  # a port that is no number, an IPv6 address with one bracket
            is_url = False
        return super().broken(value) if is_url else "http://host:port or https://host:port"


class Address(ValueRule):
    """``host:port``, with an IPv6 address in brackets."""

    def broken(self, value: str) -> str:
        """Returns the form of an address if ``value`` has another form, else ""."""
        return "" if split_address(value) else "host:port with a port from 0 to 65535, such as 127.0.0.1:9464"


class ChoiceOrAddress(OneOf):
    """One word of a closed set, or ``host:port``."""

    def broken(self, value: str) -> str:
        """Returns the words and the form of an address if ``value`` is neither, else ""."""
        return (
            "" if split_address(value) else super().broken(value) and f"{super().broken(value)} or host:port"
        )


class NamedNumbers(ValueRule):
    """Several numbers in one setting: ``name=value``, separated by commas; in code and in files also a dict.

    Args:
        kind: a NamedTuple with the names and defaults. A name whose default is a tuple may be given several times.
        limits: smallest and largest value by name; 0 and infinity by default.
    """

    table = True

    def __init__(self, kind: type[tuple[Any, ...]], **limits: tuple[float, float]) -> None:
        self.kind = kind
        self.limits = limits
        self.defaults: dict[str, Any] = kind._field_defaults  # type: ignore[attr-defined]  # a NamedTuple's

    def converted(self, value: object) -> object:
        """Returns the value as text, with only the parts that differ from their default, in the order of ``kind``."""
        if isinstance(value, Mapping):
            pairs = [(name, each) for name, listed in value.items() for each in _listed(listed)]
            value = ",".join(f"{name}={each}" for name, each in pairs)
        if isinstance(value, str) and not self.broken(value):
            parts = read_parts(self.kind, value)
            given = [(name, each) for name in self.defaults for each in _listed(getattr(parts, name))]
            return ",".join(f"{name}={each}" for name, each in given if each != self.defaults[name])
        return value

    def broken(self, value: str) -> str:
        """Returns what is expected in place of the first invalid part; "" if all are valid."""
        for word in words_of(value):
            name, equals, text = (each.strip() for each in word.partition("="))
            low, high = self.limits.get(name, (0, math.inf))
            default = self.defaults.get(name)
            try:
                number = _number_like(default, text)
            except ValueError:
                number = math.nan
            if not equals or default is None or number == math.inf or not low <= number <= high:
                return self._expected(name)
        return ""

    def _expected(self, name: str) -> str:
        if name not in self.defaults:
            return "name=value, divided by commas, with names of " + ", ".join(self.defaults)
        whole = "" if isinstance(self.defaults[name], float) else "a whole number, "
        return f"{name} to be {whole}{_range(*self.limits.get(name, (0, math.inf)))}"


def read_parts(kind: type[T], text: str) -> T:
    """Parses a text of ``NamedNumbers``; parts that it does not name have their default."""
    defaults: dict[str, Any] = kind._field_defaults  # type: ignore[attr-defined]  # a NamedTuple's
    values: dict[str, Any] = {}
    for word in words_of(text):
        name, _, number = (each.strip() for each in word.partition("="))
        value = _number_like(defaults[name], number)
        values[name] = (*values.get(name, ()), value) if isinstance(defaults[name], tuple) else value
    return kind(**values)


def _number_like(default: object, text: str) -> float:
    return float(text) if isinstance(default, float) else int(text)


def _listed(value: object) -> Sequence[object]:
    return value if isinstance(value, (list, tuple)) else [value]


class Setting(FastNamedTuple):
    """Name, default and rule of a setting.

    Attributes:
        name: name of the field of ``Config``.
        default: the default value; its type is the type of the setting.
        rule: the rule for values.
        secret: whether the value is never shown, as of a token, or an address that may have a password.
    """

    name: str
    default: Any  # Any: bool, int, float or str
    rule: ValueRule
    secret: bool = False

    def checked(self, value: object) -> Any:  # Any: of the type of the default
        """Returns ``value`` in the type of the setting, or raises ConfigError. Accepts numbers of numpy, and paths as text."""
        typed = self._typed(self.rule.converted(value), value)
        if rule := self.rule.broken(typed):
            raise self.refused(typed, rule)
        return typed

    def read(self, variable: str, text: str) -> Any:  # Any: as above
        """Parses and checks the text of a value; ``variable`` is its name in the message of a ConfigError."""
        kind, word = type(self.default), text.strip().lower()
        value: object = text
        if kind is not str:
            try:
                value = _SWITCH[word] if kind is bool else kind(word)
            except (KeyError, ValueError):
                raise self.refused(text, _EXPECTED[kind], variable) from None
        try:
            return self.checked(value)
        except ConfigError as error:
            raise ConfigError(variable + str(error).removeprefix(self.name)) from None

    def refused(self, value: object, rule: str, name: str = "") -> ConfigError:
        """Returns the error for an invalid value: value, rule, remedy."""
        shown = "(not shown)" if self.secret else _ValueRepr().repr(value)
        return ConfigError(
            f"{name or self.name}={shown}: expected {rule}. Leave it out for the default, {self.default!r}"
        )

    def _typed(self, value: object, given: object) -> Any:  # Any: as above
        kind = type(self.default)
        # bool is a subclass of int, but attempt=True is a mistake.
        if isinstance(value, bool):
            if kind is bool:
                return value
        elif kind is int and isinstance(value, Integral):
            return int(value)
        elif kind is float and isinstance(value, Real):
            try:
                return float(value)
            except OverflowError:  # an int that is too large for a float
                raise self.refused(given, self.rule.broken(float("inf")) or _EXPECTED[kind]) from None
        elif kind is str and isinstance(value, (str, os.PathLike)):
            return str.__str__(os.fspath(value))
        raise self.refused(given, _EXPECTED[kind])


class IgnoredSetting(FastNamedTuple):
    """A wrong setting that is ignored: from the environment, from a file, or one that only the agent process can check.

    Attributes:
        name: name of the variable, the key, or the file that cannot be read.
        origin: ``environment``, ``code`` or the path of a file.
        problem: value, rule and remedy.
        used: setting and value that are used instead; "" if the name is not a setting, or secret.
    """

    name: str
    origin: str
    problem: str
    used: str = ""

    def __str__(self) -> str:
        end = "" if self.problem.endswith((".", "?")) else "."
        return f"{self.problem}{end} Ignored{f'; in force: {self.used}' if self.used else ''}"

    def document(self) -> dict[str, str]:
        """Returns its entry in ``summary.json``."""
        return {"name": self.name, "from": self.origin, "problem": self.problem, "used": self.used}


def split_address(text: str) -> tuple[str, int] | None:
    """Returns host and port of ``host:port``; None for any other text."""
    host, _, port = text.rpartition(":")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    elif ":" in host:
        return None
    is_host = host.strip() and not has_control(host)
    is_number = port.isascii() and port.isdigit() and len(port) <= len(str(MOST_PORT))
    return (host, int(port)) if is_host and is_number and int(port) <= MOST_PORT else None


def address_of(text: str) -> tuple[str, int]:
    """Returns host and port of a value that the rule ``Address`` has accepted."""
    address = split_address(text)
    return address if address is not None else ("", 0)


def words_of(text: str) -> list[str]:
    """Splits a text at commas into words, without empty ones."""
    return [word.strip() for word in text.split(",") if word.strip()]


def switch_of(text: str) -> bool | None:
    """Parses the text of a switch, such as ``on`` or ``0``; returns None for other text."""
    return _SWITCH.get(text.strip().lower())


def text_of(value: object) -> str:
    """Returns a value as text for an environment variable."""
    return str(value).lower() if isinstance(value, bool) else str(value)


class _ValueRepr(reprlib.Repr):
    """Bounded ``repr`` of values in messages: a settings file may have a value of a megabyte, or a recursive list."""

    def __init__(self) -> None:
        super().__init__()
        self.maxstring = self.maxother = self.maxlong = MOST_CHARS
        self.maxlevel = 3

    def repr_int(self, x: int, level: int) -> str:
        """Returns the digits of an integer; its number of bits if ``str`` refuses it (``sys.set_int_max_str_digits``)."""
        try:
            str(x)
        except ValueError:
            return f"<a number of {x.bit_length():,} bits>"
        return super().repr_int(x, level)


def variable_of(name: str) -> str:
    """Returns the environment variable of a setting."""
    return PREFIX + name.upper()
