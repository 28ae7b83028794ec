"""How many bytes a batch holds, whatever its shape."""

from __future__ import annotations

import threading
from collections import OrderedDict, namedtuple
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch

from otel_train.instrumentation.batch_size import MOST_PARTS, BatchBytes, weigh

Pair = namedtuple("Pair", "x y")  # noqa: PYI024 - what a collate function returns


@dataclass
class Record:
    x: Any
    note: str = "a"


class Spiteful:
    """It will not be weighed."""

    @property
    def nbytes(self) -> int:
        raise RuntimeError


def floats(number: int) -> np.ndarray:
    return np.zeros(number, dtype=np.float32)


BATCHES: dict[str, tuple[Any, int]] = {
    "features and labels": ([floats(6), floats(2)], 32),
    "tensors": ((torch.zeros(6), torch.zeros(2, dtype=torch.int64)), 40),
    "named tuple": (Pair(floats(6), floats(2)), 32),
    "mapping": (OrderedDict(input_ids=floats(6), labels=floats(2)), 32),
    "nested": ({"x": [floats(1), (floats(2), {"y": floats(3)})]}, 24),
    "dataclass": (Record([floats(2)]), 8),
    "array": (floats(3), 12),
    "numbers and texts beside": ([floats(3), 7, "text", None], 12),
    "something spiteful beside": ([floats(3), Spiteful()], 12),
}


@pytest.mark.parametrize("name", BATCHES)
def test_the_bytes_of_arrays_are_found_anywhere(name: str) -> None:
    """What a full prefetch queue holds is bytes per batch times batches."""
    batch, nbytes = BATCHES[name]

    assert weigh(batch) == nbytes


@pytest.mark.parametrize("batch", ["text", 7, [], None, ["a", "b"], Spiteful(), threading.Lock()])
def test_what_has_no_arrays_has_no_weight(batch: Any) -> None:
    """Not known is not zero."""
    assert weigh(batch) is None


@pytest.mark.parametrize("batch", [[floats(1)] * (MOST_PARTS + 1), [[floats(1)] * 64] * 64, range(10**7)])
def test_a_batch_of_very_many_parts_is_not_weighed(batch: Any) -> None:
    """It is looked through on the training thread."""
    assert weigh(batch) is None


def test_a_loader_whose_batches_cannot_be_weighed_is_left_alone() -> None:
    """Trying again costs as much and finds as little."""
    weights = BatchBytes()
    weights.add(weigh([floats(2)]))
    weights.add(weigh([floats(4)]))

    assert weights.row() == {"sampled": 2, "min": 8, "avg": 12, "max": 16}
    assert not weights.hopeless
    weights.add(weigh("text"))
    assert weights.hopeless


def test_a_loader_that_was_never_weighed_has_no_row() -> None:
    """Not known is not zero."""
    assert BatchBytes().row() is None
    assert BatchBytes().mean is None
