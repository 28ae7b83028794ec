"""Functions of torch that ours stand in for, until they are given back."""

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
    """Put ``make(original)`` where ``owner`` has its function ``name``.

    A function that only waits for training to begin gives its place to the next one of ours, in a single
    assignment: another thread meets the one or the other, never neither.

    Args:
        owner: what has the function.
        name: of the function.
        make: gives what stands in for the original.
        waits: it is such a function.

    Returns:
        What undoes it, unless somebody has wrapped ours.
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
    """What has taken the place of a function that waited, else what that function waited before."""
    now = getattr(owner, name)
    taken = getattr(now, _INSTEAD_OF, None) is waited
    found: Callable[..., Any] = now if taken else getattr(waited, _WAITS_BEFORE)
    return found
