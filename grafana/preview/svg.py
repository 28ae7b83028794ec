"""Shapes of the preview, as SVG."""

from __future__ import annotations

from html import escape
from typing import Final

PAGE: Final = "#111217"
CARD: Final = "#181b1f"
EDGE: Final = "#2c3235"
TEXT: Final = "#ccccdc"
DIM: Final = "#8e8e99"
GRID: Final = "#26292e"
SERIES: Final = (
    *("#73bf69", "#f2cc0c", "#8ab8ff", "#ff780a", "#f2495c", "#5794f2", "#b877d9", "#37a2eb", "#fade2a"),
    *("#56a64b", "#ffa6b0", "#c4a2f5", "#b2912f", "#6ed0e0", "#e24d42", "#9ac48a", "#f9ba8f", "#508642"),
)
NAMED: Final = {
    "green": "#73bf69",
    "orange": "#ff9830",
    "red": "#f2495c",
    "blue": "#5794f2",
    "purple": "#b877d9",
    "transparent": "#00000000",
    "text": TEXT,
}
_FONT: Final = "Inter, Helvetica, Arial, sans-serif"
_CHARACTER: Final = 0.56


def color(name: str) -> str:
    """Grafana's name of a colour as one that SVG knows."""
    return NAMED.get(name, name)


def text_width(text: str, size: float) -> float:
    """About how wide a text is."""
    return len(text) * size * _CHARACTER


def text(
    x: float,
    y: float,
    words: str,
    *,
    size: float = 12,
    fill: str = TEXT,
    anchor: str = "start",
    bold: bool = False,
) -> str:
    """Words that end, begin or centre at a point."""
    weight = ' font-weight="600"' if bold else ""
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size:g}" fill="{fill}" text-anchor="{anchor}"{weight}>'
        f"{escape(words)}</text>"
    )


def rect(
    x: float,
    y: float,
    width: float,
    height: float,
    *,
    fill: str,
    edge: str = "none",
    radius: float = 0,
    opacity: float = 1,
) -> str:
    """A box."""
    return (
        f'<rect x="{x:.1f}" y="{y:.1f}" width="{max(width, 0):.1f}" height="{max(height, 0):.1f}" rx="{radius:g}" '
        f'fill="{fill}" stroke="{edge}" fill-opacity="{opacity:g}"/>'
    )


def line(
    x1: float, y1: float, x2: float, y2: float, *, stroke: str = GRID, dash: str = "", width: float = 1
) -> str:
    """From here to there."""
    dashed = f' stroke-dasharray="{dash}"' if dash else ""
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="{stroke}" stroke-width="{width:g}"{dashed}/>'


def path(
    points: list[tuple[float, float]], *, stroke: str, fill: str = "none", opacity: float = 1, dash: str = ""
) -> str:
    """A line through points; filled when a colour is given."""
    if not points:
        return ""
    steps = " ".join(f"{'M' if n == 0 else 'L'}{x:.1f} {y:.1f}" for n, (x, y) in enumerate(points))
    dashed = f' stroke-dasharray="{dash}"' if dash else ""
    return f'<path d="{steps}" stroke="{stroke}" stroke-width="1.3" fill="{fill}" fill-opacity="{opacity:g}"{dashed}/>'


def document(width: float, height: float, parts: list[str]) -> str:
    """A whole picture."""
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" width="{width:g}" '
        f'height="{height:g}" font-family="{_FONT}">'
    )
    return "\n".join(
        [head, rect(0, 0, width, height, fill=PAGE), *[part for part in parts if part], "</svg>", ""]
    )
