"""How many samples a batch holds, for batches of any shape."""

from __future__ import annotations

from collections import OrderedDict, namedtuple
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from otel_train.instrumentation.batch_size import size_of_batches
from tests.support.zero_code import printed_by

Pair = namedtuple("Pair", "x y")  # noqa: PYI024 - what a collate function returns


def array(*shape: int) -> np.ndarray:
    return np.zeros(shape)


BATCHES: dict[str, tuple[Any, int | None, int]] = {
    "features and labels": ([array(4, 3), array(4)], 4, 4),
    "tuple": ((array(4, 3), array(4)), None, 4),
    "named tuple": (Pair(array(4, 3), array(4)), 4, 4),
    "mapping": ({"input_ids": array(4, 7), "labels": array(4)}, 4, 4),
    "ordered mapping": (OrderedDict(a=array(4, 7)), 4, 4),
    "array": (array(4, 3), 4, 4),
    "nested": ([{"x": array(4, 3)}, array(4)], 4, 4),
    "list of samples": ([{"text": "a"}, {"text": "b"}, {"text": "c"}], 3, 3),
    "time first": ([array(9, 4, 3), array(4)], 4, 4),
    "a scalar beside": ({"epoch": array(), "x": array(4, 2)}, 4, 4),
    "texts": (["a", "b", "c"], 3, 3),
    "last and short": ([array(3, 5)], 4, 3),
}


@pytest.mark.parametrize("name", BATCHES)
def test_samples_are_counted_in_any_batch(name: str) -> None:
    """Samples per second must not depend on how a collate function likes its results."""
    batch, batch_size, samples = BATCHES[name]

    assert size_of_batches(batch, batch_size)(batch) == samples + 1


@pytest.mark.parametrize("odd", [None, 3, "text", b"bytes", object(), [], {}, array()])
def test_what_cannot_be_counted_is_unknown(odd: Any) -> None:
    """Unknown is not zero: it would lower the rate."""
    assert size_of_batches(odd, 4)(odd) == 0


def test_a_reader_follows_the_batches() -> None:
    """The reader is found once, the size is read every time."""
    size = size_of_batches([array(4, 3), array(4)], 4)

    assert size([array(2, 3), array(2)]) == 3
    assert size({"another": "shape"}) == 0


@pytest.mark.parametrize(
    ("later", "samples"),
    [
        (torch.zeros(2, 3), 2),
        (torch.zeros(0, 3), 0),
        (torch.nn.Parameter(torch.zeros(5)), 5),
        (torch.zeros(6, 2).to_sparse(), 6),
        (torch.zeros(7, device="meta"), 7),
        (array(4), 4),
    ],
)
def test_the_first_dimension_of_any_tensor_is_its_samples(later: Any, samples: int) -> None:
    """The length of a plain tensor is read without making its shape."""
    size = size_of_batches([torch.zeros(3, 3)], 3)

    assert size([later]) == samples + 1
    assert size([torch.tensor(1.0)]) == 0, "no dimension: unknown"


def test_samples_are_counted_where_there_is_no_torch() -> None:
    """A program of JAX or of numpy alone has none, and must not get it."""
    program = """
import sys
sys.modules["torch"] = None
import numpy
from otel_train.instrumentation.batch_size import size_of_batches
print(size_of_batches([numpy.zeros((4, 3))], 4)([numpy.zeros((2, 3))]))
"""
    assert printed_by("-c", program) == "3\n"


anything = st.recursive(
    st.none() | st.integers() | st.text(max_size=3) | st.integers(0, 4).map(array) | st.just(array()),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=2), inner, max_size=4),
    max_leaves=12,
)


@given(anything, anything, st.none() | st.integers(1, 4))
def test_no_batch_raises(first: Any, later: Any, batch_size: int | None) -> None:
    """It is called on the training thread, between the user's lines."""
    size = size_of_batches(first, batch_size)

    assert size(first) >= 0
    assert size(later) >= 0
