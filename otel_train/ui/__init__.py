"""The local web page and the static report of runs. It reads run directories, in a process of its own."""

from __future__ import annotations

import html

from otel_train.safety import printable


def escape(text: str) -> str:
    """Escapes a text for HTML. Characters that hide or reorder text, such as U+202E, become visible escapes."""
    return html.escape(printable(text, most=len(text), lines=True))
