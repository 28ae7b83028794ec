"""Synthetic steps: the edges that a training thread writes, without the training."""

from __future__ import annotations

from typing import TYPE_CHECKING

from otel_train.recording.events import Flag, Op, SourceKind, code

if TYPE_CHECKING:
    from otel_train.recording.recorder import Recorder

STAGES_PER_STEP = 5
EDGES_PER_STEP = 2 * STAGES_PER_STEP

_STAGES = (
    (SourceKind.DATA, "bench"),
    (SourceKind.STAGE, "augment"),
    (SourceKind.FORWARD, "model"),
    (SourceKind.BACKWARD, "backward"),
    (SourceKind.OPTIMIZER, "SGD"),
)


def step_codes(recorder: Recorder) -> tuple[int, ...]:
    """Returns the code words of one step with five stages."""
    words = []
    for kind, name in _STAGES:
        source = recorder.source(kind, name)
        flags = Flag.GRAD | Flag.TRAINING if kind is SourceKind.FORWARD else 0
        samples = 17 if kind is SourceKind.DATA else 0
        words += [code(Op.BEGIN, source, flags), code(Op.END, source, payload=samples)]
    return tuple(words)


def write_steps(recorder: Recorder, steps: int) -> None:
    """Writes ``steps`` steps into the calling thread's ring."""
    edge, words = recorder.edge, step_codes(recorder)
    for _ in range(steps):
        for word in words:
            edge(word)
