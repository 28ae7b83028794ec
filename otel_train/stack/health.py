"""Asks parts of the stack whether they are well."""

from __future__ import annotations

import time
import urllib.error
import urllib.request
from typing import TYPE_CHECKING

from otel_train.errors import StackError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

ASK_EVERY_S = 0.25
ANSWER_WITHIN_S = 2.0


def healthy(url: str) -> bool:
    """Whether ``url`` answers, and with a status below 300."""
    try:
        with urllib.request.urlopen(url, timeout=ANSWER_WITHIN_S):
            return True
    except (OSError, ValueError):
        return False


def wait(
    urls: Mapping[str, str],
    *,
    timeout_s: float,
    say: Callable[[str], None],
    check: Callable[[], None] = lambda: None,
) -> None:
    """Wait until every part is well; a line for each that is.

    Args:
        urls: part to health address.
        timeout_s: how long in all.
        say: gets the lines.
        check: called between questions; raises to give up early.

    Raises:
        StackError: some were not well in time; the message names them.
    """
    started_s = time.monotonic()
    missing = dict(urls)
    while True:
        for name in [name for name, url in missing.items() if healthy(url)]:
            del missing[name]
            say(f"  {name:<14} ready after {time.monotonic() - started_s:.1f} s")
        if not missing:
            return
        check()
        if time.monotonic() - started_s > timeout_s:
            named = ", ".join(f"{name} ({url})" for name, url in missing.items())
            raise StackError(
                f"not ready within {timeout_s:.0f} s: {named}. `otel-train stack logs` may say why"
            )
        time.sleep(ASK_EVERY_S)
