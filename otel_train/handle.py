"""What takes back something that was registered."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Literal


class Handle:
    """Stands for something registered; ``remove()``, or the end of its with-block, takes it back.

    Args:
        undo: takes it back.
    """

    __slots__ = ("_undo",)

    def __init__(self, undo: Callable[[], None] | None = None) -> None:
        self._undo = undo

    def remove(self) -> None:
        """Take it back. A second call does nothing."""
        undo, self._undo = self._undo, None
        if undo is not None:
            undo()

    def __enter__(self) -> Handle:
        return self

    def __exit__(self, *_: object) -> Literal[False]:
        self.remove()
        return False
