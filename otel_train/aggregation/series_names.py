"""Maps source numbers to the names of stage, loader and model under which their time is published."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from otel_train.accounting.types import SourceTable
from otel_train.catalog import OTHER_VALUE, PHASES, STAGES
from otel_train.recording.events import Instrumented, SourceKind

CHECKPOINT = "checkpoint"
_STAGES, _LOADERS, _MODELS = 48, 96, 24  # most names, ``_OTHER`` included; all combinations take 2 MB
_PHASES = len(PHASES) + 1


class Key(NamedTuple):
    """Labels of one series of stage times; "" for none."""

    stage: str
    loader: str
    phase: str
    model: str


class SeriesNames:
    """Tables from source numbers to bounded names, and consecutive series numbers for their combinations.

    A name beyond the bound of its table becomes ``_OTHER``.
    """

    def __init__(self) -> None:
        self.stages = _NameTable([*STAGES, CHECKPOINT], _STAGES)
        self.loaders = _NameTable([""], _LOADERS)
        self.models = _NameTable([""], _MODELS)
        self.keys: list[Key] = []
        self.sources: list[Instrumented] = []
        self.table = SourceTable()
        self.kinds = np.zeros(0, dtype=np.int8)
        self._series = np.full(_STAGES * _LOADERS * _PHASES * _MODELS, -1, dtype=np.int32)
        # One entry per source, and a last one for source -1.
        self._stage_of = np.array([self.stages.number("other")])
        self._loader_of = np.zeros(1, dtype=np.int64)
        self._model_of = np.zeros(1, dtype=np.int64)

    def learn(self, sources: Sequence[Instrumented]) -> None:
        """Adds sources that are new since the last call."""
        new = list(sources[len(self.sources) :])
        if not new:
            return
        self.sources += new
        self.table.extend(new)
        self.kinds = np.array(self.table.kinds, dtype=np.int8)
        loaders = [self.loaders.number(s.name) if s.kind is SourceKind.DATA else 0 for s in new]
        models = [self.models.number(s.name) if s.kind is SourceKind.FORWARD else 0 for s in new]
        self._stage_of = np.insert(self._stage_of, -1, [self.stages.number(s.stage) for s in new])
        self._loader_of = np.insert(self._loader_of, -1, loaders)
        self._model_of = np.insert(self._model_of, -1, models)

    def loader(self, sources: np.ndarray) -> np.ndarray:
        """Returns loader numbers of loader sources; 0 for -1."""
        loader: np.ndarray = self._loader_of[sources]
        return loader

    def series(self, owner: np.ndarray, loader: np.ndarray, phase: np.ndarray) -> np.ndarray:
        """Returns the series number of each (source ``owner``, loader of the batch, phase). Owner -1 is stage ``other``.

        Time of stage ``data`` belongs to the loader that was called, whatever loader the batch is of.
        """
        called = self._loader_of[owner]
        label = np.where(called > 0, called, self._loader_of[loader])
        flat = ((self._stage_of[owner] * _LOADERS + label) * _PHASES + phase) * _MODELS
        flat = flat + self._model_of[owner]
        series: np.ndarray = self._series[flat]
        if series.min(initial=0) < 0:
            for value in sorted(set(flat[series < 0].tolist())):
                self._add(value)
            series = self._series[flat]
        return series

    def _add(self, flat: int) -> None:
        rest, model = divmod(flat, _MODELS)
        rest, phase = divmod(rest, _PHASES)
        stage, loader = divmod(rest, _LOADERS)
        self._series[flat] = len(self.keys)
        names = (self.stages.names[stage], self.loaders.names[loader])
        self.keys.append(Key(*names, PHASES[phase] if phase < len(PHASES) else "", self.models.names[model]))


class _NameTable:
    """Numbers for at most ``bound`` names, in order of arrival; further names have the last number, ``_OTHER``."""

    def __init__(self, names: Sequence[str], bound: int) -> None:
        self.names = list(names)
        self._numbers = {name: number for number, name in enumerate(names)}
        self._bound = bound

    def published(self, name: str) -> str:
        """Returns the name under which ``name`` is published: itself, or ``_OTHER`` if it is beyond the bound."""
        full = len(self.names) == self._bound
        return OTHER_VALUE if full and name not in self._numbers else name

    def number(self, name: str) -> int:
        if name not in self._numbers:
            if len(self.names) == self._bound - 1:
                self._numbers[OTHER_VALUE] = self._bound - 1
                self.names.append(OTHER_VALUE)
            if len(self.names) == self._bound:
                return self._bound - 1
            self._numbers[name] = len(self.names)
            self.names.append(name)
        return self._numbers[name]
