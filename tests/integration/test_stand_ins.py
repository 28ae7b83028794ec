"""What ``watch`` returns stands in for the iterable, and keeps nothing alive that the program has dropped."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import otel_train
from tests.integration.loops.truth import QUIET


@pytest.fixture
def session(tmp_path: Path) -> Iterator[otel_train.Session]:
    """A session that prints nothing."""
    with otel_train.instrument(**{**QUIET, "run_dir": str(tmp_path)}) as opened:
        yield opened


class Batches:
    """Iterable with methods that Python looks up in the class."""

    def __init__(self) -> None:
        self.open = False

    def __iter__(self) -> Iterator[int]:
        return iter([1, 2])

    def __enter__(self) -> Batches:
        self.open = True
        return self

    def __exit__(self, *_: object) -> None:
        self.open = False

    def __call__(self, factor: int) -> int:
        return 3 * factor

    def __del__(self) -> None:
        DELETED.append(self)


DELETED: list[Batches] = []


@pytest.mark.parametrize(
    "make",
    [
        lambda: [1, 2],
        list,
        lambda: (1, 2),
        lambda: {"a": 1},
        lambda: {1},
        lambda: range(3),
        lambda: deque([1]),
    ],
    ids=["list", "empty", "tuple", "dict", "set", "range", "deque"],
)
def test_an_instrumented_container_is_used_as_before(
    session: otel_train.Session, make: Callable[[], Any]
) -> None:
    """Truth value, length, items, comparisons, copies."""
    bare, timed = make(), session.watch(make(), name="batches")
    assert (bool(timed), len(timed), repr(timed)) == (bool(bare), len(bare), repr(bare))
    assert isinstance(timed, type(bare))
    assert timed == bare
    assert list(timed) == list(bare)
    assert not hasattr(timed, "__next__")
    for other in (pickle.loads(pickle.dumps(timed)), copy.copy(timed), copy.deepcopy(timed)):
        assert type(other) is type(bare)
        assert other == bare


def test_an_instrumented_list_has_items_and_may_change(session: otel_train.Session) -> None:
    """Also in place, which gives the wrapper again."""
    bare = [1, 2]
    timed = session.watch(bare, name="batches")
    timed[0] = 7
    timed.append(3)
    same = timed
    timed += [4]

    assert timed is same
    assert (timed[0], timed[1:], bare) == (7, [2, 3, 4], [7, 2, 3, 4])


def test_an_instrumented_generator_is_true_and_an_iterator(session: otel_train.Session) -> None:
    """``if loader:`` asks that."""
    timed = session.watch((n for n in range(3)), name="batches")
    assert timed
    assert isinstance(timed, Iterator)
    assert (next(timed), list(timed)) == (0, [1, 2])
    with pytest.raises(TypeError, match="has no len"):
        len(timed)  # type: ignore[arg-type]  # on purpose


def test_an_instrumented_object_keeps_the_methods_of_its_class(session: otel_train.Session) -> None:
    """Python calls ``__del__`` of the object itself."""
    timed = session.watch(Batches(), name="batches")
    with timed as entered:
        assert entered is timed
        assert timed.open
    assert (timed(2), timed.open, bool(timed)) == (6, False, True)
    DELETED.clear()
    del timed, entered
    gc.collect()
    assert len(DELETED) == 1
    DELETED.clear()


def test_what_the_program_drops_is_not_kept(session: otel_train.Session) -> None:
    """A list that is instrumented for one epoch may hold gigabytes."""

    class Rows(list[Any]):
        """A list with weak references."""

    given, timed = Rows([1, 2]), Rows([3])
    kept, dropped = weakref.ref(given), weakref.ref(timed)
    session.add(loaders={"given": given})
    assert list(session.watch(timed, name="once")) == [3]
    again = session.watch(session.loaders["given"], name="given")
    del given, timed, again
    gc.collect()

    assert dropped() is None
    assert kept() is not None
    assert set(session.loaders) == {"given"}


def test_compiled_versions_that_the_program_drops_are_not_kept(session: otel_train.Session) -> None:
    """A sweep compiles its model once per trial."""
    model = nn.Linear(2, 2)
    session.add(model)
    for _ in range(5):
        torch.compile(model, backend="eager")
        gc.collect()

    assert len(session._recording.probes.models) <= 2
