"""Imported first: from now on this process has no torch, whatever is installed."""

from __future__ import annotations

import sys


class Refuses:
    """Finds no torch."""

    def find_spec(self, name: str, path: object = None, target: object = None) -> None:
        if name.partition(".")[0] == "torch":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


assert "torch" not in sys.modules
sys.meta_path.insert(0, Refuses())
