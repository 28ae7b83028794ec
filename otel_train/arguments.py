"""Checks of what a program passes to our functions: what is wrong is refused at the call."""

from __future__ import annotations

import re
from collections.abc import Mapping
from operator import index
from typing import TYPE_CHECKING, Any, Final

from otel_train.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterable

MOST_SHOWN: Final = 80
"""Characters of a value that a message repeats."""

_UNPRINTABLE: Final = re.compile(r"[\x00-\x1f\x7f]")


def refused(call: str, rule: str, remedy: str) -> ConfigError:
    """The error for a wrong argument: ``call`` repeats the value, ``rule`` says what may stand there."""
    return ConfigError(f"{call}: expected {rule}. {remedy}")


def shown(value: object) -> str:
    """A value in a message: on one line, cut, and whatever its ``repr`` does."""
    try:
        text = " ".join(repr(value).split())
    except Exception:  # noqa: BLE001  # the user's object may raise anything
        text = f"<{type(value).__name__}>"
    return text if len(text) <= MOST_SHOWN else f"{text[: MOST_SHOWN - 3]}..."


def text(call: str, value: object, remedy: str) -> str:
    """``value``, which names something: text, not empty, without control characters.

    Args:
        call: the call in which it stands, with ``{}`` for the value.
        value: what was passed.
        remedy: what to write instead.

    Raises:
        ConfigError: it is none.
    """
    if isinstance(value, str) and value.strip() and not _UNPRINTABLE.search(value):
        return value
    raise refused(
        call.replace("{}", shown(value)), "text that is not empty, without control characters", remedy
    )


def whole(
    call: str, value: Any, remedy: str, *, least: int = 0, most: int | None = None, other: str = ""
) -> int:  # Any: the user's own
    """``value`` as a whole number: Python's own, or numpy's, or a tensor of one.

    Args:
        call: as for ``text``.
        value: what was passed.
        remedy: what to write instead.
        least: smallest allowed.
        most: largest allowed; None for any.
        other: what else may stand there.

    Raises:
        ConfigError: it is none, or out of range.
    """
    try:
        number = least - 1 if isinstance(value, bool) else index(value)
    except (TypeError, ValueError, RuntimeError):  # the last of a tensor of several elements
        number = least - 1
    if number < least or (most is not None and number > most):
        rule = f"a whole number from {least} {'on' if most is None else f'to {most}'}{other}"
        raise refused(call.replace("{}", shown(value)), rule, remedy)
    return number


def truth(
    call: str, value: Any, remedy: str = "Leave it out for the default"
) -> bool:  # Any: Python's own or numpy's
    """``value`` as a truth value.

    Raises:
        ConfigError: it is none; the text "False" would be true.
    """
    if type(value).__name__ in ("bool", "bool_"):
        return bool(value)
    raise refused(call.replace("{}", shown(value)), "True or False", remedy)


def callable_(call: str, value: Any, rule: str, remedy: str) -> Any:  # Any: the user's own
    """``value``, which can be called.

    Raises:
        ConfigError: it cannot.
    """
    if callable(value):
        return value
    raise refused(call.replace("{}", shown(value)), rule, remedy)


def by_name(call: str, value: Any, rule: str, remedy: str) -> Mapping[Any, Any]:  # Any: the user's own
    """``value``, which has values by name.

    Raises:
        ConfigError: it has not.
    """
    if isinstance(value, Mapping):
        return value
    raise refused(call.replace("{}", shown(value)), rule, remedy)


def near(name: str, known: Iterable[str], *, cutoff: float = 0.6) -> str:
    """Which of the known names was meant; "" where none is near."""
    from difflib import get_close_matches

    return next(iter(get_close_matches(name, list(known), n=1, cutoff=cutoff)), "")


def one_of(call: str, name: object, known: Iterable[str]) -> str:
    """``name``, which is one of those known.

    Raises:
        ConfigError: it is none; says which one is near.
    """
    names = list(known)
    if isinstance(name, str) and name in names:
        return name
    close = near(str(name), names)
    remedy = f"Did you mean {close!r}?" if close else "Leave it out for the default"
    raise refused(call.replace("{}", shown(name)), f"one of {', '.join(names)}", remedy)
