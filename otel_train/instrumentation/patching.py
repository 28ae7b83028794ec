"""Reversible monkey-patches."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

_WAITS_BEFORE = "_otel_train_waits_before"
_INSTEAD_OF = "_otel_train_instead_of"


def replace(
    owner: Any,  # Any: a class or a module
    name: str,
    make: Callable[[Callable[..., Any]], Callable[..., Any]],
    *,
    waits: bool = False,
) -> Callable[[], None]:
    """Replaces a function of ``owner`` by ``make(original)``.

    A detector that waits for training is replaced by the instrumentation in one assignment, so that another thread calls
    either of them.

    Args:
        owner: class or module that has the function.
        name: name of the function.
        make: returns the replacement.
        waits: the replacement is such a detector.

    Returns:
        A function that restores the original, unless the replacement has been wrapped.
    """
    there = getattr(owner, name)
    original = getattr(there, _WAITS_BEFORE, there)
    made = make(original)
    made.__dict__[_INSTEAD_OF] = there
    if waits:
        made.__dict__[_WAITS_BEFORE] = original
    setattr(owner, name, made)

    def undo() -> None:
        if getattr(owner, name) is made:
            setattr(owner, name, original)

    return undo


def successor(owner: Any, name: str, waited: Callable[..., Any]) -> Callable[..., Any]:  # Any: as above
    """Returns what has replaced a waiting detector, else the original function."""
    now = getattr(owner, name)
    taken = getattr(now, _INSTEAD_OF, None) is waited
    found: Callable[..., Any] = now if taken else getattr(waited, _WAITS_BEFORE)
    return found
