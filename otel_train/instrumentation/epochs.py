"""Epochs that the program marks itself."""

from __future__ import annotations

from typing import TYPE_CHECKING, Generic, TypeVar

from otel_train.instrumentation.stages import switch

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from typing import Literal

T = TypeVar("T")


class Epoch:
    """An epoch of the user's own: it begins here.

    It is over when the next one begins, at the end of the block where it is a with-block, or at ``end()``. Without
    a session it does nothing.

    Args:
        number: as it reads in every figure; None to go on counting, from 1.
    """

    __slots__ = ("_hand", "_turn")

    def __init__(self, number: int | None = None) -> None:
        self._hand = switch.hand
        self._turn = 0 if self._hand is None else self._hand.begin_epoch(number)

    def end(self) -> None:
        """It is over. A second call does nothing."""
        self._close(failed=False)

    def __enter__(self) -> Epoch:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> Literal[False]:
        self._close(failed=kind is not None)
        return False

    def _close(self, *, failed: bool) -> None:
        if self._hand is not None and self._hand is switch.hand:
            self._hand.end_epoch(self._turn, failed=failed)


class Epochs(Generic[T]):
    """Goes over something, one epoch an item.

    Args:
        items: what the loop would have gone over.
    """

    def __init__(self, items: Iterable[T]) -> None:
        self._items = items

    def __iter__(self) -> Iterator[T]:
        epoch = None
        for item in self._items:
            epoch = Epoch()
            yield item
        if epoch is not None:
            epoch.end()

    def __len__(self) -> int:
        return len(self._items)  # type: ignore[arg-type]  # a TypeError of its own where it has none
