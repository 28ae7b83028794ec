"""Exceptions of otel_train, and checks of arguments and packages that raise them.

    OtelTrainError
    |-- ConfigError         a setting or an argument has a value that cannot be used
    |-- MissingExtraError   a feature was asked for whose package is not installed
    |-- RunDirectoryError   a run directory is not in the expected format
    |-- TraceError          a profiler trace is not in the expected format
    |-- ComparisonError     two recordings cannot be compared
    `-- StackError          the stack, or a part of it, cannot be started or reached

Set-up and offline commands raise these. A running training loop never sees them.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from importlib import import_module
from operator import index
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from types import ModuleType


class OtelTrainError(Exception):
    """Base class of the exceptions of otel_train."""


class ConfigError(OtelTrainError, ValueError):
    """A wrong argument or setting; the message has value, rule and remedy."""


class MissingExtraError(OtelTrainError, ImportError):
    """A package for the requested feature is not installed; the message has the command to install it."""


class RunDirectoryError(OtelTrainError):
    """A run directory, or a file in it, is missing or is not in the expected format."""


class TraceError(OtelTrainError):
    """A profiler trace cannot be read, or traces of ranks do not belong together; the message has the reason."""


class ComparisonError(OtelTrainError):
    """Two traces or runs cannot be compared; the message has the reason."""


class StackError(OtelTrainError):
    """The stack, or a part of it, cannot be started or reached; the message has the remedy."""


def require(module: str, *, extra: str) -> ModuleType:
    """Imports ``module``; raises MissingExtraError if it is not installed. Errors raised inside it pass through."""
    try:
        return import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module}.".startswith(f"{error.name}."):
            raise
        raise MissingExtraError(
            f"{module} is not installed. Run: pip install 'otel-train[{extra}]'", name=module
        ) from error


def imported(module: str, modules: Mapping[str, Any] = sys.modules) -> Any:  # Any: a module
    """Returns ``module`` if the program has imported it completely, else None.

    While another thread imports it, it is in ``sys.modules`` already, but lacks most of its names.
    """
    found = modules.get(module)
    return None if getattr(getattr(found, "__spec__", None), "_initializing", False) else found


MOST_SHOWN: Final = 80
"""Most characters of a value in a message."""

_CONTROL: Final = frozenset(map(chr, (*range(32), 127)))


def has_control(text: str) -> bool:
    """Returns whether a text has control characters. Without a regular expression, whose compilation takes 0.1 ms at import."""
    return not _CONTROL.isdisjoint(text)


def wrong_argument(call: str, rule: str, remedy: str) -> ConfigError:
    """Returns the error for a wrong argument: ``call`` has the value, ``rule`` is the expectation."""
    return ConfigError(f"{call}: expected {rule}. {remedy}")


def shown(value: object) -> str:
    """Returns the ``repr`` of a value for a message: on one line, of at most ``MOST_SHOWN`` characters. Never raises."""
    try:
        text = " ".join(repr(value).split())
    except Exception:  # noqa: BLE001  # the user's object may raise anything
        text = f"<{type(value).__name__}>"
    return text if len(text) <= MOST_SHOWN else f"{text[: MOST_SHOWN - 3]}..."


_KINDS: Final = {
    "int": "a whole number", "float": "a number", "str": "text", "NoneType": "None", "type": "a class",
    "function": "a function",
}  # fmt: skip


def kind_of(value: object) -> str:
    """Describes the type of a value in words that follow "is" in a message, such as "a whole number"."""
    name = type(value).__name__
    return _KINDS.get(name, f"of type {name}")


def text(call: str, value: object, remedy: str) -> str:
    """Checks that ``value`` is a name: text, not empty, without control characters.

    Args:
        call: the call in which it stands, with ``{}`` for the value.
        value: what was passed.
        remedy: what to write instead.
    """
    if isinstance(value, str) and value.strip() and not has_control(value):
        return value
    raise wrong_argument(
        call.replace("{}", shown(value)), "text that is not empty, without control characters", remedy
    )


def whole(
    call: str, value: Any, remedy: str, *, least: int = 0, most: int | None = None, other: str = ""
) -> int:  # Any: the user's own
    """Converts ``value`` to an int: from Python, numpy, or a one-element tensor. ``other``: further values, for the message."""
    try:
        number = least - 1 if isinstance(value, bool) else index(value)
    except (TypeError, ValueError, RuntimeError):  # the last of a tensor of several elements
        number = least - 1
    if number < least or (most is not None and number > most):
        rule = f"a whole number from {least} {'on' if most is None else f'to {most}'}{other}"
        raise wrong_argument(call.replace("{}", shown(value)), rule, remedy)
    return number


def truth(call: str, value: Any) -> bool:  # Any: Python's own or numpy's
    """Returns ``value`` as a bool; raises ConfigError if it is no bool of Python or numpy."""
    if type(value).__name__ in ("bool", "bool_"):
        return bool(value)
    raise wrong_argument(call.replace("{}", shown(value)), "True or False", "Leave it out for the default")


def callable_(call: str, value: object, rule: str, remedy: str) -> None:
    """Checks that ``value`` can be called."""
    if not callable(value):
        raise wrong_argument(call.replace("{}", shown(value)), rule, remedy)


def by_name(call: str, value: object, rule: str, remedy: str) -> None:
    """Checks that ``value`` is a mapping."""
    if not isinstance(value, Mapping):
        raise wrong_argument(call.replace("{}", shown(value)), rule, remedy)


def name_of(key: object) -> str:
    """Returns a key as text; for a member of a ``str`` enumeration its value, which ``str()`` would not return."""
    return str.__str__(key) if isinstance(key, str) else str(key)


def near(name: str, known: Iterable[str], *, cutoff: float = 0.6) -> str:
    """Returns the most similar of the known names; "" if none is similar enough."""
    from difflib import get_close_matches

    return next(iter(get_close_matches(name, list(known), n=1, cutoff=cutoff)), "")


def one_of(call: str, name: object, known: Iterable[str]) -> str:
    """Returns ``name`` if it is one of the known names; else raises ConfigError with the most similar one."""
    names = list(known)
    if isinstance(name, str) and name in names:
        return name
    close = near(str(name), names)
    remedy = f"Did you mean {close!r}?" if close else "Leave it out for the default"
    raise wrong_argument(call.replace("{}", shown(name)), f"one of {', '.join(names)}", remedy)
