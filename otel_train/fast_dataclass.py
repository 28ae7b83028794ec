"""Frozen dataclasses that are quick to define.

``dataclasses.dataclass`` writes the source of each method and compiles it at every import: 9 ms for a class of 72 fields.
"""

from __future__ import annotations

from dataclasses import MISSING, FrozenInstanceError, dataclass, fields
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable
    from dataclasses import dataclass as fast_dataclass
    from inspect import Signature

    T = TypeVar("T")

__all__ = ["fast_dataclass"]


def _init(self: Any, **given: Any) -> None:
    cls = type(self)
    values = {**cls._defaults, **given}
    for name, make in cls._factories:
        if name not in given:
            values[name] = make()
    if values.keys() != cls.__dataclass_fields__.keys():
        wrong = sorted(values.keys() ^ cls.__dataclass_fields__.keys())
        raise TypeError(f"{cls.__name__}(): missing or unknown: {', '.join(wrong)}")
    self.__dict__.update(values)
    if hasattr(cls, "__post_init__"):
        self.__post_init__()


def _repr(self: Any) -> str:
    values = ", ".join(f"{field.name}={getattr(self, field.name)!r}" for field in fields(self))
    return f"{type(self).__qualname__}({values})"


def _eq(self: Any, other: object) -> bool:
    return NotImplemented if type(other) is not type(self) else self.__dict__ == other.__dict__


def _hash(self: Any) -> int:
    return hash(tuple(getattr(self, field.name) for field in fields(self)))


def _refuse_set(_: object, name: str, __: object) -> None:
    raise FrozenInstanceError(f"cannot assign to field {name!r}")


def _refuse_delete(_: object, name: str) -> None:
    raise FrozenInstanceError(f"cannot delete field {name!r}")


class _Signature:
    """The keywords of a class, for ``inspect`` and ``help``: made on demand."""

    def __get__(self, instance: object, owner: Any) -> Signature:
        from inspect import Parameter, Signature

        parameters = [
            Parameter(
                each.name,
                Parameter.KEYWORD_ONLY,
                default=Parameter.empty if each.default is MISSING else each.default,
                annotation=each.type,
            )
            for each in fields(owner)
        ]
        return Signature(parameters, return_annotation=None)


if not TYPE_CHECKING:

    def fast_dataclass(*, frozen: bool, kw_only: bool) -> Callable[[type[T]], type[T]]:
        """Make a class a dataclass whose methods are functions that all such classes share.

        ``dataclasses.fields``, ``replace`` and ``asdict`` work on it.

        Args:
            frozen: has to be True.
            kw_only: has to be True.
        """
        if not (frozen and kw_only):
            raise TypeError("frozen=True and kw_only=True are all that there is")

        def decorate(cls: type[T]) -> type[T]:
            made = dataclass(init=False, repr=False, eq=False, kw_only=True)(cls)
            every = fields(made)
            made._defaults = {each.name: each.default for each in every if each.default is not MISSING}  # noqa: SLF001 - made here
            made._factories = [  # noqa: SLF001 - made here
                (each.name, each.default_factory) for each in every if each.default_factory is not MISSING
            ]
            made.__init__ = cls.__dict__.get("__init__", _init)
            made.__repr__, made.__eq__, made.__hash__ = _repr, _eq, _hash
            made.__signature__ = _Signature()
            made.__setattr__, made.__delattr__ = _refuse_set, _refuse_delete
            return made

        return decorate
