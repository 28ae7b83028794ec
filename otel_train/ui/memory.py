"""The tab that answers what the run keeps in memory."""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING, Any

from otel_train.analyze.drawing import lines
from otel_train.analyze.report import table
from otel_train.analyze.report_text import ABSENT, bytes_of
from otel_train.ui.components import section, tiles
from otel_train.ui.overview import PROCESS_MEMORY, written
from otel_train.ui.run_list import number

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from otel_train.ui.live_view import RankView

_DEVICE = ("accelerator", "hw gpu")
_NAME = "memory"


def memory(view: RankView) -> str:
    """The tab as HTML."""
    body = "".join(
        (
            section("Now" if view.state.live else "At the end", lambda: _tiles(view)),
            section("On the host", lambda: _chart(view, device=False)),
            section("On the device", lambda: _chart(view, device=True)),
            section("Written down", lambda: _figures(view), beside=written(view)),
            section("Batches", lambda: _batches(view)),
        )
    )
    return (
        body
        or '<p class="empty">No figure of memory has been written yet. The first comes with the first export of metrics.</p>'
    )


def _series(view: RankView) -> dict[str, Sequence[float | None]]:
    found: dict[str, Sequence[float | None]] = view.series.get("memory") or {}
    return found


def _tiles(view: RankView) -> str:
    cells = []
    for name, values in sorted(_series(view).items(), key=lambda item: item[0] != PROCESS_MEMORY):
        known = [value for value in values if value is not None]
        if known:
            title = "process, resident" if name == PROCESS_MEMORY else name.replace(" usage", "")
            cells.append((title, bytes_of(known[-1]), f"most {bytes_of(max(known))}"))
    return tiles(cells)


def _chart(view: RankView, *, device: bool) -> str:
    mine = {name: values for name, values in _series(view).items() if name.startswith(_DEVICE) == device}
    title = "device" if device else "host"
    return lines(
        view.series.get("times") or [], mine, label=f"Memory on the {title} over time", unit=bytes_of
    )


def _figures(view: RankView) -> str:
    """Whatever the summary says of memory: keys come with the version that wrote it."""
    rows = [[escape(name.replace("_", " ")), shown] for name, shown in _said(view.summary, ())]
    return table(("figure", "bytes"), rows)


def _said(value: Mapping[str, Any], above: tuple[str, ...]) -> Iterator[tuple[str, str]]:
    for key, inside in value.items():
        path = (*above, str(key)[:200])
        about = any(_NAME in part for part in path)
        if isinstance(inside, dict) and (about or not above):
            yield from _said(inside, path)
        elif about and (size := number(inside)) is not None:
            yield " · ".join(path), _sized(path[-1], size)


def _sized(key: str, size: float) -> str:
    if key.endswith("_mb"):
        return bytes_of(size * 2**20)
    return bytes_of(size) if key.endswith("_bytes") else f"{size:,.6g}"


def _batches(view: RankView) -> str:
    rows = [
        [escape(str(row["loader"])), *(bytes_of(size) if (size := number(sizes.get(key))) is not None else ABSENT for key in ("min", "avg", "max"))]
        for row in view.summary.get("loaders") or ()
        if isinstance(sizes := row.get("batch_bytes"), dict)
    ]  # fmt: skip
    return table(("a batch of", "least", "avg", "most"), rows)
