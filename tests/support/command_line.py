"""Commands of ``otel-train`` that run in the process of a test."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple


class Ended(NamedTuple):
    """How a command ended, and what it printed."""

    code: int
    out: str
    err: str

    @property
    def printed(self) -> str:
        """Standard output of a command that ended well."""
        assert self.code == 0, self
        return self.out

    @property
    def refused(self) -> str:
        """The message of a command that could not do what it was asked for."""
        assert self.code == 2, self
        return self.err


Cli = Callable[..., Ended]
"""Takes the words of a command line; paths are words."""
