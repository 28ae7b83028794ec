"""Frozen dataclasses, named tuples and enumerations that import faster than those of the standard library.

``dataclasses.dataclass`` writes the source of each method and compiles it at every import: 9 ms for a class of 72 fields.
``typing.NamedTuple`` compiles each annotation and a constructor: 0.11 ms for a class of 6 fields, which takes 0.02 ms here.
``enum.IntEnum`` takes 0.02 ms for each member, at the first import.
"""

from __future__ import annotations

import collections
import dataclasses
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import MISSING, Field, FrozenInstanceError, field, fields
from types import CodeType, FunctionType
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from dataclasses import dataclass as fast_dataclass
    from enum import IntEnum as FastIntEnum
    from inspect import Signature
    from typing import NamedTuple as FastNamedTuple

    T = TypeVar("T")

__all__ = ["FastIntEnum", "FastNamedTuple", "fast_dataclass"]


def _init(self: Any, **given: Any) -> None:
    cls = type(self)
    names = cls.__dataclass_fields__.keys()
    values = {**cls._defaults, **given}
    for name, make in cls._factories:
        if name not in given:
            values[name] = make()
    if values.keys() != names:
        wrong = sorted(values.keys() ^ names)
        raise TypeError(f"{cls.__name__}(): missing or unknown: {', '.join(wrong)}")
    self.__dict__.update(values)
    if hasattr(cls, "__post_init__"):
        self.__post_init__()


def _repr(self: Any) -> str:
    values = ", ".join(f"{each.name}={getattr(self, each.name)!r}" for each in fields(self))
    return f"{type(self).__qualname__}({values})"


def _eq(self: Any, other: object) -> bool:
    return NotImplemented if type(other) is not type(self) else self.__dict__ == other.__dict__


def _hash(self: Any) -> int:
    return hash(tuple(getattr(self, each.name) for each in fields(self)))


def _refuse_set(_: object, name: str, __: object) -> None:
    raise FrozenInstanceError(f"cannot assign to field {name!r}")


def _refuse_delete(_: object, name: str) -> None:
    raise FrozenInstanceError(f"cannot delete field {name!r}")


_FIELD: Any = vars(dataclasses)["_FIELD"]
"""The kind of a field that is neither ``ClassVar`` nor ``InitVar``."""


def _fields_of(cls: Any) -> dict[str, Any]:
    """Returns the fields of a class and its bases, as ``dataclasses.dataclass`` makes them, but without ``exec``.

    If source text is compiled and run during the exit, Python forgets that Ctrl-C ended the program: its exit code becomes 1.
    """
    made: dict[str, Any] = {}
    for base in reversed(cls.__mro__[1:]):
        made.update(base.__dict__.get("__dataclass_fields__", {}))
    for name, annotation in cls.__annotations__.items():
        given = cls.__dict__.get(name, MISSING)
        each: Any = given if isinstance(given, Field) else field(default=given)
        each.name, each.type, each.kw_only, each._field_type = name, annotation, True, _FIELD  # noqa: SLF001 - see above
        if each.default is not MISSING:
            setattr(cls, name, each.default)
        elif each is given:
            delattr(cls, name)
        made[name] = each
    return made


class _Signature:
    """Descriptor of ``__signature__``, for ``inspect`` and ``help``: builds the signature when it is read."""

    def __get__(self, instance: object, owner: Any) -> Signature:
        from inspect import Parameter, Signature

        result: Any
        kind: Any
        if issubclass(owner, tuple):
            kind, result = Parameter.POSITIONAL_OR_KEYWORD, Signature.empty
            defaults, types = owner._field_defaults, owner.__annotations__
        else:
            kind, result = Parameter.KEYWORD_ONLY, None
            defaults = {each.name: each.default for each in fields(owner) if each.default is not MISSING}
            types = {each.name: each.type for each in fields(owner)}
        parameters = [
            Parameter(name, kind, default=defaults.get(name, Parameter.empty), annotation=annotation)
            for name, annotation in types.items()
        ]
        return Signature(parameters, return_annotation=result)


if not TYPE_CHECKING:

    def fast_dataclass(*, frozen: bool, kw_only: bool) -> Callable[[type[T]], type[T]]:
        """Makes a class a dataclass whose methods are functions that all such classes share.

        ``dataclasses.fields``, ``replace`` and ``asdict`` work on it.

        Args:
            frozen: must be True.
            kw_only: must be True.
        """
        if not (frozen and kw_only):
            raise TypeError("frozen=True and kw_only=True are all that there is")

        def decorate(cls: type[T]) -> type[T]:
            every = _fields_of(cls)
            cls.__dataclass_fields__ = every
            cls._defaults = {
                name: each.default for name, each in every.items() if each.default is not MISSING
            }
            made = [(name, each.default_factory) for name, each in every.items()]
            cls._factories = [(name, make) for name, make in made if make is not MISSING]
            cls.__init__ = cls.__dict__.get("__init__", _init)
            cls.__repr__, cls.__eq__, cls.__hash__ = _repr, _eq, _hash
            cls.__setattr__, cls.__delattr__ = _refuse_set, _refuse_delete
            cls.__signature__ = _Signature()
            return cls

        return decorate


_FEW = 4
"""Instances of a class that are made before it gets a compiled constructor: compiling takes 45 us."""

_values: Counter[type] = Counter()
"""Instances made without a compiled constructor, by class."""


def _new(cls: Any, /, *given: Any, **named: Any) -> Any:
    """Constructs the first instances of a class; then compiles the ``__new__`` that constructs all others."""
    own = next(base for base in cls.__mro__ if "_fields" in base.__dict__)
    passed = dict(zip(own._fields, given, strict=False), **named)
    values = {**own._field_defaults, **passed}
    _values[own] += 1
    if _values[own] <= _FEW and len(passed) == len(given) + len(named) and values.keys() == set(own._fields):
        return tuple.__new__(cls, map(values.__getitem__, own._fields))
    names = ", ".join(own._fields)
    text = compile(
        f"lambda _cls, {names}: _tuple_new(_cls, ({names},))", f"namedtuple_{own.__name__}", "eval"
    )
    # Not by ``eval``, which ``collections.namedtuple`` uses: this may run during the exit; see ``_fields_of``.
    code = next(each for each in text.co_consts if isinstance(each, CodeType))
    defaults = tuple(own._field_defaults[name] for name in own._fields if name in own._field_defaults)
    made = FunctionType(code, {"_tuple_new": tuple.__new__, "__builtins__": {}}, "__new__", defaults)
    own.__new__ = staticmethod(made)
    return made(cls, *given, **named)


def _make(cls: Any, values: Iterable[Any]) -> Any:
    made = tuple.__new__(cls, values)
    if len(made) != len(cls._fields):
        raise TypeError(f"Expected {len(cls._fields)} arguments, got {len(made)}")
    return made


def _replaced(self: Any, /, **named: Any) -> Any:
    made = self._make(map(named.pop, self._fields, self))
    if named:
        raise ValueError(f"Got unexpected field names: {list(named)!r}")
    return made


def _tuple_repr(self: Any) -> str:
    values = ", ".join(f"{name}={value!r}" for name, value in zip(self._fields, self, strict=True))
    return f"{type(self).__name__}({values})"


def _as_tuple(self: Any) -> tuple[Any, ...]:
    return tuple(self)


def _tuple_as_dict(self: Any) -> dict[str, Any]:
    return dict(zip(self._fields, self, strict=True))


_getter: Any = vars(collections)["_tuplegetter"]
"""Field descriptor of ``collections.namedtuple``: a read takes 36 ns, that of a property 47 ns."""


class _NamedTupleMeta(type):
    """Metaclass of ``FastNamedTuple``: makes a subclass of ``tuple``."""

    def __new__(cls, name: str, bases: tuple[type, ...], space: dict[str, Any]) -> Any:
        """Creates ``FastNamedTuple`` itself, or a tuple class with the annotated names as fields."""
        if not bases:
            return super().__new__(cls, name, bases, space)
        names = tuple(space.get("__annotations__", ()))
        defaults = {each: space[each] for each in names if each in space}
        shared = {
            "__new__": _new, "__repr__": _tuple_repr, "__getnewargs__": _as_tuple, "_asdict": _tuple_as_dict,
            "_make": classmethod(_make), "_replace": _replaced, "__signature__": _Signature(),
        }  # fmt: skip
        fixed = {"__slots__": (), "__match_args__": names, "_fields": names, "_field_defaults": defaults}
        getters = {each: _getter(index, None) for index, each in enumerate(names)}
        return type(name, (tuple,), {**shared, **space, **fixed, **getters})


if not TYPE_CHECKING:

    class FastNamedTuple(metaclass=_NamedTupleMeta):
        """A ``typing.NamedTuple`` whose methods are functions that all such classes share.

        Its constructor is compiled after the first few instances. Field names have no leading underscore.
        """


class _IntEnumMeta(type):
    """Metaclass of ``FastIntEnum``: makes a subclass of ``int`` whose only values are its members."""

    _by_value: dict[int, Any]

    def __new__(cls, name: str, bases: tuple[type, ...], space: dict[str, Any]) -> Any:
        """Creates the class, and a member for each integer in it."""
        made = super().__new__(cls, name, bases or (int,), space)
        made._by_value = {}
        new: Any = int.__new__
        for each, value in space.items() if bases else ():
            if type(value) is int and not each.startswith("__"):  # Python 3.13 adds __firstlineno__
                member = new(made, value)
                member.name, member.value = each, value
                made._by_value[value] = member
                setattr(made, each, member)
        return made

    def __call__(cls, value: int) -> Any:
        """Returns the member of this value; a ValueError if there is none."""
        try:
            return cls._by_value[value]
        except KeyError:
            raise ValueError(f"{value!r} is not a valid {cls.__name__}") from None

    def __iter__(cls) -> Iterator[Any]:
        return iter(cls._by_value.values())


if not TYPE_CHECKING:

    class FastIntEnum(metaclass=_IntEnumMeta):
        """An ``enum.IntEnum`` without aliases and without methods other than those of ``int``."""

        def __repr__(self) -> str:
            return f"<{type(self).__name__}.{self.name}: {int(self)}>"

        __str__ = int.__repr__

        def __reduce__(self) -> tuple[Any, ...]:
            return type(self), (int(self),)
