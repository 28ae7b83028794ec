"""Codes of the events that the training thread writes.

An edge is two 64-bit integers: a code, and the instant on the monotonic clock. The code says what
happened (``Op``), to which source (a loader, a model, a user stage, ...), and carries a few bits
known on the spot. Everything else (pairing, nesting, names, steps) is worked out later by the agent.

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
"""Words per edge: code, then time. Time is written last, so a new time means a complete edge."""


class Op(FastIntEnum):
    """Operation of an event. Ops below ``END`` open a stage, those from ``END`` to ``SUSPEND`` close one."""

    BEGIN = 1
    """For the data stage the payload is the number of the iterator that is asked; 0 is unknown. For a forward it is the
    number of the part that is called; 0 is the model."""
    RESUME = 2
    """A stage that was suspended (across ``await`` or ``yield``) runs again; payload: its token."""
    END = 3
    """For the data stage the payload is the number of samples in the batch, plus one; 0 is unknown."""
    FAIL = 4
    """Ended by an exception, which went on to the user untouched. For the data stage the payload is
    ``Ending.ERROR``; 0 for Ctrl-C and the like."""
    STOP = 5
    """The loader had no further batch; payload: an ``Ending``."""
    SUSPEND = 6
    """Not finished, but not running either; payload: its token."""
    MARK = 7
    """A manual step boundary; payload: the new step number plus one, or 0 to go on counting."""
    EPOCH = 8
    """A manual epoch begins; payload: its number."""
    EPOCH_END = 9
    """The manual epoch ends; payload: 1 where an exception ended it, else 0."""
    REPORT = 10
    """What is logged every so often is to be logged now; payload: how many times that has been said."""
    PASS_END = 11
    """An iterator of a loader is disposed of; payload: its number. A pass that was at its end has ended before."""


BEGIN, RESUME, END, FAIL, STOP, SUSPEND, MARK, EPOCH, EPOCH_END, REPORT, PASS_END = map(int, Op)
"""As integers: members of an enumeration take ten times as long to look up, several times per edge."""


class Ending(FastIntEnum):
    """Why a loader returned no further batch."""

    UNKNOWN = 0
    EPOCH_END = 1
    """As many batches as it had promised, or more."""
    SHORT = 2
    """Fewer than it had promised."""
    STREAMING_END = 3
    """It had promised nothing."""
    ERROR = 4
    """An exception."""
    DISPOSED = 5
    """The loop broke it off: its iterator is gone. Never in an edge; the accounting says so."""


class Flag(FastIntEnum):
    """What was known when a stage began."""

    GRAD = 1
    """A forward with gradients on."""
    TRAINING = 2
    """A forward in training mode."""
    START = 4
    """A loader's iterator is being made: waiting for data, but no batch."""
    CLOSURE = 8
    """An optimizer's step was given a closure, which may run anything inside it."""


START_BITS, CLOSURE_BITS = Flag.START << FLAG_SHIFT, Flag.CLOSURE << FLAG_SHIFT
"""In a code."""


class SourceKind(FastIntEnum):
    """Kind of a source. The value is also its bit position in ancestor masks."""

    DATA = 0
    H2D = 1
    FORWARD = 2
    BACKWARD = 3
    GRAD = 4
    """``autograd.grad``: backward only in a run that has no other."""
    OPTIMIZER = 5
    SCALER = 6
    """``GradScaler.step``: an optimizer stage in which an update may be skipped."""
    STAGE = 7
    """A stage named by the user."""
    CHECKPOINT = 8
    MARK = 9
    WHOLE = 10
    """A function that makes a whole update, forward, backward and optimizer in one: a stage of its own name."""


class BuiltInStage(FastNamedTuple):
    """A built-in stage of a step.

    Attributes:
        name: as in the attribute ``train.stage``.
        kinds: sources whose time belongs to it.
        is_local: a rank is not held up by others in it: gradients are exchanged in or after backward.
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
"""In the order of a step. Metrics, the run summary, and the comparison of ranks follow from this table."""

STAGE_OF_KIND = {
    **{kind: stage.name for stage in STAGES for kind in stage.kinds},
    SourceKind.CHECKPOINT: "checkpoint",
    SourceKind.MARK: "other",
}
"""Stage a source of this kind belongs to; the others have a stage of their own name."""


PHASES = ("train", "eval", "test", "predict")
"""What the batches of a loader are for."""

WAIT = "block_until_ready"
"""Stage in which a call of JAX's waits for its result; the rest of the call is what the host takes to dispatch it."""


class StepRule(FastNamedTuple):
    """What ends a step.

    Attributes:
        work: what makes a step: an update, a backward, a batch, or a manual mark.
        asks: the loop requests batches from a loader, and a step ends at the request.
        aside: loaders never trained on: a request to one of them does not begin a step.
    """

    work: SourceKind
    asks: bool
    aside: frozenset[str] = frozenset()


class LoopState(FastNamedTuple):
    """How the training loop goes, for captures: the agent accounts its steps, and tells the process that is profiled.

    Attributes:
        rule: what ends its steps; None while that is unknown.
        ring: of the thread that trains.
        step: number of the running step.
        median_ns: duration of a step; 0 while that is unknown.
        epoch: pass over the training data, from 1.
        final_ns: steps before this instant have their numbers.
        slow: slow steps up to now.
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
        phase: the phase the user declared, or "" to find out.
    """

    kind: SourceKind
    name: str
    phase: str = ""

    @property
    def stage(self) -> str:
        """Name of the stage this source's time belongs to."""
        return STAGE_OF_KIND.get(self.kind, self.name)


def begin_end_fail(source: int) -> tuple[int, int, int]:
    """Returns the words of a stage without payload."""
    return code(Op.BEGIN, source), code(Op.END, source), code(Op.FAIL, source)


def code(op: Op, source: int, flags: int = 0, payload: int = 0) -> int:
    """Packs one code word. ``payload`` above ``MAX_PAYLOAD`` is cut to it."""
    return int(op) | source << SOURCE_SHIFT | flags << FLAG_SHIFT | min(payload, MAX_PAYLOAD) << PAYLOAD_SHIFT
