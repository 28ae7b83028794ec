"""What the public functions write, for tests of stages, epochs and timed functions."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from otel_train.instrumentation.stages import StageRecorder, active_session
from otel_train.recording.events import Op, SourceKind


class Writer:
    """Stands for a recorder: keeps (op, name, payload) of every edge."""

    def __init__(self) -> None:
        self._sources: list[tuple[SourceKind, str]] = []
        self.edges: list[tuple[str, str, int]] = []

    def source(self, kind: SourceKind, name: str, phase: str = "") -> int:
        """The number of a source."""
        if (kind, name) not in self._sources:
            self._sources.append((kind, name))
        return self._sources.index((kind, name))

    def edge(self, code: int) -> None:
        """Keep an edge."""
        self.edges.append((Op(code & 0xF).name, self._sources[code >> 4 & 0xFFF][1], code >> 20))

    @property
    def ops(self) -> list[str]:
        """What happened."""
        return [op for op, _, _ in self.edges]

    @property
    def names(self) -> list[tuple[str, str]]:
        """What happened, to which source."""
        return [(op, name) for op, name, _ in self.edges]

    @property
    def payloads(self) -> list[tuple[str, int]]:
        """What happened, and what the edge carries."""
        return [(op, payload) for op, _, payload in self.edges]

    def stages(self) -> StageRecorder:
        """What public functions write by."""
        return StageRecorder(self)  # type: ignore[arg-type]  # stands for a recorder

    @contextmanager
    def active(self) -> Iterator[Writer]:
        """A block in which they do."""
        before, active_session.stages = active_session.stages, self.stages()
        yield self
        active_session.stages = before
