"""Threads of ours."""

from __future__ import annotations

import threading
from contextvars import copy_context
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable


def daemon(target: Callable[[], object], name: str) -> threading.Thread:
    """A thread that does not keep the interpreter, not started yet.

    It sees the context variables of the thread that makes it: an agent serves many ranks, and logs to the one that a
    thread works for.
    """
    return threading.Thread(target=copy_context().run, args=(target,), name=name, daemon=True)
