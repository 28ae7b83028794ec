"""Codes of the events that the training thread writes.

An event, or edge, is two 64-bit integers: a code, and a time on the monotonic clock. The code says what
happened (``Op``), to which source (a loader, a model, a user stage, ...), and has a few bits that are known
at that moment. The agent works out everything else (pairing, nesting, names, steps).

Layout of a code, from the lowest bit: 4 bits op, 12 bits source, 4 bits flags, 43 bits payload.
"""

from __future__ import annotations

from otel_train.fast_classes import FastIntEnum, FastNamedTuple

SOURCE_SHIFT = 4
FLAG_SHIFT = 16
PAYLOAD_SHIFT = 20

OP_MASK = (1 << SOURCE_SHIFT) - 1
SOURCE_MASK = (1 << (FLAG_SHIFT - SOURCE_SHIFT)) - 1
FLAG_MASK = (1 << (PAYLOAD_SHIFT - FLAG_SHIFT)) - 1

MAX_SOURCES = SOURCE_MASK + 1
MAX_PAYLOAD = (1 << 43) - 1

EDGE_WORDS = 2
"""Words per event: code, then time. The time is written last, so an event with a new time is complete."""


class Op(FastIntEnum):
    """Operation of an event. Ops below ``END`` open a stage, those from ``END`` to ``SUSPEND`` close one."""

    BEGIN = 1
    """For the data stage the payload is the number of the iterator whose ``next`` is called; 0 is unknown. For a forward it
    is the number of the submodule that is called; 0 is the model."""
    RESUME = 2
    """A stage that was suspended (across ``await`` or ``yield``) runs again; payload: its token."""
    END = 3
    """For the data stage the payload is the number of samples in the batch, plus one; 0 is unknown."""
    FAIL = 4
    """A stage ended by an exception, which was passed on unchanged. For the data stage the payload is
    ``Ending.ERROR``; 0 for an exception that is no error, such as ``KeyboardInterrupt``."""
    STOP = 5
    """The loader had no further batch; payload: an ``Ending``."""
    SUSPEND = 6
    """A stage stopped running and has not ended (``await`` or ``yield``); payload: its token."""
    MARK = 7
    """A manual step boundary; payload: the new step number plus one, or 0 to go on counting."""
    EPOCH = 8
    """A manual epoch begins; payload: its number."""
    EPOCH_END = 9
    """The manual epoch ends; payload: 1 if an exception ended it, else 0."""
    REPORT = 10
    """The program called ``Session.report``: rows and console blocks are due now; payload: number of the call."""
    PASS_END = 11
    """An iterator of a loader is closed or deleted; payload: its number. If it was exhausted, ``STOP`` has ended the pass before."""


BEGIN, RESUME, END, FAIL, STOP, SUSPEND, MARK, EPOCH, EPOCH_END, REPORT, PASS_END = map(int, Op)
"""As integers: members of an enumeration take ten times as long to look up, several times per event."""


class Ending(FastIntEnum):
    """Why a loader returned no further batch."""

    UNKNOWN = 0
    EPOCH_END = 1
    """It had returned at least as many batches as it had announced."""
    SHORT = 2
    """It had returned fewer batches than announced."""
    STREAMING_END = 3
    """It had announced no number of batches."""
    ERROR = 4
    """An exception."""
    DISPOSED = 5
    """The loop left the pass early and its iterator was deleted. Never in an event: the accounting finds it out."""


class Flag(FastIntEnum):
    """What is known when a stage begins."""

    GRAD = 1
    """A forward with gradients on."""
    TRAINING = 2
    """A forward in training mode."""
    START = 4
    """A loader's iterator is being made: data wait that returns no batch."""
    CLOSURE = 8
    """An optimizer's step was given a closure, so any stage may run inside the step."""


START_BITS, CLOSURE_BITS = Flag.START << FLAG_SHIFT, Flag.CLOSURE << FLAG_SHIFT
"""The flags at their place in a code."""


class SourceKind(FastIntEnum):
    """Kind of a source. The value is also its bit position in ancestor masks."""

    DATA = 0
    H2D = 1
    FORWARD = 2
    BACKWARD = 3
    GRAD = 4
    """``autograd.grad``: counts as backward only in a run without any other backward."""
    OPTIMIZER = 5
    SCALER = 6
    """``GradScaler.step``: an optimizer stage that may skip the update."""
    STAGE = 7
    """A stage named by the user."""
    CHECKPOINT = 8
    MARK = 9
    WHOLE = 10
    """A function that does forward, backward and optimizer in one call: a stage of its own name."""


class BuiltInStage(FastNamedTuple):
    """A built-in stage of a step.

    Attributes:
        name: as in the attribute ``train.stage``.
        kinds: sources whose time belongs to it.
        is_local: other ranks cannot delay it: gradients are exchanged in or after backward.
    """

    name: str
    kinds: tuple[SourceKind, ...]
    is_local: bool


STAGES = (
    BuiltInStage("data", (SourceKind.DATA,), is_local=True),
    BuiltInStage("h2d", (SourceKind.H2D,), is_local=True),
    BuiltInStage("forward", (SourceKind.FORWARD,), is_local=True),
    BuiltInStage("backward", (SourceKind.BACKWARD, SourceKind.GRAD), is_local=False),
    BuiltInStage("optimizer", (SourceKind.OPTIMIZER, SourceKind.SCALER), is_local=False),
)
"""In the order of a step. Metrics, the run summary, and the comparison of ranks are derived from this table."""

STAGE_OF_KIND = {
    **{kind: stage.name for stage in STAGES for kind in stage.kinds},
    SourceKind.CHECKPOINT: "checkpoint",
    SourceKind.MARK: "other",
}
"""Stage by kind of source; a source of another kind has a stage of its own name."""


PHASES = ("train", "eval", "test", "predict")
"""What the batches of a loader are for."""

WAIT = "block_until_ready"
"""Stage in which a timed JAX function waits for its result; the rest of the call is the time that the host takes to dispatch it."""


class StepRule(FastNamedTuple):
    """How the profiler recognises step boundaries.

    Attributes:
        work: kind of event that a step contains: an update, a backward, a batch, or a manual mark.
        asks: the loop requests batches from a loader, and a step ends at the request.
        aside: loaders that are never trained on: a request to one of them does not begin a step.
    """

    work: SourceKind
    asks: bool
    aside: frozenset[str] = frozenset()


class LoopState(FastNamedTuple):
    """State of the training loop that captures depend on: the agent accounts the steps and sends this to the profiled process.

    Attributes:
        rule: what ends its steps; None while that is unknown.
        ring: number of the ring of the thread that trains.
        step: number of the running step.
        median_ns: median duration of a step; 0 while that is unknown.
        epoch: pass over the training data, from 1.
        final_ns: monotonic time up to which the step numbers are final.
        slow: number of slow steps so far.
    """

    rule: StepRule | None = None
    ring: int = 0
    step: int = 0
    median_ns: int = 0
    epoch: int = 1
    final_ns: int = 0
    slow: int = 0


class Instrumented(FastNamedTuple):
    """A source of events.

    Attributes:
        name: loader, model, optimizer or stage name, as metrics show it.
        phase: the phase that the program declared; "" if the agent has to find it out.
    """

    kind: SourceKind
    name: str
    phase: str = ""

    @property
    def stage(self) -> str:
        """Name of the stage this source's time belongs to."""
        return STAGE_OF_KIND.get(self.kind, self.name)


def begin_end_fail(source: int) -> tuple[int, int, int]:
    """Returns the codes for begin, end and failure of a stage without payload."""
    return code(Op.BEGIN, source), code(Op.END, source), code(Op.FAIL, source)


def code(op: Op, source: int, flags: int = 0, payload: int = 0) -> int:
    """Packs one code word. A larger ``payload`` than ``MAX_PAYLOAD`` is replaced by that."""
    return int(op) | source << SOURCE_SHIFT | flags << FLAG_SHIFT | min(payload, MAX_PAYLOAD) << PAYLOAD_SHIFT
