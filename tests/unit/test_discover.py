"""What the user gave, by name; and what was found."""

from __future__ import annotations

from typing import Any

import pytest

from otel_train.errors import ConfigError
from otel_train.instrumentation.naming import Loader, named_loaders


def names(loaders: Any) -> list[str]:
    return [entry.name for entry in named_loaders(loaders)]


ROWS = range(3)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (None, []),
        (ROWS, ["loader"]),
        ([ROWS], ["loader"]),
        ([ROWS, ROWS], ["loader_0", "loader_1"]),
        ((ROWS, ROWS), ["loader_0", "loader_1"]),
        ({"train": ROWS, "val": ROWS}, ["train", "val"]),
        ({"train": [1, 2]}, ["train"]),
        (Loader(ROWS, name="code"), ["code"]),
        ([Loader(ROWS, name="code"), ROWS], ["code", "loader_1"]),
        ({"train": Loader(ROWS, phase="eval")}, ["train"]),
        ({3: ROWS}, ["3"]),
        ((x for x in ROWS), ["loader"]),
    ],
)
def test_every_loader_has_a_name(given: Any, expected: list[str]) -> None:
    """One, several or by name: each way of giving loaders means one thing."""
    assert names(given) == expected


class Indexed:
    """Iterable by the old protocol."""

    def __getitem__(self, index: int) -> int:
        if index > 2:
            raise IndexError
        return index


def test_whatever_a_for_loop_takes_is_a_loader() -> None:
    """Old-style sequences, too."""
    assert names({"old": Indexed()}) == ["old"]


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (42, ("'loader'", "whole number", "iterable", "step()")),
        ({"train": None}, ("'train'", "is None", "iterable")),
        ("batches", ("is text", "iterable of batches")),
        ([Loader(ROWS, name="a"), Loader(ROWS, name="a")], ("'a'", "twice")),
        ({"train": Loader(ROWS, phase="fit")}, ("'fit'", "train, eval, test, predict")),
    ],
)
def test_what_is_no_loader_is_refused_with_a_remedy(given: Any, words: tuple[str, ...]) -> None:
    """Value, rule, remedy: the message is enough to correct the call."""
    with pytest.raises(ConfigError) as refused:
        named_loaders(given)

    assert [word for word in words if word not in str(refused.value)] == []
