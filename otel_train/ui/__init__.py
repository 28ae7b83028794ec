"""The local page: reads run directories, in a separate process."""

from __future__ import annotations

import html

from otel_train.safety import printable


def escape(text: str) -> str:
    """Returns a text as HTML; what would hide or reorder the text around it shows as its escape, such as that of U+202E."""
    return html.escape(printable(text, most=len(text), lines=True))
