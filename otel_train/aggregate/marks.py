"""Which edges are what."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from otel_train.aggregate.words import (
    FLAG_START,
    KIND_BACKWARD,
    KIND_CHECKPOINT,
    KIND_DATA,
    KIND_FORWARD,
    KIND_GRAD,
    KIND_OPTIMIZER,
    KIND_SCALER,
    KIND_STAGE,
    KIND_WHOLE,
    OP_BEGIN,
    OP_END,
    OP_EPOCH,
    OP_EPOCH_END,
    OP_FAIL,
    OP_MARK,
    OP_REPORT,
    OP_RESUME,
    OP_STOP,
    OP_SUSPEND,
)

if TYPE_CHECKING:
    from otel_train.aggregate.nesting import Edges

_UPDATE_BITS = 1 << KIND_OPTIMIZER | 1 << KIND_WHOLE


class Marks(NamedTuple):
    """Which edges are what; bool per edge.

    Attributes:
        ask: for a batch, or for the iterator that will give batches.
        starting: it is about an iterator, not about a batch.
        epoch: an epoch is marked by hand.
        report: a report is asked for.
        own: a stage by hand begins.
        barrier: what ends a burst of asks (``zip`` asks several loaders for one batch).
    """

    begin: np.ndarray
    close: np.ndarray
    ask: np.ndarray
    got: np.ndarray
    stop: np.ndarray
    failed_ask: np.ndarray
    compute: np.ndarray
    update: np.ndarray
    backward: np.ndarray
    forward: np.ndarray
    checkpoint: np.ndarray
    mark: np.ndarray
    epoch: np.ndarray
    report: np.ndarray
    barrier: np.ndarray
    starting: np.ndarray
    own: np.ndarray


def marks(edges: Edges) -> Marks:
    """Classify every edge. The first has been dealt with as the end of the unit before."""
    ops, kinds, counted = edges.ops, edges.kinds, edges.counted
    begin = (ops == OP_BEGIN) | (ops == OP_RESUME)
    close = (ops >= OP_END) & (ops <= OP_SUSPEND)
    close[:1] = False
    data = (kinds == KIND_DATA) & counted
    starting = (edges.flags & FLAG_START) > 0
    ended = (ops == OP_END) & ~starting
    stop, failed_ask = close & data & (ops == OP_STOP), close & data & (ops == OP_FAIL)
    forward = kinds == KIND_FORWARD
    backward = kinds == KIND_BACKWARD
    gradient = (backward | (kinds == KIND_GRAD)) & counted
    updating = (kinds == KIND_OPTIMIZER) | (kinds == KIND_WHOLE)
    compute = begin & (forward | backward | gradient | updating | (kinds == KIND_SCALER))
    update = np.flatnonzero(close & ended & updating)
    outermost = np.zeros(len(ops), dtype=bool)
    outermost[update[(edges.ancestors[update] & _UPDATE_BITS) == 0]] = True
    return Marks(
        begin=begin,
        close=close,
        ask=begin & data,
        got=close & data & ended,
        stop=stop,
        failed_ask=failed_ask,
        compute=compute,
        update=outermost,
        backward=gradient & (begin | close),
        forward=forward & counted & (begin | close),
        checkpoint=(kinds == KIND_CHECKPOINT) & counted,
        mark=(ops == OP_MARK) & (edges.payloads == 0) & (edges.sources >= 0),
        epoch=(ops == OP_EPOCH) | (ops == OP_EPOCH_END),
        report=ops == OP_REPORT,
        barrier=compute | stop | failed_ask,
        starting=starting,
        own=begin & (kinds == KIND_STAGE),
    )
