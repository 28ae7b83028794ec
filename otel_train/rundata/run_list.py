"""The runs in a folder: which there are, and a line on each."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from otel_train.files import JsonFileCache, folders_in, is_folder, mark_of, rank_folders
from otel_train.rundata.files import ABOUT, FLIGHT, SUMMARY, is_run, number, summary_of, text, whole
from otel_train.rundata.liveness import Liveness, heartbeat_of, liveness

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One run in the list.

    Attributes:
        name: of its folder.
        run_name: for people; that of the folder if there is none.
        started_unix_s: 0 if unknown.
        host: where rank 0 ran, or "".
        ranks: of the job; None if unknown.
        steps: training steps as last written down.
        wall_s: seconds from its start, as last written down.
        speed: training steps per second of those.
        finding: name of the main finding, or "".
        state: whether it goes on.
    """

    name: str
    run_name: str
    started_unix_s: float
    host: str
    ranks: int | None
    steps: int | None
    wall_s: float | None
    speed: float | None
    finding: str
    state: Liveness

    def says(self, words: str) -> bool:
        """Whether every word is in its name, host, state or finding."""
        text = f"{self.name} {self.run_name} {self.host} {self.state.word} {self.finding.replace('_', ' ')}".lower()
        return all(word in text for word in words.lower().split())


class RunList:
    """The run directories below a folder. Links are passed over: what they lead to is not ours to show.

    Args:
        root: the folder.
        only: name of the one run to show; None for all.
        documents: what has been read before.
        now: Unix seconds.
    """

    def __init__(
        self,
        root: Path,
        *,
        only: str | None = None,
        documents: JsonFileCache,
        now: Callable[[], float] = time.time,
    ) -> None:
        self.root = root
        self.only = only
        self._documents = documents
        self._now = now

    def rows(self) -> list[Row]:
        """All runs, the newest first."""
        names = folders_in(self.root) if self.only is None else [self.only]
        rows = [row for name in names if (row := self._row(name)) is not None]
        return sorted(rows, key=lambda row: (row.started_unix_s, row.name), reverse=True)

    def find(self, name: str) -> Path | None:
        """The folder of a run that is in the list; None if there is no such run, whatever the name tries to be."""
        if self.only is not None and name != self.only:
            return None
        if name not in folders_in(self.root):
            return None
        run = self.root / name
        return run if is_run(run) else None

    def _row(self, name: str) -> Row | None:
        run = self.root / name
        about = self._documents.get_or_empty(run / ABOUT, [])
        first = run / "rank0"
        if not is_folder(first):
            first = next(iter(rank_folders(run).values()), first)
        written = mark_of(first / SUMMARY)
        summary = summary_of(self._documents, first, [])
        if not about and not summary and not is_run(run):
            return None
        known = {**about, **summary}
        heartbeat = heartbeat_of(first / FLIGHT)
        state = liveness(
            summary,
            about,
            heartbeat,
            written_s=written.changed_ns / 1e9 if written else None,
            now_s=self._now(),
        )
        started_ns = number(about.get("started_unix_ns"))
        findings, throughput = summary.get("findings"), summary.get("throughput")
        leading = findings[0] if isinstance(findings, list) and findings else {}
        return Row(
            name=name,
            run_name=text(known.get("run_name")) or name,
            started_unix_s=number(summary.get("started_unix_s")) or (started_ns or 0.0) / 1e9,
            host=text(known.get("host")),
            ranks=whole(known.get("world_size")),
            steps=whole((summary.get("steps") or {}).get("train"))
            if isinstance(summary.get("steps"), dict)
            else None,
            wall_s=number(summary.get("wall_seconds")),
            speed=number(throughput.get("steps_per_second")) if isinstance(throughput, dict) else None,
            finding=text(leading.get("name")) if isinstance(leading, dict) else "",
            state=state,
        )
