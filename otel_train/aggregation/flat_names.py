"""Names as trackers take them: docs/reference/flat-names.md has every key."""

from __future__ import annotations

import logging
import re
from typing import TYPE_CHECKING, Final

from otel_train.values import words_of

if TYPE_CHECKING:
    from collections.abc import Mapping

_UNSAFE: Final = re.compile(r"[^A-Za-z0-9_.\-]")
_log = logging.getLogger("otel_train")


class SafeNames:
    """Gives every name a form of letters, digits and ``_-.``, and no two names the same one."""

    def __init__(self) -> None:
        self._safe: dict[str, str] = {}
        self._warned = False

    def __call__(self, name: str) -> str:
        """``name``, made safe: the rest becomes ``_``, a collision gets ``_2``, ``_3`` and so on, with one warning."""
        if name not in self._safe:
            self._safe[name] = self._new(name)
        return self._safe[name]

    def _new(self, name: str) -> str:
        plain = _UNSAFE.sub("_", name) or "_"
        taken = set(self._safe.values())
        safe, number = plain, 1
        while safe in taken:
            number += 1
            safe = f"{plain}_{number}"
        if number > 1 and not self._warned:
            self._warned = True
            _log.warning(
                "%r and another name are both %r to a tracker: it is %r there. Rename one to choose yourself",
                name, plain, safe,
            )  # fmt: skip
        return safe


_PARTS: Final = {
    "timing": ("batch_load_time_ms", "batch_transform_time_ms"),
    "memory": ("memory_",),
}
"""How the keys of the parts of an epoch's throughput begin, by what the setting calls them."""


def left_out(parts: str, *of: str) -> tuple[str, ...]:
    """How the keys begin that ``throughput_parts`` does not name: all, or those ``of`` some parts."""
    wanted = words_of(parts)
    return tuple(start for part in of or _PARTS if part not in wanted for start in _PARTS[part])


def without(values: Mapping[str, float], starts: tuple[str, ...]) -> dict[str, float]:
    """``values`` less those whose keys begin like that; a loader's own have its name before."""
    return {key: value for key, value in values.items() if not key.rpartition("/")[2].startswith(starts)}
