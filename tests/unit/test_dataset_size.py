"""Bytes of a dataset: close to the truth, in bounded time, without running a line of the program's."""

from __future__ import annotations

import threading
import time
import tracemalloc
from collections import OrderedDict, namedtuple
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import ConcatDataset, Dataset, Subset, TensorDataset

from otel_train.instrumentation import dataset_size
from otel_train.instrumentation.dataset_size import MOST_OBJECTS, dataset_bytes

MIB = 2**20
Pair = namedtuple("Pair", "image label")  # noqa: PYI024 - as programs write it


class Images(Dataset[Any]):
    """Holds whatever it is given, as programs do."""

    def __init__(self, held: Any) -> None:
        self.held = held
        self.transform = lambda image: image
        self.model = torch.nn.Linear(1000, 1000)


def images(number: int, size: int = MIB // 16) -> list[np.ndarray]:
    return [np.zeros(size, dtype=np.uint8) for _ in range(number)]


HELD: dict[str, Callable[[], Any]] = {
    "tensors": lambda: torch.zeros(16 * MIB // 4),
    "a list of arrays": lambda: images(256),
    "a dict of arrays": lambda: dict(enumerate(images(256))),
    "pairs": lambda: [Pair(image, 3) for image in images(256)],
    "dicts": lambda: [OrderedDict(image=image, label="cat") for image in images(256)],
    "lists in lists": lambda: [[[image] * 3, [0.5] * 20] for image in images(256)],
    "texts": lambda: [f"{number:0{MIB // 16}}" for number in range(256)],
    "an array of objects": lambda: np.array([*images(255), None], dtype=object),
}


@pytest.mark.parametrize("kind", HELD)
def test_the_estimate_is_close_to_what_is_held(kind: str) -> None:
    """16 MiB, however they are kept; the model that a dataset uses is none of it."""
    assert dataset_bytes([Images(HELD[kind]())]) == pytest.approx(16 * MIB, rel=0.02)


def test_an_array_of_objects_is_not_copied() -> None:
    """A copy of 9 million references takes half a second, and no other thread runs meanwhile."""
    column = np.full((100_000, 2), "text", dtype=object)[:, ::2]
    tracemalloc.start()
    try:
        dataset_bytes([column])
        _, most_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()

    assert not column.flags.contiguous
    assert most_bytes < column.nbytes / 4


@given(sizes=st.lists(st.integers(10_000, 50_000), min_size=1, max_size=60))
def test_few_items_are_added_up_exactly(sizes: list[int]) -> None:
    """Only of long containers a sample is looked at."""
    held = [bytes(size) for size in sizes]

    assert dataset_bytes([held]) == held.__sizeof__() + sum(item.__sizeof__() for item in held)


def test_what_is_shared_is_counted_once() -> None:
    """Splits and views of one array, and the array that a tensor was made from, are one memory."""
    array = np.zeros(16 * MIB, dtype=np.uint8)
    whole = TensorDataset(torch.from_numpy(array))
    parts = [Subset(whole, range(10)), ConcatDataset([whole, whole])]
    views = [array[place : place + 1000] for place in range(10_000)]
    repeated = [array] * 10_000

    assert dataset_bytes([*parts, views, repeated, array]) == pytest.approx(16 * MIB, rel=0.1)


def test_what_lies_in_a_file_is_no_memory_of_the_dataset(tmp_path: Path) -> None:
    """The system gives such pages back when it needs them."""
    np.zeros(MIB, dtype=np.uint8).tofile(tmp_path / "data.bin")
    mapped = np.memmap(tmp_path / "data.bin", dtype=np.uint8, mode="r")

    assert dataset_bytes([Images([mapped, mapped[10:]])]) < MIB // 10
    assert dataset_bytes([torch.zeros(MIB, device="meta")]) == 0


class Touchy:
    """Objects to being looked at."""

    def _refuse(self, *_: Any) -> NoReturn:
        raise AssertionError("a line of the program's has been run")

    __getattribute__ = __len__ = __iter__ = __getitem__ = __eq__ = __bool__ = __sizeof__ = __hash__ = _refuse
    nbytes = property(_refuse)


def test_no_code_of_the_program_is_run() -> None:
    """A property may read a disk, a ``__len__`` may build an index."""
    touchy = Touchy.__new__(Touchy)
    object.__getattribute__(touchy, "__dict__")["held"] = bytes(MIB)

    assert dataset_bytes([touchy]) == pytest.approx(MIB, rel=0.01)


def test_a_dataset_may_change_while_it_is_looked_at() -> None:
    """A cache fills while training runs; nothing is raised, here or there."""
    held: dict[int, Any] = {}
    rows: list[Any] = []
    stop = threading.Event()

    def fill() -> None:
        number = 0
        while not stop.is_set():
            number += 1
            held[number % 500] = [number] * (number % 50)
            held.pop((number * 7) % 500, None)
            rows.append(bytes(100))
            if len(rows) > 300:
                del rows[50:]

    thread = threading.Thread(target=fill)
    thread.start()
    try:
        until = time.monotonic() + 0.3
        while time.monotonic() < until:
            assert dataset_bytes([held, rows]) > 0
    finally:
        stop.set()
        thread.join(30)


def test_the_effort_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """A graph of ten million objects must not be walked to its end."""
    looked: list[object] = []
    owned = dataset_size._owned

    def counted(item: Any) -> tuple[int, int]:
        looked.append(None)
        return owned(item)

    monkeypatch.setattr(dataset_size, "_owned", counted)
    deep: list[Any] = [[[[] for _ in range(64)] for _ in range(64)] for _ in range(64)]

    dataset_bytes([deep])

    assert 8 * 32 <= len(looked) <= MOST_OBJECTS
